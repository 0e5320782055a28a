use super::{
    super::{Policy, Reason, testing},
    *,
};
use crate::Store;
use crate::record::{Artifact, Program, Release};

struct Scene {
    _dir: tempfile::TempDir,
    path: PathBuf,
    artifacts: [Artifact; 4],
    programs: [Program; 2],
    releases: [Release; 2],
    loose: Digest,
}

/// Program 0 calls artifacts 0 and 1, program 1 calls 1 and 2; release 1 has program 0, release 2 has program 1.
fn scene() -> Scene {
    let (dir, store) = testing::store();
    let artifacts = ["a", "b", "c", "d"].map(|name| testing::put_artifact(&store, name));
    let ids = artifacts.each_ref().map(|artifact| artifact.id);
    let programs = [(1, &ids[..2]), (2, &ids[1..3])]
        .map(|(batch, of)| testing::put_program(&store, "m", batch, of));
    let releases = programs
        .each_ref()
        .map(|program| testing::put_release(&store, None, &[program.id]));
    let loose = store.objects().put_bytes(b"loose").unwrap();
    Scene {
        path: store.path().to_owned(),
        _dir: dir,
        artifacts,
        programs,
        releases,
        loose,
    }
}

fn counts(done: &Collected) -> [usize; 4] {
    [done.releases, done.programs, done.artifacts, done.objects]
}

/// Keeps one release and nothing that is in none.
fn newest_only() -> Policy {
    Policy {
        keep_releases: 1,
        unreleased: true,
        ..Policy::default()
    }
}

#[test]
fn an_older_release_goes_and_what_the_newer_one_needs_stays() {
    let scene = scene();
    let store = Store::open(&scene.path).unwrap();
    let (plan, done) = store.collector().gc(&newest_only()).unwrap();
    assert_eq!(counts(&done), [1, 1, 2, 3]);
    assert_eq!(plan.releases[0].reason, Reason::Superseded);
    assert_eq!(store.releases().all("m").unwrap(), &scene.releases[1..]);
    store.releases().hold(&scene.releases[1]).unwrap();
    let has = |n: usize| store.records().has_artifact(&scene.artifacts[n].id);
    assert_eq!((has(0).unwrap(), has(1).unwrap()), (false, true));
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<GcPlan>(&json).unwrap(), plan);
}

#[test]
fn releases_are_counted_by_content_and_partial_ones_not_at_all() {
    let (_dir, store) = testing::store();
    let put = |batch, name: Option<&str>, lacks: &[&str]| {
        let program = testing::put_program(&store, "m", batch, &[]);
        let mut release = testing::release("m", name, &[program.id]);
        release.lacks = lacks.iter().map(ToString::to_string).collect();
        store.releases().put(&release).unwrap().0.seq
    };
    // Releases of four independent builders: names distinguish releases of the same content.
    put(1, None, &[]);
    for name in ["a", "b", "c", "d"] {
        put(2, Some(name), &[]);
    }
    put(3, None, &["encode batch=9"]);
    assert_eq!(put(4, None, &["encode batch=9"]), 7);
    let gone = |keep_releases| {
        let policy = Policy {
            keep_days: Some(0),
            keep_releases,
            ..Policy::default()
        };
        let plan = store.collector().plan(&policy).unwrap();
        plan.releases.iter().map(|old| old.seq).collect::<Vec<_>>()
    };
    assert_eq!(gone(2), [6]);
    assert_eq!(gone(1), [1, 6]);
    // A newer whole release supersedes the partial ones.
    assert_eq!(put(5, None, &[]), 8);
    assert_eq!(gone(3), [6, 7]);
    assert_eq!(gone(1), [1, 2, 3, 4, 5, 6, 7]);
    let policy = Policy {
        keep_releases: 1,
        ..Policy::default()
    };
    store.collector().gc(&policy).unwrap();
    assert_eq!(store.releases().all("m").unwrap().len(), 1);
}

#[test]
fn what_another_process_holds_stays_until_it_is_let_go() {
    let scene = scene();
    let (reader, store) = (
        Store::open(&scene.path).unwrap(),
        Store::open(&scene.path).unwrap(),
    );
    let hold = reader.releases().hold(&scene.releases[0]).unwrap();
    let loose = reader.leases().hold(&[scene.loose]).unwrap();
    let policy = newest_only();
    // A plan from before the lease of a reader is carried out with that lease. A read-only store reads no leases.
    let blind = Store::open_read_only(&scene.path).unwrap();
    let stale = blind.collector().plan(&policy).unwrap();
    assert!(!stale.programs.is_empty());
    let done = store.collector().collect(&stale).unwrap();
    assert_eq!(counts(&done), [1, 0, 1, 1], "{done:?}");
    for artifact in &scene.artifacts[..2] {
        assert!(reader.objects().read(&artifact.object).is_ok());
    }
    assert!(reader.objects().read(&scene.loose).is_ok());
    drop((hold, loose));
    let (_, done) = store.collector().gc(&policy).unwrap();
    assert_eq!(counts(&done), [0, 1, 1, 2]);
}

#[test]
fn age_and_size_take_the_longest_unused_first() {
    let scene = scene();
    let store = Store::open(&scene.path).unwrap();
    store
        .index()
        .write(|tx| {
            let old = crate::time::now() - 40 * 24 * 60 * 60;
            tx.execute("DELETE FROM uses", [])?;
            tx.execute("DELETE FROM releases", [])?;
            // A thing can't be newer than its last use.
            for program in &scene.programs {
                super::super::rows::insert_program(tx, program, &Digest::of(b"s"), old)?;
            }
            for artifact in &scene.artifacts {
                super::super::rows::insert_artifact(tx, artifact, &Digest::of(b"s"), old)?;
            }
            let young = scene.programs[1].id;
            super::super::rows::insert_use(tx, &young, old + 1000)
        })
        .unwrap();
    let plan = |keep_days, max_size| {
        let policy = Policy {
            keep_days,
            max_size,
            ..Policy::default()
        };
        store.collector().plan(&policy).unwrap()
    };
    for (days, gone) in [(30, 2), (50, 0)] {
        assert_eq!(plan(Some(days), None).programs.len(), gone);
    }
    assert_eq!(plan(None, Some(0)).after, 0);
    let plan = plan(None, Some(plan(None, None).after - 1));
    // Artifact d, which no program calls, and program 0 have the same age. The deletion of one of them is enough.
    assert_eq!(plan.programs.len() + plan.artifacts.len(), 1, "{plan}");
}

#[test]
fn a_marked_thing_counts_as_gone_and_is_finished_later() {
    let scene = scene();
    let store = Store::open(&scene.path).unwrap();
    let victim = &scene.artifacts[3];
    let mark_it = |tx: &rusqlite::Transaction| mark(tx, &ARTIFACTS, &[victim.id], &HashSet::new());
    assert_eq!(store.index().write(mark_it).unwrap(), [victim.id]);
    fs::remove_file(store.layout().record(Kind::Artifact, &victim.id)).unwrap();
    assert!(!store.records().has_artifact(&victim.id).unwrap());
    store.collector().recover().unwrap();
    let mut rows = store.records().artifacts();
    assert!(rows.all(|row| row.unwrap().id != victim.id));
    // Another put removes a mark.
    store.records().put_artifact(victim).unwrap();
    store.index().write(mark_it).unwrap();
    store.records().put_artifact(victim).unwrap();
    assert!(store.records().has_artifact(&victim.id).unwrap());
}
