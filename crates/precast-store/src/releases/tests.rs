use super::{super::testing, *};
use crate::Store;

/// Puts programs of one artifact.
fn programs<const N: usize>(store: &Store) -> [Digest; N] {
    let artifact = testing::put_artifact(store, "block").id;
    std::array::from_fn(|batch| testing::put_program(store, "m", batch as i64, &[artifact]).id)
}

/// Puts a release of the model `m`. Returns its number and whether it is new.
fn put(store: &Store, release: Release) -> (u64, bool) {
    let (put, new) = store.releases().put(&release).unwrap();
    (put.seq, new)
}

#[test]
fn releases_count_up_and_have_names_and_numbers() {
    let (_dir, store) = testing::store();
    let [one, two] = programs(&store);
    for (seq, name, program) in [(1, Some("v1"), one), (2, None, two), (3, Some("v1"), one)] {
        let release = testing::release("m", name, &[program]);
        assert_eq!(put(&store, release), (seq, true));
    }
    let seq = |which| {
        let found = store.releases().get("m", which).unwrap();
        found.map(|found| found.seq)
    };
    let found = [None, Some("v1"), Some("2"), Some("v9"), Some("9")].map(seq);
    assert_eq!(found, [Some(3), Some(3), Some(2), None, None]);
    assert_eq!(store.releases().all("m").unwrap().len(), 3);
    assert_eq!(store.releases().models().unwrap(), ["m"]);
    let numbered = testing::release("m", Some("7"), &[one]);
    let put = store.releases().put(&numbered);
    assert_eq!(testing::refused(put), "NumberName");
}

#[test]
fn what_the_newest_one_has_already_is_not_put_again() {
    let (_dir, store) = testing::store();
    let [one, two] = programs(&store);
    let put = |name: Option<&str>, of: &[Digest]| put(&store, testing::release("m", name, of));
    assert_eq!(put(None, &[one, two]), (1, true));
    assert_eq!(put(None, &[two, one]), (1, false), "in another order");
    assert_eq!(put(Some("v1"), &[one, two]), (2, true), "it has no name");
    assert_eq!(put(None, &[one, two]), (2, false), "any name will do");
    assert_eq!(put(Some("v2"), &[one, two]), (3, true));
    let mut other = testing::release("m", None, &[one, two]);
    other.weights = Some(store.objects().put_bytes(b"other weights").unwrap());
    assert!(store.releases().put(&other).unwrap().1);
    // Builders that publish the same release at the same time create one.
    other.programs = vec![one];
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let store = Store::open(store.path()).unwrap();
                assert_eq!(store.releases().put(&other).unwrap().0.seq, 5);
            });
        }
    });
    // A rollback returns to the previous release with other content.
    let (back, _) = store.releases().rollback("m", None).unwrap();
    assert_eq!(back.programs.len(), 2);
    let (same, new) = store.releases().rollback("m", Some(4)).unwrap();
    assert_eq!((same.seq, new), (6, false));
}

#[test]
fn a_release_needs_its_shims_and_one_more_shim_is_a_release() {
    let (_dir, store) = testing::store();
    let [one, two] = programs(&store);
    let put = |shims: &[&str], of: &[Digest]| {
        let mut release = testing::release("m", None, of);
        let shims = shims.iter().map(|torch| testing::shim(&store, torch));
        release.shims = shims.collect();
        put(&store, release)
    };
    assert_eq!(put(&["2.11.0"], &[two]), (1, true));
    assert_eq!(put(&["2.11.0"], &[one]), (2, true));
    assert_eq!(put(&["2.11.0", "2.13.0"], &[one]), (3, true));
    assert_eq!(put(&["2.11.0"], &[one]), (3, false), "it has it already");
    // Releases that differ only in shims have the same content: the rollback skips them.
    let back = store.releases().rollback("m", None).unwrap().0;
    assert_eq!((back.seq, &back.programs[..]), (4, &[two][..]));
    // gc keeps the shims of a release, and a missing one is a defect.
    let newest = put(&["2.13.0"], &[one]).0;
    let policy = super::super::Policy {
        keep_releases: 1,
        ..Default::default()
    };
    store.collector().gc(&policy).unwrap();
    let release = store.releases().get("m", None).unwrap().unwrap();
    assert_eq!(release.seq, newest);
    let _hold = store.releases().hold(&release).unwrap();
    assert_eq!(store.audit().verify().unwrap().defects, []);
    let object = release.shims[0].object;
    let usage = store.collector().usage(crate::GroupBy::Release).unwrap();
    assert!(usage.is_kept(&object));
    assert_eq!(usage.needs(&object).collect::<Vec<_>>(), [("m 5", 1)]);
    fs::remove_file(store.layout().object(&object)).unwrap();
    let mut release = testing::release("m", None, &[one]);
    release.shims = vec![testing::shim(&store, "2.14.0")];
    release.shims[0].object = object;
    let put = store.releases().put(&release);
    assert_eq!(testing::refused(put), "Dangling");
    assert!(!store.audit().verify().unwrap().defects.is_empty());
}

#[test]
fn what_a_newer_release_does_not_answer_has_a_name() {
    let (_dir, store) = testing::store();
    let [one, two, three] = programs(&store);
    let lost = |old: &[Digest]| {
        let [old, new] = [old, &[two, three]].map(|of| testing::release("m", None, of));
        store.releases().lost(&old, &new).unwrap()
    };
    assert_eq!(lost(&[one, two]), ["encode batch=0"]);
    assert_eq!(lost(&[two]), [""; 0]);
}

#[test]
fn going_back_puts_the_earlier_one_once_more() {
    let (_dir, store) = testing::store();
    let [one, two] = programs(&store);
    let back_to = |seq| store.releases().rollback("m", seq);
    assert_eq!(testing::refused(back_to(None)), "NoRelease");
    for (name, program) in [("v1", one), ("v2", two)] {
        testing::put_release(&store, Some(name), &[program]);
    }
    let back = back_to(None).unwrap().0;
    let found = (back.seq, back.name.as_deref(), &back.programs[..]);
    assert_eq!(found, (3, Some("v1"), &[one][..]));
    assert_eq!(store.releases().get("m", None).unwrap(), Some(back));
    assert_eq!(back_to(Some(2)).unwrap().0.programs, [two]);
    let error = back_to(Some(9)).unwrap_err();
    assert_eq!(error.to_string(), "`m` has no release 9");
    let record = store
        .layout()
        .record(super::super::layout::Kind::Program, &one);
    fs::remove_file(record).unwrap();
    assert_eq!(testing::refused(back_to(Some(1))), "Dangling");
    assert_eq!(store.releases().get("m", None).unwrap().unwrap().seq, 4);
}
