//! Eager in place of a slower artifact. The spec has it compiled for one thread and without vectors.
//!
//! Eager has one thread here too: with several it waits at the end of every operation for a thread that a busy machine
//! delays. Its advantage is vectors.

use serde_json::Value;

use crate::{
    ATOL, RTOL,
    lab::{precast, said, shared},
};

const SLOWER: &str = "tests/numerics/slower/precast.toml";

#[test]
fn eager_answers_in_the_place_of_a_slower_artifact() {
    let lab = shared();
    let args = ["build", "-j1", "-f", SLOWER, "--format", "json"];
    let text = said(precast(&lab.store, &args).env("OMP_NUM_THREADS", "1")).out;
    let events: Vec<Value> = (text.lines())
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |event: &str, job: &str| {
        let is = |e: &&Value| e["event"] == event && (job.is_empty() || e["job"] == job);
        events.iter().filter(is).count()
    };
    // The gate doubts it, and it is measured once more with no other task running; then it is marked.
    assert_eq!(of("end", "measure"), 1, "{text}");
    assert_eq!(of("finished", ""), 1, "{text}");
    let record = lab.json(&["show", "slower", "curve", "batch=4"]);
    let test = &record["receipt"]["gate"]["sign_test"];
    println!("{test}");
    assert_eq!(test["exclusive"], true, "{test}");
    assert_eq!(test["faster"], "eager", "{test}");

    // The artifact is right, and answers when it is asked for by name; else eager does.
    let served = lab.agrees(SLOWER, "slower", "curve", "batch=4", RTOL, ATOL);
    assert_eq!(served, ("batch=4".into(), "exact".into()));
    let inputs = lab.inputs(SLOWER, "slower", "curve", "batch=4");
    let run = ["run", "curve", "--model", "slower", "--inputs"];
    let answered = lab.json(&[&run[..], &[inputs.to_str().unwrap()]].concat());
    assert_eq!(answered["rung"], "eager", "{answered}");
}
