//! Clamped values and their notes, on the CPU, with the same calls of libtorch as on a device.

use precast_store::{record::Check, testing};

use super::*;
use crate::{deferred::DeferredChecks, fake};

const VOCABULARY: [i64; 2] = [0, 30_522];

/// A program with ids, a mask whose pad value the spec leaves out, and any integers.
fn program(dtype: Dtype, checks: usize) -> Arc<Program> {
    let mut program = testing::program("tiny", 2, &[]);
    let input = |name: &str, dtype, bounds| Input {
        bounds,
        ..fake::input(name, fake::layout(dtype, &[2, 3]), &[Some("batch"), None])
    };
    program.inputs = vec![
        input("any", Dtype::Int64, None),
        input("ids", dtype, Some(VOCABULARY)),
        input("mask", Dtype::Int64, Some([1, 2])),
    ];
    program.checks = (0..checks)
        .map(|at| Check {
            value: 4 + at,
            text: format!("index in 0..{at} of aten.embedding"),
            location: (at == 0).then(|| "model.py:12".to_owned()),
            input: None,
        })
        .collect();
    Arc::new(program)
}

fn watch(program: &Arc<Program>, padded: bool) -> Watch {
    Watch::new(program, &"encode".into(), Device::Cuda(0), padded).unwrap()
}

fn inputs(ids: &Handle, mask: i64) -> Handles {
    let all = |value| Handle::of(&[value; 6], &[2, 3], Dtype::Int64).unwrap();
    [all(i64::MIN), ids.share(), all(mask)]
        .into_iter()
        .collect()
}

fn clamp(watch: &Watch, inputs: &mut Handles) -> Flags {
    watch.clamp(inputs, Device::Cpu).unwrap()
}

fn ids(at_4: i64) -> Handle {
    Handle::of(&[0, 30_521, 5, 6, at_4, 7], &[2, 3], Dtype::Int64).unwrap()
}

fn read(tensor: &Handle) -> Vec<i64> {
    tensor.read().unwrap()
}

#[test]
fn what_is_out_of_bounds_is_clamped_and_named() {
    let program = program(Dtype::Int64, 0);
    let watch = watch(&program, false);
    for (value, clamped) in [
        (0, None),
        (30_521, None),
        (30_522, Some(30_521)),
        (-1, Some(0)),
        (i64::MAX, Some(30_521)),
        (i64::MIN, Some(0)),
    ] {
        let given = ids(value);
        let mut handles = inputs(&given, 1);
        let flags = clamp(&watch, &mut handles);
        let clean = read(&handles[1]);
        assert_eq!(clean[4], clamped.unwrap_or(value));
        assert_eq!(clean[..4], [0, 30_521, 5, 6]);
        assert_eq!(
            read(&given),
            read(&ids(value)),
            "a caller's input was written to"
        );
        if clamped.is_none() {
            flags.check().unwrap();
            continue;
        }
        let RuntimeError::BadInput { input, problem, .. } = flags.check().unwrap_err() else {
            panic!("another error")
        };
        let (position, value) = (Some(vec![1, 1]), Some(value));
        let expected = Problem::Value {
            position,
            value,
            bounds: VOCABULARY,
        };
        assert_eq!((&*input, problem), ("ids", expected));
    }
}

#[test]
fn a_value_is_known_where_its_place_is_not() {
    let program = program(Dtype::Int64, 0);
    let given = ids(-5);
    let flags = clamp(&watch(&program, false), &mut inputs(&given, 1));
    // The caller's again since the call.
    given.zero().unwrap();
    let error = flags.check().unwrap_err();
    insta::assert_snapshot!(error, @"module `encode`, input `ids`: expected values from 0 to 30521, got -5");
}

#[test]
fn every_dtype_has_bounds_of_its_own() {
    for (dtype, bad) in [
        (Dtype::Int32, 2_147_483_647),
        (Dtype::Int32, -2_147_483_648),
        (Dtype::Int16, -1),
        (Dtype::Int8, -128),
    ] {
        let program = program(dtype, 0);
        let table = |values: [i64; 6]| {
            let made = Handle::empty(&[2, 3], &[3, 1], dtype, Device::Cpu).unwrap();
            let wide = Handle::of(&values, &[2, 3], Dtype::Int64).unwrap();
            made.copy_from(&wide).unwrap();
            made
        };
        let good = table([0, 1, 2, 3, 4, 5]);
        let watch = watch(&program, false);
        let mut handles = inputs(&good, 1);
        clamp(&watch, &mut handles).check().unwrap();
        assert_eq!(handles[1].meta().dtype(), Some(dtype));
        let flags = clamp(&watch, &mut inputs(&table([bad; 6]), 1));
        let error = flags.check().unwrap_err().to_string();
        assert!(error.ends_with(&format!("got {bad} at [0, 0]")), "{error}");
    }
    // No value of it is out of bounds.
    let program = program(Dtype::Uint8, 0);
    assert_eq!(watch(&program, false).inputs.len(), 1);
}

#[test]
fn an_input_without_elements_has_no_values() {
    let program = program(Dtype::Int64, 0);
    let mut handles = inputs(&ids(0), 1);
    handles[1] = Handle::of::<i64>(&[], &[0, 3], Dtype::Int64).unwrap();
    let flags = clamp(&watch(&program, false), &mut handles);
    flags.check().unwrap();
}

#[test]
fn where_inputs_are_padded_the_pad_value_is_in_bounds() {
    let program = program(Dtype::Int64, 0);
    let check = |padded, mask| {
        let flags = clamp(&watch(&program, padded), &mut inputs(&ids(0), mask));
        flags.check()
    };
    let error = check(false, 0).unwrap_err().to_string();
    let strict = "`mask`: expected values from 1 to 1, got 0";
    assert!(error.contains(strict), "{error}");
    check(true, 0).unwrap();
    check(true, 2).unwrap_err();
}

#[test]
fn the_host_has_looked_at_what_is_in_its_memory() {
    let program = program(Dtype::Int64, 0);
    assert!(Watch::new(&program, &"encode".into(), Device::Cpu, false).is_none());
}

#[test]
fn a_replay_is_noted_apart_from_the_next_one() {
    let program = program(Dtype::Int64, 1);
    let watch = watch(&program, true);
    let mut made = clamp(&watch, &mut inputs(&ids(-7), 1));
    let of_call = |made: &Flags, at_4| {
        let given = inputs(&ids(at_4), 1);
        made.of_call(&given, Device::Cpu).unwrap().unwrap()
    };
    let outcome = |failed: bool| -> Handles {
        [Handle::of(&[u8::from(failed)], &[], Dtype::Bool).unwrap()]
            .into_iter()
            .collect()
    };
    watch.outcomes(&mut outcome(false), &mut made).unwrap();
    let first = of_call(&made, -7);
    // The notes of a later replay.
    let next = clamp(&watch, &mut inputs(&ids(0), 1));
    let (Place::Tensor(notes), Place::Tensor(later)) = (&made.notes, &next.notes) else {
        panic!()
    };
    notes.copy_from(later).unwrap();
    watch.outcomes(&mut outcome(true), &mut made).unwrap();
    let second = of_call(&made, 0);
    for _ in 0..2 {
        let error = first.check().unwrap_err().to_string();
        assert!(error.ends_with("got -7 at [1, 1]"), "{error}");
        assert_eq!(second.check().unwrap_err().name(), "CheckFailed");
    }
}

#[test]
fn outcomes_are_no_outputs_and_say_what_failed() {
    let program = program(Dtype::Int64, 2);
    let watch = watch(&program, false);
    for (outcomes, failed) in [
        ([false, false], None),
        ([false, true], Some(1)),
        ([true, true], Some(0)),
    ] {
        let mut handles = inputs(&ids(0), 1);
        let mut flags = clamp(&watch, &mut handles);
        let tensor = |outcome| Handle::of(&[0, u8::from(outcome)], &[2], Dtype::Uint8);
        let mut results: Handles = outcomes
            .into_iter()
            .map(|one| tensor(one).unwrap())
            .collect();
        watch.outcomes(&mut results, &mut flags).unwrap();
        assert!(results.is_empty());
        let checked = flags.check();
        let texts = [
            "`index in 0..0 of aten.embedding (model.py:12)`",
            "`index in 0..1 of aten.embedding`",
        ];
        match failed {
            None => checked.unwrap(),
            Some(at) => {
                let error = checked.unwrap_err().to_string();
                assert!(error.contains(texts[at]), "{error}");
            }
        }
    }
}

/// A program whose second input it clamps itself.
fn checked() -> Watch {
    let mut own = (*program(Dtype::Int64, 1)).clone();
    own.checks[0].input = Some("ids".to_owned());
    watch(&Arc::new(own), false)
}

fn noted(watch: &Watch, at_4: i64, failed: bool) -> Arc<Flags> {
    let given = ids(at_4);
    let mut handles = inputs(&given, 1);
    let mut flags = clamp(watch, &mut handles);
    // The runtime leaves the input to the program.
    assert_eq!(read(&handles[1]), read(&given));
    let outcome = Handle::of(&[i64::from(failed)], &[], Dtype::Int64).unwrap();
    let mut results = [outcome].into_iter().collect();
    watch.outcomes(&mut results, &mut flags).unwrap();
    Arc::new(flags)
}

#[test]
fn an_input_that_the_program_clamps_is_named_with_its_value() {
    let watch = checked();
    noted(&watch, 3, false).check().unwrap();
    let error = noted(&watch, 30_600, true).check().unwrap_err();
    insta::assert_snapshot!(error, @"module `encode`, input `ids`: expected values from 0 to 30521, got 30600 at [1, 1]");
}

#[test]
fn a_later_call_learns_of_a_value_that_nobody_asked_for() {
    let (watch, late) = (checked(), DeferredChecks::default());
    late.add(&noted(&watch, 3, false));
    late.add(&noted(&watch, 30_600, true));
    late.add(&noted(&watch, -1, true));
    let error = late.poll().unwrap_err();
    insta::assert_snapshot!(error, @"an earlier call, number 2: module `encode`, input `ids`: expected values from 0 to 30521, got 30600 at [1, 1]");
    insta::assert_snapshot!(error.hint(), @"discard its outputs, and repeat this call; `check` waits for the device and tells at once");
    // Each is told once.
    let error = late.settle().unwrap_err().to_string();
    assert!(error.starts_with("an earlier call, number 3: "), "{error}");
    late.settle().unwrap();
    // Who has the outputs may still ask: no other call is told before they are gone.
    let held = noted(&watch, 30_600, true);
    late.add(&held);
    late.add(&noted(&watch, 3, false));
    late.poll().unwrap();
    drop(held);
    let error = late.poll().unwrap_err().to_string();
    assert!(error.starts_with("an earlier call, number 4: "), "{error}");
    // Who asks is told, and nobody else.
    let own = noted(&watch, 30_600, true);
    late.add(&own);
    assert!(own.check().is_err() && own.check().is_err());
    late.poll().unwrap();
    let own = noted(&watch, 30_600, true);
    late.add(&own);
    own.claim();
    late.settle().unwrap();
    assert!(own.check().is_err());
}
