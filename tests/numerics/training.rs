//! Training steps on real artifacts: losses as with torch.optim, checkpoints that continue bit by bit, also after
//! `kill -9`, and weights that a serving model takes.

mod devices;
mod float64;
mod folder;
mod published;

use std::{
    path::{Path, PathBuf},
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
use tempfile::TempDir;

use crate::{
    lab::{self, checkout, lab, libtorch, precast, python, runtime, said, well},
    random::Random,
};

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
    let rows = (number * 8..number * 8 + 8).map(|row| [(row * 7 + 3) % 31, (row * 5 + 1) % 31]);
    let targets = rows.clone().map(|[a, b]| (a * 3 + b) % 31);
    (rows.flatten().collect(), targets.collect())
}

fn values(number: i64) -> Batch {
    let (ids, targets) = batch(number);
    given(&ids, &targets)
}

type Batch = [(&'static str, Value); 2];

fn given(ids: &[i64], targets: &[i64]) -> Batch {
    let ids = Value::new(ids, &[ids.len() / 2, 2]).unwrap();
    let targets = Value::new(targets, &[targets.len()]).unwrap();
    [("ids", ids), ("targets", targets)]
}

fn step(trainer: &mut Trainer<'_>, number: i64) -> Losses {
    trainer.step(&values(number)).unwrap()
}

fn eager(kind: &str, count: u64, rates: &[f64]) -> Json {
    let mut script = Command::new(python());
    let script = script.current_dir(checkout().join("tests/numerics/training"));
    let rates = json!(rates).to_string();
    lab::json(script.args(["eager.py", kind, &count.to_string(), &rates]))
}

fn near(got: f64, want: &Json, what: &str) {
    let want = want.as_f64().unwrap();
    let near = (got - want).abs() <= 2e-4 * want.abs() + 2e-5;
    assert!(near, "{what}: {got} {want}");
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
        let programs = model.programs(module);
        let eager = programs.iter().all(|program| program.steps.is_empty());
        assert_eq!(eager, module == "plain");
        let path = |number: &str| folder.path().join(number);
        let [first, second, third] =
            ["1", "2", "3"].map(|number| added(&model, module, &path(number)));
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
    let refused = |trainer: &mut Trainer<'_>, why: &str| {
        let error = trainer.load(&bad).unwrap_err();
        assert_eq!(error.name(), "Checkpoint", "{error}");
        assert!(error.to_string().contains(why), "{error}");
    };
    std::fs::write(&bad, &whole[..whole.len() / 2]).unwrap();
    refused(&mut other, "cut off");
    let mut changed = whole.clone();
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&bad, changed).unwrap();
    refused(
        &mut other,
        "it was changed after it was written: its digest is another",
    );
    let mut chat = model.session().unwrap();
    chat.save(&bad).unwrap();
    refused(
        &mut other,
        "it has the states of a session, not a checkpoint of a training",
    );
    let error = chat.load(&path).unwrap_err().to_string();
    let why = "it has a checkpoint of a training, not the states of a session";
    assert!(error.ends_with(why), "{error}");
    std::fs::copy(&path, &bad).unwrap();
    let why = "it is of module `train`, not of `halves`";
    refused(&mut model.trainer("halves").unwrap(), why);
    let missing = folder.path().join("none");
    let errors = [
        other.load(&missing).err(),
        other.save(&missing.join("x")).err(),
    ];
    let names = errors.map(|error| error.unwrap().name());
    assert_eq!(names, ["CheckpointFile"; 2]);
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
    let (ids, targets) = batch(1);
    let error = trainer.step(&given(&ids, &targets)[..1]).unwrap_err();
    assert_eq!(error.name(), "InputNames", "{error}");
    for (wrong, names) in [(&[1; 7][..], "BadInput NoBucket"), (&[31; 8], "BadInput")] {
        let error = trainer.step(&given(&ids, wrong)).unwrap_err();
        assert!(names.contains(error.name()), "{error}");
    }
    assert_eq!(step(&mut trainer, 1), second);
    assert_ne!(first, second);

    let Err(RuntimeError::NoStep { module, known }) = model.trainer("forward") else {
        panic!("it is no step");
    };
    assert_eq!((module.as_str(), known.len()), ("forward", 3));
}

/// Writes the examples of a training.
fn data(path: &Path, rows: i64) {
    let all: Vec<_> = (0..rows / 8).map(batch).collect();
    let (ids, targets): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let (ids, targets) = (ids.concat(), targets.concat());
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
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
    let own = ["train", module, "--model", "next@1", "--data", data];
    training(&[&own[..], &["--checkpoint", folder][..], more].concat())
}

/// Returns `precast` with these arguments, in the store of the training.
fn training(args: &[&str]) -> Command {
    let mut command = precast(&lab(SPEC).store, args);
    command.env("LIBTORCH", libtorch()).stdin(Stdio::null());
    // Threads that spin slow each other down on a busy machine.
    command.env("OMP_WAIT_POLICY", "passive");
    command
}

/// A folder with the examples of a training, and without checkpoints.
struct Place {
    _dir: TempDir,
    data: PathBuf,
    saved: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [data_, saved] = ["data", "run"].map(|name| dir.path().join(name));
        data(&data_, 200);
        Self {
            _dir: dir,
            data: data_,
            saved,
        }
    }

    fn train(&self, more: &[&str]) -> Command {
        train(&self.data, &self.saved, more)
    }
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
    let errors = well(&mut training(&args)).err;
    let says = "slower: eager answers train fixed in place of its artifact: 14.3 ms a call instead of 19.5 ms, \
                1.36× as fast; it was faster in 19 of 20 rounds, with nothing else to do\n";
    assert!(errors.contains(says), "{errors}");
    let document = lab::json(&mut training(&[&args[..], &["--format", "json"]].concat()));
    assert_eq!(document["eager_instead"][0]["program"], "train fixed");
    // Rows, whatever a row is: eight in each of three steps.
    let of = |field: &str| document[field].as_f64().unwrap();
    assert_eq!((of("rows_per_second") * of("seconds")).round(), 24.0);
    for says in [" rows/s", "starts from release 1 of `slow-step`"] {
        assert!(errors.contains(says), "{errors}");
    }
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
    data(&folder.path().join("text.safetensors"), 200);
    let run = || {
        let own = ["train", "--model", "next"];
        let mut command = training(&[&own, &words[..]].concat());
        let errors = well(command.current_dir(folder.path())).err;
        let newest = store.releases().get("next", None).unwrap().unwrap();
        (newest.weights, errors)
    };
    let ((first, trained), (again, continued)) = (run(), run());
    assert!(trained.contains("starts from release "), "{trained}");
    let later = continued.contains("continues from step 2000");
    assert!(later, "{continued}");
    assert_eq!(first, again);
}

#[test]
fn a_run_that_is_killed_at_any_moment_continues_bit_by_bit() {
    let place = Place::new();
    let more = "--steps 300 --every 7 --lr 0.003 --schedule cosine --quiet";
    let more: Vec<&str> = more.split(' ').collect();
    let broken = place.saved.with_file_name("broken");
    let started = std::time::Instant::now();
    well(&mut place.train(&more));
    let took = started.elapsed();
    let mut random = Random(7);
    for _ in 0..50 {
        let share = random.below(1 << 24) as f64 / f64::from(1 << 24);
        let mut run = train(&place.data, &broken, &more);
        let run = run.stdout(Stdio::null()).stderr(Stdio::null());
        let mut run = run.spawn().unwrap();
        // Early in a run, which begins anew each time, or late in a long one.
        let latest = took.min(Duration::from_secs(1));
        thread::sleep(latest.mul_f64(share));
        run.kill().unwrap();
        run.wait().unwrap();
    }
    well(&mut train(&place.data, &broken, &more));
    let last = |folder: &Path| std::fs::read(folder.join("step-0000000300.safetensors")).unwrap();
    assert!(last(&place.saved) == last(&broken));
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_and_bad_data_begins_none() {
    let (kept_in, place) = (store(), Place::new());
    let run = |more: &[&str]| {
        let said = said(&mut place.train(more));
        (said.code.unwrap(), said.err)
    };
    let more = ["--steps", "10", "--every", "5", "--format", "json"];
    let good = lab::json(&mut place.train(&more));
    assert_eq!(good["steps"], 10);
    assert_eq!(good["losses"].as_array().unwrap().len(), 10);
    let (code, text) = run(&["--steps", "40", "--every", "100", "--lr", "1e30"]);
    assert_eq!(code, 1, "{text}");
    for says in ["is no number", "step-0000000010"] {
        assert!(text.contains(says), "{text}");
    }
    let mut kept = folder::names(&place.saved).into_iter();
    let kept = kept.rfind(|name| name.contains("not-a-number")).unwrap();
    let kept = std::fs::File::open(place.saved.join(kept)).unwrap();
    let kept = tensors::read(kept).unwrap();
    assert_eq!(kept["ids"].shape(), [8, 2]);
    // The last checkpoint is good: the same run at a smaller rate continues.
    let (code, text) = run(&["--steps", "12"]);
    assert_eq!(code, 0, "{text}");
    let (code, text) = run(&["--steps", "14", "--seed", "3"]);
    assert!(code == 2 && text.contains("`--seed 0`, not 3"), "{text}");
    let (code, text) = run(&["--steps", "13", "--publish", "nothing"]);
    let named = text.contains("there is no model `nothing`");
    assert!(code != 0 && named && !text.contains("step 13"), "{text}");
    let kept = kept_in.releases().get("next", Some("1")).unwrap().unwrap();
    let kept = kept_in.objects().map(&kept.weights.unwrap()).unwrap();
    let kept: Vec<_> = tensors::read(&kept[..]).unwrap().into_iter().collect();
    let before = published::put(&kept_in, "chat", &kept);
    let more = ["--steps", "13", "--format", "json", "--publish", "chat"];
    let good = lab::json(&mut place.train(&more));
    let found = json!([good["model"], good["published"], good["release"]]);
    assert_eq!(found, json!(["next", "chat", before.seq + 1]));

    let whole = std::fs::read(&place.data).unwrap();
    let ids = || Tensor::from_slice(&[1_i64; 16], &[8, 2]).unwrap();
    let nine = Tensor::from_slice(&[1_i64; 9], &[9]).unwrap();
    for (targets, why) in [
        (None, "it has no tensor `targets`"),
        (Some(ids()), "its tensor `targets` is I64 [8, 2]"),
        (Some(nine), "have other numbers of rows"),
    ] {
        let mut named = vec![("ids".to_owned(), ids())];
        named.extend(targets.map(|targets| ("targets".to_owned(), targets)));
        tensors::write(&place.data, &named).unwrap();
        let (code, text) = run(&["--steps", "14"]);
        assert!(code == 2 && text.contains(why), "{text}");
    }
    std::fs::write(&place.data, &whole[..300]).unwrap();
    let (code, text) = run(&["--steps", "14"]);
    assert!(code != 0 && text.contains("cut off"), "{text}");
}
