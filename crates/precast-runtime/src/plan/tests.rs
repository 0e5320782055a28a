//! A program whose three steps are one artifact bound in two ways.

use precast_store::record::Dtype;

use super::*;
use crate::{
    fake::{self, Fake, Memory},
    loaded::Loaded,
    loader::Held,
    source::Source,
};

/// Returns a program that computes `((x * 2 + 1) * 10 + 5) * 2 + 1`, a source that has it, and a second weight set with
/// which it computes `((x * 3 + 1) * 10 + 5) * 3 + 1`.
fn three_steps() -> (Arc<dyn Source>, Program, [Digest; 2]) {
    let mut memory = Memory::default();
    let fake = Fake::sized(2, 2).constants(2);
    let mut program = memory.add("f", &fake);
    let set = |first: f32| {
        fake::weights(&[
            ("a.scale", &[first]),
            ("a.shift", &[1.0]),
            ("b.scale", &[10.0]),
            ("b.shift", &[5.0]),
        ])
    };
    let sets = [2.0, 3.0].map(|first| memory.put(set(first)));
    let step = program.steps.remove(0);
    for (i, owner) in ["a", "b", "a"].into_iter().enumerate() {
        let mut step = step.clone();
        step.name = format!("{owner}{i}");
        (step.inputs, step.outputs) = (vec![i], vec![i + 1]);
        for (constant, name) in [("scale", "scale"), ("shift.0", "shift")] {
            let bound = format!("{owner}.{name}");
            step.binding.insert(constant.to_owned(), bound);
        }
        program.steps.push(step);
    }
    (program.values, program.results) = (4, vec![3]);
    (memory.source(), program, sets)
}

fn with(weights: &Arc<Weights>) -> With {
    With {
        device: Device::Cpu,
        weights: weights.clone(),
        aliases: Arc::default(),
        extras: None,
        instances: 1,
        host: Arc::new(fake::target()),
        trials: None,
    }
}

fn answer(plan: &Plan, containers: &mut Containers, x: f32) -> Vec<f32> {
    let x = Handle::of(&[x; 4], &[2, 2], Dtype::Float32).unwrap();
    let inputs = [x].into_iter().collect();
    let results = plan.execute(containers, inputs, RawStream::NONE).unwrap();
    results[0].read().unwrap()
}

#[test]
fn steps_that_share_a_container_have_their_own_weights() {
    let (source, program, sets) = three_steps();
    let held = Held::default();
    let weights = sets.map(|set| held.on(&source, Some(set), Device::Cpu, None, &[]).unwrap());
    let loaded = Loaded::load(&source, Arc::new(program), with(&weights[0])).unwrap();
    let plan = &loaded.plan;
    for (weights, scale) in weights.into_iter().zip([2.0, 3.0]) {
        let mut plain = plan.containers().unwrap();
        let mut shared = plan.shared_containers().unwrap();
        plan.bind(&mut plain, &weights).unwrap();
        plan.bind(&mut shared, &weights).unwrap();
        assert_eq!((plain.containers.len(), shared.containers.len()), (3, 1));
        for x in [1.0, -4.0, 1.0] {
            let wanted = vec![((x * scale + 1.0) * 10.0 + 5.0) * scale + 1.0; 4];
            assert_eq!(answer(plan, &mut plain, x), wanted);
            assert_eq!(answer(plan, &mut shared, x), wanted);
        }
    }
}

#[test]
fn shared_containers_name_the_constant_that_they_can_not_bind() {
    let (source, mut program, sets) = three_steps();
    program.steps[1]
        .binding
        .insert("scale".to_owned(), "b.gone".to_owned());
    let weights = Held::default()
        .on(&source, Some(sets[0]), Device::Cpu, None, &[])
        .unwrap();
    let loaded = Loaded::load(&source, Arc::new(program), with(&weights)).unwrap();
    let error = loaded.accepts(&weights).unwrap_err();
    let RuntimeError::Unbound {
        constant, reason, ..
    } = &error
    else {
        panic!("{error}");
    };
    assert!(
        constant == "scale" && reason.to_string().contains("b.gone"),
        "{error}"
    );
    // The load fails, not a later call.
    assert_eq!(loaded.prepare().unwrap_err().to_string(), error.to_string());
}

#[test]
fn unused_weights_are_freed() {
    let mut memory = Memory::default();
    let sets = [0.0, 1.0, 2.0, 3.0].map(|value| memory.put(fake::weights(&[("scale", &[value])])));
    let (source, held) = (memory.source(), Held::default());
    let on = |set: Digest| held.on(&source, Some(set), Device::Cpu, None, &[]).unwrap();
    let first = on(sets[0]);
    for set in sets {
        drop(on(set));
    }
    assert!(Arc::ptr_eq(&first, &on(sets[0])));
    assert_eq!(held.known(), 2, "the first, and the last that was made");
}

#[test]
fn a_record_takes_no_memory_for_values_without_a_step() {
    let (source, program, _) = three_steps();
    for values in [5, 1 << 50, usize::MAX] {
        let mut program = program.clone();
        program.values = values;
        let weights = Arc::new(Weights::none(Device::Cpu));
        let error = Loaded::load(&source, Arc::new(program), with(&weights)).err();
        let Some(RuntimeError::Malformed { reason, .. }) = error else {
            panic!("{error:?}");
        };
        let expected = format!("it has {values} values, and inputs, states and steps make 4");
        assert_eq!(reason, expected);
    }
}
