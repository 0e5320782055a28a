//! The vision-language example: every module against eager, each served as its spec says.

use crate::{
    ATOL, RTOL,
    lab::{VLM, lab, precast, said},
};

/// Answers a request of these sizes and returns which bucket and rung did.
fn served(module: &str, case: &str) -> (String, String) {
    lab(VLM).agrees(VLM, "vlm", module, case, RTOL, ATOL)
}

fn by(bucket: &str, rung: &str) -> (String, String) {
    (bucket.to_owned(), rung.to_owned())
}

#[test]
#[ignore = "long: `make test-long`"]
fn variants_are_picked_by_the_names_of_the_inputs() {
    for variant in ["answer(ids,pixels)", "answer(ids)"] {
        let exact = served(variant, "batch=1,tokens=16");
        assert_eq!(exact, by("batch=1 tokens=16", "exact"), "{variant}");
        let padded = served(variant, "batch=1,tokens=5");
        assert_eq!(padded, by("batch=1 tokens=16", "padded"), "{variant}");
        let larger = served(variant, "batch=2,tokens=21");
        assert_eq!(larger.1, "eager", "{variant}");
    }
}

#[test]
#[ignore = "long: `make test-long`"]
fn methods_of_one_submodule_are_compiled_in_their_own_ways() {
    assert_eq!(served("see", "").1, "exact");
    assert_eq!(served("index", "batch=4"), by("batch=4", "exact"));
    assert_eq!(served("index", "batch=3"), by("batch=4", "padded"));
    assert_eq!(served("project", "batch=1"), by("batch=1", "exact"));
    let plan = lab(VLM).json(&["plan", "-f", VLM]);
    let setting = |module: &str, key: &str| {
        let programs = plan["programs"].as_array().unwrap();
        let found = programs.iter().find(|program| program["module"] == module);
        let settings = &found.unwrap()["settings"];
        let (group, name) = key.split_once('.').unwrap_or(("", key));
        let value = match group {
            "" => &settings["compile"][name],
            group => &settings["compile"][group][name],
        };
        let origin = settings["origins"][key].as_str().unwrap_or("built-in");
        format!("{value} ({origin})")
    };
    assert_eq!(setting("see", "mode"), "\"default\" (built-in)");
    assert_eq!(setting("index", "mode"), "\"reduce-overhead\" (module)");
    let fusion = "options.epilogue_fusion";
    assert_eq!(setting("see", fusion), "null (built-in)");
    assert_eq!(setting("index", fusion), "false (module)");
    assert_eq!(setting("project", fusion), "false (submodule)");
    assert_eq!(setting("project", "smoketest_steps"), "2 (module)");
    assert_eq!(setting("likelihood", "enabled"), "false (submodule)");
    assert_eq!(setting("project", "options.max_fusion_size"), "32 (spec)");
}

#[test]
#[ignore = "long: `make test-long`"]
fn one_artifact_serves_every_length() {
    assert_eq!(served("language", "length=16"), by("length=16", "exact"));
    assert_eq!(served("language", "length=9"), by("length=16", "padded"));
    for length in [17, 64, 128] {
        let (_, rung) = served("language", &format!("length={length}"));
        assert_eq!(rung, "dynamic", "{length}");
    }
    assert_eq!(served("language", "length=129").1, "eager");
}

#[test]
#[ignore = "long: `make test-long`"]
fn modules_left_to_eager_are_served() {
    for (module, case) in [
        ("patches", "batch=1"),
        ("patches", "batch=3"),
        ("likelihood", "batch=2,tokens=16"),
        ("likelihood", "batch=5,tokens=4"),
    ] {
        assert_eq!(served(module, case).1, "eager", "{module} {case}");
    }
    let listed = lab(VLM).json(&["ls", "--model", "vlm"]);
    for program in listed["programs"].as_array().unwrap() {
        let eager = program["steps"] == 0;
        let module = program["module"].as_str().unwrap();
        let expected = program["bucket"] == "eager" || ["patches", "likelihood"].contains(&module);
        assert_eq!(eager, expected, "{program}");
    }
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_pass_that_changes_the_numbers_is_told_by_the_gate() {
    let passes = "--set=patches.passes=['passes:halve']";
    let root = tempfile::tempdir().unwrap();
    let example = crate::lab::checkout().join("examples/vlm");
    for name in ["model.py", "precast.toml"] {
        std::fs::copy(example.join(name), root.path().join(name)).unwrap();
    }
    let source = "import torch\n\n\ndef halve(module):\n    for node in list(module.graph.nodes):\n        \
        if node.target is torch.ops.aten.convolution.default or node.target is torch.ops.aten.conv2d.default:\n            \
        with module.graph.inserting_after(node):\n                \
        half = module.graph.call_function(torch.ops.aten.mul.Scalar, (node, 0.5))\n            \
        node.replace_all_uses_with(half)\n            half.args = (node, 0.5)\n";
    std::fs::write(root.path().join("passes.py"), source).unwrap();
    let (spec, store) = (root.path().join("precast.toml"), root.path().join("store"));
    let mut build = precast(&store, &["build", "-j1", "--only", "patches batch=1", "-f"]);
    let build = build
        .arg(spec)
        .args([passes, "--set=blocklist=[]", "--set=fail_policy=raise"]);
    let output = said(build);
    let stderr = output.err;
    assert_eq!(output.code, Some(1), "{stderr}");
    let why = "failed its gate: output `output` differs from eager";
    assert!(stderr.contains(why), "{stderr}");
}
