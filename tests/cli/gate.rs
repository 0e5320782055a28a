//! Results of the gate in receipts and records. Wrong answers, NaN and crashes: see `build`.

use std::{path::Path, process::Command};

use serde_json::Value;

use crate::{
    sandbox::{EAGER, Sandbox, assert_run, count},
    schemas::check,
};

/// The program that these tests look at.
const FOUR: &str = "affine batch=4";

/// Builds a model whose file says this, and returns the record of the program.
fn built(lines: &[&str], args: &[&str]) -> (Sandbox, Value) {
    let sandbox = Sandbox::new();
    for line in lines {
        sandbox.append("model.py", line);
    }
    sandbox.ok(&[&["build", "--only", FOUR], args].concat());
    let record = sandbox.json(&["show", FOUR]);
    (sandbox, record)
}

#[test]
fn a_receipt_says_whether_two_runs_are_equal() {
    let (_, record) = built(&[], &[]);
    assert_eq!(record["receipt"]["gate"]["deterministic"], true);
    // One step is no two runs.
    let one = ["--set", "smoketest_steps=1"];
    let (_, record) = built(&["# fake: answers vary"], &one);
    let gate = &record["receipt"]["gate"];
    assert_eq!(
        (&gate["deterministic"], &gate["steps"]),
        (&false.into(), &2.into())
    );
}

#[test]
fn an_object_that_asks_for_an_executable_stack_is_not_published() {
    let sandbox = Sandbox::steered(&["link -Wl,-z,execstack", "link -Wl,-rpath,/elsewhere"]);
    let ran = sandbox.run(&["build", "--only", FOUR]);
    let line = "failed affine batch=4: the artifact's shared object is refused: it asks for an executable stack, it says \
        where libraries are looked for (RPATH or RUNPATH)\n";
    ran.shows(line);
    assert_eq!(sandbox.json(&["ls"])["programs"][0]["state"], "failed");
}

#[test]
fn an_object_that_exports_the_cpp_library_is_not_published() {
    let refused = "shared object is refused: it exports the C++ library, which the compiler linked statically";
    let flags = ["link -Wl,-u,_ZNSt6locale7classicEv", "link -l:libstdc++.a"];
    let ran = Sandbox::steered(&flags).run(&["build", "--only", FOUR]);
    ran.shows(&format!(
        "failed affine batch=4: the artifact's {refused}\n"
    ));

    let sandbox = Sandbox::new();
    let text = "#include <locale>\nstd::locale shim() { return std::locale::classic(); }\n";
    sandbox.write("shim.cpp", text);
    let mut compiler = Command::new("g++");
    compiler.args([
        "-static-libstdc++",
        "-shared",
        "-fPIC",
        "-o",
        "shim.so",
        "shim.cpp",
    ]);
    assert!(
        compiler
            .current_dir(sandbox.path(""))
            .status()
            .unwrap()
            .success()
    );
    let answer = serde_json::json!({"file": sandbox.path("shim.so"), "cuda": null, "why": null});
    sandbox.write("answer", answer.to_string());
    let mut build = sandbox.command(&["build", "--only", FOUR]);
    let ran = sandbox.output(build.env("FAKE_SHIM", sandbox.path("answer")));
    assert_ne!(ran.code, 0);
    ran.shows(&format!("error: the shim's {refused}\n"));
    ran.shows("`CXX`");
}

#[test]
fn an_artifact_that_minds_padding_is_for_its_exact_size() {
    let (_, record) = built(&[], &[]);
    assert_eq!(record["padding"], "allowed");
    let padding = &record["receipt"]["gate"]["padding"];
    assert_eq!(padding["points"], serde_json::json!([{ "batch": 3 }]));
    assert_eq!(padding["refused"], Value::Null);

    // Eager does not, so nothing but a run of the artifact can tell.
    let (sandbox, record) = built(&["# fake: padding leaks"], &[]);
    assert_eq!(record["padding"], "refused");
    let shown = sandbox.run(&["show", FOUR]);
    shown.prints("\nexact sizes only: padded from batch=3, output `out` differs from eager in 1 of 9 elements");
    sandbox.tensors("x.safetensors", &[("x", &[3, 3], &[1.0; 9])]);
    let run = [
        "run",
        "affine",
        "--model",
        "fake@1",
        "--inputs",
        "x.safetensors",
    ];
    assert_run!(sandbox, run, @"
    exit code 3, stderr
    error: module `affine` has no bucket for batch=3; it has batch=4
    hint: batch=4 covers it, and its record says why it can't be padded into
    ");
    sandbox.tensors("x.safetensors", &[("x", &[4, 3], &[1.0; 12])]);
    sandbox.ok(&run);
}

/// Returns a build command whose gates report these figures: `beside` while other tasks run, `alone` in an exclusive
/// run.
fn timed(sandbox: &Sandbox, beside: &Value, alone: &Value) -> Command {
    timed_by("2", sandbox, beside, alone)
}

fn timed_by(jobs: &str, sandbox: &Sandbox, beside: &Value, alone: &Value) -> Command {
    let gate = r#"
import json, subprocess, sys
asked = sys.stdin.read()
ran = subprocess.run([REAL, *sys.argv[1:]], input=asked, capture_output=True, text=True, check=True)
verdict = json.loads(ran.stdout)
verdict["report"].update(ALONE if json.loads(asked)["exclusive"] else BESIDE)
print(json.dumps(verdict))
"#;
    let figures = |value: &Value| value.to_string().replace("null", "None");
    let gate = gate
        .replace("REAL", &format!("{:?}", env!("CARGO_BIN_EXE_precast")))
        .replace("ALONE", &figures(alone))
        .replace("BESIDE", &figures(beside));
    sandbox.write("gate.py", gate);
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let script = format!(
        "exec {} -S {} \"$@\"",
        python.display(),
        sandbox.path("gate.py").display()
    );
    built_with_gate(jobs, sandbox, &script)
}

/// Returns the command to build with, where this script is the gate.
pub fn built_with_gate(jobs: &str, sandbox: &Sandbox, script: &str) -> Command {
    sandbox.script("gate", script);
    let mut command = sandbox.command(&["build", "-j", jobs]);
    command.env("PRECAST_GATE", sandbox.path("gate"));
    command
}

#[test]
fn a_gate_out_of_memory_is_retried_exclusively() {
    let sandbox = Sandbox::new();
    let mut build = timed(&sandbox, &Value::Null, &Value::Null);
    // The first gate finds none.
    let full = r#"{"verdict": "failed", "message": "CUDA out of memory"}"#;
    let script = format!(
        "if mkdir {} 2>/dev/null; then cat > {}; echo '{full}'; else exec {} \"$@\"; fi",
        sandbox.path("full").display(),
        sandbox.path("asked").display(),
        env!("CARGO_BIN_EXE_precast"),
    );
    sandbox.script("gate", &script);
    let ran = sandbox.output(&mut build).exits(0);
    let again = ran.stderr.matches("CUDA out of memory").count();
    assert_eq!(again, 1, "{}", ran.text());
    ran.says("again: gate: affine batch=");
    ran.says("built 2 programs");
}

/// The figures of a gate: microseconds of artifact and eager, and how many of 20 rounds eager won.
fn took(artifact: f64, eager: f64, wins: u64) -> Value {
    serde_json::json!({
        "artifact_us": artifact, "artifact_runs": 20, "eager_us": eager, "eager_runs": 20, "eager_wins": wins,
    })
}

#[test]
fn only_a_slower_artifact_of_an_exclusive_run_is_marked() {
    let fast = took(100.0, 300.0, 0);
    let slow = took(300.0, 100.0, 20);
    // Not often enough beside the rest of the build, and so alone too.
    let close = took(300.0, 200.0, 13);
    let eager = "eager was faster in 20 of 20 rounds, with nothing else to do: eager answers in place of the artifact";
    // times beside other work, times alone, whether it was measured alone, the verdict
    for (beside, alone, measured, says) in [
        (
            &fast,
            &slow,
            false,
            "eager was faster in 0 of 20 rounds: the artifact answers",
        ),
        (
            &slow,
            &fast,
            true,
            "eager was faster in 0 of 20 rounds, with nothing else to do: the artifact answers",
        ),
        (&slow, &slow, true, eager),
        (&close, &slow, true, eager),
    ] {
        let sandbox = Sandbox::new();
        let ran = sandbox.output(&mut timed(&sandbox, beside, alone)).exits(0);
        let count = |start: &str, end: &str| {
            let lines = ran.stderr.lines();
            lines
                .filter(|line| line.starts_with(start) && line.ends_with(end))
                .count()
        };
        let programs = if measured { 2 } else { 0 };
        assert_eq!(count("measure: affine", ""), programs, "{}", ran.text());
        assert_eq!(
            count("again: measure: affine", ""),
            programs,
            "{}",
            ran.text()
        );
        let slower = if says == eager { 2 } else { 0 };
        assert_eq!(
            count("published: affine", ", slower than eager"),
            slower,
            "{}",
            ran.text()
        );
        sandbox
            .run(&["show", FOUR])
            .prints(&format!("\n  by turns    {says}\n"));
        let record = sandbox.json(&["show", FOUR]);
        check("show", &record);
        assert_eq!(
            record["receipt"]["gate"]["sign_test"]["exclusive"],
            measured
        );
        check("report", &sandbox.json(&["report"]));
    }
}

#[test]
fn eager_in_place_of_a_slower_artifact_is_named_at_the_end() {
    let sandbox = Sandbox::new();
    let slow = took(19_500.0, 14_300.0, 20);
    let mut build = timed(&sandbox, &slow, &slow);
    let ran = sandbox.output(build.env("FAKE_EAGER", EAGER)).exits(0);
    let says = "eager answers affine batch=4 in place of its artifact: 14.3 ms a call instead of 19.5 ms, \
                1.36× as fast; it was faster in 20 of 20 rounds, with nothing else to do";
    ran.says(&format!("slower: {says}"));
    // A build of nothing says it too.
    let again = sandbox.run(&["build"]).exits(0);
    again.says("programs are in the store, nothing to compile");
    again.says(&format!("slower: {says}"));
    let last = sandbox.run(&["build", "--format", "json"]).last();
    let instead = &last["eager_instead"];
    assert_eq!(count(instead), 2, "{last}");
    assert_eq!(instead[0]["artifact"], 0.0195);
    assert_eq!(instead[0]["sign_test"]["eager_faster"], 20);
    sandbox.ok(&["report", "-o", "page.html"]);
    let page = std::fs::read_to_string(sandbox.path("page.html")).unwrap();
    assert!(page.contains(says), "{says}");
    // Without a graph for eager the artifact answers, and nothing is said.
    let sandbox = Sandbox::new();
    let ran = sandbox.output(&mut timed(&sandbox, &slow, &slow)).exits(0);
    assert!(!ran.stderr.contains("eager answers"), "{}", ran.text());
}

#[test]
fn a_measurement_waits_for_no_unneeded_model() {
    let sandbox = Sandbox::steered(&["open hangs again", "capture is slow"]);
    sandbox.buckets("1, 2, 3, 4");
    let (slow, fast) = (took(300.0, 100.0, 20), took(100.0, 300.0, 0));
    // So many workers that one has nothing else to do, however slow the compiles.
    let mut command = timed_by("6", &sandbox, &slow, &fast);
    let ran = sandbox.output(command.arg("-v")).exits(0);
    ran.says("measure: affine");
    assert_eq!(faster(&sandbox), "artifact");
}

#[test]
fn a_program_with_other_weights_is_measured_again() {
    let sandbox = Sandbox::new();
    let slow = took(300.0, 100.0, 20);
    sandbox.output(&mut timed(&sandbox, &slow, &slow)).exits(0);
    assert_eq!(faster(&sandbox), "eager");
    // The same graph: the artifact is in the store, and its figures hold.
    sandbox.append("model.py", "# one more line");
    assert_eq!(gated_before(&sandbox, &[]), [true, true]);
    assert_eq!(faster(&sandbox), "eager");
    // With other weights it is gated.
    sandbox.edit("model.py", "SCALE = 2.0", "SCALE = 5.0");
    let ran = sandbox.output(&mut timed(&sandbox, &took(100.0, 300.0, 0), &slow));
    ran.says("built 2 programs, 0 artifacts compiled");
    assert_eq!(faster(&sandbox), "artifact");
}

/// Returns the faster side by a program's record.
fn faster(sandbox: &Sandbox) -> Value {
    sandbox.json(&["show", "affine", "batch=4"])["receipt"]["gate"]["sign_test"]["faster"].clone()
}

/// Builds all, and returns for each program that was built whether it was not gated again.
fn gated_before(sandbox: &Sandbox, args: &[&str]) -> Vec<bool> {
    let ran = sandbox.ok(&[&["build", "--format", "json", "-j", "1"], args].concat());
    let lines = ran.events();
    lines.iter().for_each(|line| check("build", line));
    let gates = lines
        .iter()
        .filter(|line| line["event"] == "begin" && line["job"] == "gate");
    let earlier = lines.iter().filter(|line| line["event"] == "gated_before");
    let programs = lines.last().unwrap()["programs"].as_array().unwrap();
    let built = programs
        .iter()
        .filter(|program| program["state"] == "built");
    let before: Vec<bool> = built
        .map(|program| program["gated_by"].is_string())
        .collect();
    let count = before.iter().filter(|before| **before).count();
    assert_eq!(earlier.count(), count, "{}", ran.text());
    assert_eq!(gates.count(), before.len() - count, "{}", ran.text());
    before
}

#[test]
fn a_gate_that_would_look_at_the_same_things_is_not_repeated() {
    let sandbox = Sandbox::built();
    let first = sandbox.json(&["show", FOUR]);
    sandbox.append("model.py", "# a comment");
    assert_run!(brief sandbox, ["build", "-j", "1"], @"
    exit code 0, stderr
    plan: 3 of 3 programs are missing
    gate: affine batch=1: the gate of [ID] holds, with the same artifacts, weights and samples
    published: affine batch=1 [ID]
    gate: affine batch=4: the gate of [ID] holds, with the same artifacts, weights and samples
    published: affine batch=4 [ID]
    left out affine eager: the fake model has no dynamic dimensions; requests that no other program covers are refused
    built 2 programs, 0 artifacts compiled ([TIME]), 2 not gated again
    published fake release 2
    ");
    let second = sandbox.json(&["show", FOUR]);
    assert_ne!(first["id"], second["id"]);
    assert_eq!(second["receipt"]["gated_by"], first["id"]);
    assert_eq!(second["receipt"]["gate"], first["receipt"]["gate"]);
    assert_eq!(
        second["receipt"]["gate_given"],
        first["receipt"]["gate_given"]
    );
    sandbox.run(&["show", FOUR]).prints("gated       as ");
    // The first gate is named, however often it is taken over.
    sandbox.append("model.py", "# another comment");
    assert_eq!(gated_before(&sandbox, &[]), [true, true]);
    let third = sandbox.json(&["show", FOUR]);
    assert_eq!(third["receipt"]["gated_by"], first["id"]);
    // Each input of a gate counts: weights, eager's answers, tolerances, smoke steps, artifacts.
    let comment = || sandbox.append("model.py", "# one more");
    sandbox.edit("model.py", "SCALE = 2.0", "SCALE = 5.0");
    assert_eq!(gated_before(&sandbox, &[]), [false, false], "weights");
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_eq!(gated_before(&sandbox, &[]), [false, false], "the graph");
    comment();
    let steps = ["--set", "smoketest_steps=5"];
    assert_eq!(gated_before(&sandbox, &steps), [false, false]);
    comment();
    sandbox.append("precast.toml", "[module.gate]\nrtol = 0.1\natol = 0.1");
    assert_eq!(gated_before(&sandbox, &[]), [false, false], "tolerances");
    comment();
    assert_eq!(gated_before(&sandbox, &[]), [true, true]);
    sandbox.ok(&["verify"]);
}

#[test]
fn the_change_of_the_graph_is_reported() {
    let sandbox = Sandbox::built();
    sandbox.append("model.py", "# a comment");
    sandbox.ok(&["build", "-q"]);
    assert_run!(sandbox, ["diff", "fake@1", "fake@2"], @"
    ~ fake affine batch=1 cpu [ID] -> [ID]
        `model.py` changed
        the captured graph is the same, and so are its artifacts
    ~ fake affine batch=4 cpu [ID] -> [ID]
        `model.py` changed
        the captured graph is the same, and so are its artifacts
    the weights are the same
    0 programs the same, 2 changed, 0 added, 0 removed
    ");
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.ok(&["build", "-q"]);
    let why = sandbox.json(&["why", FOUR]);
    check("why", &why);
    assert_eq!(why["why"][0]["graph"]["is"], "changed", "{why}");
    let id = |name: &str| {
        sandbox.json(&["show", name])["id"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    for sides in [
        ["fake@2", "fake@3"],
        [&id("fake@2 affine batch=4"), &id(FOUR)],
    ] {
        check("diff", &sandbox.json(&[&["diff"], &sides[..]].concat()));
    }
    // A change that can't affect an artifact needs a capture alone, and the plan says so.
    sandbox.edit("precast.toml", "pad = 0", "pad = 7");
    let plan = sandbox.ok(&["plan"]);
    plan.prints("capture  affine batch=4  `pad` of input `x` changed: `0.0` -> `7.0`\n");
    plan.prints(
        "\n3 of 3 programs would be built, 2 of them captured only: nothing is compiled for them\n",
    );
    let plan = sandbox.json(&["plan"]);
    check("plan", &plan);
    assert_eq!(plan["programs"][0]["capture_only"], true, "{plan}");
    let last = sandbox.run(&["build", "--format", "json"]).last();
    assert_eq!(last["compiled"], 0, "{last}");
}
