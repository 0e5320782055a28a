//! `why` and `diff`: the changes between a program and its predecessor.

use crate::sandbox::{Sandbox, assert_run};

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
    exit code 0
    ----- stdout
    affine batch=1 [ID], built [TIME]
      it replaced nothing
    ");

    sandbox.append("model.py", "# one more line");
    let file = rebuilt(&sandbox);
    assert_run!(sandbox, ["why", &file], @"
    exit code 0
    ----- stdout
    affine batch=1 [ID], built [TIME]
      it replaced [ID]
      `model.py` changed
      the captured graph is the same, and so are its artifacts
    ");

    sandbox.edit(
        "precast.toml",
        "[[module]]",
        "[compile]\noptions = { epilogue_fusion = true }\n[[module]]",
    );
    rebuilt(&sandbox);
    sandbox.edit(
        "precast.toml",
        "epilogue_fusion = true",
        "epilogue_fusion = false",
    );
    let option = rebuilt(&sandbox);
    assert_run!(sandbox, ["why", &option], @"
    exit code 0
    ----- stdout
    affine batch=1 [ID], built [TIME]
      it replaced [ID]
      option `epilogue_fusion` changed: `true` -> `false`
      the captured graph is the same, compiled otherwise
    ");

    sandbox.edit(
        "precast.toml",
        "device = \"cpu\"",
        "device = \"cpu\"\nisa = \"x86-64-v2\"",
    );
    let target = rebuilt(&sandbox);
    assert_run!(sandbox, ["why", &target], @"
    exit code 0
    ----- stdout
    affine batch=1 [ID], built [TIME]
      it replaced [ID]
      the target changed: `native` -> `x86-64-v2`
      the target changed: CPU features [FEATURES]
      the captured graph is the same, compiled otherwise
    ");
    // The artifact of the program says the same of itself.
    let shown = sandbox.json(&["show", &target]);
    let artifact = shown["steps"][0]["artifact"].as_str().unwrap().to_owned();
    assert_run!(sandbox, ["why", &artifact], @"
    exit code 0
    ----- stdout
    affine batch=1 [ID], built [TIME]
      it replaced [ID]
      the target changed: `native` -> `x86-64-v2`
      the target changed: CPU features [FEATURES]
    ");

    // A change of another file had no effect.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    sandbox.write("README.md", "about the model");
    let readme = std::fs::File::options()
        .write(true)
        .open(sandbox.path("README.md"));
    readme.unwrap().set_modified(later).unwrap();
    let ran = sandbox.ok(&["why", "affine"]);
    assert_eq!(
        ran.stdout.matches("it replaced").count(),
        2,
        "{}",
        ran.text()
    );
    ran.prints("\nnot rebuilt: `README.md` is not a source\n");

    assert_run!(sandbox, ["diff", &first, &file], @"
    exit code 0
    ----- stdout
    `model.py` changed
    the captured graph is the same, and so are its artifacts
    ");
    assert_run!(sandbox, ["diff", &option, &target], @"
    exit code 0
    ----- stdout
    the target changed: `native` -> `x86-64-v2`
    the target changed: CPU features [FEATURES]
    the captured graph is the same, compiled otherwise
    ");
    assert_run!(sandbox, ["diff", &first, &first], @"
    exit code 0
    ----- stdout
    the keys are the same
    ");
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
    exit code 0
    ----- stdout
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
    assert_run!(sandbox, ["plan"], @r#"
    exit code 0
    ----- stdout
    build  affine(x) batch=1  `model.py` changed
    build  affine(x) batch=4  `model.py` changed
    build  affine(x) eager  never built
               answers sizes that no bucket covers; `fail_policy = "raise"` leaves it out
    build  affine(x, y) batch=1  `model.py` changed
    build  affine(x, y) eager  never built
               answers sizes that no bucket covers; `fail_policy = "raise"` leaves it out
    5 of 5 programs would be built
    "#);
    sandbox.ok(&["build", "-q"]);
    let why = sandbox.json(&["why", "affine"]);
    let reasons = why["why"].as_array().unwrap().iter().map(|why| {
        let reasons = why["reasons"].as_array().unwrap().iter();
        let reasons: Vec<&str> = reasons.map(|r| r["reason"].as_str().unwrap()).collect();
        format!("{}: {}", why["name"].as_str().unwrap(), reasons.join(", "))
    });
    let mut reasons: Vec<String> = reasons.collect();
    reasons.sort();
    let expected = [
        "affine batch=4",
        "affine(x) batch=1",
        "affine(x, y) batch=1",
    ];
    assert_eq!(
        reasons,
        expected.map(|name| format!("{name}: source-changed"))
    );
    // A variant with a renamed input is compared with its predecessor, not with the other variant.
    sandbox.edit("precast.toml", "y = {", "z = {");
    assert_run!(sandbox, ["plan"], @r#"
    exit code 0
    ----- stdout
    hit  affine(x) batch=1  [ID]
    hit  affine(x) batch=4  [ID]
    skip  affine(x) eager  the fake model has no dynamic dimensions
    build  affine(x, z) batch=1  input `y` was removed; input `z` was added
    build  affine(x, z) eager  never built
               answers sizes that no bucket covers; `fail_policy = "raise"` leaves it out
    2 of 4 programs would be built
    "#);
}
