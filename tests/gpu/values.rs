//! Values out of bounds on a device, with the store of `values/`: an error of their call, and of no other.
//!
//! A kernel that reads by such an index ends the context of the whole process, so every test here ends with good calls.

use precast::{
    Model, Value,
    runtime::{
        Outputs, RuntimeError,
        cuda::{Graphs, Stream},
        errors::Problem,
    },
};
use tch::{Kind, Tensor};

use super::{runtime, store_with};

const ROWS: i64 = 1000;

/// Sizes that are exact, padded and, but for eager, dynamic.
const SIZES: [(i64, i64); 5] = [(1, 4), (4, 16), (1, 16), (3, 7), (5, 40)];

struct Under {
    name: &'static str,
    model: Model,
}

impl Under {
    fn all() -> Option<Vec<Self>> {
        let (store, _) = store_with("values")?;
        store_with("values-eager")?;
        let load = |name, model, graphs| Self {
            name,
            model: runtime(&store, graphs).load(model).unwrap(),
        };
        Some(vec![
            load("artifact", "values", Graphs::Never),
            load("graph", "values", Graphs::Always),
            load("eager", "values-eager", Graphs::Never),
        ])
    }

    fn takes(&self, (batch, seq): (i64, i64)) -> bool {
        self.name != "eager" || (batch <= 4 && seq <= 16)
    }

    fn run(&self, ids: &Tensor) -> Outputs {
        self.model.run("forward", &[ids]).unwrap()
    }

    /// Calls with good values and compares every number.
    fn right(&self, (batch, seq): (i64, i64), seed: i64) {
        let ids = good(batch, seq, seed);
        let out = self.run(&ids.to_device(tch::Device::Cuda(0)));
        out.check().unwrap();
        let got = out[0].to_vec::<f32>().unwrap();
        let wanted = Vec::<f32>::try_from(answer(&ids).view(-1)).unwrap();
        assert_eq!(got, wanted, "{} batch={batch} seq={seq}", self.name);
        assert_eq!(out.array::<f32>(0).unwrap().data(), wanted);
    }
}

/// Returns ids of which none is out of bounds, on the host.
fn good(batch: i64, seq: i64, seed: i64) -> Tensor {
    let ids = (0..batch * seq).map(|i| (i * 37 + seed * 101) % 990);
    let ids: Vec<i64> = ids.collect();
    Tensor::from_slice(&ids).view([batch, seq])
}

/// Returns the model's answer.
fn answer(ids: &Tensor) -> Tensor {
    let column = Tensor::arange(8, (Kind::Float, tch::Device::Cpu)) / 128;
    let group = ids.narrow(1, 0, 1).divide_scalar_mode(64, "floor") * 1000;
    (ids + group).to_kind(Kind::Float).unsqueeze(-1) + column
}

/// Returns good ids with one other value.
fn with(batch: i64, seq: i64, at: [i64; 2], value: i64) -> Tensor {
    let ids = good(batch, seq, 3);
    let _ = ids.get(at[0]).get(at[1]).fill_(value);
    ids
}

fn on_device(ids: &Tensor) -> Tensor {
    ids.to_device(tch::Device::Cuda(0))
}

#[track_caller]
fn assert_value(error: RuntimeError, at: [i64; 2], given: i64) {
    let RuntimeError::BadInput { input, problem, .. } = error else {
        panic!("another error: {error}")
    };
    let expected = Problem::Value {
        position: Some(at.to_vec()),
        value: Some(given),
        bounds: [0, ROWS],
    };
    assert_eq!((&*input, problem), ("ids", expected));
}

#[test]
fn a_value_out_of_bounds_is_an_error_of_its_call() {
    let Some(all) = Under::all() else { return };
    for under in &all {
        for (batch, seq) in SIZES.into_iter().filter(|&sizes| under.takes(sizes)) {
            under.right((batch, seq), 0);
            let at = [batch - 1, seq - 1];
            for value in [ROWS, -1, -5, ROWS + 1, i64::MAX, i64::MIN, 1 << 31, 1 << 32] {
                let ids = with(batch, seq, at, value);
                // On the device already: the call is answered, and a read is an error.
                let out = under.run(&on_device(&ids));
                assert_value(out.array::<f32>(0).unwrap_err(), at, value);
                assert_value(out.check().unwrap_err(), at, value);
                // In the host's memory: before anything runs.
                let sizes = [batch as usize, seq as usize];
                let plain = Vec::<i64>::try_from(ids.view(-1)).unwrap();
                let plain = Value::new(&plain, &sizes).unwrap();
                assert_value(under.model.run("forward", &[plain]).unwrap_err(), at, value);
                under.right((batch, seq), value & 7);
            }
            // The edges of the bounds are inside.
            for value in [0, ROWS - 1] {
                let at = [batch - 1, seq - 1];
                let ids = with(batch, seq, at, value);
                let out = under.run(&on_device(&ids));
                let wanted = Vec::<f32>::try_from(answer(&ids).view(-1)).unwrap();
                assert_eq!(out.array::<f32>(0).unwrap().data(), wanted);
            }
        }
        assert!(under.model.is_ready(), "{}", under.name);
    }
}

#[test]
fn a_computed_index_out_of_bounds_is_an_error_of_its_call() {
    let Some(all) = Under::all() else { return };
    let wrong = [
        (997, "index in 0..16 of aten.embedding"),
        (998, "index in 0..16 of aten.embedding"),
        (999, "999 is reserved"),
    ];
    for under in &all {
        for (batch, seq) in SIZES.into_iter().filter(|&sizes| under.takes(sizes)) {
            for (value, text) in wrong {
                let ids = with(batch, seq, [batch - 1, 0], value);
                for ids in [on_device(&ids), on_device(&ids)] {
                    let out = under.run(&ids);
                    let error = out.array::<f32>(0).unwrap_err();
                    let RuntimeError::CheckFailed { check, .. } = &error else {
                        panic!("another error: {error}")
                    };
                    let named = check.contains(text) && check.contains("model.py:");
                    assert!(named, "{}: {check}", under.name);
                    assert!(out.check().is_err());
                }
                let plain = Vec::<i64>::try_from(ids.view(-1)).unwrap();
                let plain = Value::new(&plain, &[batch as usize, seq as usize]).unwrap();
                let out = under.model.run("forward", &[plain]).unwrap();
                assert!(matches!(out.check(), Err(RuntimeError::CheckFailed { .. })));
                under.right((batch, seq), value & 7);
            }
        }
        assert!(under.model.is_ready(), "{}", under.name);
    }
}

#[test]
fn a_fixed_program_checks_the_values_of_its_last_run() {
    let Some(all) = Under::all() else { return };
    let graph = &all[1];
    let sizes = [("batch".to_owned(), 4), ("seq".to_owned(), 16)].into();
    let mut fixed = graph.model.fixed("forward", &sizes).unwrap();
    let right = |fixed: &mut precast::runtime::cuda::Fixed<'_>| {
        let ids = good(4, 16, 5);
        fixed.inputs()[0].write(&ids).unwrap();
        fixed.run().unwrap();
        fixed.check().unwrap();
        let got = Tensor::from(fixed.outputs()[0].copied().unwrap()).to_device(tch::Device::Cpu);
        assert!(got.equal(&answer(&ids)));
    };
    right(&mut fixed);
    for value in [ROWS, -1, i64::MIN, i64::MAX] {
        let ids = with(4, 16, [2, 9], value);
        fixed.inputs()[0].write(&ids).unwrap();
        fixed.run().unwrap();
        assert_value(fixed.check().unwrap_err(), [2, 9], value);
        right(&mut fixed);
    }
    let ids = with(4, 16, [3, 0], 997);
    fixed.inputs()[0].write(&ids).unwrap();
    fixed.run().unwrap();
    let failed = fixed.check();
    assert!(matches!(failed, Err(RuntimeError::CheckFailed { .. })));
    right(&mut fixed);
}

#[test]
fn good_calls_beside_bad_ones_are_right() {
    let Some(all) = Under::all() else { return };
    for under in &all {
        std::thread::scope(|scope| {
            for thread in 0..4_i64 {
                scope.spawn(move || {
                    let stream = Stream::new(0).unwrap();
                    let _scope = stream.enter().unwrap();
                    for round in 0..200 {
                        let sizes = SIZES[((thread + round) % 4) as usize];
                        if (thread + round) % 3 != 0 {
                            under.right(sizes, round);
                            continue;
                        }
                        let at = [sizes.0 - 1, sizes.1 - 1];
                        let value = [ROWS, -1, i64::MIN, 1 << 40][(round % 4) as usize];
                        let out = under.run(&on_device(&with(sizes.0, sizes.1, at, value)));
                        assert_value(out.check().unwrap_err(), at, value);
                    }
                });
            }
        });
        assert!(under.model.is_ready(), "{}", under.name);
    }
}
