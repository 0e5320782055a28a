//! What a build measured, read from the records it left.

use serde_json::Value;

use crate::lab::lab;

/// Returns the bucket and the record of every compiled program of a model.
fn programs(model: &str) -> Vec<(String, Value)> {
    let listed = lab().json(&["ls", "--model", model]);
    let rows = listed["programs"].as_array().unwrap();
    let compiled = rows.iter().filter(|row| row["bucket"] != "eager");
    compiled
        .map(|row| {
            let record = lab().json(&["show", row["id"].as_str().unwrap()]);
            (row["bucket"].as_str().unwrap().to_owned(), record)
        })
        .collect()
}

#[test]
fn peak_memory_of_artifact_and_eager() {
    let mut peaks = Vec::new();
    for (bucket, record) in programs("minilm") {
        let gate = &record["receipt"]["gate"];
        let peak = |name: &str| {
            gate[name]
                .as_u64()
                .unwrap_or_else(|| panic!("{bucket}: {gate}"))
        };
        let (artifact, eager) = (peak("artifact_peak_bytes"), peak("eager_peak_bytes"));
        println!("{bucket}: artifact {artifact}, eager {eager}");
        peaks.push((bucket, artifact, eager));
    }
    assert_eq!(peaks.len(), 4);
    let of = |bucket: &str| peaks.iter().find(|(b, _, _)| b == bucket).unwrap();
    let ((_, small, _), (_, large, eager)) = (of("batch=1 seq=32"), of("batch=8 seq=128"));
    // A call holds its output and the widest activation in it: 1024 tokens of 384 and of 1536 floats.
    let needed = 1024 * (384 + 1536) * 4;
    for peak in [large, eager] {
        assert!((needed..needed * 32).contains(peak), "{peaks:?}");
    }
    assert!(small < large, "{peaks:?}");
}
