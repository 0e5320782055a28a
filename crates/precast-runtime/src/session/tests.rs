//! The tensors of sessions that reuse each other's.

use precast_store::record::State;

use crate::{
    Tensor,
    fake::{Fake, Memory, weights},
    saved::{self, Header, Holds},
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
        let fake = Fake::sized(1, 2).constants(0).stateful();
        let fake = fake.salted(salt as u32);
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

#[test]
fn sizes_and_positions_of_no_bucket_are_refused_in_a_file_that_is_whole() {
    let mut memory = Memory::default();
    let fake = Fake::sized(1, 2).constants(0).stateful();
    let mut program = memory.add("decode", &fake);
    program.inputs[0].within = Some("seq".to_owned());
    program.states[0].dims = vec![None, Some("seq".to_owned())];
    memory.programs.insert(program.id, program);
    let model = memory.load();
    let mut session = model.session().unwrap();
    let one = Tensor::from_slice(&[1.0_f32, 2.0], &[1, 2]).unwrap();
    session.run("decode", &[one]).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    session.save(&path).unwrap();
    let (_, states) = saved::read(&path, |_| Ok(())).unwrap();
    let states: Vec<_> = states.into_iter().collect();
    let mut load_of = |position: i64, states: &[(String, Tensor)]| {
        let header = Header::new("fake", None, position, Holds::Session);
        saved::write(&path, &header, states, false).unwrap();
        session.load(&path).map(|()| session.position())
    };
    let wide = Tensor::from_slice(&[0.0_f32; 5], &[1, 5]).unwrap();
    let error = load_of(0, &[("total".to_owned(), wide)]).unwrap_err();
    insta::assert_snapshot!(error, @"state `total`: it is float32 [1, 2] or another bucket's, not float32 [1, 5]");
    let mut load = |position: i64| load_of(position, &states);
    for position in [-1, i64::MIN, 3, 1 << 40, i64::MAX] {
        let error = load(position).unwrap_err();
        assert_eq!(error.name(), "SessionFile", "{error}");
        let said = format!("its position is {position}, ");
        assert!(error.to_string().contains(&said), "{error}");
    }
    for position in 0..3 {
        assert_eq!(load(position).unwrap(), position as usize);
    }
}

#[test]
fn the_digest_of_some_weights_is_that_of_their_names_and_values() {
    let digest = |values: &[(&str, &[f32])], names: &[&str]| {
        let mut memory = Memory::default();
        memory.add("f", &Fake::sized(1, 2).constants(0).stateful());
        memory.weights = Some(memory.put(weights(values)));
        let model = memory.load();
        let names = names.iter().copied().collect();
        model.session().unwrap().digest_of(&names).unwrap()
    };
    let both: &[(&str, &[f32])] = &[("scale", &[2.0]), ("trained", &[1.0])];
    let own = digest(both, &["scale"]);
    // Other values of the others, as after a training that published them.
    assert!(own.is_some());
    let others: &[(&str, &[f32])] = &[("scale", &[2.0]), ("trained", &[5.0])];
    assert_eq!(own, digest(others, &["scale"]));
    assert_eq!(own, digest(both, &["scale", "a constant of the program"]));
    assert_ne!(own, digest(&[("scale", &[3.0])], &["scale"]));
    assert_ne!(own, digest(&[("shift", &[2.0])], &["shift"]));
    assert_ne!(own, digest(both, &["scale", "trained"]));
    assert_eq!(digest(both, &[]), None);
}
