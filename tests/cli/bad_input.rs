//! Wrong input of users: each case is a clear error with its exit code.

use std::fs;

use crate::sandbox::{Sandbox, assert_ran, assert_run};

#[test]
fn a_spec_with_mistakes_shows_each_with_its_line() {
    let sandbox = Sandbox::new();
    sandbox.edit("precast.toml", "pad = 0 }", "padd = 0 }");
    sandbox.edit("precast.toml", "batch = [1, 4]", "batch = []");
    assert_run!(sandbox, ["build"], @r#"
    exit code 2, stderr
    error: unknown key `padd` in input `x`
      --> precast.toml:13:48
       |
    13 | x = { dtype = "float32", shape = ["batch", 3], padd = 0 }
       |  ^^^^
       = help: did you mean `pad`?

    error: `batch` in [module.buckets] has no size, which leaves no bucket
      --> precast.toml:15:9
       |
    15 | batch = []
       |  ^^
       = help: as in `batch = [1, 8]`
    "#);
}

#[test]
fn a_python_that_is_not_there_or_has_another_torch_or_none() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["build", "--python", "/no/such/python"]);
    let ran = sandbox.output(command.env_remove("PRECAST_WORKER"));
    assert_ran!(ran, @"
    exit code 2, stderr
    plan: 3 of 3 programs are missing
    error: can't start Python `/no/such/python`
      caused by: No such file or directory (os error 2)
    hint: name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`
    ");
    let with = |torch: &str| sandbox.output(sandbox.command(&["build"]).env("FAKE_TORCH", torch));
    assert_ran!(with("2.10.1+cpu"), @"
    exit code 4, stderr
    plan: 3 of 3 programs are missing
    error: Python at `[ROOT]/worker` has torch 2.10.1+cpu, which is too old: 2.11 is the least
    hint: install torch 2.11 to 2.15 there, or name another interpreter with `--python PATH` or `PRECAST_PYTHON`
    ");
    with("none")
        .exits(4)
        .says("error: this Python has no torch\nhint: install torch there\n");
}

#[test]
fn a_python_without_torch() {
    let sandbox = Sandbox::new();
    // Without the folders that packages are installed in.
    sandbox.script("python", "exec /usr/bin/env python3 -S \"$@\"");
    let python = sandbox.path("python");
    let mut command = sandbox.command(&["build", "--python"]);
    let ran = sandbox
        .output(command.arg(python).env_remove("PRECAST_WORKER"))
        .exits(4);
    ran.says("` can't import torch: there is none");
    ran.says("` or `PRECAST_PYTHON`, or install torch there");
}

#[test]
fn a_mistake_in_a_name_that_the_spec_has() {
    let sandbox = Sandbox::new();
    sandbox.edit("precast.toml", "model:load", "model:laod");
    assert_run!(sandbox, ["build", "-j", "1"], @r#"
    exit code 2, stderr
    plan: 3 of 3 programs are missing
    worker: Python [PYTHON], torch [TORCH] ([TIME])
    error: `model` has no `laod`
     --> precast.toml:5:9
      |
    5 | entry = "model:laod"
      |  ^^^^^^^^^^^^
      = help: did you mean `load`?
    "#);
    sandbox.edit("precast.toml", "model:laod", "modle:load");
    let ran = sandbox.run(&["build", "-j", "1"]).exits(2);
    ran.says("error: there is no module `modle`\n --> precast.toml:5:9\n");
}

#[test]
fn a_warning_about_the_model_is_printed_once() {
    let sandbox = Sandbox::steered(&["trains", "returns text"]);
    let ran = sandbox.run(&["build", "-j", "1"]);
    let notes = ran
        .stderr
        .lines()
        .filter_map(|line| line.strip_prefix("note: "));
    let expected = ["the model was in training mode", "output `note` is a str"];
    assert_eq!(notes.collect::<Vec<_>>(), expected);
}

#[test]
fn a_bucket_that_takes_no_smaller_request_and_eager_that_nobody_asked_for() {
    let sandbox = Sandbox::steered(&["padding is refused batch=4"]);
    let ran = sandbox.run(&["build", "-j", "1"]);
    ran.says("exact sizes only affine batch=4: it refuses");
    ran.says(
        "hint: list the sizes that requests have as buckets, or set `dynamic`; a mask among the inputs can make the \
         module ignore its padding",
    );
    sandbox
        .run(&["plan"])
        .prints("exact sizes only: it refuses; list the sizes");
}

#[test]
fn a_bucket_is_padded_in_the_dimensions_that_can_be() {
    let sandbox = Sandbox::steered(&["seq is exact"]);
    sandbox.edit("precast.toml", "[\"batch\", 3]", "[\"batch\", \"seq\"]");
    sandbox.append("precast.toml", "seq = [3]");
    let ran = sandbox.run(&["build", "-j", "1"]);
    ran.says(
        "exact in seq, padded in batch affine batch=1 seq=3, affine batch=4 seq=3: it refuses",
    );
    sandbox
        .run(&["plan"])
        .prints("exact in seq, padded in batch: it refuses; list");
    let shown = sandbox.run(&["show", "affine", "batch=4 seq=3"]);
    shown.prints("exact in seq, padded in batch: it refuses\n");
    let run = |shape: &[usize]| {
        let values = vec![1.0; shape.iter().product()];
        sandbox.tensors("x.safetensors", &[("x", shape, &values)]);
        sandbox.run(&["run", "affine", "--inputs", "x.safetensors"])
    };
    run(&[3, 3]).prints("padded from batch=3 seq=3");
    let refused = run(&[4, 2]);
    let is_refused = refused.code == 3 || refused.stdout.contains("eager");
    assert!(is_refused, "{}", refused.text());
}

#[test]
fn eager_that_the_spec_does_not_ask_for_is_named() {
    const LINE: &str =
        "answers sizes that no bucket covers; `fail_policy = \"raise\"` leaves it out";
    let sandbox = Sandbox::new();
    assert!(sandbox.run(&["plan"]).stdout.contains(LINE));
    sandbox.module("fail_policy = \"fallback_eager\"");
    assert!(!sandbox.run(&["plan"]).stdout.contains(LINE));
}

#[test]
fn an_entry_that_does_not_import_or_fails() {
    for (from, to, error) in [
        (
            "SCALE = 2.0",
            "import no_such_package",
            "can't import `model`: No module named 'no_such_package'\n  --> model.py:1",
        ),
        (
            "    return {",
            "    raise RuntimeError(\"no weights here\")\n    return {",
            "`model:load` failed: no weights here\n  --> model.py:6",
        ),
    ] {
        let sandbox = Sandbox::new();
        sandbox.edit("model.py", from, to);
        let ran = sandbox.run(&["build", "-j", "1"]).exits(1);
        let hint = "`entry` names a `module:callable` beside the spec; calling it in that Python shows the same";
        ran.says(&format!(
            "error: {error}\nhint: {hint}\n      `precast log "
        ));
        ran.says("` prints the Python stack\n");
    }
}

#[test]
fn a_file_of_weights_that_is_none() {
    let sandbox = Sandbox::new();
    sandbox.weights_file();
    // No Python is needed to say so.
    sandbox.script("worker", "exit 1");
    let refused = |why: &str| {
        let ran = sandbox.run(&["build"]).exits(2);
        ran.says(&format!("error: can't use `./w.safetensors` as weights: {why}\nhint: `weights` in [model] names a "));
    };
    refused("it is not there");
    sandbox.write("w.safetensors", "what torch.save writes");
    refused("it is no safetensors file");
    sandbox.tensors("w.safetensors", &[("scale", &[2], &[1.0, 2.0])]);
    let whole = fs::read(sandbox.path("w.safetensors")).unwrap();
    sandbox.write("w.safetensors", &whole[..whole.len() - 4]);
    refused("it was cut off: its tensors end at byte 80, the file at byte 76");
    let header = r#"{"scale":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&[0; 8]);
    sandbox.write("w.safetensors", file);
    refused("tensor `scale` is F8_E4M3, which no weight set can hold");
}

#[test]
fn a_module_path_that_does_not_exist() {
    let sandbox = Sandbox::new();
    sandbox.module("path = \"encoder.layers.0\"");
    // A second worker may or may not have made the model by then.
    assert_run!(brief sandbox, ["build", "-j", "1"], @r#"
    exit code 2, stderr
    plan: 3 of 3 programs are missing
    error: the model has no submodule `encoder.layers.0`
      --> precast.toml:12:8
       |
    12 | path = "encoder.layers.0"
       |  ^^^^^^^^^^^^^^^^^^
       = help: did you mean `encoder.layer.0`?
    "#);
}

#[test]
fn a_store_that_is_not_one() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("photos")).unwrap();
    sandbox.write("photos/holiday.jpg", "not a store");
    let made = "`precast build` makes one; `--store` says where it is";
    for (command, store, why, hint) in [
        (
            "ls",
            "photos",
            "is not a store: it has no `precast-store.json`",
            made,
        ),
        (
            "ls",
            "nowhere",
            "is not a store: there is no such folder",
            made,
        ),
        ("ls", "precast.toml", "is not a store: it is a file", made),
        (
            "build",
            "photos",
            "is not a store and not empty: it holds `holiday.jpg`",
            "choose a new folder with `--store`",
        ),
    ] {
        let ran = sandbox.run(&[command, "--store", store]).exits(2);
        assert_eq!(
            ran.stderr,
            format!("error: `{store}` {why}\nhint: {hint}\n")
        );
    }
}
