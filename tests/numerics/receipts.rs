//! The measurements of a build, read from its records.

use serde_json::Value;

use crate::{
    ATOL, RTOL,
    lab::{Lab, MINILM, SMALL, lab},
};

/// Returns the bucket and the record of every compiled program of a model.
fn programs(lab: &Lab, model: &str) -> Vec<(String, Value)> {
    let listed = lab.json(&["ls", "--model", model]);
    let rows = listed["programs"].as_array().unwrap();
    let compiled = rows.iter().filter(|row| row["bucket"] != "eager");
    compiled
        .map(|row| {
            let record = lab.json(&["show", row["id"].as_str().unwrap()]);
            (row["bucket"].as_str().unwrap().to_owned(), record)
        })
        .collect()
}

#[test]
fn peak_memory_of_artifact_and_eager() {
    let mut peaks = Vec::new();
    for (bucket, record) in programs(lab(MINILM), "minilm") {
        let gate = &record["receipt"]["gate"];
        let peak = |name: &str| gate[name].as_u64().unwrap();
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

#[test]
fn tuning_tries_real_option_sets_and_keeps_one_that_is_right() {
    let only = |tune: &[&str]| {
        let args = ["build", "-f", SMALL, "--only", "widen seq=4"];
        lab(SMALL).json(&[&args[..], tune].concat())
    };
    let compiled = only(&["--tune"])["compiled"].as_u64().unwrap();
    let mut programs = programs(lab(SMALL), "small").into_iter();
    let tuned = programs.find(|(_, record)| record["request"]["tuned"] == true);
    let (_, record) = tuned.unwrap();
    let rows = record["receipt"]["tuned"].as_array().unwrap();
    println!("{rows:#?}");
    let names = rows.iter().map(|row| row["options"].as_str().unwrap());
    let names: Vec<&str> = names.collect();
    // Offers of installed packages come last.
    let (own, offered) = names.split_at(5);
    let sets = "mode=default coordinate_descent_tuning=true epilogue_fusion=false max_autotune=true freezing=false";
    assert_eq!(own.join(" "), sets);
    assert!(offered.is_empty() || offered == ["precast_kernels:fuse"]);
    // The module's own settings are compiled already.
    assert_eq!(compiled as usize, names.len() - 1);
    for row in rows {
        assert_eq!(row["refused"], Value::Null);
        for measured in ["latency", "seconds"] {
            assert!(row[measured].as_f64().unwrap() > 0.0, "{row}");
        }
        assert!(row["max_abs"].as_f64().unwrap() < ATOL, "{row}");
    }
    assert_eq!(rows.iter().filter(|row| row["chosen"] == true).count(), 1);
    assert_eq!(only(&["--tune"])["compiled"], 0);
    let found = &only(&[])["programs"][0]["id"];
    assert_eq!(*found, record["id"], "a plain build finds it");
    let served = lab(SMALL).agrees(SMALL, "small", "widen", "seq=3", RTOL, ATOL);
    assert_eq!(served, ("seq=4".into(), "padded".into()));
}
