//! Malicious stores. No command reads, changes or removes a file outside of them, or takes long or much memory. Every
//! refusal is an error, never a crash.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use precast::{
    Digest, Store,
    store::{Filter, Options},
};

use crate::{
    report::Tally,
    scene::{self, Scene, crafted, object},
    seeds::{record, write_record},
};

type Attack = (&'static str, fn(&Path, &Scene, &Path));

/// The limit of an endless operation; a busy machine takes a minute where another takes a second.
const PATIENCE: Duration = Duration::from_secs(300);

fn fifo(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn release_json(scene: &Scene, model: &str, seq: u64) -> String {
    let mut release = scene::release(model, &[scene.programs[0].id], None);
    release.seq = seq;
    serde_json::to_string(&release).unwrap()
}

/// Every attack: its name, and its change of a sound store. The file of the last path must not change.
#[rustfmt::skip]
const ATTACKS: &[Attack] = &[
    ("an object is a link to a secret", |r, s, out| {
        let path = object(r, &s.artifacts[0].object);
        fs::remove_file(&path).unwrap();
        symlink(out.join("secret"), path).unwrap();
    }),
    ("an unpacked object is a link to a secret", |r, s, out| {
        let hex = s.artifacts[0].object.hex();
        let path = r.join("ready").join(&hex[..2]).join(&hex);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(out.join("secret"), path).unwrap();
    }),
    ("an object is a second name of a secret", |r, s, out| {
        let path = object(r, &s.artifacts[0].object);
        fs::remove_file(&path).unwrap();
        fs::hard_link(out.join("secret"), path).unwrap();
    }),
    ("a shard folder is a link outside", |r, s, out| {
        let folder = object(r, &s.artifacts[0].object).parent().unwrap().to_owned();
        fs::remove_dir_all(&folder).unwrap();
        symlink(out, folder).unwrap();
    }),
    ("every shard folder of `ready` is a link outside", |r, _, out| {
        for n in 0..=255u8 {
            let folder = r.join("ready").join(format!("{n:02x}"));
            let _ = fs::remove_dir_all(&folder);
            symlink(out, folder).unwrap();
        }
    }),
    ("`tmp` is a link outside", |r, _, out| {
        fs::remove_dir_all(r.join("tmp")).unwrap();
        symlink(out, r.join("tmp")).unwrap();
    }),
    ("a temp folder is a link outside, with a dead lease", |r, _, out| {
        symlink(out, r.join("tmp/1-x")).unwrap();
        fs::write(r.join("leases/1-x.lease"), "").unwrap();
    }),
    ("a lease is named `...lease`", |r, _, _| fs::write(r.join("leases/...lease"), "").unwrap()),
    ("a lease is named `..lease`", |r, _, _| fs::write(r.join("leases/..lease"), "").unwrap()),
    ("a lease is a link to a secret", |r, _, out| symlink(out.join("secret"), r.join("leases/1-y.lease")).unwrap()),
    ("a lease has a gigabyte of zeros", |r, _, _| {
        fs::File::create(r.join("leases/1-z.lease")).unwrap().set_len(1 << 30).unwrap();
    }),
    ("locks are links to a secret", |r, _, out| {
        for name in ["gate", "use", "add"] {
            let _ = fs::remove_file(r.join("locks").join(name));
            symlink(out.join("secret"), r.join("locks").join(name)).unwrap();
        }
    }),
    ("locks are second names of a secret", |r, _, out| {
        let _ = fs::remove_file(r.join("locks/add"));
        fs::hard_link(out.join("secret"), r.join("locks/add")).unwrap();
    }),
    ("locks are pipes", |r, _, _| fifo(&r.join("locks/use"))),
    ("the marker is a pipe", |r, _, _| fifo(&r.join("precast-store.json"))),
    ("the tag is a pipe", |r, _, _| fifo(&r.join("CACHEDIR.TAG"))),
    ("a record is a pipe", |r, s, _| fifo(&record(r, "programs", &s.programs[0].id))),
    ("the index is a link outside", |r, _, out| {
        fs::rename(r.join("index.sqlite"), out.join("index.sqlite")).unwrap();
        symlink(out.join("index.sqlite"), r.join("index.sqlite")).unwrap();
    }),
    ("the index has triggers that delete", |r, _, _| {
        let index = rusqlite::Connection::open(r.join("index.sqlite")).unwrap();
        index.execute_batch("CREATE TRIGGER t AFTER INSERT ON uses BEGIN DELETE FROM releases; DELETE FROM programs; END").unwrap();
    }),
    ("the index has views in the place of tables", |r, _, _| {
        let index = rusqlite::Connection::open(r.join("index.sqlite")).unwrap();
        index.execute_batch("ALTER TABLE objects RENAME TO o; CREATE VIEW objects AS SELECT * FROM o, o AS a, o AS b, o AS c, o AS d, o AS e").unwrap();
    }),
    ("a release is of the model `../../../outside`", |r, s, _| {
        write_record(&r.join("releases/m/00000002.json"), &release_json(s, "../../../outside", 2));
    }),
    ("a release has the last number there is", |r, s, _| {
        write_record(&r.join(format!("releases/m/{}.json", u64::MAX)), &release_json(s, "m", u64::MAX));
    }),
    ("a release's number is written in another way", |r, s, _| {
        write_record(&r.join("releases/m/+2.json"), &release_json(s, "m", 2));
        write_record(&r.join("releases/m/2.json"), &release_json(s, "m", 2));
    }),
    ("a model's name moves the cursor", |r, s, _| {
        let mut program = s.programs[0].clone();
        program.model = "\u{1b}[2J\u{7}../x".into();
        program.id = Digest::of(b"evil");
        write_record(&record(r, "programs", &program.id), &serde_json::to_string(&program).unwrap());
    }),
    ("a program calls a million artifacts", |r, s, _| {
        let mut program = s.programs[0].clone();
        let step = program.steps[0].clone();
        program.steps = (0..200_000u32).map(|n| precast::record::Step { artifact: Digest::of(&n.to_le_bytes()), ..step.clone() }).collect();
        write_record(&record(r, "programs", &program.id), &serde_json::to_string(&program).unwrap());
    }),
    ("a record nests a hundred thousand deep", |r, s, _| {
        write_record(&record(r, "artifacts", &s.artifacts[0].id), &format!("{}1{}", "{\"a\":".repeat(100_000), "}".repeat(100_000)));
    }),
    ("a record is larger than any", |r, s, _| {
        let path = record(r, "artifacts", &s.artifacts[0].id);
        fs::remove_file(&path).unwrap();
        fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    }),
    ("numbers beyond every range", |r, s, _| {
        let text = serde_json::to_string(&s.artifacts[0]).unwrap();
        write_record(&record(r, "artifacts", &s.artifacts[0].id), &text.replace("\"size\":3000", "\"size\":99999999999999999999999999"));
    }),
    ("a bomb that says that it is small", |r, s, _| {
        // A megabyte of zeros in a frame whose header is rewritten to declare four bytes.
        let big = zstd::encode_all(&vec![0u8; 1 << 20][..], 3).unwrap();
        let body = &big[zstd_header(&big)..];
        let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0x20, 4];
        frame.extend(body);
        crafted(r, &s.artifacts[0].object, &frame);
    }),
    ("a bomb that says that it is a terabyte", |r, s, _| {
        let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0xE0];
        frame.extend((1u64 << 40).to_le_bytes());
        frame.extend([0x03, 0x00, 0x00, 0x00]);
        crafted(r, &s.artifacts[0].object, &frame);
    }),
    ("a bomb of a quarter gigabyte of zeros", |r, s, _| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.set_pledged_src_size(Some(256 << 20)).unwrap();
        let block = vec![0u8; 1 << 20];
        for _ in 0..256 {
            std::io::Write::write_all(&mut encoder, &block).unwrap();
        }
        crafted(r, &s.artifacts[0].object, &encoder.finish().unwrap());
    }),
    ("a frame that wants a window of two gigabytes", |r, s, _| {
        // No single segment, window exponent 21 (2 GiB), content size of 8 bytes.
        let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0xC0, 21 << 3];
        frame.extend(3000u64.to_le_bytes());
        frame.extend([0x01, 0x00, 0x00]);
        crafted(r, &s.artifacts[0].object, &frame);
    }),
    ("ten thousand files that nobody knows", |r, _, _| {
        for n in 0..10_000 {
            fs::write(r.join("objects").join(format!("junk{n}")), "").unwrap();
        }
    }),
];

/// Returns the length of a zstd frame's header.
fn zstd_header(frame: &[u8]) -> usize {
    let flags = frame[4];
    let single = flags & 0x20 != 0;
    let size = [usize::from(single), 2, 4, 8][usize::from(flags >> 6)];
    5 + usize::from(!single) + size
}

/// Tries every attack, one at a time: the cost of each is measured.
pub fn all(sound: &Path, scene: &Scene) -> Tally {
    let tried = |attack| try_attack(sound, scene, attack).err();
    let bad = ATTACKS.iter().filter_map(tried).map(|why| why.to_string());
    Tally::one("stores", ATTACKS.len(), bad.collect())
}

/// Runs a user's operations on such a store, and looks for changes outside of it.
fn try_attack(sound: &Path, scene: &Scene, (name, make): &Attack) -> Result<()> {
    let dir = scene::scratch();
    let root = dir.path().join("store");
    let outside = dir.path().join("outside");
    scene::copy(sound, &root);
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "the secret\n").unwrap();
    fs::set_permissions(outside.join("secret"), Permissions::from_mode(0o600)).unwrap();
    make(&root, scene, &outside);
    let before = state(&outside);
    let start = Instant::now();
    let memory = peak();
    let answers = use_it(&root, scene);
    let took = start.elapsed();
    ensure!(
        !answers.contains("the secret"),
        "{name}: the secret was read"
    );
    let panicked = answers.find("panicked");
    ensure!(panicked.is_none(), "{name}: {answers}");
    let after = state(&outside);
    ensure!(
        after == before,
        "{name}: outside changed: {before:?} to {after:?}"
    );
    ensure!(took < PATIENCE, "{name}: took {took:?}");
    // The honest bomb is read whole on request, as its header says.
    let grown = peak().saturating_sub(memory);
    ensure!(grown < 600 << 20, "{name}: took {} MiB", grown >> 20);
    Ok(())
}

/// Returns all answers and errors as text.
fn use_it(root: &Path, scene: &Scene) -> String {
    let tried = |work: &dyn Fn() -> String| match catch_unwind(AssertUnwindSafe(work)) {
        Ok(text) => text,
        Err(panic) => format!("panicked: {:?}", panic.downcast_ref::<String>()),
    };
    let mut all =
        tried(&|| Store::open(root).map_or_else(scene::chain, |store| look(&store, scene)));
    for step in ["build", "gc", "verify", "repair", "build", "gc"] {
        all += &tried(&|| {
            let done =
                match step {
                    "build" => Store::open(root)
                        .and_then(|store| scene::build(&store, &mut |_| {}).map(drop)),
                    "gc" => Store::open(root)
                        .and_then(|store| store.collector().gc(&scene::newest_only()).map(drop)),
                    "verify" => Store::open_read_only(root)
                        .and_then(|store| store.audit().verify().map(drop)),
                    _ => Store::open_for_repair(root, Options::default())
                        .and_then(|store| store.audit().repair().map(drop)),
                };
            done.map_or_else(scene::chain, |()| String::new())
        });
    }
    all
}

fn look(store: &Store, scene: &Scene) -> String {
    // Reads are compared, not kept: the text must not hold gigabytes.
    let start = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(100)]).into_owned();
    let mut text = String::new();
    for artifact in &scene.artifacts {
        text += &format!("{:?}", store.records().artifact(&artifact.id));
        let read = store.objects().read(&artifact.object);
        text += &read.map_or_else(scene::chain, |bytes| start(&bytes));
        let mapped = store.objects().map(&artifact.object);
        text += &mapped.map_or_else(scene::chain, |bytes| start(&bytes));
    }
    for program in &scene.programs {
        let found = store.records().program(&program.id);
        text += &found.map_or_else(scene::chain, |_| String::new());
    }
    text += &format!("{:?}", store.releases().models());
    let rows = store.records().programs(Filter::default()).take(100);
    let rows: Vec<_> = rows.map(|row| row.map(|row| row.model)).collect();
    let newest = store.releases().get("m", None);
    text + &format!("{rows:?}{:?}", newest.map(|release| release.map(|r| r.seq)))
}

/// Returns a folder's content: names, modes, links and bytes.
fn state(folder: &Path) -> Vec<String> {
    let file = |path: &std::path::PathBuf| {
        let meta = fs::symlink_metadata(path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy();
        let text = match name.starts_with("index") {
            true => meta.len().to_string(),
            false => String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned(),
        };
        format!("{name} {:o} {text}", meta.permissions().mode())
    };
    scene::files(folder).iter().map(file).collect()
}

/// Returns the most memory this process ever had, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
