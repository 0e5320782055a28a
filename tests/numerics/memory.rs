//! One copy of the weights, however many buckets use them: measured on a process that does nothing else.

use std::{
    collections::BTreeMap, env, fs, os::unix::fs::PermissionsExt, path::Path, process::Command,
};

use precast::{Store, record::Dtype, runtime::Tensor};

use crate::lab::{MINILM, lab, python, runtime, shared, well};

const WIDE: &str = "tests/numerics/wide/precast.toml";

/// A gate's process, and the largest memory that it had, in KiB.
const MEASURED: &str = r#"
import pathlib, resource, subprocess, sys
code = subprocess.call(["PRECAST", *sys.argv[1:]])
most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
pathlib.Path(__file__).with_suffix(".peak").write_text(str(most))
sys.exit(code)
"#;

const MIB: f64 = 1024.0 * 1024.0;

/// Resident bytes of this process: all of them, and those of maps of objects, as they are or unpacked, by path.
fn resident() -> (u64, BTreeMap<String, u64>) {
    let mut total = 0;
    let mut maps = BTreeMap::new();
    let mut path = String::new();
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        if let Some(rest) = line.strip_prefix("Rss:") {
            let kib: u64 = rest.trim().trim_end_matches(" kB").parse().unwrap();
            total += kib << 10;
            if path.contains("/objects/") || path.contains("/ready/") {
                *maps.entry(path.clone()).or_default() += kib << 10;
            }
            continue;
        }
        let mut words = line.split_whitespace();
        let range = |word: &str| word.contains('-') && !word.ends_with(':');
        if words.next().is_some_and(range) {
            path = words.nth(4).unwrap_or_default().to_owned();
        }
    }
    (total, maps)
}

const ALONE: &str = "PRECAST_TEST_MEMORY_ALONE";

/// In a process of its own: other tests of this one map weights too, and take memory.
#[test]
fn four_buckets_hold_one_copy_of_the_weights() {
    if let Some(store) = env::var_os(ALONE) {
        return alone(store.as_ref());
    }
    let name = "memory::four_buckets_hold_one_copy_of_the_weights";
    let mut test = Command::new(env::current_exe().unwrap());
    let test = test.args(["--exact", name, "--nocapture"]);
    // Each thread of a product has memory of its own.
    let test = test
        .env(ALONE, &lab(MINILM).store)
        .env("OMP_NUM_THREADS", "2");
    let told = well(test).out;
    println!("{told}");
    assert!(told.contains("1 passed"));
}

fn alone(store: &Path) {
    let store = Store::open(store).unwrap();
    let model = runtime(&store).load("minilm").unwrap();
    let mut after = Vec::new();
    for (batch, seq) in [(1, 32), (1, 128), (8, 32), (8, 128)] {
        // Distinct ids touch as much of the embedding table as the bucket can.
        let ids: Vec<i64> = (0..batch * seq).map(|i| i * 29 % 30_522).collect();
        let mask = Tensor::from_slice(&vec![1_i64; ids.len()], &[batch, seq]).unwrap();
        let ids = Tensor::from_slice(&ids, &[batch, seq]).unwrap();
        let out = model.run_named("encode", &[("input_ids", &ids), ("attention_mask", &mask)]);
        let out = out.unwrap();
        assert_eq!(out[0].dtype(), Some(Dtype::Float32));
        after.push((batch, seq, resident()));
    }
    let mib = |bytes: u64| bytes as f64 / MIB;
    for (batch, seq, (total, maps)) in &after {
        let (all, maps) = (mib(*total), mib(maps.values().sum()));
        println!("after batch={batch} seq={seq}: {all:.1} MiB resident, {maps:.1} MiB in maps");
    }
    let (_, _, (first, before)) = &after[0];
    let (_, _, (last, maps)) = &after[3];
    assert_eq!(maps.len(), 1, "the weights are mapped once: {maps:?}");
    let mapped: u64 = maps.values().sum();
    let weights = maps.keys().map(|path| fs::metadata(path).unwrap().len());
    let weights: u64 = weights.sum();
    let slack = 4096;
    let once = mapped <= weights + slack;
    assert!(once, "{mapped} bytes are resident of {weights}");
    // Without pages of the map that were first read meanwhile.
    let first = first - before.values().sum::<u64>();
    let added = (last - mapped).saturating_sub(first);
    let (all, more) = (mib(weights), mib(added));
    println!("weights: {all:.1} MiB; three more buckets added {more:.1} MiB besides");
    assert!(more < all, "three more buckets added a copy of them");
}

/// Eager reads the weights, and the artifact prepacked ones.
#[test]
#[ignore = "long: `make test-long`"]
fn a_gate_never_holds_the_weights_in_two_forms() {
    let root = tempfile::tempdir().unwrap();
    let gate = root.path().join("gate");
    let script = MEASURED.replace("PRECAST", env!("CARGO_BIN_EXE_precast"));
    fs::write(&gate, format!("#!{}{script}", python().display())).unwrap();
    fs::set_permissions(&gate, fs::Permissions::from_mode(0o755)).unwrap();
    let lab = shared();
    let built = lab.json(&["build", "-f", WIDE, "--gate", gate.to_str().unwrap()]);
    assert_eq!(built["compiled"], 1, "{built}");

    let store = Store::open(&lab.store).unwrap();
    let release = store.releases().get("wide", None).unwrap().unwrap();
    let digest = release.weights.unwrap();
    let weights = store.objects().map(&digest).unwrap().len() as u64;
    let kept = lab.store.join(format!("cache/prepacked/{digest}"));
    let kept = fs::read_dir(kept).unwrap();
    let prepacked = kept.map(|file| file.unwrap().metadata().unwrap().len());
    let prepacked: u64 = prepacked.sum();
    assert!(prepacked >= weights, "{prepacked} of {weights}");
    let most = fs::read_to_string(gate.with_extension("peak")).unwrap();
    let most = most.parse::<u64>().unwrap() << 10;
    let [all, peak] = [weights, most].map(|bytes| bytes as f64 / MIB);
    println!("weights: {all:.1} MiB; the gate had {peak:.1} MiB at its peak");
    assert!(most < 2 * weights, "{most} bytes for {weights} of weights");
}
