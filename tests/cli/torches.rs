//! Builds with several versions of torch: each is a target of its own, and one store holds all.

use std::{
    fs,
    path::{Path, PathBuf},
};

use precast::Store;
use serde_json::Value;

use crate::{
    gate::built_with_gate,
    sandbox::{Ran, Sandbox, assert_ran, assert_run},
};

/// Makes the folders and files of an environment with a torch of this version, without its code; returns its Python.
fn environment(sandbox: &Sandbox, version: &str) -> PathBuf {
    let root = sandbox.path(&format!("torch-{version}"));
    let torch = root.join("lib/python3.12/site-packages/torch");
    fs::create_dir_all(torch.join("lib")).unwrap();
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::write(torch.join("lib/libtorch_cpu.so"), "").unwrap();
    fs::write(root.join("bin/python"), "").unwrap();
    let text = format!("__version__ = '{version}'\ncuda = None\ngit_version = 'of {version}'\n");
    fs::write(torch.join("version.py"), text).unwrap();
    root.join("bin/python")
}

/// Returns the Python of the checkout.
fn own() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python")
}

/// Returns a sandbox built with the torch of the checkout. Its gates' verdicts are kept for builds with environments
/// that have no code.
fn built() -> Sandbox {
    let sandbox = Sandbox::new();
    let keep = format!(
        "{} \"$@\" | tee {}",
        env!("CARGO_BIN_EXE_precast"),
        sandbox.path("verdict").display()
    );
    let mut command = built_with_gate("1", &sandbox, &keep);
    sandbox.output(command.arg("--python").arg(own())).exits(0);
    sandbox
}

/// Builds with a Python whose torch is that of an environment, or the checkout's.
fn build(sandbox: &Sandbox, python: &Path, args: &[&str], env: &[(&str, &str)]) -> Ran {
    let kept = format!("cat > /dev/null; cat {}", sandbox.path("verdict").display());
    let mut command = built_with_gate("1", sandbox, &kept);
    command.args(args).arg("--python").arg(python);
    let root = python.ancestors().nth(2).unwrap();
    let site = root.join("lib/python3.12/site-packages");
    if site.exists() {
        command.env("FAKE_SITE", site);
    }
    sandbox.output(command.envs(env.iter().copied()))
}

/// Plans with a Python.
fn plan(sandbox: &Sandbox, python: &Path, args: &[&str]) -> Ran {
    let mut plan = sandbox.command(&["plan", "--python"]);
    sandbox.output(plan.arg(python).args(args))
}

/// Returns ID, state and target of the programs of `affine batch=1`, sorted by their targets.
fn listed(sandbox: &Sandbox) -> Vec<(String, String, String)> {
    let document = sandbox.json(&["ls", "affine", "--bucket", "batch=1"]);
    let rows = document["programs"].as_array().unwrap().iter();
    let text = |row: &Value, field: &str| row[field].as_str().unwrap().to_owned();
    let rows = rows.map(|row| (text(row, "id"), text(row, "state"), text(row, "target")));
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|(_, _, one), (_, _, other)| one.cmp(other));
    rows
}

#[test]
fn one_store_holds_what_was_built_with_each() {
    let sandbox = built();
    let newer = environment(&sandbox, "2.15.0");
    let planned = plan(&sandbox, &newer, &[]);
    planned.prints("the target's torch changed: `2.11.0");
    planned.prints("\n3 of 3 programs would be built\n");
    build(&sandbox, &newer, &[], &[])
        .exits(0)
        .says("published fake release 2");

    // The newest release for this torch runs here.
    sandbox.tensors("x.safetensors", &[("x", &[1, 3], &[0.0, 1.0, 2.0])]);
    let run = ["run", "affine", "--inputs", "x.safetensors", "--model"];
    sandbox.ok(&[&run[..], &["fake"]].concat());
    let named = sandbox.run(&[&run[..], &["fake@2"]].concat());
    named.exits(4).says("torch: artifact has `2.15.0`");

    let both = listed(&sandbox);
    let states: Vec<_> = both
        .iter()
        .map(|(_, state, target)| (&target[..9], &**state))
        .collect();
    assert_eq!(
        states,
        [("torch211-", "old"), ("torch215-", "live")],
        "{both:?}"
    );
    for (id, state, _) in &both {
        let of_newer = state == "live";
        let shown = sandbox.json(&["show", id]);
        assert_eq!(shown["target"]["torch"] == "2.15.0", of_newer, "{shown:#}");
        let why = sandbox.run(&["why", id]);
        let changed = why.stdout.contains("the target's torch changed: `2.11.0");
        assert_eq!(changed, of_newer, "{}", why.text());
        assert_eq!(why.stderr, "", "the newest release is for that torch");
    }

    // Each finds its own, whichever was built last.
    for python in [&own(), &newer, &own()] {
        let planned = plan(&sandbox, python, &["--format", "json"]).json();
        assert_eq!(planned["missing"], 0, "{planned:#}");
        build(&sandbox, python, &[], &[])
            .exits(0)
            .says("nothing to compile");
    }
    sandbox.ok(&["verify"]);

    // The last build was with the older torch: its release could run under the newer one.
    let id = &both[1].0;
    let why = sandbox.run(&["why", id]);
    why.says("hint: `precast verify --host fake` may let release 5 run under torch 2.15.0");
    let why = sandbox.json(&["why", id]);
    assert!(why["why"][0]["hint"].is_string(), "{why:#}");
    crate::schemas::check("why", &why);
}

#[test]
fn a_release_says_under_which_torch_it_runs() {
    let sandbox = built();
    let newer = environment(&sandbox, "2.15.0");
    let hint = plan(&sandbox, &newer, &[]).stderr;
    let may = "hint: `precast verify --host fake` may let release 1 run under torch 2.15.0, without a build\n";
    assert_eq!(hint, may);
    let (program, _, _) = listed(&sandbox).remove(0);
    let shown = sandbox.run(&["show", &program]);
    shown.prints(" is the least; a newer one runs it once its gates passed there\n");

    // As `verify --host` leaves it when the gates passed.
    let store = Store::open(sandbox.path("artifacts")).unwrap();
    let mut release = store.releases().get("fake", None).unwrap().unwrap();
    let mut shim = release.shims[0].clone();
    let least = std::mem::replace(&mut shim.torch, "2.15.0".to_owned());
    shim.torch_git = "of 2.15.0".to_owned();
    release.shims.push(shim);
    assert!(store.releases().put(&release).unwrap().1);
    release.shims.clear();
    release.name = Some("early".to_owned());
    assert!(store.releases().put(&release).unwrap().1);
    sandbox.ok(&["release", "rollback", "fake@2"]);
    let hint = plan(&sandbox, &newer, &[]).stderr;
    let runs = "hint: release 4 of `fake` runs under torch 2.15.0 without a build: its gates passed there\n";
    assert_eq!(hint, runs);
    let planned = plan(&sandbox, &newer, &["--format", "json"]).json();
    assert!(planned["hint"].is_string(), "{planned:#}");
    crate::schemas::check("plan", &planned);
    assert_run!(sandbox, ["release", "ls"], @"
    MODEL  SEQ  NAME  PROGRAMS  TORCH  WEIGHTS  AGE
    fake  4  2  rollback to 2  [TORCH], 2.15.0  [ID]  [TIME]
    fake  3  early  2  [TORCH]  [ID]  [TIME]
    fake  2  2  [TORCH], 2.15.0  [ID]  [TIME]
    fake  1  2  [TORCH]  [ID]  [TIME]
    ");
    let listed = sandbox.json(&["release", "ls"]);
    crate::schemas::check("release", &listed);
    let torches = serde_json::json!([&least, "2.15.0"]);
    assert_eq!(listed["releases"][0]["torch"], torches);
    // An earlier version of Precast made it: it has no shim.
    assert_eq!(listed["releases"][1]["torch"], serde_json::json!([&least]));

    let document = sandbox.json(&["show", &program]);
    let artifact = document["steps"][0]["artifact"].as_str().unwrap();
    for id in [program.as_str(), artifact] {
        let line = format!("  torch {least} is the least; its gates passed under 2.15.0 too\n");
        sandbox.run(&["show", id]).prints(&line);
        let shown = sandbox.json(&["show", id]);
        crate::schemas::check("show", &shown);
        let torches = serde_json::json!({"least": &least, "also": ["2.15.0"]});
        assert_eq!(shown["torches"], torches);
    }
    // A changed model needs a build.
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_eq!(plan(&sandbox, &newer, &[]).stderr, "");
}

#[test]
fn a_torch_newer_than_the_tried_ones_needs_a_flag() {
    let sandbox = built();
    let newer = environment(&sandbox, "2.16.0");
    assert_ran!(build(&sandbox, &newer, &[], &[]), @"
    exit code 4, stderr
    plan: 3 of 3 programs are missing
    error: Python at `[ROOT]/worker` has torch 2.16.0, which is newer than what was tried: 2.11 to 2.15
    hint: `--untried-torch` builds with it all the same; or install torch 2.11 to 2.15 there, or name another interpreter with `--python PATH` or `PRECAST_PYTHON`
    ");
    let off = [("FAKE_OFF", "shared headers")];
    let asked = build(&sandbox, &newer, &["--untried-torch"], &off).exits(0);
    asked.says("torch 2.16.0: shared headers is off: a name moved: builds take longer");
}
