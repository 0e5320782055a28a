//! The folder of checkpoints: one run at a time, damaged files, and runs that continue with other settings.

use std::{
    fs,
    io::Read as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use precast::Runtime;

use super::{data, store, train, train_module};
use crate::lab::libtorch;

/// Returns the exit code and stderr of a command.
fn said(mut command: Command) -> (i32, String) {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), text)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn one_run_at_a_time_trains_into_a_folder() {
    let (_store, folder) = (store(), tempfile::tempdir().unwrap());
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    let (file, saved) = (folder.path().join("data"), folder.path().join("run"));
    data(&file, 200);
    let mut first = train(&file, &saved, &["--steps", "1000000", "--every", "50"]);
    let mut first = first
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let begins = || saved.exists() && names(&saved).iter().any(|name| name.starts_with("step-"));
    while !begins() && begun.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (code, said_) = said(train(&file, &saved, &["--steps", "1000"]));
    first.kill().unwrap();
    let mut text = String::new();
    first
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    first.wait().unwrap();
    let owner = format!(
        "process {} is training into `{}`",
        first.id(),
        saved.display()
    );
    assert!(code == 2 && said_.contains(&owner), "{code} {said_} {text}");
    // The lock ended with its process. What the write that was killed left is removed.
    fs::create_dir(saved.join(".tensors-x1y2")).unwrap();
    fs::write(saved.join(".tensors-x1y2/draft"), "half").unwrap();
    let mut left = names(&saved).into_iter();
    let newest = left.rfind(|name| name.starts_with("step-"));
    let newest = newest.unwrap();
    let step: u64 = newest["step-".len()..][..10].parse().unwrap();
    let more = (step + 1).to_string();
    let (code, text) = said(train(&file, &saved, &["--steps", &more]));
    assert!(
        code == 0 && text.contains(&format!("continues from step {step}")),
        "{text}"
    );
    let left = names(&saved);
    assert!(
        left.iter().all(|name| !name.starts_with(".tensors-")),
        "{left:?}"
    );
}

#[test]
fn a_run_says_when_the_folder_is_of_a_longer_one_or_has_all_steps() {
    let (_store, folder) = (store(), tempfile::tempdir().unwrap());
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    let (file, saved) = (folder.path().join("data"), folder.path().join("run"));
    data(&file, 200);
    let (code, text) = said(train(&file, &saved, &["--steps", "10"]));
    assert!(code == 0 && !text.contains("warning"), "{text}");
    let before = names(&saved);
    let (code, text) = said(train(&file, &saved, &["--steps", "9"]));
    assert!(code == 2, "{text}");
    assert!(text.contains("is of step 10, and `--steps` is 9"), "{text}");
    assert!(text.contains("another folder"), "{text}");
    let (code, text) = said(train(&file, &saved, &["--steps", "10", "--quiet"]));
    assert!(code == 0 && text.contains("nothing is trained"), "{text}");
    assert_eq!(names(&saved), before);
}

#[test]
fn a_damaged_newest_checkpoint_is_refused_and_the_one_before_is_offered() {
    let (_store, folder) = (store(), tempfile::tempdir().unwrap());
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    let (file, saved) = (folder.path().join("data"), folder.path().join("run"));
    data(&file, 200);
    let (code, text) = said(train(&file, &saved, &["--steps", "20", "--every", "10"]));
    assert_eq!(code, 0, "{text}");
    let newest = saved.join("step-0000000020.safetensors");
    let sound = saved.join("step-0000000010.safetensors");
    let whole = fs::read(&newest).unwrap();
    let mut changed = whole.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(&newest, changed).unwrap();
    let (code, text) = said(train(&file, &saved, &["--steps", "30"]));
    let offer = format!(
        "`{}` can be used: remove `{}`",
        sound.display(),
        newest.display()
    );
    assert!(code == 1 && text.contains("it was changed"), "{text}");
    assert!(text.replace("\n", " ").contains(&offer), "{text}");
    // As it says.
    fs::remove_file(&newest).unwrap();
    let (code, text) = said(train(&file, &saved, &["--steps", "20"]));
    assert!(
        code == 0 && text.contains("continues from step 10"),
        "{text}"
    );
    assert!(fs::read(&newest).unwrap() == whole);
    // Nothing is offered where all are damaged, or are of another module.
    for path in [&sound, &newest] {
        fs::write(path, "half").unwrap();
    }
    let (code, text) = said(train(&file, &saved, &["--steps", "30"]));
    assert!(code == 1 && !text.contains("can be used"), "{text}");
}

#[test]
fn a_run_that_continues_with_other_settings_says_so() {
    let (_store, folder) = (store(), tempfile::tempdir().unwrap());
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    let (file, other) = (folder.path().join("data"), folder.path().join("other"));
    let saved = folder.path().join("run");
    data(&file, 200);
    data(&other, 208);
    let mut steps = 0;
    let mut run = |file: &Path, more: &[&str]| {
        steps += 5;
        let count = steps.to_string();
        let (code, text) = said(train_module(
            "halves",
            file,
            &saved,
            &[&["--steps", &count], more].concat(),
        ));
        assert_eq!(code, 0, "{text}");
        let warned = text.lines().filter(|line| line.contains("continues with"));
        warned.map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(run(&file, &["--lr", "0.01"]), "");
    // More steps are no other setting of a constant rate.
    assert_eq!(run(&file, &["--lr", "0.01"]), "");
    let text = run(&file, &["--lr", "0.01", "--accumulate", "2"]);
    assert!(
        text.contains("batches of an update: 2, and had 1"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1, "{text}");
    // Two devices with a batch each have the same update.
    assert_eq!(run(&file, &["--lr", "0.01", "--devices", "cpu,cpu"]), "");
    let text = run(&other, &["--lr", "0.01", "--accumulate", "2"]);
    assert!(
        text.contains("with the data ") && text.lines().count() == 1,
        "{text}"
    );
    let text = run(
        &other,
        &["--lr", "0.02", "--accumulate", "2", "--schedule", "cosine"],
    );
    assert!(
        text.contains("the learning rate 0.02 cosine over 30 steps, and had 0.01 constant"),
        "{text}"
    );
}
