//! `why` and `diff`: the changes between a program and its predecessor.

use crate::sandbox::{Sandbox, assert_run, count};

/// Builds, and returns the ID of the program of `affine batch=1` that is live then.
fn rebuilt(sandbox: &Sandbox) -> String {
    sandbox.ok(&["build", "-q"]);
    let listed = sandbox.json(&["ls", "affine", "--bucket", "batch=1", "--state", "live"]);
    listed["programs"][0]["id"].as_str().unwrap()[..12].to_owned()
}

#[test]
fn every_kind_of_change_is_named() {
    let sandbox = Sandbox::new();
    let first = rebuilt(&sandbox);
    assert_run!(sandbox, ["why", &first], @"
    affine batch=1 [ID], built [TIME]
      it replaced nothing
    ");

    sandbox.append("model.py", "# one more line");
    let file = rebuilt(&sandbox);
    assert_run!(sandbox, ["why", &file], @"
    affine batch=1 [ID], built [TIME]
      it replaced [ID]
      `model.py` changed
      the captured graph is the same, and so are its artifacts
    ");

    sandbox.module("options = { epilogue_fusion = true }");
    rebuilt(&sandbox);
    sandbox.edit("precast.toml", "fusion = true", "fusion = false");
    let option = rebuilt(&sandbox);
    let why = sandbox.ok(&["why", &option]);
    why.prints("\n  option `epilogue_fusion` changed: `true` -> `false`\n  the captured graph is the same, compiled otherwise\n");

    sandbox.edit("precast.toml", "device =", "isa = \"x86-64-v2\"\ndevice =");
    let target = rebuilt(&sandbox);
    assert_run!(sandbox, ["why", &target], @"
    affine batch=1 [ID], built [TIME]
      it replaced [ID]
      the target changed: `native` -> `x86-64-v2`
      the target changed: CPU features [FEATURES]
      the captured graph is the same, compiled otherwise
    ");
    // The artifact of the program says the same of itself.
    let shown = sandbox.json(&["show", &target]);
    let why = sandbox.ok(&["why", shown["steps"][0]["artifact"].as_str().unwrap()]);
    why.prints(
        "\n  the target changed: `native` -> `x86-64-v2`\n  the target changed: CPU features ",
    );

    // A change of another file had no effect.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    sandbox.write("README.md", "about the model");
    let readme = std::fs::File::open(sandbox.path("README.md"));
    readme.unwrap().set_modified(later).unwrap();
    let ran = sandbox.ok(&["why", "affine"]);
    assert_eq!(
        ran.stdout.matches("it replaced").count(),
        2,
        "{}",
        ran.text()
    );
    ran.prints("\nnot rebuilt: `README.md` is not a source\n");

    let diff = sandbox.ok(&["diff", &first, &file]).stdout;
    assert_eq!(
        diff,
        "`model.py` changed\nthe captured graph is the same, and so are its artifacts\n"
    );
    let diff = sandbox.ok(&["diff", &option, &target]);
    diff.prints("the target changed: `native` -> `x86-64-v2`\nthe target changed: CPU features ");
    assert_eq!(
        sandbox.ok(&["diff", &first, &first]).stdout,
        "the keys are the same\n"
    );
}

#[test]
fn variants_are_compared_with_themselves() {
    let sandbox = Sandbox::new();
    sandbox.append(
        "precast.toml",
        "[[module]]\nname = \"affine\"\n[module.inputs]\nx = { dtype = \"float32\", shape = [\"batch\", 3], pad = 0 }\n\
         y = { dtype = \"float32\", shape = [\"batch\", 3], pad = 0 }\n[module.buckets]\nbatch = [1]\n",
    );
    sandbox.ok(&["build", "-q"]);
    assert_run!(sandbox, ["plan"], @"
    hit  affine(x) batch=1  [ID]
    hit  affine(x) batch=4  [ID]
    skip  affine(x) eager  the fake model has no dynamic dimensions
    hit  affine(x, y) batch=1  [ID]
    skip  affine(x, y) eager  the fake model has no dynamic dimensions
    0 of 3 programs would be built
    ");
    let listed = sandbox.run(&["ls", "--bucket", "batch=1"]).stdout;
    for variant in ["affine(x)  ", "affine(x, y)  "] {
        assert!(listed.contains(variant), "{listed}");
    }
    // No reason reports an input as added or removed.
    sandbox.append("model.py", "# one more line");
    let plan = sandbox.ok(&["plan"]);
    plan.prints("affine(x) batch=1  `model.py` changed\n");
    plan.prints("affine(x, y) batch=1  `model.py` changed\n");
    sandbox.ok(&["build", "-q"]);
    let why = sandbox.json(&["why", "affine"]);
    let mut names: Vec<&str> = Vec::new();
    for why in why["why"].as_array().unwrap() {
        assert_eq!(
            (count(&why["reasons"]), &why["reasons"][0]["reason"]),
            (1, &"source-changed".into())
        );
        names.push(why["name"].as_str().unwrap());
    }
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "affine batch=4",
            "affine(x) batch=1",
            "affine(x, y) batch=1"
        ]
    );
    // A variant with a renamed input is compared with its predecessor, not with the other variant.
    sandbox.edit("precast.toml", "y = {", "z = {");
    let plan = sandbox.ok(&["plan"]);
    plan.prints("affine(x, z) batch=1  input `y` was removed; input `z` was added\n");
    plan.prints("\n2 of 4 programs would be built\n");
}
