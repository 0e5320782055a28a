//! The folder of checkpoints: one run at a time, damaged files, and runs that continue with other settings.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::{Place, data, train_module};
use crate::lab;

/// Returns the exit code and stderr of a command.
fn said(mut command: Command) -> (i32, String) {
    let said = lab::said(&mut command);
    (said.code.unwrap(), said.err)
}

pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn one_run_at_a_time_trains_into_a_folder() {
    let place = Place::new();
    let saved = &place.saved;
    let mut first = place.train(&["--steps", "1000000", "--every", "50"]);
    let first = first.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut first = first.spawn().unwrap();
    let begun = Instant::now();
    let begins = || saved.exists() && names(saved).iter().any(|name| name.starts_with("step-"));
    while !begins() && begun.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (code, said_) = said(place.train(&["--steps", "1000"]));
    first.kill().unwrap();
    let (id, output) = (first.id(), first.wait_with_output().unwrap());
    let owner = format!("process {id} is training into `{}`", saved.display());
    let refused = code == 2 && said_.contains(&owner);
    assert!(refused, "{code} {said_} {output:?}");
    // The lock ended with its process. What the write that was killed left is removed.
    fs::create_dir(saved.join(".tensors-x1y2")).unwrap();
    fs::write(saved.join(".tensors-x1y2/draft"), "half").unwrap();
    let mut left = names(saved).into_iter();
    let newest = left.rfind(|name| name.starts_with("step-"));
    let newest = newest.unwrap();
    let step: u64 = newest["step-".len()..][..10].parse().unwrap();
    let (code, text) = said(place.train(&["--steps", &(step + 1).to_string()]));
    let from = format!("continues from step {step}");
    assert!(code == 0 && text.contains(&from), "{text}");
    let left = names(saved);
    let drafts = left.iter().any(|name| name.starts_with(".tensors-"));
    assert!(!drafts, "{left:?}");
}

#[test]
fn a_run_says_when_the_folder_is_of_a_longer_one_or_has_all_steps() {
    let place = Place::new();
    let (code, text) = said(place.train(&["--steps", "10"]));
    assert!(code == 0 && !text.contains("warning"), "{text}");
    let before = names(&place.saved);
    let (code, text) = said(place.train(&["--steps", "9"]));
    assert_eq!(code, 2, "{text}");
    for says in ["is of step 10, and `--steps` is 9", "another folder"] {
        assert!(text.contains(says), "{text}");
    }
    let (code, text) = said(place.train(&["--steps", "10", "--quiet"]));
    assert!(code == 0 && text.contains("nothing is trained"), "{text}");
    assert_eq!(names(&place.saved), before);
}

#[test]
fn a_damaged_newest_checkpoint_is_refused_and_the_one_before_is_offered() {
    let place = Place::new();
    let (code, text) = said(place.train(&["--steps", "20", "--every", "10"]));
    assert_eq!(code, 0, "{text}");
    let step = |step: u32| place.saved.join(format!("step-00000000{step}.safetensors"));
    let (newest, sound) = (step(20), step(10));
    let whole = fs::read(&newest).unwrap();
    let mut changed = whole.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(&newest, changed).unwrap();
    let (code, text) = said(place.train(&["--steps", "30"]));
    let [used, removed] = [&sound, &newest].map(|path| path.display());
    let offer = format!("`{used}` can be used: remove `{removed}`");
    assert!(code == 1 && text.contains("it was changed"), "{text}");
    assert!(text.replace("\n", " ").contains(&offer), "{text}");
    // As it says.
    fs::remove_file(&newest).unwrap();
    let (code, text) = said(place.train(&["--steps", "20"]));
    let continues = text.contains("continues from step 10");
    assert!(code == 0 && continues, "{text}");
    assert!(fs::read(&newest).unwrap() == whole);
    // Nothing is offered where all are damaged, or are of another module.
    for path in [&sound, &newest] {
        fs::write(path, "half").unwrap();
    }
    let (code, text) = said(place.train(&["--steps", "30"]));
    assert!(code == 1 && !text.contains("can be used"), "{text}");
}

#[test]
fn a_run_that_continues_with_other_settings_says_so() {
    let place = Place::new();
    let (file, other) = (&place.data, place.data.with_file_name("other"));
    data(&other, 208);
    let rate = "the learning rate 0.02 cosine over 30 steps, and had 0.01 constant";
    for (steps, file, more, warns) in [
        (5, file, "--lr 0.01", ""),
        // More steps are no other setting of a constant rate.
        (10, file, "--lr 0.01", ""),
        (
            15,
            file,
            "--lr 0.01 --accumulate 2",
            "batches of an update: 2, and had 1",
        ),
        // Two devices with a batch each have the same update.
        (20, file, "--lr 0.01 --devices cpu,cpu", ""),
        (25, &other, "--lr 0.01 --accumulate 2", "with the data "),
        (
            30,
            &other,
            "--lr 0.02 --accumulate 2 --schedule cosine",
            rate,
        ),
    ] {
        let more = format!("--steps {steps} {more}");
        let more: Vec<&str> = more.split(' ').collect();
        let (code, text) = said(train_module("halves", file, &place.saved, &more));
        assert_eq!(code, 0, "{text}");
        let warned: Vec<&str> = (text.lines())
            .filter(|line| line.contains("continues with"))
            .collect();
        assert_eq!(warned.len(), usize::from(!warns.is_empty()), "{text}");
        assert!(warned.iter().all(|line| line.contains(warns)), "{text}");
    }
}
