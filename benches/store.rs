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

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn median(times: Vec<Duration>) -> f64 {
    ms(middle(times))
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
    let (mut cold, mut opened, mut missing) = (vec![], vec![], vec![]);
    for _ in 0..21 {
        cool(&index);
        let start = Instant::now();
        let store = Store::open(root).unwrap();
        opened.push(start.elapsed());
        let id = Digest::of(&(random.draw() % ROWS).to_le_bytes());
        let start = Instant::now();
        // A row without a file: one look-up and one `stat`, as for a program that is there.
        assert!(!store.records().has_program(&id).unwrap());
        cold.push(start.elapsed());
        let start = Instant::now();
        assert!(!store.records().has_program(&Digest::of(b"none")).unwrap());
        missing.push(start.elapsed());
    }
    let store = Store::open(root).unwrap();
    let start = Instant::now();
    for _ in 0..10_000 {
        let id = Digest::of(&(random.draw() % ROWS).to_le_bytes());
        black_box(store.records().has_program(&id).unwrap());
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

/// Writes bytes to a new file beside the store and syncs it, as publishing does.
fn written(root: &Path, bytes: &[u8]) -> Duration {
    let start = Instant::now();
    let mut file = tempfile::tempfile_in(root.parent().unwrap()).unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
    file.sync_all().unwrap();
    start.elapsed()
}

/// Commits one row as the index does, again and again.
fn committed(root: &Path) -> Duration {
    let file = root.with_extension("sqlite");
    let mut index = rusqlite::Connection::open(file).unwrap();
    index.pragma_update(None, "synchronous", "EXTRA").unwrap();
    index
        .execute_batch("CREATE TABLE t (a BLOB PRIMARY KEY) WITHOUT ROWID")
        .unwrap();
    let once = |n: u64| {
        let start = Instant::now();
        let tx = index.transaction().unwrap();
        tx.execute(
            "INSERT INTO t VALUES (?)",
            [Digest::of(&n.to_le_bytes()).as_bytes()],
        )
        .unwrap();
        tx.commit().unwrap();
        start.elapsed()
    };
    middle((0..40).map(once).collect())
}

/// How long publishing takes, and where that goes: each step once more by itself.
fn publish(root: &Path) -> Value {
    let store = Store::create(root).unwrap();
    let commit = committed(root);
    let mut cases = Vec::new();
    let mut random = Random(7);
    let noise: Vec<u8> = (0..16 << 20)
        .flat_map(|_| (random.draw() as u32).to_le_bytes())
        .collect();
    let library = fs::read(std::env::current_exe().unwrap()).unwrap();
    let cases_of = [
        ("3 KB", 40, scene::content(1, 3000)),
        ("a program of this machine", 5, library),
        ("repetitive", 5, scene::content(500, 64 << 20)),
        ("random", 5, noise),
    ];
    for (name, times, mut content) in cases_of {
        let from: PathBuf = root.with_extension("from");
        let (mut total, mut hash, mut zstd, mut fsync) = (vec![], vec![], vec![], vec![]);
        let mut stored = 0;
        for n in 0..times {
            // Each time another content, and nothing of it in the store.
            content[..8].copy_from_slice(&u64::to_le_bytes(n));
            fs::write(&from, &content).unwrap();
            let start = Instant::now();
            let packed = zstd::encode_all(&content[..], 3).unwrap();
            zstd.push(start.elapsed());
            stored = packed.len();
            let start = Instant::now();
            // Once for the look-up, once while it is packed, and once for the stored bytes.
            black_box((
                Digest::of(&content),
                Digest::of(&content),
                Digest::of(&packed),
            ));
            hash.push(start.elapsed());
            fsync.push(written(root, &packed));
            let start = Instant::now();
            store.objects().put_file(&from).unwrap();
            total.push(start.elapsed());
        }
        let of = [middle(zstd), middle(hash), middle(fsync), commit];
        let total = middle(total);
        cases.push(json!({
            "content": name,
            "bytes": content.len(),
            "stored": stored,
            "total_ms": ms(total),
            "zstd_ms": ms(of[0]),
            "sha256_ms": ms(of[1]),
            "write_and_fsync_ms": ms(of[2]),
            "index_ms": ms(of[3]),
            "rest_ms": ms(total.saturating_sub(of.iter().sum())),
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
        let times = (0..11).map(|_| {
            let start = Instant::now();
            what();
            start.elapsed()
        });
        median(times.collect())
    };
    let hex = digest.hex();
    let ready = root.join("ready").join(&hex[..2]).join(&hex);
    let first = (0..5).map(|_| {
        let _ = fs::remove_file(&ready);
        let start = Instant::now();
        drop(black_box(store.objects().map(&digest).unwrap()));
        start.elapsed()
    });
    let first = median(first.collect());
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
        "map_first_ms": first,
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
    let start = Instant::now();
    store.audit().reindex().unwrap();
    let reindex = start.elapsed();
    let start = Instant::now();
    let (plan, done) = store.collector().gc(&Policy::default()).unwrap();
    let gc = start.elapsed();
    assert_eq!(
        (plan.objects.len() as u64, done.objects as u64),
        (OBJECTS, OBJECTS)
    );
    json!({
        "objects": OBJECTS,
        "where": place,
        "reindex_s": ms(reindex) / 1e3,
        "gc_s": ms(gc) / 1e3,
    })
}
