use serde_json::{Value, json};

use super::*;
use crate::testing::read;

/// Receipts of programs as builds wrote them, the oldest first.
fn written() -> [Value; 5] {
    let row = json!({
        "name": "output", "max_abs": 2.1e-6, "max_rel": 0.0027, "cosine": 0.9999999, "rtol": 0.0001, "atol": 5.9e-5,
    });
    [
        json!({
            "seconds": {"capture": 1.25},
            "gate": {
                "outputs": [row, {"name": "ids", "equal": true}], "deterministic": true, "seconds_per_run": 0.004,
            },
        }),
        json!({
            "seconds": {"capture": 1.25}, "eager_us": 44.5, "eager_runs": 20, "threads": 2, "eager_peak_bytes": 4096,
            "padding": {
                "points": [{"sizes": {"batch": 15}}, {"sizes": {"batch": 1}, "skipped": "ValueError: one row"}],
                "max_abs": 0.0, "sensitive": false,
            },
            "gate": {
                "outputs": [row], "deterministic": true, "seconds_per_run": 0.004, "artifact_us": 34.7, "artifact_runs": 20,
            },
        }),
        json!({
            "seconds": {"capture": 1.25, "gate": 0.75}, "eager_us": 44.5, "eager_runs": 20, "threads": 2,
            "gate": {
                "outputs": [row], "deterministic": false, "steps": 3, "seconds_per_run": 0.004,
                "artifact_peak_bytes": 12288, "padding": {"points": [{"batch": 15}], "max_abs": 1e-6, "refused": null},
                "eager_peak_bytes": null, "artifact_us": 34.7, "artifact_runs": 20,
            },
            "tuned": [
                {"options": "mode=default", "seconds": 4.2, "latency": 1e-5, "max_abs": 0.0, "chosen": true, "refused": null},
                {"options": "freezing=false", "seconds": null, "latency": null, "max_abs": null, "chosen": false,
                 "refused": "it does not end"},
            ],
            "tuned_by": "c".repeat(64),
        }),
        json!({
            "seconds": {"capture": 1.25, "gate": 0.75, "measure": 4.5}, "eager_us": 44.5, "eager_runs": 20, "threads": 2,
            "gate_given": {
                "precast": "0.1.0", "host": {"machine": "cb5b012f81ef", "cpu": "Some CPU", "cores": 2, "driver": null},
                "samples": "a".repeat(64), "weights": null, "aliases": {"head.weight": "embed.weight"}, "steps": 3,
                "rtol": null, "atol": 0.01, "computed_in": [null, "bfloat16"], "padding": {"padding": "allowed"},
            },
            "gate": {
                "outputs": [row], "deterministic": true, "steps": 3, "seconds_per_run": 0.004,
                "artifact_peak_bytes": 12288, "padding": {"points": [], "max_abs": 0.0, "refused": "it differs"},
                "eager_peak_bytes": 4096, "artifact_us": 34.7, "artifact_runs": 200, "eager_us": 20.5, "eager_runs": 200,
                "eager_wins": 20, "rivals_eager_wins": [],
                "turns": {"rounds": 200, "eager_faster": 198, "alone": true, "faster": "eager"},
            },
            "gated_by": "b".repeat(64),
        }),
        json!({"latency": {"eager": 0.004, "artifact": {"median": 0.001, "low": 0.0009, "high": 0.0012}}}),
    ]
}

#[test]
fn old_receipts_are_read_and_written_as_they_were() {
    let receipts = written().map(|json| {
        let receipt: Receipt = read(json.clone());
        assert_eq!(json!(receipt), json);
        assert!(receipt.other.is_empty(), "{receipt:?}");
        receipt
    });
    let [first, eager, tuned, decided, _] = &receipts;
    let outputs = first.gate.get().unwrap().outputs.get().unwrap();
    assert_eq!(outputs[0].max_abs, Some(2.1e-6));
    assert_eq!((outputs[1].equal, outputs[1].max_abs), (Some(true), None));
    assert_eq!(first.phases()["capture"], 1.25);
    let padding = eager.padding.get().unwrap();
    assert_eq!(
        padding.points[1].skipped.as_deref(),
        Some("ValueError: one row")
    );
    assert_eq!((eager.turns(), eager.tried().len()), (None, 0));
    assert_eq!(tuned.tried()[1].refused.as_deref(), Some("it does not end"));
    assert!(tuned.tuned_by.get().is_some());
    assert_eq!(decided.turns().unwrap().faster, Faster::Eager);
    assert_eq!(
        decided
            .gate
            .get()
            .unwrap()
            .padding
            .get()
            .unwrap()
            .refused
            .as_deref(),
        Some("it differs")
    );
    assert_eq!(decided.gate_given.get().unwrap().atol, Some(0.01));
}

#[test]
fn fields_of_a_newer_version_stay() {
    let json = json!({
        "seconds": {"capture": 1.0, "odd": "x"}, "watts": 12, "gated_by": "somebody", "padding": [],
        "tuned": [{"options": "a", "seconds": null, "latency": null, "max_abs": null, "chosen": true, "refused": null, "new": 1}],
        "gate": {
            "outputs": [{"name": "y", "max_abs": 0.5, "ulp": 3}], "artifact_us": "fast", "eager_us": 20.5, "watts": [1],
            "turns": {"rounds": 2, "eager_faster": 0, "alone": true, "faster": "neither", "margin": 1.5},
        },
    });
    let mut receipt: Receipt = read(json.clone());
    assert_eq!(json!(receipt), json);
    assert_eq!(receipt.phases().len(), 1);
    assert_eq!(
        (receipt.gated_by.get(), receipt.padding.get()),
        (None, None)
    );
    let gate = receipt.gate.get().unwrap();
    assert_eq!(
        (gate.artifact_us.get(), gate.eager_us.get()),
        (None, Some(&20.5))
    );
    // What this version does not know stays when a phase is noted.
    receipt.took("gate", 2.5);
    assert_eq!(
        json!(receipt)["seconds"],
        json!({"capture": 1.0, "gate": 2.5, "odd": "x"})
    );
    assert_eq!(json!(receipt)["watts"], 12);
}

#[test]
fn what_a_gate_was_given_is_known_whole_or_not_at_all() {
    let mut json = written()[3]["gate_given"].clone();
    let known: Lenient<Given> = read(json.clone());
    assert!(known.get().is_some());
    json["host"]["color"] = "red".into();
    let newer: Lenient<Given> = read(json.clone());
    assert_eq!(newer.get(), None);
    assert_eq!(json!(newer), json);
}

#[test]
fn compile_times_are_read_in_both_forms() {
    let receipt = |json: Value| {
        let receipt: CompileReceipt = read(json.clone());
        assert_eq!(json!(receipt), json);
        receipt.phases().into_iter().collect::<Vec<_>>()
    };
    assert_eq!(
        receipt(json!({"seconds": 1.5})),
        [("compile".to_owned(), 1.5)]
    );
    let phases =
        receipt(json!({"seconds": {"lower": 2.0, "cpp": 1.0, "link": -1.0, "load": null}}));
    assert_eq!(phases, [("cpp".to_owned(), 1.0), ("lower".to_owned(), 2.0)]);
    for odd in [
        json!({}),
        json!({"seconds": null}),
        json!({"seconds": [1.0]}),
    ] {
        assert_eq!(receipt(odd), []);
    }
}

#[test]
fn a_receipt_that_is_no_object_is_an_error() {
    for odd in [json!(5), json!("fast"), json!(null), json!([])] {
        let error = serde_json::from_value::<Receipt>(odd.clone()).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("expected a receipt, which is an object"),
            "{odd}: {error}"
        );
    }
}
