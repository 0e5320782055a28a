//! Training with dropout and on several devices: masks from a seed that is state, and sums that equal those of one device.

use std::collections::BTreeSet;

use precast::runtime::{command::sum, errors::TorchError, training::Sums};

use super::*;

type Sum = fn(&[Tensor]) -> Result<Tensor, TorchError>;

#[test]
fn dropout_has_other_masks_in_each_step_and_the_same_ones_after_a_checkpoint() {
    let (store, folder) = (store(), tempfile::tempdir().unwrap());
    let path = folder.path().join("step.safetensors");
    let runtime = runtime(&store);
    let model = loaded(&runtime);
    let mut trainer = model.trainer("dropped").unwrap();
    // Without an update, only the masks differ.
    trainer.set_lr(0.0);
    trainer.set_seed(11).unwrap();
    let still = |trainer: &mut Trainer<'_>| step(trainer, 0).loss;
    let losses: Vec<f64> = (0..64).map(|_| still(&mut trainer)).collect();
    let distinct: BTreeSet<u64> = losses.iter().map(|loss| loss.to_bits()).collect();
    assert_eq!(distinct.len(), losses.len(), "each step drops others");
    let whole = trainer.eval_step(&values(0)).unwrap().loss;
    assert_eq!(trainer.eval_step(&values(0)).unwrap().loss, whole);
    // Scaled by the rate, dropout keeps the mean of what it drops.
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    assert!((mean / whole - 1.0).abs() < 0.1, "{mean} {whole}");

    trainer.set_lr(0.05);
    trainer.save(&path).unwrap();
    let after: Vec<Losses> = (0..4).map(|number| step(&mut trainer, number)).collect();
    let mut other = model.trainer("dropped").unwrap();
    other.set_lr(0.05);
    other.load(&path).unwrap();
    let again: Vec<Losses> = (0..4).map(|number| step(&mut other, number)).collect();
    assert_eq!(again, after);
    let mut other = model.trainer("dropped").unwrap();
    other.set_lr(0.0);
    other.set_seed(12).unwrap();
    assert!(!distinct.contains(&still(&mut other).to_bits()));
}

/// Returns a batch of 16 rows: those of two batches.
fn twice(number: i64) -> Batch {
    let (first, second) = (batch(number * 2), batch(number * 2 + 1));
    given(&[first.0, second.0].concat(), &[first.1, second.1].concat())
}

#[test]
fn two_devices_train_as_one_at_twice_the_batch_and_a_wrong_sum_is_refused() {
    let (store, folder) = (store(), tempfile::tempdir().unwrap());
    let path = folder.path().join("step.safetensors");
    let runtime = runtime(&store);
    let one = loaded(&runtime);
    let both = Runtime::new(&store, [Device::Cpu, Device::Cpu]).unwrap();
    let two = loaded(&both);
    let mut alone = one.trainer("halves").unwrap();
    let mut trainer = two.trainer("halves").unwrap();
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
    for number in 0..6 {
        let wanted = alone.step(&twice(number)).unwrap();
        let losses = trainer.step(&twice(number)).unwrap();
        assert!(close(losses.loss, wanted.loss), "{losses:?} {wanted:?}");
        let norms = (losses.grad_norm.unwrap(), wanted.grad_norm.unwrap());
        assert!(close(norms.0, norms.1), "{norms:?}");
    }
    let wanted = alone.eval_step(&twice(9)).unwrap();
    let losses = trainer.eval_step(&twice(9)).unwrap();
    assert!(close(losses.loss, wanted.loss), "{losses:?} {wanted:?}");

    // A checkpoint continues bit by bit, also between two batches of an update, and on one device.
    let run = |trainer: &mut Trainer<'_>| -> Vec<Losses> {
        trainer.accumulate(&twice(1)).unwrap();
        let steps = (2..5).map(|number| trainer.step(&twice(number)).unwrap());
        steps.collect()
    };
    trainer.save(&path).unwrap();
    let after = run(&mut trainer);
    assert!(trainer.load(&path).unwrap());
    assert_eq!(run(&mut trainer), after);
    trainer.load(&path).unwrap();
    trainer.accumulate(&twice(1)).unwrap();
    trainer.save(&path).unwrap();
    alone.load(&path).unwrap();
    assert!(close(alone.step(&twice(2)).unwrap().loss, after[0].loss));

    // A part that one device refuses adds nothing on the other one.
    trainer.load(&path).unwrap();
    let mut bad = vec![1_i64; 16];
    bad[12] = 31;
    let error = trainer.step(&given(&[1; 32], &bad)).unwrap_err();
    assert_eq!(error.name(), "BadInput", "{error}");
    let losses = trainer.step(&twice(2)).unwrap();
    assert_eq!(losses.loss, after[0].loss);
    let norms = (losses.grad_norm.unwrap(), after[0].grad_norm.unwrap());
    assert!(close(norms.0, norms.1), "{norms:?}");
    let error = trainer
        .step(&given(&[1; 14], &[1; 7]))
        .unwrap_err()
        .to_string();
    let end = "on 2 devices: input `ids` has 7 rows";
    assert!(error.ends_with(end), "{error}");
    drop(trainer);

    let one_program = two.trainer("train").err().unwrap();
    assert_eq!(one_program.name(), "SeveralDevices", "{one_program}");
    // A sum that leaves a device out, one that counts it twice, and one with NaN.
    let wrong: [Sum; 3] = [
        |all| Ok(all[0].share()),
        |all| sum(&[all[0].share(), all[1].share(), all[1].share()]),
        |all| {
            let total = sum(all)?;
            match total.shape()[..] {
                [31] => Tensor::from_slice(&[f32::NAN; 31], &[31]),
                _ => Ok(total),
            }
        },
    ];
    for add in wrong {
        let mut trainer = two.trainer("halves").unwrap().adding(add);
        let error = trainer.step(&twice(0)).unwrap_err();
        let RuntimeError::WrongSum { state, .. } = &error else {
            panic!("{error}");
        };
        assert!(state.starts_with("optimizer."), "{error}");
        assert_eq!(trainer.progress().step, 0);
        let mut new = two.trainer("halves").unwrap();
        let [left, begun] = [&mut trainer, &mut new].map(|one| one.eval_step(&twice(9)).unwrap());
        assert_eq!(left.loss, begun.loss);
    }
}

/// Compiles nccl.c, which has the functions of NCCL over the host's memory.
fn nccl(folder: &Path, more: &[&str]) -> std::path::PathBuf {
    let library = folder.join(format!("nccl{}.so", more.len()));
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&library).args(more);
    let source = checkout().join("tests/numerics/training/nccl.c");
    assert!(cc.arg(source).status().unwrap().success());
    library
}

#[test]
fn two_devices_train_alike_through_nccl_and_its_failure_has_a_name() {
    let (store, folder) = (store(), tempfile::tempdir().unwrap());
    let both = Runtime::new(&store, [Device::Cpu, Device::Cpu]).unwrap();
    let two = loaded(&both);
    let run = |trainer: &mut Trainer<'_>| -> Vec<Losses> {
        let steps = (0..4).map(|number| trainer.step(&twice(number)).unwrap());
        steps.collect()
    };
    let mut trainer = two.trainer("halves").unwrap();
    assert_eq!(trainer.sums(), Some(Sums::Memory), "these are CPUs");
    let wanted = run(&mut trainer);
    drop(trainer);

    let library = nccl(folder.path(), &[]);
    let mut trainer = two.trainer("halves").unwrap().through(&library).unwrap();
    assert_eq!(trainer.sums(), Some(Sums::Nccl));
    assert_eq!(run(&mut trainer), wanted);
    let path = folder.path().join("step.safetensors");
    trainer.save(&path).unwrap();
    let after = run(&mut trainer);
    assert!(trainer.load(&path).unwrap());
    assert_eq!(run(&mut trainer), after);
    let mut trainer = trainer.without_nccl();
    assert_eq!(trainer.sums(), Some(Sums::Memory));
    trainer.load(&path).unwrap();
    assert_eq!(run(&mut trainer), after);
    drop(trainer);

    let library = nccl(folder.path(), &["-DFAILS"]);
    let mut trainer = two.trainer("halves").unwrap().through(&library).unwrap();
    for _ in 0..2 {
        let error = trainer.step(&twice(0)).unwrap_err();
        assert_eq!(error.name(), "Nccl", "{error}");
        let says = "NCCL on 2 devices: `ncclReduce` failed: internal error: the fake refuses it";
        assert_eq!(error.to_string(), says);
    }
    let missing = trainer.through(Path::new("/nowhere/libnccl.so.2"));
    let error = missing.err().unwrap().to_string();
    assert!(error.contains("`/nowhere/libnccl.so.2`"), "{error}");
}

#[test]
fn two_devices_leave_the_checkpoint_of_one_with_two_batches_of_an_update() {
    let place = Place::new();
    let run = |name: &str, setting: [&str; 2]| {
        let folder = place.saved.with_file_name(name);
        let more = [&["--steps", "20", "--lr", "0.05", "--quiet"], &setting[..]].concat();
        well(&mut train_module("halves", &place.data, &folder, &more));
        std::fs::read(folder.join("step-0000000020.safetensors")).unwrap()
    };
    let two = run("two", ["--devices", "cpu,cpu"]);
    assert!(two == run("one", ["--accumulate", "2"]));
    let text = said(&mut place.train(&["--steps", "1", "--devices", "cpu,cpu"])).err;
    for says in [
        "gradients and update are one program",
        "`accumulate = true`",
    ] {
        assert!(text.contains(says), "{text}");
    }
}
