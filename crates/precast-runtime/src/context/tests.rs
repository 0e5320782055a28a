//! ExecutionContexts of a program whose three steps are one artifact bound in two ways.

use precast_store::record::Dtype;

use super::*;
use crate::{loader::Held, program::Ready, source::Source};
use fake::{Fake, Memory};

#[path = "../../../../tests/fake/records.rs"]
#[allow(dead_code)]
mod fake;

/// Returns a program that computes `((x * 2 + 1) * 10 + 5) * 2 + 1`, a source that has it, and a second weight set with which
/// it computes `((x * 3 + 1) * 10 + 5) * 3 + 1`.
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

fn answer(plan: &Plan, context: &mut ExecutionContext, x: f32) -> Vec<f32> {
    let x = Handle::of(&[x; 4], &[2, 2], Dtype::Float32).unwrap();
    let inputs = [x].into_iter().collect();
    let results = plan.execute(context, inputs, RawStream::NONE).unwrap();
    results[0].read().unwrap()
}

#[test]
fn steps_that_share_a_container_have_their_own_weights() {
    let (source, program, sets) = three_steps();
    let held = Held::default();
    let weights = sets.map(|set| {
        held.on(&*source, Some(set), Device::Cpu, None, &[])
            .unwrap()
    });
    let with = With {
        device: Device::Cpu,
        weights: weights[0].clone(),
        aliases: Arc::default(),
        extras: None,
        instances: 1,
        host: Arc::new(fake::target()),
        trials: None,
    };
    let ready = Ready::load(&source, Arc::new(program), with).unwrap();
    let plan = &ready.plan;
    for (weights, scale) in weights.into_iter().zip([2.0, 3.0]) {
        let mut plain = plan.context(weights.clone()).unwrap();
        let mut shared = plan.shared_context(weights).unwrap();
        assert_eq!((plain.containers.len(), shared.containers.len()), (3, 1));
        for x in [1.0, -4.0, 1.0] {
            let wanted = vec![((x * scale + 1.0) * 10.0 + 5.0) * scale + 1.0; 4];
            assert_eq!(answer(plan, &mut plain, x), wanted);
            assert_eq!(answer(plan, &mut shared, x), wanted);
        }
    }
}

#[test]
fn a_shared_lane_names_the_constant_that_it_can_not_bind() {
    let (source, mut program, sets) = three_steps();
    program.steps[1]
        .binding
        .insert("scale".to_owned(), "b.gone".to_owned());
    let weights = Held::default()
        .on(&*source, Some(sets[0]), Device::Cpu, None, &[])
        .unwrap();
    let with = With {
        device: Device::Cpu,
        weights: weights.clone(),
        aliases: Arc::default(),
        extras: None,
        instances: 1,
        host: Arc::new(fake::target()),
        trials: None,
    };
    let ready = Ready::load(&source, Arc::new(program), with).unwrap();
    let error = ready.plan.shared_context(weights).err().unwrap();
    assert!(
        matches!(&error, RuntimeError::Unbound { constant, reason, .. } if constant == "scale" && reason.to_string().contains("b.gone")),
        "{error}"
    );
    // What would take an execution context at a call is refused when it is loaded.
    assert_eq!(ready.prepare().unwrap_err().to_string(), error.to_string());
}

#[test]
fn of_weights_that_nobody_uses_nothing_is_kept() {
    let mut memory = Memory::default();
    let sets = [0.0, 1.0, 2.0, 3.0].map(|value| memory.put(fake::weights(&[("scale", &[value])])));
    let (source, held) = (memory.source(), Held::default());
    let on = |set: Digest| {
        held.on(&*source, Some(set), Device::Cpu, None, &[])
            .unwrap()
    };
    let first = on(sets[0]);
    for set in sets {
        drop(on(set));
    }
    assert!(Arc::ptr_eq(&first, &on(sets[0])));
    assert_eq!(held.known(), 2, "the first, and the last that was made");
}

#[test]
fn a_record_takes_no_memory_for_values_that_nothing_makes() {
    let (source, program, _) = three_steps();
    for values in [5, 1 << 50, usize::MAX] {
        let mut program = program.clone();
        program.values = values;
        let with = With {
            device: Device::Cpu,
            weights: Arc::new(Weights::none(Device::Cpu)),
            aliases: Arc::default(),
            extras: None,
            instances: 1,
            host: Arc::new(fake::target()),
            trials: None,
        };
        let error = Ready::load(&source, Arc::new(program), with).err().unwrap();
        let RuntimeError::Malformed { reason, .. } = &error else {
            panic!("{error}");
        };
        let told = format!("it has {values} values, and inputs and steps make 4");
        assert_eq!(*reason, told);
    }
}
