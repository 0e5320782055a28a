//! Benchmarks of the store, written to `benches/results/store-cpu.json`. `make bench-store` runs this.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark that fails panics"
)]

use std::{
    fs::{self, File},
    hint::black_box,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use precast::{
    Digest, Store,
    store::{Options, Policy, Unpacked},
};
use serde_json::{Value, json};

#[allow(unsafe_code, reason = "it waits by `wait4`")]
#[path = "../tests/sample/ran.rs"]
mod ran;
#[path = "../tests/torture/report.rs"]
mod report;
#[path = "../tests/sample/rows.rs"]
mod rows;
#[allow(dead_code, reason = "the torture of the store uses the rest")]
#[path = "../tests/torture/scene.rs"]
mod scene;

use report::{machine, printed, profile, versions};
use scene::{Random, crafted, object};

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let document = json!({
        "schema": 1,
        "command": "make bench-store",
        "date": printed("date", &["-u", "+%F"]),
        "machine": machine(),
        "versions": versions(),
        "profile": profile(),
        "load_average": fs::read_to_string("/proc/loadavg").unwrap_or_default().trim(),
        "look_up": look_up(&dir.path().join("rows")),
        "ls": listing(&dir.path().join("rows")),
        "publish": publish(&dir.path().join("publish")),
        "load": load(&dir.path().join("load")),
        "gc": [
            collect("disk", tempfile::tempdir().unwrap()),
            collect("memory", scene::scratch()),
        ],
    });
    println!("{document:#}");
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/benches/results/store-cpu.json"
    );
    report::write(file, &document);
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    ms(times[times.len() / 2])
}

/// Does something, and adds the time that it took.
fn timed<T>(times: &mut Vec<Duration>, what: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = what();
    times.push(start.elapsed());
    result
}

/// Drops a file's pages from the kernel's cache.
fn cool(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn look_up(root: &Path) -> Value {
    const ROWS: u64 = 1_000_000;
    drop(Store::create(root).unwrap());
    rows::write(root, ROWS);
    let index = root.join("index.sqlite");
    let mut random = Random(1);
    let id = |random: &mut Random| Digest::of(&(random.draw() % ROWS).to_le_bytes());
    let (mut cold, mut opened, mut missing) = (vec![], vec![], vec![]);
    for _ in 0..21 {
        cool(&index);
        let store = timed(&mut opened, || Store::open(root).unwrap());
        let (id, none) = (id(&mut random), Digest::of(b"none"));
        // A row without a file: one look-up and one `stat`, as for a program that is there.
        assert!(!timed(&mut cold, || store
            .records()
            .has_program(&id)
            .unwrap()));
        assert!(!timed(&mut missing, || store
            .records()
            .has_program(&none)
            .unwrap()));
    }
    let store = Store::open(root).unwrap();
    let start = Instant::now();
    for _ in 0..10_000 {
        black_box(store.records().has_program(&id(&mut random)).unwrap());
    }
    let warm = start.elapsed() / 10_000;
    drop(store);
    json!({
        "rows": ROWS,
        "index_bytes": fs::metadata(&index).unwrap().len(),
        "open_cold_ms": median(opened),
        "has_program_cold_ms": median(cold.clone()),
        "has_program_cold_worst_ms": ms(cold.into_iter().max().unwrap()),
        "has_program_missing_cold_ms": median(missing),
        "has_program_warm_us": (warm.as_secs_f64() * 1e8).round() / 1e2,
    })
}

/// The cost of listing the rows that [`look_up`] made.
fn listing(root: &Path) -> Value {
    let cases = [
        &["ls"][..],
        &["ls", "--format", "json"],
        &["ls", "--sort", "bucket-"],
        &["ls", "model-7*", "--ids"],
        &["du"],
    ];
    let one = |args: &&[&str]| {
        let ran = ran::run(args, root);
        json!({
            "args": args.join(" "), "lines": ran.lines, "first_line_ms": ms(ran.first), "total_s": ran.total.as_secs_f64(),
            "peak_mib": ran.peak >> 20,
        })
    };
    cases.iter().map(one).collect()
}

/// How long publishing takes, and how long compression by itself.
fn publish(root: &Path) -> Value {
    let store = Store::create(root).unwrap();
    let mut random = Random(7);
    let noise = (0..16 << 20).flat_map(|_| (random.draw() as u32).to_le_bytes());
    let library = fs::read(std::env::current_exe().unwrap()).unwrap();
    let contents = [
        ("3 KB", 40, scene::content(1, 3000)),
        ("a program of this machine", 5, library),
        ("repetitive", 5, scene::content(500, 64 << 20)),
        ("random", 5, noise.collect()),
    ];
    let mut cases = Vec::new();
    for (name, times, mut content) in contents {
        let from: PathBuf = root.with_extension("from");
        let (mut total, mut zstd, mut stored) = (vec![], vec![], 0);
        for n in 0..times {
            // Each time another content, and nothing of it in the store.
            content[..8].copy_from_slice(&u64::to_le_bytes(n));
            fs::write(&from, &content).unwrap();
            stored = timed(&mut zstd, || {
                zstd::encode_all(&content[..], 3).unwrap().len()
            });
            timed(&mut total, || store.objects().put_file(&from).unwrap());
        }
        let (total, zstd) = (median(total), median(zstd));
        let bytes = content.len();
        cases.push(json!({
            "content": name, "bytes": bytes, "stored": stored, "total_ms": total, "zstd_ms": zstd,
        }));
    }
    json!(cases)
}

/// The cost of a load: unpacking without checks, with all checks, and of a known unpacked file.
fn load(root: &Path) -> Value {
    let store = Store::create(root).unwrap();
    let content = fs::read(std::env::current_exe().unwrap()).unwrap();
    let digest = store.objects().put_bytes(&content).unwrap();
    let packed = fs::read(object(root, &digest)).unwrap();
    let time = |what: &dyn Fn()| {
        let mut times = vec![];
        (0..11).for_each(|_| timed(&mut times, what));
        median(times)
    };
    let hex = digest.hex();
    let ready = root.join("ready").join(&hex[..2]).join(&hex);
    let mut first = vec![];
    for _ in 0..5 {
        let _ = fs::remove_file(&ready);
        timed(&mut first, || {
            drop(black_box(store.objects().map(&digest).unwrap()))
        });
    }
    let with = |unpacked| {
        let options = Options {
            unpacked,
            ..Options::default()
        };
        Store::open_with(root, options).unwrap()
    };
    let (trusting, copying) = (with(Unpacked::Trust), with(Unpacked::Copy));
    json!({
        "bytes": content.len(),
        "stored": packed.len(),
        "unpack_unchecked_ms": time(&|| drop(black_box(zstd::decode_all(&packed[..]).unwrap()))),
        "read_checked_ms": time(&|| drop(black_box(store.objects().read(&digest).unwrap()))),
        "map_first_ms": median(first),
        "map_next_ms": time(&|| drop(black_box(store.objects().map(&digest).unwrap()))),
        "map_trusted_ms": time(&|| drop(black_box(trusting.objects().map(&digest).unwrap()))),
        "map_copied_ms": time(&|| drop(black_box(copying.objects().map(&digest).unwrap()))),
        "hash_whole_ms": time(&|| _ = black_box(Digest::of_reader(&mut File::open(&ready).unwrap()).unwrap())),
        "in_memory_ms": time(&|| drop(black_box(store.objects().memfd(&digest).unwrap()))),
    })
}

/// Indexes and collects objects that nothing refers to.
fn collect(place: &str, dir: tempfile::TempDir) -> Value {
    const OBJECTS: u64 = 100_000;
    let root = dir.path().join("store");
    let store = Store::create(&root).unwrap();
    for n in 0..OBJECTS {
        let content = n.to_le_bytes();
        let mut encoder = zstd::bulk::Compressor::new(1).unwrap();
        crafted(
            &root,
            &Digest::of(&content),
            &encoder.compress(&content).unwrap(),
        );
    }
    let mut times = vec![];
    timed(&mut times, || store.audit().reindex().unwrap());
    let (plan, done) = timed(&mut times, || {
        store.collector().gc(&Policy::default()).unwrap()
    });
    assert_eq!(
        (plan.objects.len() as u64, done.objects as u64),
        (OBJECTS, OBJECTS)
    );
    json!({
        "objects": OBJECTS,
        "where": place,
        "reindex_s": ms(times[0]) / 1e3,
        "gc_s": ms(times[1]) / 1e3,
    })
}
