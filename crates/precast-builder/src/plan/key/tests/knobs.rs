//! The settings of the spec, and the inputs outside of it, that change a request key.

use std::collections::BTreeSet;

use precast_store::target::DeviceKind;

use super::*;
use crate::spec::{compile, parse};

/// Knobs of the spec as `(knob, text, other text)`; the knob is the key of `precast.toml`.
const MOVES: &[(&str, &str, &str)] = &[
    ("name", "\"tiny\"", "\"tiny2\""),
    ("entry", "\"model:load\"", "\"model:load2\""),
    ("samples", "entry =", "samples = \"model:samples\"\nentry ="),
    ("context", "entry =", "context = 64\nentry ="),
    ("device", "\"cpu\"", "\"cuda\""),
    ("isa", "device =", "isa = \"x86-64-v3\"\ndevice ="),
    ("enabled", "[[module]]", "[[module]]\nenabled = false"),
    ("backend", "[[module]]", "[[module]]\nbackend = \"eager\""),
    ("mode", "[[module]]", "[[module]]\nmode = \"max-autotune\""),
    ("mode", "[compile]", "[compile]\nmode = \"reduce-overhead\""),
    (
        "mode",
        "[compile]",
        "[compile]\nmode = \"max-autotune-no-cudagraphs\"",
    ),
    ("dynamic", "[[module]]", "[[module]]\ndynamic = true"),
    (
        "dynamic",
        "[[module]]",
        "[[module]]\ndynamic.batch = { min = 1, max = 8 }",
    ),
    (
        "options",
        "epilogue_fusion = true",
        "epilogue_fusion = false",
    ),
    ("options", "epilogue_fusion = true", "epilogue_fusion = 1"),
    ("options", "\"triton.x\" = 1", "\"triton.x\" = 1.0"),
    ("options", "\"triton.x\" = 1", "\"triton.x\" = \"1\""),
    ("options", ", \"triton.x\" = 1", ""),
    ("options", "options = {", "options = { freezing = false,"),
    (
        "options",
        "options = {",
        "options = { attention = \"math\",",
    ),
    ("passes", "\"passes:fold\"", "\"passes:unfold\""),
    (
        "passes",
        "\"passes:fold\"",
        "\"passes:fold\", \"passes:fold\"",
    ),
    (
        "allowlist",
        "[[module]]",
        "[[module]]\nallowlist = [\"head\"]",
    ),
    (
        "blocklist",
        "[compile]",
        "[compile]\nblocklist = [\"body\"]",
    ),
    ("name", "\"encode\"", "\"decode\""),
    ("path", "\"body\"", "\"body.0\""),
    ("method", "path =", "method = \"embed\"\npath ="),
    ("regions", "\"layer.*\"", "\"layer.**\""),
    ("regions", "\"layer.*\"", "\"layer.*\", \"head\""),
    (
        "inputs",
        "ids = { dtype = \"int64\"",
        "ids = { dtype = \"int32\"",
    ),
    (
        "inputs",
        "\"int64\", shape = [\"batch\", 4]",
        "\"int64\", shape = [\"batch\", 5]",
    ),
    (
        "inputs",
        "\"int64\", shape = [\"batch\", 4]",
        "\"int64\", shape = [2, 4]",
    ),
    ("inputs", "pad = 0", "pad = 1"),
    ("padding", "path =", "padding = \"trusted\"\npath ="),
    (
        "state",
        "[module.gate]",
        "[module.state]\nmask = \"zeros\"\n[module.gate]",
    ),
    ("inputs", "pad = 0", "range = [0, 9]"),
    ("inputs", "ids =", "tokens ="),
    (
        "inputs",
        "mask = { dtype = \"bool\", shape = [\"batch\", 4] }",
        "",
    ),
    ("buckets", "batch = [2]", "batch = [3]"),
    (
        "kind",
        "regions = [\"layer.*\"]",
        "kind = \"step\"\ntrain = { optimizer = \"sgd\" }",
    ),
    (
        "train",
        "regions = [\"layer.*\"]",
        "kind = \"step\"\ntrain = { optimizer = \"sgd\", momentum = 0.9 }",
    ),
    (
        "train",
        "regions = [\"layer.*\"]",
        "kind = \"step\"\ntrain = { optimizer = \"sgd\", clip = 1.0 }",
    ),
    ("kind", "path = \"body\"", "kind = \"autograd\""),
    // Programs hold the tensors that a file of weights lacks. The path of the file does not matter.
    (
        "weights",
        "entry =",
        "weights = \"other.safetensors\"\nentry =",
    ),
];

const STAYS: &[(&str, &str, &str)] = &[
    ("fullgraph", "[[module]]", "[[module]]\nfullgraph = false"),
    (
        "healthcheck",
        "[[module]]",
        "[[module]]\nhealthcheck = false",
    ),
    (
        "smoketest_steps",
        "[compile]",
        "[compile]\nsmoketest_steps = 9",
    ),
    (
        "fail_policy",
        "[compile]",
        "[compile]\nfail_policy = \"raise\"",
    ),
    ("gate", "rtol = 1e-4", "rtol = 1e-2\natol = 1"),
    ("gate", "[module.gate]\nrtol = 1e-4", ""),
    // The same value in another notation.
    ("path", "\"body\"", "'body'"),
    ("mode", "[[module]]", "[[module]]\nmode = \"default\""),
    ("method", "path =", "method = \"forward\"\npath ="),
    ("padding", "path =", "padding = \"checked\"\npath ="),
    ("isa", "device =", "isa = \"native\"\ndevice ="),
    (
        "allowlist",
        "[[module]]",
        "[[module]]\nallowlist = [\"b*\", \"head\"]",
    ),
    (
        "blocklist",
        "[compile]",
        "[compile]\nblocklist = [\"head\"]",
    ),
    (
        "options",
        "epilogue_fusion = true, \"triton.x\" = 1",
        "triton = { x = 1 }, epilogue_fusion = true",
    ),
    // The default on a CPU.
    ("options", "options = {", "options = { freezing = true,"),
    (
        "options",
        "options = {",
        "options = { attention = \"auto\",",
    ),
    ("inputs", "pad = 0", "pad = 0x0"),
    ("inputs", ", pad = 0", ""),
    ("buckets", "batch = [2]", "points = [{ batch = 2 }]"),
    // Another bucket is another program.
    ("buckets", "batch = [2]", "batch = [7, 2]"),
    (
        "unused_weights",
        "entry =",
        "unused_weights = [\"head.**\"]\nentry =",
    ),
    (
        "assets",
        "entry =",
        "assets = { words = \"knobs.rs\" }\nentry =",
    ),
    ("name", "# end", "[[module]]\nname = \"other\""),
];

#[test]
fn every_knob_of_the_spec_moves_the_key_or_does_not() {
    let spec = format!("{SPEC}[[module]]\nname = \"tail\"\npath = \"head\"\n# end");
    let (base, _) = request(&spec, &world());
    let mut seen = BTreeSet::from([base]);
    let mut knobs = BTreeSet::new();
    for (knob, from, to) in MOVES {
        assert!(spec.contains(from), "{from}");
        let (key, _) = request(&spec.replacen(from, to, 1), &world());
        // Three ways to say that a module is not compiled: one outcome, one key.
        let outcome = matches!(*knob, "enabled" | "allowlist" | "blocklist");
        assert!(
            key != base && (seen.insert(key) || outcome),
            "{knob}: `{from}` -> `{to}` gave a key that was there"
        );
        knobs.insert(*knob);
    }
    for (knob, from, to) in STAYS {
        assert!(spec.contains(from), "{from}");
        assert_eq!(
            request(&spec.replacen(from, to, 1), &world()).0,
            base,
            "{knob}: `{from}` -> `{to}`"
        );
        knobs.insert(*knob);
    }
    let all = [parse::MODEL, parse::TARGET, parse::MODULE, compile::KEYS].concat();
    let missing: Vec<_> = all.iter().filter(|knob| !knobs.contains(*knob)).collect();
    assert!(missing.is_empty(), "knobs that nobody turned: {missing:?}");
}

/// Returns worlds that must have different keys, each by the name of its difference.
fn other_worlds() -> Vec<(&'static str, World)> {
    let mut worlds = Vec::new();
    let mut with = |name, change: &dyn Fn(&mut World)| {
        let mut world = world();
        change(&mut world);
        worlds.push((name, world));
    };
    with("source bytes", &|w| {
        w.sources[0].digest = Digest::of(b"model ")
    });
    with("source path", &|w| w.sources[0].path = "model2.py".into());
    with("source added", &|w| {
        w.sources.push(SourceFile {
            path: "x.py".into(),
            digest: Digest::of(b""),
        })
    });
    with("source removed", &|w| drop(w.sources.pop()));
    with("sources swapped", &|w| {
        let (a, b) = w.sources.split_at_mut(1);
        std::mem::swap(&mut a[0].digest, &mut b[0].digest);
    });
    with("package version", &|w| {
        w.packages[0].version = "2.11.1".into()
    });
    with("package name", &|w| w.packages[0].name = "torch2".into());
    with("package removed", &|w| w.packages.clear());
    with("os", &|w| w.target.os = "macos".into());
    with("arch", &|w| w.target.arch = "aarch64".into());
    with("isa", &|w| w.target.isa = "x86-64-v4".into());
    with("features", &|w| w.target.features.push("sha".into()));
    with("device", &|w| w.target.device = DeviceKind::Cuda);
    with("sm", &|w| w.target.sm = Some("90".into()));
    with("torch", &|w| w.target.torch = "2.11.0".into());
    with("torch_git", &|w| w.target.torch_git = "0".into());
    with("cuda", &|w| w.target.cuda = None);
    with("cxx11_abi", &|w| w.target.cxx11_abi = false);
    worlds
}

/// A module that fills a state is in the key of the module with the state, as far as its outputs depend on it.
#[test]
fn a_module_that_fills_a_state_moves_the_key() {
    let with = |first: &str, filler: &str| {
        let state = format!("[module.state]\nkept = \"{first}\"\n[module.gate]");
        let text = SPEC.replacen("[module.gate]", &state, 1);
        let module = format!("\n[[module]]\n{filler}\n");
        request(&(text + &module), &world()).0
    };
    let start = "name = \"start\"\nmethod = \"start\"\n";
    let inputs = "[module.inputs]\nx = { dtype = \"float32\", shape = [1, 8] }";
    let base = with("start", &format!("{start}{inputs}"));
    let mut seen = BTreeSet::from([base]);
    for (first, filler) in [
        ("zeros", format!("{start}{inputs}")),
        ("start", format!("{start}path = \"body\"\n{inputs}")),
        (
            "start",
            format!("name = \"start\"\nmethod = \"begin\"\n{inputs}"),
        ),
        (
            "start",
            format!("{start}{}", inputs.replace("[1, 8]", "[1, 9]")),
        ),
        ("start", format!("{start}{}", inputs.replace("x =", "y ="))),
    ] {
        assert!(seen.insert(with(first, &filler)), "{first} {filler}");
    }
    assert_eq!(
        with("start", &format!("{start}fullgraph = false\n{inputs}")),
        base
    );
}

#[test]
fn everything_outside_the_spec_that_matters_moves_the_key() {
    let (base, _) = request(SPEC, &world());
    let mut seen = BTreeSet::from([base]);
    for (what, world) in other_worlds() {
        assert!(seen.insert(request(SPEC, &world).0), "{what}");
    }
    let turned: BTreeSet<&str> = other_worlds().iter().map(|(what, _)| *what).collect();
    let Ok(Value::Object(target)) = serde_json::to_value(world().target) else {
        panic!()
    };
    for field in target.keys() {
        assert!(
            turned.contains(field.as_str()),
            "nobody turned the target's {field}"
        );
    }
    let mut shuffled = world();
    shuffled.sources.reverse();
    shuffled.target.features.reverse();
    assert_eq!(
        request(SPEC, &shuffled).0,
        base,
        "the order in which things were found"
    );
}
