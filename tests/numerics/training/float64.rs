//! The gate of a step that amplifies rounding (`tests/broken/steps`): right steps pass by their distance from float64, and
//! wrong ones are refused by the name of a tensor.

use std::sync::OnceLock;

use crate::{
    broken::Built,
    lab::{precast, shared, well},
};

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| Built::build("steps", &[]))
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_right_step_is_as_near_to_float64_as_eager() {
    let id = &built().program("right", "built")["id"].as_str().unwrap()[..12];
    let shown = shared().json(&["show", id]);
    let outputs = shown["receipt"]["gate"]["outputs"].as_array().unwrap();
    let decided = outputs.iter().filter_map(|output| output.get("truth"));
    let distance = |of: &serde_json::Value, whose: &str| of[whose].as_f64().unwrap();
    let times = decided.map(|both| distance(both, "artifact") / distance(both, "eager"));
    let times: Vec<f64> = times.collect();
    assert!(!times.is_empty(), "the plain comparison refuses none");
    assert!(times.iter().all(|times| *times < 3.0), "{times:?}");
    let text = well(&mut precast(&shared().store, &["show", id])).out;
    let line = text.lines().find(|line| line.contains("  float64 "));
    let values = format!("decided on {} values", times.len());
    assert!(line.is_some_and(|line| line.contains(&values)), "{text}");
}

#[test]
fn a_wrong_gradient_is_refused_by_name() {
    for module in ["scaled", "turned", "zeroed", "missing"] {
        built().failed(module, "layers.2.weight` differs from eager in");
        built().failed(module, "from float64, eager is");
    }
    built().failed("no_number", "has NaN or infinity where eager has none");
}

#[test]
fn the_plain_refusal_stands_where_float64_can_not_run() {
    let why = "; float64 can't run it: TypeError: the rows are float32";
    built().failed("single", why);
}
