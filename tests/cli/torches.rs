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
    let site = python
        .ancestors()
        .nth(2)
        .unwrap()
        .join("lib/python3.12/site-packages");
    if site.exists() {
        command.env("FAKE_SITE", site);
    }
    sandbox.output(command.envs(env.iter().copied()))
}

/// Returns ID, state and target of the live and old programs of `affine batch=1`.
fn listed(sandbox: &Sandbox) -> Vec<(String, String, String)> {
    let document = sandbox.json(&["ls", "affine", "--bucket", "batch=1"]);
    let rows = document["programs"].as_array().unwrap().iter();
    let text = |row: &Value, field: &str| row[field].as_str().unwrap().to_owned();
    rows.map(|row| (text(row, "id"), text(row, "state"), text(row, "target")))
        .collect()
}

#[test]
fn one_store_holds_what_was_built_with_each() {
    let sandbox = built();
    let newer = environment(&sandbox, "2.15.0");
    let mut plan = sandbox.command(&["plan", "--python"]);
    let planned = sandbox.output(plan.arg(&newer)).stdout;
    assert!(
        planned.contains("the target's torch changed: `2.11.0")
            && planned.ends_with("3 of 3 programs would be built\n"),
        "{planned}"
    );
    let ran = build(&sandbox, &newer, &[], &[]);
    assert!(
        ran.code == 0 && ran.stderr.contains("published fake release 2"),
        "{}",
        ran.text()
    );

    // The newest release for this torch runs here.
    sandbox.tensors("x.safetensors", &[("x", &[1, 3], &[0.0, 1.0, 2.0])]);
    let run = ["run", "affine", "--inputs", "x.safetensors", "--model"];
    sandbox.ok(&[&run[..], &["fake"]].concat());
    let named = sandbox.run(&[&run[..], &["fake@2"]].concat());
    assert!(
        named.code == 4 && named.stderr.contains("torch: artifact has `2.15.0`"),
        "{}",
        named.text()
    );

    let both = listed(&sandbox);
    let [(_, _, before), (_, _, after)] = &both[..] else {
        panic!("{both:?}");
    };
    let mut targets = [before.as_str(), after.as_str()];
    targets.sort_unstable();
    assert!(
        targets[0].starts_with("torch211-") && targets[1].starts_with("torch215-"),
        "{both:?}"
    );
    for (id, state, target) in &both {
        let of_newer = target.starts_with("torch215-");
        assert_eq!(state, if of_newer { "live" } else { "old" });
        let shown = sandbox.json(&["show", id]);
        let torch = shown["target"]["torch"]
            .as_str()
            .unwrap_or_else(|| panic!("{shown:#}"));
        assert_eq!(torch == "2.15.0", of_newer, "{torch}");
        let why = sandbox.run(&["why", id]);
        let changed = why.stdout.contains("the target's torch changed: `2.11.0");
        assert_eq!(changed, of_newer, "{}", why.text());
        assert_eq!(why.stderr, "", "the newest release is for that torch");
    }

    // Each finds its own, whichever was built last.
    for python in [&own(), &newer, &own()] {
        let mut plan = sandbox.command(&["plan", "--format", "json", "--python"]);
        let planned: Value =
            serde_json::from_str(&sandbox.output(plan.arg(python)).stdout).unwrap();
        assert_eq!(planned["missing"], 0, "{planned:#}");
        let ran = build(&sandbox, python, &[], &[]);
        assert!(
            ran.code == 0 && ran.stderr.contains("nothing to compile"),
            "{}",
            ran.text()
        );
    }
    sandbox.ok(&["verify"]);

    // The last build was with the older torch: its release could run under the newer one.
    let of_newer = |(_, _, target): &&(String, String, String)| target.starts_with("torch215-");
    let (id, _, _) = both.iter().find(of_newer).unwrap();
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
    let planned = |args: &[&str]| {
        let mut plan = sandbox.command(&["plan", "--python"]);
        sandbox.output(plan.arg(&newer).args(args))
    };
    let hint = planned(&[]).stderr;
    assert_eq!(
        hint,
        "hint: `precast verify --host fake` may let release 1 run under torch 2.15.0, without a build\n"
    );
    let program = sandbox.json(&["ls", "affine"])["programs"][0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let shown = sandbox.run(&["show", &program]).stdout;
    assert!(
        shown.contains(" is the least; a newer one runs it once its gates passed there\n"),
        "{shown}"
    );

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
    let hint = planned(&[]).stderr;
    assert_eq!(
        hint,
        "hint: release 4 of `fake` runs under torch 2.15.0 without a build: its gates passed there\n"
    );
    let plan: Value = serde_json::from_str(&planned(&["--format", "json"]).stdout).unwrap();
    assert!(plan["hint"].is_string(), "{plan:#}");
    crate::schemas::check("plan", &plan);
    assert_run!(sandbox, ["release", "ls"], @"
    exit code 0
    ----- stdout
    MODEL  SEQ  NAME  PROGRAMS  TORCH  WEIGHTS  AGE
    fake  4  2  rollback to 2  [TORCH], 2.15.0  [ID]  [TIME]
    fake  3  early  2  [TORCH]  [ID]  [TIME]
    fake  2  2  [TORCH], 2.15.0  [ID]  [TIME]
    fake  1  2  [TORCH]  [ID]  [TIME]
    ");
    let listed = sandbox.json(&["release", "ls"]);
    crate::schemas::check("release", &listed);
    assert_eq!(
        listed["releases"][0]["torch"],
        serde_json::json!([&least, "2.15.0"])
    );
    // An earlier version of Precast made it: it has no shim.
    assert_eq!(listed["releases"][1]["torch"], serde_json::json!([&least]));

    let document = sandbox.json(&["show", &program]);
    let artifact = document["steps"][0]["artifact"].as_str().unwrap();
    for id in [program.as_str(), artifact] {
        let shown = sandbox.run(&["show", id]).stdout;
        let line = format!("  torch {least} is the least; its gates passed under 2.15.0 too\n");
        assert!(shown.contains(&line), "{shown}");
        let shown = sandbox.json(&["show", id]);
        crate::schemas::check("show", &shown);
        assert_eq!(
            shown["torches"],
            serde_json::json!({"least": &least, "also": ["2.15.0"]})
        );
    }
    // A changed model needs a build.
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_eq!(planned(&[]).stderr, "");
}

#[test]
fn a_torch_newer_than_the_tried_ones_needs_a_flag() {
    let sandbox = built();
    let newer = environment(&sandbox, "2.16.0");
    assert_ran!(build(&sandbox, &newer, &[], &[]), @"
    exit code 4
    ----- stderr
    plan: 3 of 3 programs are missing
    error: Python at `[ROOT]/worker` has torch 2.16.0, which is newer than what was tried: 2.11 to 2.15
    hint: `--untried-torch` builds with it all the same; or install torch 2.11 to 2.15 there, or name another interpreter with `--python PATH` or `PRECAST_PYTHON`
    ");
    let asked = build(
        &sandbox,
        &newer,
        &["--untried-torch"],
        &[("FAKE_OFF", "shared headers")],
    );
    assert!(
        asked.code == 0
            && asked
                .stderr
                .contains("torch 2.16.0: shared headers is off: a name moved: builds take longer"),
        "{}",
        asked.text()
    );
}
