//! Slots that sessions leave to later ones, and the states that the warm-ups of a graph may write.

use precast_store::record::State;

use super::*;
use crate::{
    Model, Session,
    fake::{Fake, Memory},
};

/// Two modules, each with a state of its name.
fn model() -> Model {
    let mut memory = Memory::default();
    for (salt, module) in ["a", "b"].into_iter().enumerate() {
        let fake = Fake::sized(1, 2).constants(0).stateful();
        let mut program = memory.add(module, &fake.salted(salt as u32));
        program.states = vec![State {
            name: module.to_owned(),
            ..program.states[0].clone()
        }];
        memory.programs.insert(program.id, program);
    }
    memory.runtime().sessions(1).load("fake").unwrap()
}

fn call(session: &mut Session<'_>, module: &str) {
    let one = Tensor::from_slice(&[1.0_f32, 2.0], &[1, 2]).unwrap();
    session.run(module, &[one]).unwrap();
}

/// The states that a call or the caller has written.
fn written(session: &mut Session<'_>) -> Vec<String> {
    let level = session.states().level().unwrap();
    let written = level.tensors.iter().filter(|(_, kept)| kept.written);
    written.map(|(name, _)| name.clone()).collect()
}

#[test]
fn a_session_runs_in_the_slots_that_an_earlier_one_has_left() {
    let model = model();
    // A number that a slot of a session does not use tells them apart.
    let numbers = |number: u64| {
        let mut session = model.session().unwrap();
        call(&mut session, "a");
        call(&mut session, "b");
        let states = session.states();
        let slots = states.levels[0].slots.values_mut().flatten();
        slots
            .map(|slot| std::mem::replace(&mut slot.swaps, number))
            .collect::<Vec<_>>()
    };
    assert_eq!([numbers(7), numbers(8)], [[0, 0], [7, 7]]);
}

#[test]
fn a_slot_made_before_the_first_call_serves_it_and_writes_nothing() {
    let model = model();
    let mut session = model.session().unwrap();
    let variant = &model.replicas[0].modules["a"][0];
    let prepared = variant.programs[0].loaded().unwrap();
    let number = |states: &mut States, number| {
        let slots = states.levels[0].slots.values_mut().flatten();
        let mut slots = slots.map(|slot| std::mem::replace(&mut slot.swaps, number));
        let only = slots.next();
        assert_eq!(slots.next(), None);
        only
    };
    let states = session.states();
    states.prepare(prepared).unwrap();
    assert_eq!(number(states, 7), Some(0));
    assert!(written(&mut session).is_empty());
    session.reset();
    call(&mut session, "a");
    assert_eq!(number(session.states(), 8), Some(7));
}

#[test]
fn a_state_is_written_from_a_call_or_a_write_until_a_reset() {
    let model = model();
    let mut session = model.session().unwrap();
    call(&mut session, "a");
    assert_eq!(written(&mut session), ["a"]);
    let value = session.state("a").unwrap();
    session.set_state("b", &value).unwrap();
    assert_eq!(written(&mut session), ["a", "b"]);
    session.reset();
    call(&mut session, "b");
    assert_eq!(written(&mut session), ["b"]);
    session.reset();
    session.set_state("a", &value).unwrap();
    assert_eq!(written(&mut session), ["a"]);
}

#[test]
fn what_warm_ups_have_written_gets_its_first_value_again_and_nothing_else() {
    let model = model();
    let mut session = model.session().unwrap();
    call(&mut session, "a");
    let kept = session.state("a").unwrap().to_vec::<f32>().unwrap();
    assert_ne!(kept, [0.0, 0.0]);
    let states = session.states();
    let at = states.at.unwrap();
    let programs = model.replicas[0].programs();
    let programs: Vec<Arc<Program>> = programs.map(|one| one.record.clone()).collect();
    for program in &programs {
        for state in &program.states {
            let level = &mut states.levels[at];
            let tensor = level.kept(state, &states.weights, &states.loader).unwrap();
            if !tensor.written {
                let garbage = Handle::of(&[7.0_f32, 7.0], &tensor.shape, state.layout.dtype);
                tensor.tensor.copy_from(&garbage.unwrap()).unwrap();
            }
        }
        states.levels[at].restore(program).unwrap();
    }
    for (name, value) in [("a", kept), ("b", vec![0.0, 0.0])] {
        let state = session.state(name).unwrap();
        assert_eq!(state.to_vec::<f32>().unwrap(), value);
    }
}
