//! `precast init`: the written spec, and refusals. tests/check has the descriptions of models, on real torch.

use std::fs;

use crate::{
    sandbox::{Sandbox, count},
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

/// Returns the spec that a command wrote into `new.toml`.
fn written(sandbox: &Sandbox, args: &[&str]) -> String {
    let ran = sandbox.ok(args);
    ran.says("wrote `new.toml`: `precast check` says what will break, `precast build` builds it\n");
    fs::read_to_string(sandbox.path("new.toml")).unwrap()
}

#[test]
fn a_spec_with_comments_that_can_be_planned() {
    let sandbox = Sandbox::new();
    let declared = "DECLARED = {\"encoder\": {\"forward\": {\"mode\": \"max-autotune\"}}}";
    sandbox.append("model.py", declared);
    insta::assert_snapshot!(written(&sandbox, &FROM_SAMPLE), @r#"
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
    let sizes = "{\"seq\": [3, 17, 17, 120], \"batch\": [1, 1, 5]}";
    sandbox.write("sizes.json", sizes);
    let line = "init model:load --force -q --sizes sizes.json --input ids=int64[batch,seq] --input x=float32[batch,3]";
    let ran = sandbox.ok(&line.split(' ').collect::<Vec<_>>());
    assert_eq!((&*ran.stdout, &*ran.stderr), ("", ""));
    let text = fs::read_to_string(sandbox.path("precast.toml")).unwrap();
    let (_, inputs) = text.split_once("[module.inputs]").unwrap();
    let (inputs, _) = inputs.split_once("# The tolerance").unwrap();
    insta::assert_snapshot!(inputs.trim(), @r#"
    # in call order; `range` is the values that an integer may have
    ids = { dtype = "int64", shape = ["batch", "seq"], pad = 0, range = [0, 9] }
    x = { dtype = "float32", shape = ["batch", 3], pad = 0 }
    [module.buckets]   # chosen to pad the least; 6 in all, each compiled by itself
    batch = [1, 5]
    seq = [8, 24, 120]
    "#);
}

#[test]
fn a_generative_model_has_prefill_and_decode() {
    let sandbox = Sandbox::steered(&["generates"]);
    let text = written(&sandbox, &["init", "model:load", "-f", "new.toml"]);
    for part in [
        "\ncontext = 64   # tokens of its cache: the largest of the buckets below\n",
        "\n[compile]\nfail_policy = \"raise\"   # no program for other sizes: a prompt goes through the buckets\n",
    ] {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
    let modules: Vec<&str> = text.split("\n[[module]]\n").skip(1).collect();
    let [prefill, decode] = &modules[..] else {
        panic!("{text}")
    };
    insta::assert_snapshot!(prefill, @r#"
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
    "#);
    // A call of one token is the rest of the same module.
    let changes = [
        ("\"prefill\"", "\"decode\""),
        ("\"seq\"", "1"),
        ("seq = [4]\n", ""),
    ];
    let expected = changes
        .iter()
        .fold((*prefill).to_owned(), |text, (from, to)| {
            text.replace(from, to)
        });
    assert_eq!(decode.trim(), expected.trim());
    let planned = sandbox.json(&["plan", "-f", "new.toml"]);
    assert_eq!(count(&planned["programs"]), 4);
}

#[test]
fn nested_inputs_are_left_to_the_samples() {
    let sandbox = Sandbox::steered(&["inputs are nested", "capture fails"]);
    let text = written(&sandbox, &FROM_SAMPLE);
    assert!(text.contains("samples = \"model:load\""), "{text}");
    assert!(!text.contains("[module.inputs]"), "{text}");
    assert!(text.contains("# Note: it can't be captured"), "{text}");
}

#[test]
fn nothing_is_overwritten_and_mistakes_are_named() {
    let sandbox = Sandbox::new();
    let before = fs::read(sandbox.path("precast.toml")).unwrap();
    let refused = |line: &str, says: &str| {
        let words: Vec<&str> = ["init"].into_iter().chain(line.split(' ')).collect();
        sandbox.run(&words).exits(2).says(says);
    };
    refused(
        "model:load --input x=float32[2]",
        "error: `precast.toml` is there already\nhint: `--force` writes over it, `-f FILE` writes another one\n",
    );
    assert_eq!(fs::read(sandbox.path("precast.toml")).unwrap(), before);
    refused(
        "model.py:load -f new.toml",
        "error: the entry must be `module:callable`, not `model.py:load`\nhint: write `model:load`\n",
    );
    refused(
        "model:load -f new.toml --input x",
        "'--input <NAME=DTYPE[SIZES]>': expected a name, a dtype and sizes, as `ids=int64[batch,seq]`\n",
    );
    let sized = "model:load -f new.toml --sizes sizes.json";
    sandbox.write("sizes.json", "{}");
    refused(
        sized,
        "error: `sizes.json` has no sizes\nhint: write a JSON list of numbers, or an object with a list for each dimension\n",
    );
    sandbox.write("sizes.json", "{\"tokens\": [3]}");
    refused(
        sized,
        "error: no input has the dimension `tokens` of the file of sizes\nhint: the inputs have the dimensions `batch`\n",
    );
    assert!(!sandbox.path("new.toml").exists());
}
