//! Defects, one at a time: `verify` must report each, `repair` and the next build must undo it.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use precast::{
    Digest, Store,
    store::{Defect, Needs, Options},
};

use crate::{
    report::Tally,
    scene::{self, Scene, damage, object},
    spread,
};

type Seed = (&'static str, &'static [&'static str], fn(&Path, &Scene));

pub fn record(root: &Path, kind: &str, id: &Digest) -> PathBuf {
    let hex = id.hex();
    root.join(kind).join(&hex[..2]).join(format!("{hex}.json"))
}

fn first(root: &Path, scene: &Scene) -> PathBuf {
    object(root, &scene.artifacts[0].object)
}

fn ready(root: &Path, scene: &Scene) -> PathBuf {
    let hex = scene.weights.hex();
    root.join("ready").join(&hex[..2]).join(hex)
}

fn release(root: &Path) -> PathBuf {
    root.join("releases/m/00000001.json")
}

fn sql(root: &Path, text: &str) {
    let index = rusqlite::Connection::open(root.join("index.sqlite")).unwrap();
    index.execute_batch(text).unwrap();
}

/// Writes a record file with the right checksum.
pub fn write_record(path: &Path, json: &str) {
    let line = format!("{json}\n");
    let checksum = Digest::of(line.as_bytes());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let _ = fs::remove_file(path);
    fs::write(path, format!("{line}{{\"sha256\":\"{checksum}\"}}\n")).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
}

/// Every defect: its name, the kinds that may name it, how it is made.
#[rustfmt::skip]
const SEEDS: &[Seed] = &[
    ("object: bit flipped in the frame", &["object"], |r, s| damage(&first(r, s), |b| b[20] ^= 4)),
    ("object: bit flipped in the header", &["object"], |r, s| damage(&first(r, s), |b| b[4] ^= 1)),
    ("object: bit flipped in the checksum", &["object"], |r, s| damage(&first(r, s), |b| { let n = b.len(); b[n - 1] ^= 1 })),
    ("object: cut short", &["object"], |r, s| damage(&first(r, s), |b| b.truncate(100))),
    ("object: empty", &["object"], |r, s| damage(&first(r, s), Vec::clear)),
    ("object: extended", &["object"], |r, s| damage(&first(r, s), |b| b.push(0))),
    ("object: zeroed", &["object"], |r, s| damage(&first(r, s), |b| b.fill(0))),
    ("object: swapped with another", &["object"], |r, s| {
        let other = fs::read(object(r, &s.artifacts[1].object)).unwrap();
        damage(&first(r, s), |b| *b = other);
    }),
    ("object: missing", &["no_object"], |r, s| fs::remove_file(first(r, s)).unwrap()),
    ("object: writable", &["mode"], |r, s| fs::set_permissions(first(r, s), Permissions::from_mode(0o644)).unwrap()),
    ("object: set-uid", &["mode"], |r, s| fs::set_permissions(first(r, s), Permissions::from_mode(0o4444)).unwrap()),
    ("object: hard link elsewhere", &["linked"], |r, s| fs::hard_link(first(r, s), r.parent().unwrap().join("other-name")).unwrap()),
    ("object: symbolic link", &["not_plain"], |r, s| {
        let path = first(r, s);
        let away = r.parent().unwrap().join("away");
        fs::rename(&path, &away).unwrap();
        symlink(&away, &path).unwrap();
    }),
    ("object: folder in its place", &["not_plain"], |r, s| {
        fs::remove_file(first(r, s)).unwrap();
        fs::create_dir(first(r, s)).unwrap();
    }),
    ("object: pipe in its place", &["not_plain"], |r, s| {
        fs::remove_file(first(r, s)).unwrap();
        let made = std::process::Command::new("mkfifo").arg(first(r, s)).status().unwrap();
        assert!(made.success());
    }),
    ("object: in the wrong folder", &["misplaced"], |r, s| {
        let hex = s.artifacts[0].object.hex();
        let wrong = if &hex[..2] == "00" { "01" } else { "00" };
        let folder = r.join("objects").join(wrong);
        fs::create_dir_all(&folder).unwrap();
        fs::rename(first(r, s), folder.join(format!("{hex}.zst"))).unwrap();
    }),
    ("object: name in capitals", &["foreign"], |r, s| {
        let path = first(r, s);
        let name = path.file_stem().unwrap().to_string_lossy().to_uppercase();
        fs::rename(&path, path.with_file_name(format!("{name}.zst"))).unwrap();
    }),
    ("object: extra file beside it", &["foreign"], |r, s| fs::write(first(r, s).with_extension("bak"), "x").unwrap()),
    ("object: extra and indexed by nobody", &["unindexed"], |r, s| {
        let all = r.parent().unwrap().join("more");
        let digest = Store::create(&all).unwrap().objects().put_bytes(b"extra").unwrap();
        let to = object(r, &digest);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(object(&all, &digest), &to).unwrap();
        let _ = s;
    }),
    ("object: whole shard folder missing", &["no_object"], |r, s| fs::remove_dir_all(first(r, s).parent().unwrap()).unwrap()),
    ("object: shard folder is a file", &["not_plain"], |r, s| {
        let folder = first(r, s).parent().unwrap().to_owned();
        fs::remove_dir_all(&folder).unwrap();
        fs::write(folder, "x").unwrap();
    }),
    ("object: file in objects itself", &["foreign"], |r, _| fs::write(r.join("objects/notes.txt"), "x").unwrap()),
    ("ready: bytes changed", &["ready"], |r, s| damage(&ready(r, s), |b| b[5] ^= 1)),
    ("ready: cut short", &["ready"], |r, s| damage(&ready(r, s), |b| b.truncate(5))),
    ("ready: without its object", &["ready"], |r, s| fs::remove_file(object(r, &s.weights)).unwrap()),
    ("ready: writable", &["mode"], |r, s| fs::set_permissions(ready(r, s), Permissions::from_mode(0o666)).unwrap()),
    ("artifact: bit flipped", &["record"], |r, s| damage(&record(r, "artifacts", &s.artifacts[0].id), |b| b[30] ^= 1)),
    ("artifact: cut short", &["record"], |r, s| damage(&record(r, "artifacts", &s.artifacts[0].id), |b| b.truncate(50))),
    ("artifact: empty", &["record"], |r, s| damage(&record(r, "artifacts", &s.artifacts[0].id), Vec::clear)),
    ("artifact: swapped with another", &["record"], |r, s| {
        let other = fs::read(record(r, "artifacts", &s.artifacts[1].id)).unwrap();
        damage(&record(r, "artifacts", &s.artifacts[0].id), |b| *b = other);
    }),
    ("artifact: a program's record in its place", &["record"], |r, s| {
        let other = fs::read(record(r, "programs", &s.programs[1].id)).unwrap();
        damage(&record(r, "artifacts", &s.artifacts[0].id), |b| *b = other);
    }),
    ("artifact: missing", &["no_artifact"], |r, s| fs::remove_file(record(r, "artifacts", &s.artifacts[0].id)).unwrap()),
    ("artifact: another size than its object", &["size"], |r, s| {
        let mut other = s.artifacts[0].clone();
        other.size += 1;
        write_record(&record(r, "artifacts", &other.id), &serde_json::to_string(&other).unwrap());
    }),
    ("artifact: deep JSON, right checksum", &["record"], |r, s| {
        write_record(&record(r, "artifacts", &s.artifacts[0].id), &"[".repeat(100_000));
    }),
    ("artifact: of a newer version", &["newer"], |r, s| {
        let mut other = s.artifacts[0].clone();
        other.schema = 99;
        write_record(&record(r, "artifacts", &other.id), &serde_json::to_string(&other).unwrap());
    }),
    ("artifact: of a newer version, with other fields", &["newer"], |r, s| {
        let id = s.artifacts[0].id;
        write_record(&record(r, "artifacts", &id), &format!("{{\"schema\":99,\"id\":\"{id}\",\"parts\":[]}}"));
    }),
    ("program: bit flipped", &["record"], |r, s| damage(&record(r, "programs", &s.programs[0].id), |b| b[9] ^= 2)),
    ("program: missing", &["no_program"], |r, s| fs::remove_file(record(r, "programs", &s.programs[0].id)).unwrap()),
    ("program: wrong extension", &["foreign"], |r, s| {
        let path = record(r, "programs", &s.programs[0].id);
        fs::rename(&path, path.with_extension("jsn")).unwrap();
    }),
    ("release: bit flipped", &["record"], |r, _| damage(&release(r), |b| b[9] ^= 2)),
    ("release: under another number", &["record"], |r, _| fs::rename(release(r), release(r).with_file_name("00000007.json")).unwrap()),
    ("release: under another model", &["record"], |r, _| fs::rename(r.join("releases/m"), r.join("releases/other")).unwrap()),
    ("release: extra file", &["foreign"], |r, _| fs::write(r.join("releases/m/notes.txt"), "x").unwrap()),
    ("release: file among the models", &["not_plain"], |r, _| fs::write(r.join("releases/x"), "x").unwrap()),
    ("failure: bit flipped", &["record"], |r, s| damage(&record(r, "failures", &s.failure.id), |b| b[9] ^= 2)),
    ("failure: log missing", &["no_object"], |r, s| fs::remove_file(object(r, &s.failure.log.unwrap())).unwrap()),
    ("weights: missing", &["no_object"], |r, s| {
        fs::remove_file(object(r, &s.weights)).unwrap();
        let _ = fs::remove_file(ready(r, s));
    }),
    ("index: missing", &["index"], |r, _| fs::remove_file(r.join("index.sqlite")).unwrap()),
    ("index: not a database", &["index"], |r, _| fs::write(r.join("index.sqlite"), "x".repeat(8192)).unwrap()),
    ("index: cut short", &["index"], |r, _| damage(&r.join("index.sqlite"), |b| b.truncate(9000))),
    ("index: page zeroed", &["index"], |r, _| damage(&r.join("index.sqlite"), |b| b[4096..12288].fill(0))),
    ("index: row missing", &["unindexed"], |r, _| sql(r, "DELETE FROM programs WHERE bucket='batch=0'")),
    ("index: row without a file", &["dangling"], |r, _| sql(r, "INSERT INTO objects VALUES (zeroblob(32),1,2,3,4)")),
    ("index: row with another size", &["row"], |r, _| sql(r, "UPDATE objects SET size=size+1")),
    ("index: row with another model", &["row"], |r, _| sql(r, "UPDATE programs SET model='x'")),
    ("index: link missing", &["unindexed"], |r, _| sql(r, "DELETE FROM program_artifacts")),
    ("index: link to another", &["dangling"], |r, _| sql(r, "INSERT INTO artifact_objects SELECT id,zeroblob(32) FROM artifacts")),
    ("index: release row without a file", &["dangling"], |r, _| sql(r, "CREATE TEMP TABLE t AS SELECT * FROM releases; UPDATE t SET seq=9; INSERT INTO releases SELECT * FROM t")),
    ("index: a last use that never was", &["row"], |r, _| sql(r, "INSERT OR REPLACE INTO uses SELECT id,5,6 FROM programs")),
    ("index: half deleted", &["half_deleted"], |r, s| {
        sql(r, &format!("INSERT INTO marked VALUES ('artifacts',x'{}')", s.artifacts[0].id));
    }),
    ("temp file of a dead process", &["stale"], |r, _| {
        fs::create_dir(r.join("tmp/1-dead")).unwrap();
        fs::write(r.join("tmp/1-dead/.tmp1"), "half").unwrap();
    }),
    ("temp file at the top", &["stale"], |r, _| fs::write(r.join("tmp/.tmpXY"), "half").unwrap()),
    ("lease of a dead process", &["dead_lease"], |r, _| fs::write(r.join("leases/1-dead.lease"), "+x\n").unwrap()),
    ("lock that is not one", &["foreign"], |r, _| fs::write(r.join("locks/mine"), "").unwrap()),
    ("tag missing", &["tag"], |r, _| fs::remove_file(r.join("CACHEDIR.TAG")).unwrap()),
    ("tag with other text", &["tag"], |r, _| damage(&r.join("CACHEDIR.TAG"), |b| b[3] = b'x')),
    ("folder that all can write", &["mode"], |r, _| fs::set_permissions(r.join("objects"), Permissions::from_mode(0o777)).unwrap()),
    ("folder is a symbolic link", &["not_plain"], |r, _| {
        let away = r.parent().unwrap().join("away");
        fs::rename(r.join("failures"), &away).unwrap();
        symlink(&away, r.join("failures")).unwrap();
    }),
    ("foreign file at the top", &["foreign"], |r, _| fs::write(r.join("thesis.doc"), "x").unwrap()),
    ("foreign folder at the top", &["foreign"], |r, _| fs::create_dir(r.join("old")).unwrap()),
];

/// Returns the name of a defect's kind.
fn kind(defect: &Defect) -> String {
    serde_json::to_value(defect).unwrap()["kind"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// Deletes the index of a sound store, has it made again, and compares every row of every table that follows from
/// files. Returns their number.
pub fn index_comes_back(root: &Path) -> Result<u64> {
    let before = rows(root);
    fs::remove_file(root.join("index.sqlite")).unwrap();
    drop(Store::open(root)?);
    let after = rows(root);
    ensure!(before == after, "{before:#?} is not {after:#?}");
    Ok(before.len() as u64)
}

fn rows(root: &Path) -> Vec<String> {
    let index = rusqlite::Connection::open(root.join("index.sqlite")).unwrap();
    let tables: Vec<String> = index
        .prepare("SELECT name FROM sqlite_schema WHERE type='table' AND name NOT IN ('uses','ready','marked')")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let mut all = Vec::new();
    for table in tables {
        let mut query = index.prepare(&format!("SELECT * FROM {table}")).unwrap();
        let columns = query.column_count();
        let mut rows = query.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let fields: Vec<_> = (0..columns).map(|at| row.get_ref(at).unwrap()).collect();
            all.push(format!("{table} {fields:?}"));
        }
    }
    all.sort();
    all
}

/// Makes every defect, each in a copy of a sound store. It must be found, by a reader too, and repaired.
pub fn all(sound: &Path, scene: &Scene) -> Tally {
    let bad = spread::each(SEEDS, |seed| {
        try_seed(sound, scene, seed).with_context(|| seed.0.to_owned())
    });
    Tally::one("kinds", SEEDS.len(), bad)
}

fn try_seed(sound: &Path, scene: &Scene, (name, kinds, make): &Seed) -> Result<()> {
    let dir = scene::scratch();
    let root = dir.path().join("store");
    scene::copy(sound, &root);
    make(&root, scene);
    let find = |store: &Store| -> Result<Vec<String>> {
        let found = store.audit().verify()?;
        Ok(found.defects.iter().map(kind).collect())
    };
    let named = |seen: &[String]| seen.iter().any(|seen| kinds.contains(&&**seen));
    if let Ok(reader) = Store::open_read_only(&root) {
        let seen = find(&reader).context("reading")?;
        ensure!(named(&seen), "reading found {seen:?}, not {kinds:?}");
    }
    let store = Store::open_for_repair(&root, Options::default())?;
    let seen = find(&store)?;
    let healed = seen.is_empty() && *name == "index: missing";
    ensure!(healed || named(&seen), "found {seen:?}, not {kinds:?}");
    let repaired = store.audit().repair().context("repairing")?;
    if name.starts_with("artifact: of a newer version") {
        // It is left as it is, for a newer Precast.
        let left = repaired.left.iter().any(|d| d.needs() == Needs::Person);
        ensure!(left, "it was touched");
        return Ok(());
    }
    scene::build(&store, &mut |_| {}).context("building again")?;
    scene::check(&store).context("after building again")?;
    let after = store.audit().verify()?.defects;
    ensure!(after.is_empty(), "still {after:?}");
    Ok(())
}
