//! The settings of the spec, and the inputs outside of it, that change a request key.

use std::collections::BTreeSet;

use precast_store::target::DeviceKind;

use super::*;
use crate::spec::{compile, parse};

/// A knob, which is the key of `precast.toml`, with a text of the spec and what takes its place.
type Knob = (&'static str, &'static str, &'static str);

const MODEL: &str = "[model]";
const TARGET: &str = "[target]";
const COMPILE: &str = "[compile]";
const MODULE: &str = "[[module]]";
const REGIONS: &str = "regions = ['layer.*']";

/// Knobs that move the key: lines that are added below a heading of the spec.
const MOVES_ADDED: &[Knob] = &[
    ("samples", MODEL, "samples = 'model:samples'"),
    ("context", MODEL, "context = 64"),
    // Programs hold the tensors that a file of weights lacks. The path of the file does not matter.
    ("weights", MODEL, "weights = 'other.safetensors'"),
    ("isa", TARGET, "isa = 'x86-64-v3'"),
    ("mode", COMPILE, "mode = 'reduce-overhead'"),
    ("mode", COMPILE, "mode = 'max-autotune-no-cudagraphs'"),
    ("blocklist", COMPILE, "blocklist = ['body']"),
    ("enabled", MODULE, "enabled = false"),
    ("backend", MODULE, "backend = 'eager'"),
    ("mode", MODULE, "mode = 'max-autotune'"),
    ("dynamic", MODULE, "dynamic = true"),
    ("dynamic", MODULE, "dynamic.batch = { min = 1, max = 8 }"),
    ("allowlist", MODULE, "allowlist = ['head']"),
    ("method", MODULE, "method = 'embed'"),
    ("padding", MODULE, "padding = 'trusted'"),
];

/// Knobs that move the key: texts that are replaced.
const MOVES: &[Knob] = &[
    ("name", "'tiny'", "'tiny2'"),
    ("name", "'encode'", "'decode'"),
    ("entry", "'model:load'", "'model:load2'"),
    ("device", "'cpu'", "'cuda'"),
    ("options", "fusion = true", "fusion = false"),
    ("options", "fusion = true", "fusion = 1"),
    ("options", "'triton.x' = 1", "'triton.x' = 1.0"),
    ("options", "'triton.x' = 1", "'triton.x' = '1'"),
    ("options", ", 'triton.x' = 1", ""),
    ("options", "options = {", "options = { freezing = false,"),
    ("options", "options = {", "options = { attention = 'math',"),
    ("passes", "'passes:fold'", "'passes:unfold'"),
    ("passes", "'passes:fold'", "'passes:fold', 'passes:fold'"),
    ("path", "'body'", "'body.0'"),
    ("regions", "'layer.*'", "'layer.**'"),
    ("regions", "'layer.*'", "'layer.*', 'head'"),
    ("inputs", "dtype = 'int64'", "dtype = 'int32'"),
    ("inputs", "['batch', 4], pad", "['batch', 5], pad"),
    ("inputs", "['batch', 4], pad", "[2, 4], pad"),
    ("inputs", "pad = 0", "pad = 1"),
    ("inputs", "pad = 0", "range = [0, 9]"),
    ("inputs", "ids =", "tokens ="),
    (
        "inputs",
        "\nmask = { dtype = 'bool', shape = ['batch', 4] }",
        "",
    ),
    (
        "state",
        "[module.gate]",
        "[module.state]\nmask = 'zeros'\n[module.gate]",
    ),
    ("buckets", "batch = [2]", "batch = [3]"),
    ("kind", "path = 'body'", "kind = 'autograd'"),
    (
        "kind",
        REGIONS,
        "kind = 'step'\ntrain = { optimizer = 'sgd' }",
    ),
    (
        "train",
        REGIONS,
        "kind = 'step'\ntrain = { optimizer = 'sgd', momentum = 0.9 }",
    ),
    (
        "train",
        REGIONS,
        "kind = 'step'\ntrain = { optimizer = 'sgd', clip = 1.0 }",
    ),
];

/// Knobs that leave the key as it is: lines that are added below a heading of the spec.
const STAYS_ADDED: &[Knob] = &[
    ("unused_weights", MODEL, "unused_weights = ['head.**']"),
    ("assets", MODEL, "assets = { words = 'knobs.rs' }"),
    ("smoketest_steps", COMPILE, "smoketest_steps = 9"),
    ("fail_policy", COMPILE, "fail_policy = 'raise'"),
    ("blocklist", COMPILE, "blocklist = ['head']"),
    ("fullgraph", MODULE, "fullgraph = false"),
    ("healthcheck", MODULE, "healthcheck = false"),
    ("allowlist", MODULE, "allowlist = ['b*', 'head']"),
    // The default.
    ("isa", TARGET, "isa = 'native'"),
    ("mode", MODULE, "mode = 'default'"),
    ("method", MODULE, "method = 'forward'"),
    ("padding", MODULE, "padding = 'checked'"),
    ("name", "# end", "[[module]]\nname = 'other'"),
];

/// Knobs that leave the key as it is: texts that are replaced.
const STAYS: &[Knob] = &[
    ("gate", "rtol = 1e-4", "rtol = 1e-2\natol = 1"),
    ("gate", "[module.gate]\nrtol = 1e-4", ""),
    // The same value in another notation.
    ("path", "'body'", "\"body\""),
    (
        "options",
        "epilogue_fusion = true, 'triton.x' = 1",
        "triton = { x = 1 }, epilogue_fusion = true",
    ),
    ("inputs", "pad = 0", "pad = 0x0"),
    ("inputs", ", pad = 0", ""),
    ("buckets", "batch = [2]", "points = [{ batch = 2 }]"),
    // The default on a CPU.
    ("options", "options = {", "options = { freezing = true,"),
    ("options", "options = {", "options = { attention = 'auto',"),
    // Another bucket is another program.
    ("buckets", "batch = [2]", "batch = [7, 2]"),
];

#[test]
fn every_knob_of_the_spec_moves_the_key_or_does_not() {
    let spec = format!("{SPEC}[[module]]\nname = \"tail\"\npath = \"head\"\n# end");
    let spec = spec.replace('"', "'");
    let with = |from: &str, to: &str| {
        assert!(spec.contains(from), "{from}");
        request(&spec.replacen(from, to, 1), &world()).0
    };
    let base = with("", "");
    let all = |replaced: &'static [Knob], added: &'static [Knob]| {
        let replaced = replaced
            .iter()
            .map(|(knob, from, to)| (*knob, *from, (*to).to_owned()));
        let added = added
            .iter()
            .map(|(knob, below, line)| (*knob, *below, format!("{below}\n{line}")));
        replaced.chain(added)
    };
    let mut seen = BTreeSet::from([base]);
    let mut knobs = BTreeSet::new();
    for (knob, from, to) in all(MOVES, MOVES_ADDED) {
        let key = with(from, &to);
        // Three ways to say that a module is not compiled: one outcome, one key.
        let outcome = matches!(knob, "enabled" | "allowlist" | "blocklist");
        let moves = key != base && (seen.insert(key) || outcome);
        assert!(
            moves,
            "{knob}: `{from}` -> `{to}` gave a key that was there"
        );
        knobs.insert(knob);
    }
    for (knob, from, to) in all(STAYS, STAYS_ADDED) {
        assert_eq!(with(from, &to), base, "{knob}: `{from}` -> `{to}`");
        knobs.insert(knob);
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
    let digest = Digest::of(b"another");
    with("source bytes", &|w| w.sources[0].digest = digest);
    with("source path", &|w| w.sources[0].path = "model2.py".into());
    let path = || "x.py".to_owned();
    with("source added", &|w| {
        w.sources.push(SourceFile {
            path: path(),
            digest,
        })
    });
    with("source removed", &|w| drop(w.sources.pop()));
    with("sources swapped", &|w| {
        let (a, b) = w.sources.split_at_mut(1);
        std::mem::swap(&mut a[0].digest, &mut b[0].digest);
    });
    with("package version", &|w| w.packages[0].version = "3".into());
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
            format!("{start}{inputs}").replace("\"start\"\n[", "\"begin\"\n["),
        ),
        (
            "start",
            format!("{start}{inputs}").replace("[1, 8]", "[1, 9]"),
        ),
        ("start", format!("{start}{inputs}").replace("x =", "y =")),
    ] {
        assert!(seen.insert(with(first, &filler)), "{first} {filler}");
    }
    let partly = format!("{start}fullgraph = false\n{inputs}");
    assert_eq!(with("start", &partly), base);
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
    let (shuffled, _) = request(SPEC, &shuffled);
    assert_eq!(shuffled, base, "the order in which things were found");
}
