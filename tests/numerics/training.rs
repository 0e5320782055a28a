//! Training steps on real artifacts: losses as with torch.optim, checkpoints that continue bit by bit, also after
//! `kill -9`, and weights that a serving model takes.

mod devices;
mod float64;
mod folder;
mod published;

use std::{
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use precast::{
    Device, Model, Runtime, Store,
    record::{Dtype, Faster, SignTest},
    runtime::{RuntimeError, Tensor, Trainer, Value, command::tensors, training::Losses},
};
use serde_json::{Value as Json, json};

use crate::lab::{checkout, lab, libtorch, precast, python, runtime};

const SPEC: &str = "tests/numerics/training/precast.toml";

fn store() -> Store {
    Store::open(&lab(SPEC).store).unwrap()
}

/// Returns the model as it was built: tests publish later releases.
fn loaded(runtime: &Runtime) -> Model {
    runtime.load("next@1").unwrap()
}

/// Returns tokens, and the tokens that follow them.
fn batch(number: i64) -> (Vec<i64>, Vec<i64>) {
    let rows = (number * 8..number * 8 + 8).map(|row| ((row * 7 + 3) % 31, (row * 5 + 1) % 31));
    rows.map(|(a, b)| ([a, b], (a * 3 + b) % 31)).fold(
        (vec![], vec![]),
        |(mut ids, mut targets), (pair, target)| {
            ids.extend(pair);
            targets.push(target);
            (ids, targets)
        },
    )
}

fn values(number: i64) -> [(&'static str, Value); 2] {
    let (ids, targets) = batch(number);
    let ids = Value::new(&ids, &[8, 2]).unwrap();
    [
        ("ids", ids),
        ("targets", Value::new(&targets, &[8]).unwrap()),
    ]
}

fn step(trainer: &mut Trainer<'_>, number: i64) -> Losses {
    trainer.step(&values(number)).unwrap()
}

fn eager(kind: &str, count: u64, rates: &[f64]) -> Json {
    let mut script = Command::new(python());
    let script = script.current_dir(checkout().join("tests/numerics/training"));
    let script = script.args([
        "eager.py",
        kind,
        &count.to_string(),
        &json!(rates).to_string(),
    ]);
    let output = script.output().unwrap();
    let found = serde_json::from_slice(&output.stdout);
    found.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

fn near(got: f64, want: &Json, what: &str) {
    let want = want.as_f64().unwrap();
    assert!(
        (got - want).abs() <= 2e-4 * want.abs() + 2e-5,
        "{what}: {got} {want}"
    );
}

#[test]
fn steps_are_those_of_torch_optim() {
    let (store, rates) = (store(), [1e-3, 1e-2, 1e-2, 3e-3, 1e-2, 1e-2, 1e-2, 1e-3]);
    let runtime = runtime(&store);
    let model = loaded(&runtime);
    let mut trainer = model.trainer("train").unwrap();
    let eager_ = eager("adamw", 1, &rates);
    for (number, rate) in rates.iter().enumerate() {
        trainer.set_lr(*rate as f32);
        let losses = step(&mut trainer, number as i64);
        near(losses.loss, &eager_["losses"][number], "loss");
        near(losses.grad_norm.unwrap(), &eager_["norms"][number], "norm");
        assert_eq!(losses.metrics[0].0, "accuracy");
    }
    let evaluated = trainer.eval_step(&values(0)).unwrap();
    near(evaluated.loss, &eager_["eval"], "eval");
    assert_eq!((evaluated.grad_norm, trainer.progress().step), (None, 8));
    // The forward pass has two products, and each has two more in the backward pass.
    let counted = &model.programs("train")[0].receipt.flops;
    let wanted = 3 * 2 * 8 * (32 * 64 + 64 * 31);
    assert_eq!(*counted, [(Dtype::Float32, wanted)].into());

    // The mean of two batches.
    let rates = [0.05, 0.02, 0.05];
    let mut trainer = model.trainer("halves").unwrap();
    let eager = eager("sgd", 2, &rates);
    for (number, rate) in rates.iter().enumerate() {
        trainer.set_lr(*rate as f32);
        let first = trainer.accumulate(&values(number as i64 * 2)).unwrap();
        let second = step(&mut trainer, number as i64 * 2 + 1);
        near(first.loss, &eager["losses"][number * 2], "first loss");
        near(second.loss, &eager["losses"][number * 2 + 1], "second loss");
        near(second.grad_norm.unwrap(), &eager["norms"][number], "norm");
    }
    let evaluated = trainer.eval_step(&values(0)).unwrap();
    near(evaluated.loss, &eager["eval"], "eval");
}

/// Returns losses and the bytes of the checkpoint after a training of gradients that many values are added to.
fn added(model: &Model, module: &str, path: &Path) -> (Vec<Losses>, Vec<u8>) {
    const ROWS: i64 = 1024;
    let mut trainer = model.trainer(module).unwrap();
    let losses = (0..12).map(|number| {
        let of = |factor: i64| -> Value {
            let rows = (number * ROWS..(number + 1) * ROWS).map(|row| row * row * factor % 61);
            Value::new(&rows.collect::<Vec<_>>(), &[ROWS as usize]).unwrap()
        };
        let batch = [("ids", of(3)), ("other", of(5))];
        trainer.step(&batch).unwrap()
    });
    let losses = losses.collect();
    trainer.save(path).unwrap();
    (losses, std::fs::read(path).unwrap())
}

/// 65,536 values of a gradient, which threads would add in any order: libtorch adds 32,768 of an `index_put` by threads.
#[test]
fn two_trainings_on_all_cores_are_one_bit_by_bit() {
    let store = Store::open(&lab("tests/numerics/training/added.toml").store).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let runtime = runtime(&store);
    let model = runtime.load("added").unwrap();
    for module in ["train", "plain"] {
        let eager = model
            .programs(module)
            .iter()
            .all(|program| program.steps.is_empty());
        assert_eq!(eager, module == "plain");
        let [first, second, third] =
            [1, 2, 3].map(|number| added(&model, module, &folder.path().join(format!("{number}"))));
        assert!(first == second && second == third, "{module}");
    }
}

#[test]
fn a_checkpoint_continues_bit_by_bit_and_a_bad_one_changes_nothing() {
    let (store, folder) = (store(), tempfile::tempdir().unwrap());
    let path = folder.path().join("step.safetensors");
    let runtime = runtime(&store);
    let model = loaded(&runtime);
    let mut trainer = model.trainer("train").unwrap();
    let before: Vec<Losses> = (0..4).map(|number| step(&mut trainer, number)).collect();
    trainer.set_position(4, 9);
    trainer.save(&path).unwrap();
    let after: Vec<Losses> = (4..8).map(|number| step(&mut trainer, number)).collect();
    drop(trainer);

    let mut other = model.trainer("train").unwrap();
    assert_eq!(step(&mut other, 0), before[0], "a new trainer begins anew");
    assert!(other.load(&path).unwrap());
    let progress = other.progress();
    assert_eq!((progress.step, progress.position, progress.seed), (4, 4, 9));
    let again: Vec<Losses> = (4..8).map(|number| step(&mut other, number)).collect();
    assert_eq!(again, after);

    // Damaged files, and those of other trainings.
    other.load(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let bad = folder.path().join("bad.safetensors");
    let refused = |trainer: &mut Trainer<'_>, bytes: &[u8]| {
        std::fs::write(&bad, bytes).unwrap();
        match trainer.load(&bad) {
            Err(RuntimeError::Checkpoint { problem, .. }) => problem,
            other => panic!("{other:?}"),
        }
    };
    for length in [0, 7, 200, whole.len() / 2, whole.len() - 1] {
        let problem = refused(&mut other, &whole[..length]);
        assert!(problem.contains("cut off"), "{problem}");
    }
    // One bit in each of many bytes: all of the header, and some of the tensors.
    let head = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in (0..head).chain((head..whole.len()).step_by(997)) {
        let mut changed = whole.clone();
        changed[at] ^= 1 << (at % 8);
        refused(&mut other, &changed);
    }
    let changed = "it was changed after it was written: its digest is another";
    let replaced = |from: &str, to: &str| {
        let at = whole
            .windows(from.len())
            .position(|part| part == from.as_bytes());
        let mut bytes = whole.clone();
        bytes[at.unwrap()..at.unwrap() + from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    for (from, to) in [
        (r#"position\":4"#, r#"position\":5"#),
        (r#"step\":4"#, r#"step\":5"#),
        (r#"seed\":9"#, r#"seed\":8"#),
    ] {
        assert_eq!(refused(&mut other, &replaced(from, to)), changed);
    }
    let problem = refused(&mut other, &replaced(r#"position\":4"#, r#"position\":-"#));
    assert!(problem.contains("can't be read"), "{problem}");
    let problem = refused(&mut other, &replaced(r#"format\":2"#, r#"format\":7"#));
    assert_eq!(problem, "it has format 7, and this version reads 2");
    let problem = refused(
        &mut other,
        &replaced(r#"model\":\"next"#, r#"model\":\"text"#),
    );
    assert_eq!(problem, "it is of model `text`, not of `next`");
    let problem = refused(
        &mut other,
        &replaced(r#"optimizer\":\"adamw"#, r#"optimizer\":\"adamx"#),
    );
    assert_eq!(problem, "it is of optimizer `adamx`, not of `adamw`");
    tensors::write(
        &bad,
        &[(
            "x".to_owned(),
            Tensor::from_slice(&[1.0_f32], &[1]).unwrap(),
        )],
    )
    .unwrap();
    let error = other.load(&bad).unwrap_err().to_string();
    assert!(
        error.ends_with("it has neither the states of a session nor a checkpoint"),
        "{error}"
    );
    let mut chat = model.session().unwrap();
    chat.save(&bad).unwrap();
    let error = other.load(&bad).unwrap_err().to_string();
    assert!(
        error.ends_with("it has the states of a session, not a checkpoint of a training"),
        "{error}"
    );
    let error = chat.load(&path).unwrap_err().to_string();
    assert!(
        error.ends_with("it has a checkpoint of a training, not the states of a session"),
        "{error}"
    );
    let error = model.trainer("halves").unwrap().load(&path).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it is of module `train`, not of `halves`"),
        "{error}"
    );
    let missing = folder.path().join("none");
    assert!(matches!(
        other.load(&missing),
        Err(RuntimeError::CheckpointFile { .. })
    ));
    assert!(matches!(
        other.save(&missing.join("x")),
        Err(RuntimeError::CheckpointFile { .. })
    ));
    let again: Vec<Losses> = (4..8).map(|number| step(&mut other, number)).collect();
    assert_eq!(again, after, "nothing of them was loaded");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn a_bad_batch_changes_nothing_and_other_modules_are_no_steps() {
    let store = store();
    let runtime = runtime(&store);
    let model = loaded(&runtime);
    let mut trainer = model.trainer("train").unwrap();
    let first = step(&mut trainer, 0);
    let second = step(&mut trainer, 1);
    let mut trainer = model.trainer("train").unwrap();
    step(&mut trainer, 0);
    let [ids, targets] = values(1);
    let error = trainer
        .step(&[&ids].map(|one| (one.0, &one.1)))
        .unwrap_err();
    assert!(matches!(error, RuntimeError::InputNames { .. }), "{error}");
    let short = ("targets", Value::new(&[1_i64; 7], &[7]).unwrap());
    let error = trainer
        .step(&[(ids.0, &ids.1), (short.0, &short.1)])
        .unwrap_err();
    assert!(
        matches!(
            error,
            RuntimeError::BadInput { .. } | RuntimeError::NoBucket { .. }
        ),
        "{error}"
    );
    let beyond = ("targets", Value::new(&[31_i64; 8], &[8]).unwrap());
    let error = trainer
        .step(&[(ids.0, &ids.1), (beyond.0, &beyond.1)])
        .unwrap_err();
    assert!(matches!(error, RuntimeError::BadInput { .. }), "{error}");
    assert_eq!(trainer.step(&[ids, targets]).unwrap(), second);
    assert_ne!(first, second);

    let Err(RuntimeError::NoStep { module, known }) = model.trainer("forward") else {
        panic!("it is no step");
    };
    assert_eq!((module.as_str(), known.len()), ("forward", 3));
}

/// Writes the examples of a training.
fn data(path: &Path, rows: i64) {
    let all: Vec<_> = (0..rows / 8).map(batch).collect();
    let ids: Vec<i64> = all.iter().flat_map(|(ids, _)| ids.clone()).collect();
    let targets: Vec<i64> = all
        .iter()
        .flat_map(|(_, targets)| targets.clone())
        .collect();
    let ids = Tensor::from_slice(&ids, &[rows, 2]).unwrap();
    let targets = Tensor::from_slice(&targets, &[rows]).unwrap();
    tensors::write(path, &[("ids".into(), ids), ("targets".into(), targets)]).unwrap();
}

/// Returns `precast train` on this data, with checkpoints in this folder.
fn train(data: &Path, folder: &Path, more: &[&str]) -> Command {
    train_module("train", data, folder, more)
}

fn train_module(module: &str, data: &Path, folder: &Path, more: &[&str]) -> Command {
    let (data, folder) = (data.to_str().unwrap(), folder.to_str().unwrap());
    let own = [
        "train",
        module,
        "--model",
        "next@1",
        "--data",
        data,
        "--checkpoint",
        folder,
    ];
    let mut command = precast(&lab(SPEC).store, &[&own, more].concat());
    command.env("LIBTORCH", libtorch()).stdin(Stdio::null());
    // Threads that spin slow each other down on a busy machine.
    command.env("OMP_WAIT_POLICY", "passive");
    command
}

#[test]
fn eager_in_place_of_a_slower_step_is_named_at_the_end() {
    let (store, folder) = (store(), tempfile::tempdir().unwrap());
    let mut release = store.releases().get("next", Some("1")).unwrap().unwrap();
    // The step as it is when its gate finds eager faster.
    for id in &mut release.programs {
        let mut program = store.records().program(id).unwrap().unwrap();
        if program.module == "train" {
            let gate = program.receipt.gate.as_mut().unwrap();
            (gate.eager_us, gate.artifact_us) = (Some(14_300.0), Some(19_500.0));
            gate.sign_test = Some(SignTest {
                rounds: 20,
                eager_faster: 19,
                exclusive: true,
                busy_us: None,
                faster: Faster::Eager,
            });
            program.request["padding"] = "trusted".into();
            program.id = precast::store::canon::digest(&program.request);
            *id = store.records().put_program(&program).unwrap().id;
        }
    }
    release.model = "slow-step".to_owned();
    store.releases().put(&release).unwrap();
    let rows = folder.path().join("rows.safetensors");
    data(&rows, 64);
    let path = rows.to_str().unwrap();
    let args = [
        "train",
        "train",
        "--model",
        "slow-step",
        "--data",
        path,
        "--steps",
        "3",
    ];
    let trained = |more: &[&str]| {
        let mut command = precast(&lab(SPEC).store, &[&args, more].concat());
        let output = command.env("LIBTORCH", libtorch()).output().unwrap();
        let [out, errors] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{errors}");
        (out, errors)
    };
    let (_, errors) = trained(&[]);
    let says = "slower: eager answers train fixed in place of its artifact: 14.3 ms a call instead of 19.5 ms, \
                1.36× as fast; it was faster in 19 of 20 rounds, with nothing else to do\n";
    assert!(errors.contains(says), "{errors}");
    let (out, _) = trained(&["--format", "json"]);
    let document: Json = serde_json::from_str(&out).unwrap();
    assert_eq!(document["eager_instead"][0]["program"], "train fixed");
    // Rows, whatever a row is: eight in each of three steps.
    let of = |field: &str| document[field].as_f64().unwrap();
    assert_eq!((of("rows_per_second") * of("seconds")).round(), 24.0);
    assert!(errors.contains(" rows/s"), "{errors}");
    assert!(
        errors.contains("starts from release 1 of `slow-step`"),
        "{errors}"
    );
    assert_eq!(document["from"], 1);
}

/// The weights are those of the checkpoint, so the second run has nothing to train and publishes the same ones.
#[test]
fn the_guides_training_can_be_run_twice() {
    let (store, folder) = (store(), tempfile::tempdir().unwrap());
    let page = std::fs::read_to_string(checkout().join("docs/src/guide/training.md")).unwrap();
    let (_, line) = page.split_once("\n$ precast train ").unwrap();
    let (line, _) = line.split_once("\n```").unwrap();
    let line = line.replace("\\\n", " ");
    let words: Vec<_> = line.split_whitespace().collect();
    assert!(words.contains(&"--publish"), "{line}");
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    data(&folder.path().join("text.safetensors"), 200);
    let run = || {
        let own = ["train", "--model", "next"];
        let mut command = precast(&lab(SPEC).store, &[&own, &words[..]].concat());
        command.current_dir(folder.path()).stdin(Stdio::null());
        command
            .env("LIBTORCH", libtorch())
            .env("OMP_WAIT_POLICY", "passive");
        let output = command.output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{errors}");
        let newest = store.releases().get("next", None).unwrap().unwrap();
        (newest.weights, errors)
    };
    let ((first, trained), (again, continued)) = (run(), run());
    assert!(trained.contains("starts from release "), "{trained}");
    assert!(
        continued.contains("continues from step 2000"),
        "{continued}"
    );
    assert_eq!(first, again);
}

#[test]
fn a_run_that_is_killed_at_any_moment_continues_bit_by_bit() {
    let (_store, folder) = (store(), tempfile::tempdir().unwrap());
    let file = folder.path().join("data.safetensors");
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    data(&file, 200);
    let more = [
        "--steps",
        "300",
        "--every",
        "7",
        "--lr",
        "0.003",
        "--schedule",
        "cosine",
        "--quiet",
    ];
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let started = std::time::Instant::now();
    assert!(train(&file, &whole, &more).status().unwrap().success());
    let took = started.elapsed();
    let mut random = 7_u64;
    for _ in 0..50 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let share = (random >> 40) as f64 / (1_u64 << 24) as f64;
        let mut run = train(&file, &broken, &more);
        let mut run = run
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Early in a run, which begins anew each time, or late in a long one.
        let latest = took.min(Duration::from_secs(1));
        thread::sleep(latest.mul_f64(share));
        run.kill().unwrap();
        run.wait().unwrap();
    }
    assert!(train(&file, &broken, &more).status().unwrap().success());
    let last = "step-0000000300.safetensors";
    let (whole, broken) = (whole.join(last), broken.join(last));
    assert!(std::fs::read(whole).unwrap() == std::fs::read(broken).unwrap());
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_and_bad_data_begins_none() {
    let (kept_in, folder) = (store(), tempfile::tempdir().unwrap());
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    let (file, saved) = (
        folder.path().join("data.safetensors"),
        folder.path().join("run"),
    );
    data(&file, 200);
    let run = |file: &Path, more: &[&str]| {
        let output = train(file, &saved, more).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), text)
    };
    let more = ["--steps", "10", "--every", "5", "--format", "json"];
    let good = train(&file, &saved, &more).output().unwrap();
    let good: Json = serde_json::from_slice(&good.stdout).unwrap();
    assert_eq!(good["steps"], 10);
    assert_eq!(good["losses"].as_array().unwrap().len(), 10);
    let (code, text) = run(&file, &["--steps", "40", "--every", "100", "--lr", "1e30"]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("is no number") && text.contains("step-0000000010"),
        "{text}"
    );
    let kept = std::fs::read_dir(&saved).unwrap().filter_map(|entry| {
        let path = entry.unwrap().path();
        path.to_str()
            .unwrap()
            .contains("not-a-number")
            .then_some(path)
    });
    let kept = tensors::read(std::fs::File::open(kept.last().unwrap()).unwrap()).unwrap();
    assert_eq!(kept["ids"].shape(), [8, 2]);
    // The last checkpoint is good: the same run at a smaller rate continues.
    let (code, text) = run(&file, &["--steps", "12"]);
    assert_eq!(code, 0, "{text}");
    let (code, text) = run(&file, &["--steps", "14", "--seed", "3"]);
    assert!(code == 2 && text.contains("`--seed 0`, not 3"), "{text}");
    let (code, text) = run(&file, &["--steps", "13", "--publish", "nothing"]);
    assert!(
        code != 0 && text.contains("there is no model `nothing`") && !text.contains("step 13"),
        "{text}"
    );
    let kept = kept_in
        .releases()
        .get("next", Some("1"))
        .unwrap()
        .unwrap()
        .weights;
    let kept = kept_in.objects().map(&kept.unwrap()).unwrap();
    let kept: Vec<_> = tensors::read(&kept[..]).unwrap().into_iter().collect();
    let before = published::put(&kept_in, "chat", &kept);
    let more = ["--steps", "13", "--format", "json", "--publish", "chat"];
    let good = train(&file, &saved, &more).output().unwrap();
    let good: Json = serde_json::from_slice(&good.stdout).unwrap();
    assert_eq!(
        (&good["model"], &good["published"], &good["release"]),
        (&json!("next"), &json!("chat"), &json!(before.seq + 1))
    );

    let bad = folder.path().join("bad.safetensors");
    let ids = || Tensor::from_slice(&[1_i64; 16], &[8, 2]).unwrap();
    let cases = [
        (vec![("ids", ids())], "it has no tensor `targets`"),
        (
            vec![("ids", ids()), ("targets", ids())],
            "its tensor `targets` is I64 [8, 2]",
        ),
        (
            vec![
                ("ids", ids()),
                ("targets", Tensor::from_slice(&[1_i64; 9], &[9]).unwrap()),
            ],
            "have other numbers of rows",
        ),
    ];
    for (tensors_, why) in cases {
        let named: Vec<_> = tensors_
            .into_iter()
            .map(|(name, one)| (name.to_owned(), one))
            .collect();
        tensors::write(&bad, &named).unwrap();
        let (code, text) = run(&bad, &["--steps", "14"]);
        assert!(code == 2 && text.contains(why), "{text}");
    }
    std::fs::write(&bad, &std::fs::read(&file).unwrap()[..300]).unwrap();
    let (code, text) = run(&bad, &["--steps", "14"]);
    assert!(code != 0 && text.contains("cut off"), "{text}");
}
