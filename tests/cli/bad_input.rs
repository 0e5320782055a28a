//! Wrong input of users: each case is a clear error with its exit code.

use std::fs;

use crate::sandbox::{Sandbox, assert_ran, assert_run};

#[test]
fn no_spec() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["build", "-f", "elsewhere/precast.toml"], @"
    exit code 2
    ----- stderr
    error: cannot read the spec `elsewhere/precast.toml`: No such file or directory (os error 2)
      = help: name a spec with `-f`, or run where `precast.toml` is
    ");
}

#[test]
fn a_spec_with_mistakes_shows_each_with_its_line() {
    let sandbox = Sandbox::new();
    sandbox.edit("precast.toml", "pad = 0 }", "padd = 0 }");
    sandbox.edit("precast.toml", "batch = [1, 4]", "batch = []");
    assert_run!(sandbox, ["build"], @r#"
    exit code 2
    ----- stderr
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
fn missing_python() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["build", "--python", "/no/such/python"]);
    let ran = sandbox.output(command.env_remove("PRECAST_WORKER"));
    assert_ran!(ran, @"
    exit code 2
    ----- stderr
    plan: 3 of 3 programs are missing
    error: can't start Python `/no/such/python`
      caused by: No such file or directory (os error 2)
    hint: name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`
    ");
}

#[test]
fn wrong_torch() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["build"]);
    let ran = sandbox.output(command.env("FAKE_TORCH", "2.10.1+cpu"));
    assert_ran!(ran, @"
    exit code 4
    ----- stderr
    plan: 3 of 3 programs are missing
    error: Python at `[ROOT]/worker` has torch 2.10.1+cpu, which is too old: 2.11 is the least
    hint: install torch 2.11 to 2.15 there, or name another interpreter with `--python PATH` or `PRECAST_PYTHON`
    ");
}

#[test]
fn no_torch() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["build"]);
    let ran = sandbox.output(command.env("FAKE_TORCH", "none"));
    assert_ran!(ran, @"
    exit code 4
    ----- stderr
    plan: 3 of 3 programs are missing
    error: this Python has no torch
    hint: install torch there
    ");
}

#[test]
fn a_python_without_torch() {
    let sandbox = Sandbox::new();
    // Without the folders that packages are installed in.
    sandbox.script("python", "exec /usr/bin/env python3 -S \"$@\"");
    let python = sandbox.path("python");
    let mut command = sandbox.command(&["build", "--python"]);
    let ran = sandbox.output(command.arg(python).env_remove("PRECAST_WORKER"));
    assert_eq!(ran.code, 4);
    let text = ran.text();
    assert!(
        text.contains("` can't import torch: there is none"),
        "{text}"
    );
    assert!(
        text.contains(
            "hint: name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`, or install torch there"
        ),
        "{text}"
    );
}

#[test]
fn a_mistake_in_a_name_that_the_spec_has() {
    let sandbox = Sandbox::new();
    sandbox.edit("precast.toml", "model:load", "model:laod");
    assert_run!(sandbox, ["build", "-j", "1"], @r#"
    exit code 2
    ----- stderr
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
    assert_run!(sandbox, ["build", "-j", "1"], @r#"
    exit code 2
    ----- stderr
    plan: 3 of 3 programs are missing
    worker: Python [PYTHON], torch [TORCH] ([TIME])
    error: there is no module `modle`
     --> precast.toml:5:9
      |
    5 | entry = "modle:load"
      |  ^^^^^^^^^^^^
      = help: `entry` names a `module:callable` beside the spec; calling it in that Python shows the same
    "#);
}

#[test]
fn a_warning_about_the_model_is_printed_once() {
    let sandbox = Sandbox::steered(&["trains", "returns text"]);
    let ran = sandbox.run(&["build", "-j", "1"]);
    let notes: Vec<_> = (ran.stderr.lines())
        .filter(|line| line.starts_with("note:"))
        .collect();
    assert_eq!(
        notes,
        [
            "note: the model was in training mode",
            "note: output `note` is a str"
        ]
    );
}

#[test]
fn a_bucket_that_takes_no_smaller_request_and_eager_that_nobody_asked_for() {
    let sandbox = Sandbox::steered(&["padding is refused batch=4"]);
    let errors = sandbox.run(&["build", "-j", "1"]).stderr;
    for line in [
        "exact sizes only affine batch=4: it refuses",
        "hint: list the sizes that requests have as buckets, or set `dynamic`; a mask among the inputs can make the \
         module ignore its padding",
    ] {
        assert!(errors.contains(line), "{errors}");
    }
    let plan = sandbox.run(&["plan"]).stdout;
    assert!(
        plan.contains("exact sizes only: it refuses; list the sizes"),
        "{plan}"
    );
}

#[test]
fn a_bucket_is_padded_in_the_dimensions_that_can_be() {
    let sandbox = Sandbox::steered(&["seq is exact"]);
    sandbox.edit("precast.toml", "[\"batch\", 3]", "[\"batch\", \"seq\"]");
    sandbox.append("precast.toml", "seq = [3]");
    let errors = sandbox.run(&["build", "-j", "1"]).stderr;
    let line =
        "exact in seq, padded in batch affine batch=1 seq=3, affine batch=4 seq=3: it refuses";
    assert!(errors.contains(line), "{errors}");
    let plan = sandbox.run(&["plan"]).stdout;
    assert!(
        plan.contains("exact in seq, padded in batch: it refuses; list"),
        "{plan}"
    );
    let listed = sandbox.json(&["ls"]);
    let id = listed["programs"][0]["id"].as_str().unwrap();
    let shown = sandbox.run(&["show", id]).stdout;
    assert!(
        shown.contains("exact in seq, padded in batch: it refuses\n"),
        "{shown}"
    );
    let run = |shape: &[usize]| {
        let values = vec![1.0; shape.iter().product()];
        sandbox.tensors("x.safetensors", &[("x", shape, &values)]);
        sandbox.run(&["run", "affine", "--inputs", "x.safetensors"])
    };
    let padded = run(&[3, 3]);
    padded.prints("padded from batch=3 seq=3");
    let refused = run(&[4, 2]);
    assert!(
        refused.code == 3 || refused.stdout.contains("eager"),
        "{}",
        refused.text()
    );
}

#[test]
fn eager_that_the_spec_does_not_ask_for_is_named() {
    const LINE: &str =
        "answers sizes that no bucket covers; `fail_policy = \"raise\"` leaves it out";
    let sandbox = Sandbox::new();
    assert!(sandbox.run(&["plan"]).stdout.contains(LINE));
    sandbox.append(
        "precast.toml",
        "[compile]\nfail_policy = \"fallback_eager\"",
    );
    assert!(!sandbox.run(&["plan"]).stdout.contains(LINE));
}

#[test]
fn an_entry_that_does_not_import() {
    let sandbox = Sandbox::new();
    sandbox.edit("model.py", "SCALE = 2.0", "import no_such_package");
    // A second worker that is slow to fail in the same way has the first one try again.
    assert_run!(sandbox, ["build", "-j", "1"], @"
    exit code 1
    ----- stderr
    plan: 3 of 3 programs are missing
    worker: Python [PYTHON], torch [TORCH] ([TIME])
    error: can't import `model`: No module named 'no_such_package'
      --> model.py:1
    hint: `entry` names a `module:callable` beside the spec; calling it in that Python shows the same
          `precast log [ID]` prints the Python stack
    ");
}

#[test]
fn an_entry_that_fails() {
    let sandbox = Sandbox::new();
    sandbox.edit(
        "model.py",
        "    return {",
        "    raise RuntimeError(\"no weights here\")\n    return {",
    );
    assert_run!(sandbox, ["build", "-j", "1"], @"
    exit code 1
    ----- stderr
    plan: 3 of 3 programs are missing
    worker: Python [PYTHON], torch [TORCH] ([TIME])
    error: `model:load` failed: no weights here
      --> model.py:6
    hint: `entry` names a `module:callable` beside the spec; calling it in that Python shows the same
          `precast log [ID]` prints the Python stack
    ");
}

#[test]
fn a_file_of_weights_that_is_none() {
    let sandbox = Sandbox::new();
    sandbox.weights_file();
    // No Python is needed to say so.
    sandbox.script("worker", "exit 1");
    assert_run!(sandbox, ["build"], @"
    exit code 2
    ----- stderr
    error: can't use `./w.safetensors` as weights: it is not there
    hint: `weights` in [model] names a safetensors file, an index of several, or their folder, from the folder of the spec
    ");
    sandbox.write("w.safetensors", "what torch.save writes");
    assert_run!(sandbox, ["build"], @"
    exit code 2
    ----- stderr
    error: can't use `./w.safetensors` as weights: it is no safetensors file
    hint: `weights` in [model] names a safetensors file, an index of several, or their folder, from the folder of the spec
    ");
    sandbox.tensors("w.safetensors", &[("scale", &[2], &[1.0, 2.0])]);
    let whole = fs::read(sandbox.path("w.safetensors")).unwrap();
    sandbox.write("w.safetensors", &whole[..whole.len() - 4]);
    assert_run!(sandbox, ["build"], @"
    exit code 2
    ----- stderr
    error: can't use `./w.safetensors` as weights: it was cut off: its tensors end at byte 80, the file at byte 76
    hint: `weights` in [model] names a safetensors file, an index of several, or their folder, from the folder of the spec
    ");
    let header = r#"{"scale":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&[0; 8]);
    sandbox.write("w.safetensors", file);
    assert_run!(sandbox, ["build"], @"
    exit code 2
    ----- stderr
    error: can't use `./w.safetensors` as weights: tensor `scale` is F8_E4M3, which no weight set can hold
    hint: `weights` in [model] names a safetensors file, an index of several, or their folder, from the folder of the spec
    ");
}

#[test]
fn a_module_path_that_does_not_exist() {
    let sandbox = Sandbox::new();
    sandbox.module("path = \"encoder.layers.0\"");
    // A second worker may or may not have made the model by then.
    assert_run!(brief sandbox, ["build", "-j", "1"], @r#"
    exit code 2
    ----- stderr
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
    assert_run!(sandbox, ["ls", "--store", "photos"], @"
    exit code 2
    ----- stderr
    error: `photos` is not a store: it has no `precast-store.json`
    hint: `precast build` makes one; `--store` says where it is
    ");
    assert_run!(sandbox, ["build", "--store", "photos"], @"
    exit code 2
    ----- stderr
    error: `photos` is not a store and not empty: it holds `holiday.jpg`
    hint: choose a new folder with `--store`
    ");
    assert_run!(sandbox, ["ls", "--store", "nowhere"], @"
    exit code 2
    ----- stderr
    error: `nowhere` is not a store: there is no such folder
    hint: `precast build` makes one; `--store` says where it is
    ");
    assert_run!(sandbox, ["ls", "--store", "precast.toml"], @"
    exit code 2
    ----- stderr
    error: `precast.toml` is not a store: it is a file
    hint: `precast build` makes one; `--store` says where it is
    ");
}

#[test]
fn an_id_that_is_not_in_the_store() {
    let sandbox = Sandbox::built();
    assert_run!(sandbox, ["show", "ffffffffffff"], @"
    exit code 3
    ----- stderr
    error: no program and no ID `[ID]` is in the store
    hint: `precast ls` lists programs and their IDs
    ");
}
