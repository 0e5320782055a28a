//! Every bucket at every size in its range, after a call that filled its buffers with NaN.

use precast::{Device, Runtime, Store, record::Program, runtime::counters::Rung};
use tch::{Kind, Tensor};

use crate::{Random, fake::Fake, flat, load, real, report::Tally, x};

/// Fakes of these buckets, each alone, so that every size in its range goes to it. Their second output adds up whole
/// rows, padding too.
pub fn fakes(buckets: &[(i64, i64)]) -> Tally {
    let mut outcome = Tally::default();
    for &(rows, cols) in buckets {
        let fake = Fake::sized(rows, cols).inputs(2).outputs(2);
        let model = load(&[fake]);
        outcome.add("buckets", 1);
        for (r, c) in (1..=rows).flat_map(|r| (1..=cols).map(move |c| (r, c))) {
            outcome.add("sizes", 1);
            let ids = |fill: i64, r, c| Tensor::full([r, c], fill, (Kind::Int64, tch::Device::Cpu));
            // Poison of every size that leaves more behind than the request covers, the whole bucket among them.
            for (pr, pc) in [(rows, cols), (r, cols), (rows, c)] {
                let nan = Tensor::full([pr, pc], f64::NAN, (Kind::Float, tch::Device::Cpu));
                model.run("f", &[nan, ids(i64::MAX, pr, pc)]).unwrap();
                let input = x(r, c);
                let out = model.run("f", &[input.shallow_clone(), ids(3, r, c)]);
                let out = out.unwrap();
                outcome.add("calls", 2);
                let doubled = &input * 2 + 3;
                // Pad rows and columns are 0 doubled, plus the pad ids 0.
                let sums = doubled.sum_dim_intlist(1, false, Kind::Float);
                let rung = match (r, c) == (rows, cols) {
                    true => Rung::Exact,
                    false => Rung::Padded,
                };
                let right = out[0].shape() == [r, c]
                    && out[1].shape() == [r]
                    && flat(&out[0]) == flat(&doubled)
                    && flat(&out[1]) == flat(&sums)
                    && out.served().rung() == rung;
                if !right {
                    outcome.fail(format!("{rows}x{cols} at {r}x{c} after {pr}x{pc}: {out:?}"));
                }
            }
        }
    }
    outcome
}

/// The numerics tests' small model: each bucket at every size against eager at that size, and the same bits whatever
/// an earlier call left in the buffers.
pub fn real(store: &Store) -> Tally {
    let mut outcome = Tally::default();
    let runtime = Runtime::new(store, Device::Cpu).unwrap();
    let whole = runtime.load(real::MODEL).unwrap();
    let release = store.releases().get(real::MODEL, None).unwrap().unwrap();
    let alone = |programs: Vec<Program>| real::alone(&runtime, &release, programs);
    let mut random = Random(17);
    let mut largest = 0.0f64;
    for program in real::buckets(&whole) {
        outcome.add("buckets", 1);
        let any_size = whole.programs(&program.module).into_iter();
        let any_size = any_size.filter(|other| other.steps.is_empty());
        let eager = alone(any_size.cloned().collect());
        let model = alone(vec![program.clone()]);
        let most: Vec<i64> = program.sizes.values().copied().collect();
        let mut sizes = vec![1; most.len()];
        loop {
            outcome.add("sizes", 1);
            let given = real::inputs(&program, &sizes, &mut random);
            let fresh = alone(vec![program.clone()]);
            let fresh = fresh.run(&program.module, &given).unwrap();
            // Eager has the sizes that the model can be captured for at any size.
            let wanted = eager.run(&program.module, &given).ok();
            outcome.add("with_eager", wanted.is_some().into());
            let mut poison = |sizes: &[i64]| {
                let inputs = real::inputs(&program, sizes, &mut random).into_iter();
                let nan = inputs.map(|tensor| match tensor.kind() {
                    Kind::Float => tensor.full_like(f64::NAN),
                    _ => tensor,
                });
                let nan: Vec<Tensor> = nan.collect();
                model.run(&program.module, &nan).unwrap();
            };
            poison(&most);
            // Padded, so that the poison goes through the buffers themselves.
            if most.iter().any(|size| *size > 1) {
                let mut less = most.clone();
                let last = less.len() - 1;
                less[last] = (less[last] - 1).max(1);
                poison(&less);
            }
            let after = model.run(&program.module, &given).unwrap();
            outcome.add("calls", 5);
            let name = || format!("{} {} at {sizes:?}", program.module, program.bucket());
            if real::bits(&fresh) != real::bits(&after) {
                outcome.fail(format!("{}: other bits after poison", name()));
            }
            for (got, wanted) in
                std::iter::zip(after.iter(), wanted.iter().flat_map(|out| out.iter()))
            {
                let (got, wanted) = (Tensor::from(got), Tensor::from(wanted));
                if !got.allclose(&wanted, 1e-4, 1e-5, false) || got.size() != wanted.size() {
                    outcome.fail(format!("{}: differs from eager", name()));
                } else {
                    largest = largest.max(f64::try_from((&got - &wanted).abs().max()).unwrap());
                }
            }
            let Some(axis) = (0..sizes.len()).rfind(|&axis| sizes[axis] < most[axis]) else {
                break;
            };
            sizes[axis] += 1;
            sizes[axis + 1..].fill(1);
        }
    }
    outcome.set("largest_error", largest);
    outcome
}
