//! `precast init`: the written spec, and refusals. tests/check has the descriptions of models, on real torch.

use std::fs;

use crate::{
    sandbox::{Sandbox, assert_run},
    schemas::check,
};

const FROM_SAMPLE: [&str; 6] = [
    "init",
    "model:load",
    "-f",
    "new.toml",
    "--sample",
    "model:load",
];

#[test]
fn a_spec_with_comments_that_can_be_planned() {
    let sandbox = Sandbox::new();
    sandbox.append(
        "model.py",
        "DECLARED = {\"encoder\": {\"forward\": {\"mode\": \"max-autotune\"}}}",
    );
    assert_run!(sandbox, FROM_SAMPLE, @"
    exit code 0
    ----- stderr
    wrote `new.toml`: `precast check` says what will break, `precast build` builds it
    ");
    insta::assert_snapshot!(fs::read_to_string(sandbox.path("new.toml")).unwrap(), @r#"
    # How `Fake` is compiled. `precast check` says what will break, `precast build` builds it.
    schema = 1

    [model]
    name  = "fake"   # in the store; callers load the model by it
    entry = "model:load"

    [target]
    device = "cpu"
    # isa = "x86-64-v3"   # for a fleet; by default the machine that builds

    # What submodules say themselves holds unless it is said here:
    #   encoder.forward: {"mode":"max-autotune"}

    [[module]]
    name = "forward"
    # 2 submodules share 1 graph: for each bucket, 1 compile fewer than with one for each of them
    regions = ["encoder.layer.*"]
    [module.inputs]   # in call order; `range` is the values that an integer may have
    x = { dtype = "float32", shape = ["batch", 3], pad = 0 }
    [module.buckets]   # sizes that the model takes: list those that requests have; 2 in all, each compiled by itself
    batch = [2, 4]
    # The tolerance against eager, `atol + rtol * |eager|`. The default for float32:
    # [module.gate]
    # rtol = 1e-4
    # atol = 1e-5   # times the largest value
    "#);
    let document = sandbox.json(&["init", "model:load", "--force", "--sample", "model:load"]);
    check("init", &document);
    let planned = sandbox.json(&["plan", "-f", "new.toml"]);
    assert_eq!(planned["model"], "fake");
}

#[test]
fn inputs_from_the_command_line_and_buckets_from_a_file() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "sizes.json",
        "{\"seq\": [3, 17, 17, 120], \"batch\": [1, 1, 5]}",
    );
    let args = [
        "init",
        "model:load",
        "--force",
        "-q",
        "--sizes",
        "sizes.json",
        "--input",
        "ids=int64[batch,seq]",
        "--input",
        "x=float32[batch,3]",
    ];
    assert_run!(sandbox, args, @"exit code 0");
    let text = fs::read_to_string(sandbox.path("precast.toml")).unwrap();
    insta::assert_snapshot!(text, @r#"
    # How `Fake` is compiled. `precast check` says what will break, `precast build` builds it.
    schema = 1

    [model]
    name  = "fake"   # in the store; callers load the model by it
    entry = "model:load"

    [target]
    device = "cpu"
    # isa = "x86-64-v3"   # for a fleet; by default the machine that builds

    [[module]]
    name = "forward"
    # 2 submodules share 1 graph: for each bucket, 1 compile fewer than with one for each of them
    regions = ["encoder.layer.*"]
    [module.inputs]   # in call order; `range` is the values that an integer may have
    ids = { dtype = "int64", shape = ["batch", "seq"], pad = 0, range = [0, 9] }
    x = { dtype = "float32", shape = ["batch", 3], pad = 0 }
    [module.buckets]   # chosen to pad the least; 6 in all, each compiled by itself
    batch = [1, 5]
    seq = [8, 24, 120]
    # The tolerance against eager, `atol + rtol * |eager|`. The default for float32:
    # [module.gate]
    # rtol = 1e-4
    # atol = 1e-5   # times the largest value
    "#);
}

#[test]
fn a_generative_model_has_prefill_and_decode() {
    let sandbox = Sandbox::steered(&["generates"]);
    let args = ["init", "model:load", "-f", "new.toml"];
    assert_run!(sandbox, args, @"
    exit code 0
    ----- stderr
    wrote `new.toml`: `precast check` says what will break, `precast build` builds it
    ");
    insta::assert_snapshot!(fs::read_to_string(sandbox.path("new.toml")).unwrap(), @r#"
    # How `Fake` is compiled. `precast check` says what will break, `precast build` builds it.
    schema = 1

    [model]
    name  = "fake"   # in the store; callers load the model by it
    entry = "model:load"
    context = 64   # tokens of its cache: the largest of the buckets below

    [target]
    device = "cpu"
    # isa = "x86-64-v3"   # for a fleet; by default the machine that builds

    [compile]
    fail_policy = "raise"   # no program for other sizes: a prompt goes through the buckets

    [[module]]
    name = "prefill"
    method = "step"
    # 2 submodules share 1 graph: for each bucket, 1 compile fewer than with one for each of them
    regions = ["encoder.layer.*"]
    [module.inputs]   # in call order; `range` is the values that an integer may have
    ids = { dtype = "int64", shape = [1, "seq"], range = [0, 97] }
    at = { dtype = "int64", shape = ["seq"], range = [0, "context"] }
    heat = { dtype = "float32", shape = [1], default = 0.0 }
    [module.state]   # kept from call to call in a session
    "cache.*.*" = { shape = [1, 2, "context", 8] }
    [module.buckets]   # tokens of a call, and of the cache; 2 in all, each compiled by itself
    context = [16, 64]
    seq = [4]
    # The tolerance against eager, `atol + rtol * |eager|`. The default for float32:
    # [module.gate]
    # rtol = 1e-4
    # atol = 1e-5   # times the largest value

    [[module]]
    name = "decode"
    method = "step"
    # 2 submodules share 1 graph: for each bucket, 1 compile fewer than with one for each of them
    regions = ["encoder.layer.*"]
    [module.inputs]   # in call order; `range` is the values that an integer may have
    ids = { dtype = "int64", shape = [1, 1], range = [0, 97] }
    at = { dtype = "int64", shape = [1], range = [0, "context"] }
    heat = { dtype = "float32", shape = [1], default = 0.0 }
    [module.state]   # kept from call to call in a session
    "cache.*.*" = { shape = [1, 2, "context", 8] }
    [module.buckets]   # tokens of a call, and of the cache; 2 in all, each compiled by itself
    context = [16, 64]
    # The tolerance against eager, `atol + rtol * |eager|`. The default for float32:
    # [module.gate]
    # rtol = 1e-4
    # atol = 1e-5   # times the largest value
    "#);
    let planned = sandbox.json(&["plan", "-f", "new.toml"]);
    assert_eq!(planned["programs"].as_array().unwrap().len(), 4);
}

#[test]
fn nested_inputs_are_left_to_the_samples() {
    let sandbox = Sandbox::steered(&["inputs are nested", "capture fails"]);
    assert_run!(sandbox, FROM_SAMPLE, @"
    exit code 0
    ----- stderr
    note: it can't be captured
    wrote `new.toml`: `precast check` says what will break, `precast build` builds it
    ");
    let text = fs::read_to_string(sandbox.path("new.toml")).unwrap();
    assert!(text.contains("samples = \"model:load\""), "{text}");
    assert!(!text.contains("[module.inputs]"), "{text}");
    assert!(text.contains("# Note: it can't be captured"), "{text}");
}

#[test]
fn nothing_is_overwritten_and_mistakes_are_named() {
    let sandbox = Sandbox::new();
    let before = fs::read(sandbox.path("precast.toml")).unwrap();
    assert_run!(sandbox, ["init", "model:load", "--input", "x=float32[2]"], @"
    exit code 2
    ----- stderr
    error: `precast.toml` is there already
    hint: `--force` writes over it, `-f FILE` writes another one
    ");
    assert_eq!(fs::read(sandbox.path("precast.toml")).unwrap(), before);
    assert_run!(sandbox, ["init", "model.py:load", "-f", "new.toml"], @"
    exit code 2
    ----- stderr
    error: the entry must be `module:callable`, not `model.py:load`
    hint: write `model:load`
    ");
    assert_run!(sandbox, ["init", "model:load", "-f", "new.toml", "--input", "x"], @"
    exit code 2
    ----- stderr
    error: invalid value 'x' for '--input <NAME=DTYPE[SIZES]>': expected a name, a dtype and sizes, as `ids=int64[batch,seq]`

    For more information, try '--help'.
    ");
    sandbox.write("sizes.json", "{}");
    let sized = [
        "init",
        "model:load",
        "-f",
        "new.toml",
        "--sizes",
        "sizes.json",
    ];
    assert_run!(sandbox, sized, @"
    exit code 2
    ----- stderr
    error: `sizes.json` has no sizes
    hint: write a JSON list of numbers, or an object with a list for each dimension
    ");
    sandbox.write("sizes.json", "{\"tokens\": [3]}");
    assert_run!(sandbox, sized, @"
    exit code 2
    ----- stderr
    error: no input has the dimension `tokens` of the file of sizes
    hint: the inputs have the dimensions `batch`
    ");
    assert!(!sandbox.path("new.toml").exists());
}
