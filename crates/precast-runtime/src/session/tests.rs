//! The tensors of sessions that reuse each other's.

use precast_store::record::State;

use crate::{
    Tensor,
    fake::{Fake, Memory},
};

/// Opens a session, calls these modules, and returns the number of levels.
fn levels(model: &crate::Model, modules: &[&str]) -> usize {
    let mut session = model.session().unwrap();
    for module in modules {
        let one = Tensor::from_slice(&[1.0_f32, 2.0], &[1, 2]).unwrap();
        session.run(module, &[one]).unwrap();
    }
    session.states().levels()
}

#[test]
fn sessions_that_begin_without_a_bucket_reuse_the_tensors_of_earlier_ones() {
    let mut memory = Memory::default();
    // `decode` has a state of the bucket's size, `encode` one of a fixed size.
    for (salt, module) in ["encode", "decode"].into_iter().enumerate() {
        let fake = Fake::sized(1, 2)
            .constants(0)
            .stateful()
            .salted(salt as u32);
        let mut program = memory.add(module, &fake);
        program.states = vec![State {
            name: module.to_owned(),
            dims: vec![None, (module == "decode").then(|| "seq".to_owned())],
            ..program.states[0].clone()
        }];
        memory.programs.insert(program.id, program);
    }
    let model = memory.runtime().sessions(1).load("fake").unwrap();
    let both = ["encode", "decode"];
    let all = [&both[..], &both, &both[1..], &both].map(|modules| levels(&model, modules));
    assert_eq!(all, [1, 2, 2, 2]);
}
