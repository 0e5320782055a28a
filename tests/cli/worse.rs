//! Releases that would be worse than the newest one: fewer programs, or weights that do not fit or are no numbers.

use std::{fs, path::PathBuf};

use crate::sandbox::{EAGER, Sandbox, assert_run, count};

/// Answers four rows of zeros with the newest release.
fn answer(sandbox: &Sandbox) -> f32 {
    sandbox.tensors("x.safetensors", &[("x", &[4, 3], &[1.0; 12])]);
    sandbox.answer(&[])[0]
}

#[test]
fn a_release_without_a_program_of_the_newest_one_needs_a_word() {
    let sandbox = Sandbox::built();
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 5.0");
    sandbox.append("model.py", "# fake: compile fails batch=4");
    assert_run!(sandbox, ["build", "-q", "-j", "1"], @"
    exit code 1, stderr
    error: no release was published: it would lack `affine batch=4`, which the newest one has
    hint: the newest release stays what it was; fix what failed (`precast ls --state failed`), or publish without them: `precast build --allow-lost`
    ");
    assert_eq!((sandbox.releases(), answer(&sandbox)), (1, 3.0));
    // The same once more, and for a part of the spec.
    for args in [&["build"][..], &["build", "--only", "affine batch=1"]] {
        sandbox.run(args).exits(1);
        assert_eq!(sandbox.releases(), 1);
    }
    let last = sandbox.run(&["build", "--format", "json"]).last();
    crate::schemas::check("build", &last);
    let lost = serde_json::json!(["affine batch=4"]);
    assert_eq!((&last["published"], &last["lost"]), (&false.into(), &lost));
    // The command of the hint.
    let ran = sandbox.ok(&["build", "--allow-lost"]);
    ran.says("lost affine batch=4: release 1 has it");
    sandbox.ok(&["build"]);
    assert_eq!(sandbox.releases(), 2);
    // Or the model is fixed.
    sandbox.edit("model.py", "# fake: compile fails batch=4", "");
    sandbox.ok(&["build", "-q"]);
    assert_eq!((sandbox.releases(), answer(&sandbox)), (3, 7.0));
}

#[test]
fn a_bucket_that_leaves_the_spec_is_no_loss_unless_its_successor_failed() {
    let sandbox = Sandbox::built();
    sandbox.edit("precast.toml", "[1, 4]", "[1, 8]");
    sandbox.append("model.py", "# fake: compile fails batch=8");
    let ran = sandbox.run(&["build", "-q"]).exits(1);
    ran.says("it would lack `affine batch=4`,");
    assert_eq!((sandbox.releases(), answer(&sandbox)), (1, 3.0));
    // A new bucket beside all that was there may fail.
    sandbox.edit("precast.toml", "[1, 8]", "[1, 4, 8]");
    sandbox.ok(&["build", "-q"]);
    assert_eq!(answer(&sandbox), 3.0);
    sandbox.edit("precast.toml", "[1, 4, 8]", "[1]");
    sandbox.ok(&["build"]).says("lost affine batch=4: release");
}

#[test]
fn eager_is_not_lost_without_a_word_and_may_answer_where_the_spec_says_so() {
    let sandbox = Sandbox::steered(&["has eager"]);
    let build = || sandbox.output(sandbox.command(&["build", "-q"]).env("FAKE_EAGER", EAGER));
    build().exits(0);
    let listed = sandbox.json(&["ls", "--state", "live"]);
    assert_eq!(count(&listed["programs"]), 3, "{listed}");
    // Other buckets leave it as it is.
    sandbox.edit("precast.toml", "[1, 4]", "[1, 8]");
    sandbox
        .ok(&["plan"])
        .prints("\n1 of 3 programs would be built\n");
    sandbox.edit("precast.toml", "[1, 8]", "[1, 4]");
    sandbox.edit("model.py", "# fake: has eager", "# without");
    build().exits(1).says(
        "error: no release was published: it would lack `affine eager`, which the newest one has",
    );
    // Eager that the spec asks for by name may take the place of a program.
    let eager = "# fake: has eager\n# fake: answers wrong batch=4";
    sandbox.edit("model.py", "# without", eager);
    build().exits(1);
    assert_eq!(sandbox.releases(), 1);
    sandbox.module("fail_policy = \"fallback_eager\"");
    build().exits(0);
    assert_eq!((sandbox.releases(), answer(&sandbox)), (2, 3.0));
}

#[test]
fn eager_that_could_not_be_captured_at_the_largest_bucket_is_tried_at_another() {
    let sandbox = Sandbox::built();
    sandbox.edit("precast.toml", "[1, 4]", "[1, 8]");
    sandbox.run(&["plan"]).prints("affine eager  failed before");
}

/// A model whose weights are a file, built.
fn with_file() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.weights_file();
    weights(&sandbox, &[("scale", &[1], &[10.0])]);
    sandbox.ok(&["build", "-q"]);
    sandbox
}

/// The spec's line that lets a file have more tensors than the model.
const UNUSED: &str = "unused_weights = [\"extra.**\"]\nweights =";

fn weights(sandbox: &Sandbox, tensors: &[(&str, &[usize], &[f32])]) {
    sandbox.tensors("w.safetensors", tensors);
}

/// Returns every file of the store's content.
fn content(sandbox: &Sandbox) -> Vec<PathBuf> {
    let mut files = sandbox.files("artifacts");
    let machinery = |file: &PathBuf| {
        let inside = file.strip_prefix(sandbox.path("artifacts")).unwrap();
        let top = inside.iter().next().unwrap().to_string_lossy().into_owned();
        top.starts_with("index") || ["cache", "locks", "lock", "leases"].contains(&&*top)
    };
    files.retain(|file| !machinery(file));
    files
}

/// Builds with a refused file of weights.
fn refused(sandbox: &Sandbox, says: &str) {
    let before = (content(sandbox), sandbox.releases());
    let ran = sandbox.run(&["build", "-q"]).exits(1);
    ran.says(says);
    let after = (content(sandbox), sandbox.releases());
    assert_eq!(after, before, "{}", ran.text());
    sandbox.ok(&["verify"]);
}

#[test]
fn weights_that_the_model_lacks_are_refused_unless_they_are_named() {
    let sandbox = with_file();
    let extra = [
        ("extra.weight", &[2][..], &[1.0, 2.0][..]),
        ("scale", &[1], &[3.0]),
    ];
    weights(&sandbox, &extra);
    refused(
        &sandbox,
        "has tensor `extra.weight`: the model has none of that name",
    );
    // The right file after a wrong one.
    weights(&sandbox, &[("scale", &[1], &[3.0])]);
    sandbox.ok(&["build", "-q"]);
    assert_eq!((sandbox.releases(), answer(&sandbox)), (2, 4.0));
    weights(&sandbox, &extra);
    sandbox.edit("precast.toml", "weights =", UNUSED);
    sandbox.ok(&["build", "-q"]);
    assert_eq!(sandbox.releases(), 3);
    weights(&sandbox, &[("scale", &[1], &[5.0])]);
    sandbox.ok(&["build", "-q"]);
    assert_eq!((sandbox.releases(), answer(&sandbox)), (4, 6.0));
}

#[test]
fn a_folder_with_an_index_is_a_weight_set() {
    let sandbox = Sandbox::new();
    sandbox.weights_file();
    sandbox.edit("precast.toml", "w.safetensors", "checkpoint");
    fs::create_dir(sandbox.path("checkpoint")).unwrap();
    let shard = |scale: f32| {
        let name = "checkpoint/model-00001-of-00002.safetensors";
        sandbox.tensors(name, &[("scale", &[1], &[scale])]);
    };
    shard(10.0);
    let other = "checkpoint/model-00002-of-00002.safetensors";
    sandbox.tensors(other, &[("extra.a", &[2], &[1.0, 2.0])]);
    let index = r#"{"metadata": {}, "weight_map": {
        "scale": "model-00001-of-00002.safetensors", "extra.a": "model-00002-of-00002.safetensors"}}"#;
    sandbox.write("checkpoint/model.safetensors.index.json", index);
    // The second file has a tensor that the model lacks.
    let ran = sandbox.run(&["build", "-q"]).exits(1);
    ran.says("`checkpoint` has tensor `extra.a`");
    assert_eq!(sandbox.files("artifacts/objects"), [] as [PathBuf; 0]);
    sandbox.edit("precast.toml", "weights =", UNUSED);
    sandbox.ok(&["build", "-q"]);
    assert_eq!(sandbox.json(&["plan"])["weights"], serde_json::Value::Null);
    // New values in one file are a new release, without Python.
    sandbox.script("worker", "exit 1");
    shard(3.0);
    sandbox.ok(&["plan"]).prints("`checkpoint` changed");
    sandbox.ok(&["build"]).says("release 2");
    sandbox.ok(&["verify"]);
    // A file that was cut off changes nothing.
    sandbox.write(other, "");
    sandbox.run(&["build", "-q"]).exits(2).says(
        "can't use `./checkpoint` as weights: `model.safetensors.index.json`: \
         `model-00002-of-00002.safetensors`: it is no safetensors file",
    );
}

#[test]
fn weights_that_are_no_numbers_are_refused() {
    let sandbox = with_file();
    for bad in [f32::NAN, f32::INFINITY] {
        weights(&sandbox, &[("scale", &[1], &[bad])]);
        refused(
            &sandbox,
            "tensor `scale` has NaN or infinity, and had none before",
        );
    }
    assert_eq!(answer(&sandbox), 11.0);
    // Numbers that make none of the answers.
    weights(&sandbox, &[("scale", &[1], &[f32::MAX])]);
    refused(&sandbox, "output `out` of `affine batch=");
    // With another source, every program is compared with an eager that answers so too.
    weights(&sandbox, &[("scale", &[1], &[f32::NAN])]);
    sandbox.append("model.py", "# a comment");
    refused(&sandbox, "");
    sandbox.edit("model.py", "# a comment\n", "");
    // With another program to build.
    weights(&sandbox, &[("scale", &[1], &[f32::MAX])]);
    sandbox.edit("precast.toml", "[1, 4]", "[1, 4, 8]");
    refused(&sandbox, "");
    weights(&sandbox, &[("scale", &[1], &[2.0])]);
    sandbox.ok(&["build", "-q"]);
    assert_eq!((sandbox.releases(), answer(&sandbox)), (2, 3.0));
    // Where nothing is compared, nothing is run.
    sandbox.module("healthcheck = false");
    weights(&sandbox, &[("scale", &[1], &[f32::MAX])]);
    sandbox.ok(&["build", "-q"]);
}

#[test]
fn a_plan_says_that_other_weights_would_be_published() {
    let sandbox = with_file();
    assert_eq!(sandbox.json(&["plan"])["weights"], serde_json::Value::Null);
    weights(&sandbox, &[("scale", &[1], &[3.0])]);
    let says = "`w.safetensors` changed: a release with these weights would be published\n";
    sandbox
        .ok(&["plan"])
        .prints(&format!("\n0 of 2 programs would be built\n{says}"));
    let document = sandbox.json(&["plan"]);
    crate::schemas::check("plan", &document);
    assert!(document["weights"].is_string(), "{document}");
}

#[test]
fn a_rollback_is_listed_as_one_with_its_own_age() {
    let sandbox = Sandbox::built();
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.ok(&["build", "-q"]);
    sandbox.ok(&["release", "rollback", "fake"]);
    assert_run!(sandbox, ["release", "ls"], @"
    MODEL  SEQ  NAME  PROGRAMS  TORCH  WEIGHTS  AGE
    fake  3  2  rollback to 1  [TORCH]  [ID]  [TIME]
    fake  2  2  [TORCH]  [ID]  [TIME]
    fake  1  2  [TORCH]  [ID]  [TIME]
    ");
    let listed = sandbox.json(&["release", "ls"]);
    let created = |index: usize| listed["releases"][index]["provenance"]["created"].as_i64();
    assert!(created(0) >= created(1), "{listed}");
    assert_eq!(listed["releases"][0]["rollback"], 1);
}
