//! How fast the store is, written to `benchmarks/store.json`. `make bench-store` runs this.

use std::{
    fs::{self, File},
    hint::black_box,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use precast::{
    Digest, Store,
    store::{Filter, Policy},
};
use serde_json::{Value, json};

#[path = "../sample/ran.rs"]
mod ran;
#[path = "../sample/rows.rs"]
mod rows;

use crate::{
    attacks::{crafted, peak},
    scene::{self, Random},
};

pub fn run() {
    let dir = tempfile::tempdir().unwrap();
    let document = json!({
        "schema": 1,
        "command": "make bench-store",
        "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "load_average": fs::read_to_string("/proc/loadavg").unwrap_or_default().trim(),
        "look_up": look_up(&dir.path().join("rows")),
        "ls": listing(&dir.path().join("rows")),
        "publish": publish(&dir.path().join("publish")),
        "load": load(&dir.path().join("load")),
        "gc": collect(),
    });
    let text = serde_json::to_string_pretty(&document).unwrap();
    println!("{text}");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benchmarks/store.json");
    fs::write(path, format!("{text}\n")).unwrap();
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    ms(times[times.len() / 2])
}

/// Forgets what the kernel keeps of a file in memory.
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
    let (mut cold, mut opened, mut missing) = (vec![], vec![], vec![]);
    for _ in 0..21 {
        cool(&index);
        let start = Instant::now();
        let store = Store::open(root).unwrap();
        opened.push(start.elapsed());
        let id = Digest::of(&(random.next() % ROWS).to_le_bytes());
        let start = Instant::now();
        assert!(store.has_program(&id).unwrap());
        cold.push(start.elapsed());
        let start = Instant::now();
        assert!(!store.has_program(&Digest::of(b"none")).unwrap());
        missing.push(start.elapsed());
    }
    let store = Store::open(root).unwrap();
    let start = Instant::now();
    for _ in 0..10_000 {
        let id = Digest::of(&(random.next() % ROWS).to_le_bytes());
        black_box(store.has_program(&id).unwrap());
    }
    let warm = start.elapsed() / 10_000;
    let before = peak();
    let start = Instant::now();
    let mut all = store.programs(Filter::default());
    all.next().unwrap().unwrap();
    let first = start.elapsed();
    let count = all.fold(1u64, |count, row| row.map(|_| count + 1).unwrap());
    assert_eq!(count, ROWS);
    let listed = start.elapsed();
    json!({
        "rows": ROWS,
        "open_cold_ms": median(opened),
        "has_program_cold_ms": median(cold.clone()),
        "has_program_cold_worst_ms": ms(cold.into_iter().max().unwrap()),
        "has_program_missing_cold_ms": median(missing),
        "has_program_warm_us": warm.as_secs_f64() * 1e6,
        "ls_first_row_ms": ms(first),
        "ls_all_rows_s": listed.as_secs_f64(),
        "ls_memory_growth_mib": (peak() - before) >> 20,
    })
}

/// What the program takes to list the rows that [`look_up`] made.
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

fn publish(root: &Path) -> Value {
    let store = Store::create(root).unwrap();
    let mut small = Vec::new();
    for n in 0..60 {
        let content = scene::content(n, 3000);
        let start = Instant::now();
        store.put_bytes(&content).unwrap();
        small.push(start.elapsed());
    }
    let mut cases = Vec::new();
    let mut random = Random(7);
    let noise: Vec<u8> = (0..16 << 20)
        .flat_map(|_| (random.next() as u32).to_le_bytes())
        .collect();
    for (name, content) in [
        ("code-like", scene::content(500, 64 << 20)),
        ("random", noise),
    ] {
        let from: PathBuf = root.with_extension(name);
        fs::write(&from, &content).unwrap();
        let start = Instant::now();
        black_box(Digest::of(&content));
        let hash = start.elapsed();
        let start = Instant::now();
        let packed = zstd::encode_all(&content[..], 3).unwrap();
        let zstd = start.elapsed();
        let start = Instant::now();
        let mut file = tempfile::tempfile_in(root.parent().unwrap()).unwrap();
        std::io::Write::write_all(&mut file, &packed).unwrap();
        file.sync_all().unwrap();
        let fsync = start.elapsed();
        let start = Instant::now();
        store.put_file(&from).unwrap();
        cases.push(json!({
            "content": name,
            "bytes": content.len(),
            "stored": packed.len(),
            "total_ms": ms(start.elapsed()),
            "of_which_one_sha256_ms": ms(hash),
            "of_which_zstd_ms": ms(zstd),
            "of_which_write_and_fsync_ms": ms(fsync),
        }));
    }
    json!({ "small_object_bytes": 3000, "small_object_ms": median(small), "files": cases })
}

/// What a load costs before and after the unpacked file is there.
fn load(root: &Path) -> Value {
    let store = Store::create(root).unwrap();
    let content = scene::content(9, 64 << 20);
    let digest = store.put_bytes(&content).unwrap();
    let time = |what: &dyn Fn()| {
        let start = Instant::now();
        what();
        ms(start.elapsed())
    };
    let first = time(&|| drop(black_box(store.map(&digest).unwrap())));
    let next: Vec<Duration> = (0..21)
        .map(|_| {
            let start = Instant::now();
            drop(black_box(store.map(&digest).unwrap()));
            start.elapsed()
        })
        .collect();
    let read = time(&|| drop(black_box(store.read(&digest).unwrap())));
    let memfd = time(&|| drop(black_box(store.memfd(&digest).unwrap())));
    json!({
        "bytes": content.len(),
        "map_first_ms": first,
        "map_next_ms": median(next),
        "read_ms": read,
        "memfd_ms": memfd,
    })
}

fn collect() -> Value {
    const OBJECTS: u64 = 100_000;
    let dir = scene::scratch();
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
    let start = Instant::now();
    store.reindex().unwrap();
    let reindex = start.elapsed();
    let start = Instant::now();
    let (plan, done) = store.gc(&Policy::default()).unwrap();
    let gc = start.elapsed();
    assert_eq!(
        (plan.objects.len() as u64, done.objects as u64),
        (OBJECTS, OBJECTS)
    );
    json!({ "objects": OBJECTS, "reindex_s": reindex.as_secs_f64(), "gc_s": gc.as_secs_f64(), "where": "tmpfs" })
}
