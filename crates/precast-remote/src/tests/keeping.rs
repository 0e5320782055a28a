//! Remotes that are looked at, checked and collected, while others push.

use std::{io::Cursor, sync::Once, time::Duration};

use precast_store::{ListedPart, transfer::RemoteGc};

use super::*;
use crate::carrier::Found;

/// Calls a hook before a call that creates a file whose name begins so, once; and waits a little before every call, if
/// asked.
struct Hooked<F> {
    inner: Storage,
    before: &'static str,
    hook: F,
    once: Once,
    random: Option<Mutex<u64>>,
}

impl<F: Fn() + Send + Sync> Hooked<F> {
    fn new(inner: Storage, before: &'static str, hook: F) -> Self {
        let (once, random) = (Once::new(), None);
        Self {
            inner,
            before,
            hook,
            once,
            random,
        }
    }

    fn wait(&self) {
        let Some(random) = &self.random else { return };
        let mut random = random.lock().unwrap();
        *random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let micros = (*random >> 33) % 120;
        drop(random);
        std::thread::sleep(Duration::from_micros(micros));
    }
}

impl<F: Fn() + Send + Sync> Carrier for Hooked<F> {
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
        self.wait();
        self.inner.head(name)
    }

    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
        self.wait();
        self.inner.get(name)
    }

    fn create(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
        how: How,
    ) -> Result<bool, RemoteError> {
        self.wait();
        if !self.before.is_empty() && name.starts_with(self.before) {
            self.once.call_once(|| (self.hook)());
        }
        self.inner.create(name, from, bytes, how)
    }

    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
        self.wait();
        self.inner.list(folder)
    }

    fn found(&self, folder: &str) -> Result<Option<Vec<Found>>, RemoteError> {
        self.wait();
        self.inner.found(folder)
    }

    fn delete(&self, name: &str) -> Result<(), RemoteError> {
        self.wait();
        self.inner.delete(name)
    }
}

fn gc(remote: &Remote, grace: i64, keep: Option<usize>) -> Result<RemoteGc, RemoteError> {
    remote.gc(grace, keep, true, &tell())
}

/// Fails if a visible release lacks anything.
fn is_whole(remote: &Remote) {
    assert_eq!(remote.verify(&tell()).unwrap().flaws, []);
    let (_to, to) = testing::store();
    for (model, numbers) in remote.numbers().unwrap() {
        for seq in numbers {
            let listing = remote.find(&model, Some(&seq.to_string()), &Wanted::Any);
            remote
                .pull_release(&to, &listing.unwrap(), false, &tell())
                .unwrap();
        }
    }
    is_sound(&to);
}

/// Removes a release, so that nothing needs its parts.
fn forget(store: &Arc<InMemory>, seq: u64) {
    let carrier = memory(store);
    for path in [
        precast_store::release_path("m", seq),
        precast_store::listing_path("m", seq),
    ] {
        carrier.delete(&path.unwrap()).unwrap();
    }
}

fn names(store: &Arc<InMemory>, folder: &str) -> Vec<String> {
    memory(store).list(folder).unwrap().unwrap()
}

#[test]
fn a_mirror_answers_what_records_say_and_verify_names_what_is_wrong() {
    let store = Arc::new(InMemory::new());
    let (carrier, there) = (memory(&store), remote(memory(&store)));
    let (_a, a, first) = source("a");
    let (_b, b, second) = source("b");
    push(&there, &a, &first).unwrap();
    push(&there, &b, &second).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mirrored = there.mirror(&folder.path().join("m"), &tell()).unwrap();
    assert_eq!((mirrored.releases, mirrored.left_out.len()), (2, 0));
    let mirror = Store::open(folder.path().join("m")).unwrap();
    let release = mirror.releases().get("m", None).unwrap().unwrap();
    assert_eq!((release.seq, release.weights), (2, second.weights));
    for program in &release.programs {
        assert_eq!(
            mirror.records().program(program).unwrap(),
            a.records().program(program).unwrap()
        );
    }
    assert!(mirror.objects().rows().count() > 3);
    let verified = there.verify(&tell()).unwrap();
    assert_eq!((verified.releases, verified.flaws.len()), (2, 0));
    assert_eq!(verified.objects, names(&store, "objects").len());
    assert!(verified.bytes > 0);

    // A flipped bit of an object, a lost record, and a release that is another one.
    let listing = there.listing("m", 2).unwrap().unwrap();
    let object = listing
        .parts
        .iter()
        .find(|part| part.kind == PartKind::Object);
    let program = listing
        .parts
        .iter()
        .find(|part| part.kind == PartKind::Program);
    let (object, program) = (object.unwrap().path(), program.unwrap().path());
    let mut bytes = small(&carrier, &object, 1 << 20).unwrap().unwrap();
    bytes[20] ^= 1;
    let size = bytes.len() as u64;
    carrier
        .create(&object, &mut Cursor::new(&bytes), size, How::Any)
        .unwrap();
    carrier.delete(&program).unwrap();
    let flaws = there.verify(&tell()).unwrap().flaws;
    let found: Vec<&str> = flaws.iter().map(|flaw| &*flaw.name).collect();
    assert_eq!(found, [&*object, &*program]);
    assert_eq!(flaws[1].why, "it is missing");
    // Both releases need that program.
    let mirrored = there.mirror(&folder.path().join("n"), &tell()).unwrap();
    assert_eq!((mirrored.releases, mirrored.left_out.len()), (0, 2));
    // A connection that breaks is no flaw of a file.
    let cut = (0..40).map(|at| remote(faulty(memory(&store), Some(at), at)));
    let ended = cut.filter_map(|there| there.verify(&tell()).ok());
    for verified in ended {
        assert_eq!(verified.flaws, flaws);
    }
}

#[test]
fn gc_takes_what_no_release_needs_and_only_what_is_old() {
    let store = Arc::new(InMemory::new());
    let (carrier, there) = (memory(&store), remote(memory(&store)));
    let sources: Vec<_> = ["a", "b", "c"].into_iter().map(source).collect();
    for (_, from, release) in &sources {
        push(&there, from, release).unwrap();
    }
    let write = |name: &str, text: &[u8]| {
        let size = text.len() as u64;
        carrier
            .create(name, &mut Cursor::new(&text), size, How::Any)
            .unwrap();
    };
    write("README.md", b"of the user");
    write("objects/ab/abcd.zst", b"of a push that died");
    write("tmp/race-1", b"0");
    let before = names(&store, "");
    // Young, or only planned.
    let planned = gc(&there, 3600, Some(1)).unwrap();
    assert_eq!((planned.files.len(), planned.young), (0, 2));
    let planned = there.gc(0, None, false, &tell()).unwrap();
    assert_eq!(
        (planned.applied, planned.files),
        (false, vec!["objects/ab/abcd.zst".to_owned()])
    );
    assert_eq!(names(&store, ""), before);
    let done = gc(&there, 0, None).unwrap();
    assert!(done.applied && done.files == ["objects/ab/abcd.zst"] && done.bytes == 19);
    is_whole(&there);
    // Old releases, with what only they need.
    let done = gc(&there, 0, Some(2)).unwrap();
    assert_eq!((done.releases.len(), done.releases[0].seq), (1, 1));
    assert!(
        done.files[0].starts_with("releases/") && done.files.len() > 2,
        "{done:?}"
    );
    assert_eq!(there.numbers().unwrap()["m"], [2, 3].into());
    let kept = small(&carrier, "cache/releases.json", 1 << 20)
        .unwrap()
        .unwrap();
    assert!(String::from_utf8(kept).unwrap().contains("[2,3]"));
    is_whole(&there);
    assert_eq!(gc(&there, 0, Some(2)).unwrap().files, [""; 0]);
    // The next number is a new one.
    let (_, from, release) = &sources[0];
    assert_eq!(push(&there, from, release).unwrap().to, Some(4));
    is_whole(&there);
    assert!(names(&store, "").contains(&"README.md".to_owned()));
    assert_eq!(names(&store, "tmp"), ["tmp/race-1"]);
    // What a release needs is not known.
    carrier.delete("cache/listings/m/00000003.json").unwrap();
    let refused = gc(&there, 0, None).unwrap_err();
    assert!(matches!(refused, RemoteError::NoGc { .. }), "{refused}");
    let cut = remote(Lists(memory(&store)));
    let refused = gc(&cut, 0, None).unwrap_err();
    assert!(matches!(refused, RemoteError::NoGc { .. }), "{refused}");
    assert_eq!(names(&store, "tmp"), ["tmp/race-1"]);
}

/// A storage that does not say how old files are.
struct Lists(Storage);

impl Carrier for Lists {
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
        self.0.head(name)
    }
    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
        self.0.get(name)
    }
    fn create(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
        how: How,
    ) -> Result<bool, RemoteError> {
        self.0.create(name, from, bytes, how)
    }
    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
        self.0.list(folder)
    }
    fn delete(&self, name: &str) -> Result<(), RemoteError> {
        self.0.delete(name)
    }
}

#[test]
fn gc_keeps_what_a_push_is_about_to_publish() {
    let store = Arc::new(InMemory::new());
    let (carrier, there) = (memory(&store), remote(memory(&store)));
    let (_from, from, release) = source("a");
    push(&there, &from, &release).unwrap();
    let parts = there.listing("m", 1).unwrap().unwrap().parts;
    // The listing is there, and the release is not.
    carrier.delete("releases/m/00000001.json").unwrap();
    assert_eq!(gc(&there, 0, None).unwrap().files, [""; 0]);
    // Without a listing, young records keep what they refer to, however old.
    carrier.delete("cache/listings/m/00000001.json").unwrap();
    let of = |kind| {
        parts
            .iter()
            .filter(move |part| part.kind == kind)
            .map(ListedPart::path)
    };
    let objects = memory(&store).found("objects").unwrap().unwrap();
    let aged: Vec<&Found> = objects.iter().collect();
    assert_eq!(aged.len(), of(PartKind::Object).count());
    let mut needed = std::collections::BTreeSet::new();
    let young: Vec<String> = of(PartKind::Program).collect();
    let young: Vec<&str> = young.iter().map(String::as_str).collect();
    there.of_records(&young, &mut needed).unwrap();
    let weights = ListedPart::of(PartKind::Object, release.weights.unwrap()).path();
    let all = parts
        .iter()
        .map(ListedPart::path)
        .filter(|path| *path != weights);
    assert_eq!(needed, all.collect());
    let gone = gc(&there, 0, None).unwrap();
    assert_eq!(gone.files.len(), parts.len());
}

#[test]
fn a_push_sends_again_what_a_gc_took_before_its_listing() {
    let store = Arc::new(InMemory::new());
    let (_from, from, release) = source("a");
    push(&remote(memory(&store)), &from, &release).unwrap();
    forget(&store, 1);
    // The push has seen all of it, and a gc takes it before the listing is there.
    let hook = {
        let store = store.clone();
        move || {
            let done = gc(&remote(memory(&store)), 0, None).unwrap();
            assert!(done.files.len() > 5, "{done:?}");
        }
    };
    let there = remote(Hooked::new(memory(&store), "cache/listings", hook));
    let pushed = push(&there, &from, &release).unwrap();
    assert_eq!((pushed.published, pushed.plan.moves), (true, 0));
    is_whole(&remote(memory(&store)));
}

#[test]
fn a_gc_ends_where_a_push_has_come_since_its_plan() {
    let store = Arc::new(InMemory::new());
    let (_from, from, release) = source("a");
    push(&remote(memory(&store)), &from, &release).unwrap();
    forget(&store, 1);
    let hook = {
        let (store, from, release) = (store.clone(), from.clone(), release.clone());
        move || drop(push(&remote(memory(&store)), &from, &release).unwrap())
    };
    let there = remote(Hooked::new(memory(&store), "tmp/gc-", hook));
    let ended = gc(&there, 0, None).unwrap_err();
    assert!(
        ended.to_string().contains("another release has come"),
        "{ended}"
    );
    is_whole(&remote(memory(&store)));
    assert_eq!(names(&store, "tmp"), [""; 0]);
}

#[test]
fn pushes_and_gcs_at_once_leave_only_whole_releases() {
    const ROUNDS: u64 = 200;
    let sources: Vec<_> = ["a", "b"].into_iter().map(source).collect();
    let (mut taken, mut refused) = (0, 0);
    for round in 0..ROUNDS {
        let store = Arc::new(InMemory::new());
        for (_, from, release) in &sources {
            push(&remote(memory(&store)), from, release).unwrap();
        }
        // One of them, or both, have parts that nothing needs.
        forget(&store, 2);
        if round % 2 == 0 {
            forget(&store, 1);
        }
        let slow = |seed: u64| {
            let mut slow = Hooked::new(memory(&store), "", || {});
            slow.random = Some(Mutex::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1));
            remote(slow)
        };
        std::thread::scope(|scope| {
            let pushers = sources.iter().zip([1, 2]);
            let pushers = pushers.map(|((_, from, release), n)| {
                let there = slow(round * 4 + n);
                scope.spawn(move || {
                    // One that meets another's record, or a record whose object a gc took and its push sends again, is
                    // told so, and tries again.
                    let tries = (0..100).map(|_| {
                        let done = push(&there, from, release);
                        done.inspect_err(|_| std::thread::sleep(Duration::from_millis(20)))
                    });
                    let mut errors = Vec::new();
                    let done =
                        tries.map(|done| done.map_err(|error| errors.push(error.to_string())));
                    assert!(done.into_iter().any(|done| done.is_ok()), "{errors:?}");
                })
            });
            let pushers: Vec<_> = pushers.collect();
            let there = slow(round * 4);
            let gcs =
                scope.spawn(move || (0..3).map(|_| gc(&there, 0, Some(1))).collect::<Vec<_>>());
            for pusher in pushers {
                pusher.join().unwrap();
            }
            for gc in gcs.join().unwrap() {
                match gc {
                    Ok(gc) => taken += gc.files.len(),
                    Err(RemoteError::NoGc { .. }) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
        });
        // A pull reads the same files; a few have to do.
        let there = remote(memory(&store));
        match round % 20 {
            0 => is_whole(&there),
            _ => assert_eq!(there.verify(&tell()).unwrap().flaws, []),
        }
    }
    assert!(
        taken > 100 && refused > 0,
        "{taken} taken, {refused} refused"
    );
}

#[test]
fn one_call_pulls_a_model_and_a_lock_holds_its_release() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/models", folder.path().display());
    let (_from, from, release) = source("a");
    push(&Remote::open_to_write(&url).unwrap(), &from, &release).unwrap();
    let cache = folder.path().join("cache");
    let open = || Store::create(&cache).unwrap();
    let store = Remote::open(&url).unwrap().pull(&open(), "m@1").unwrap();
    assert_eq!(store.releases().newest("m").unwrap(), Some(1));
    let none = Remote::open(&url)
        .unwrap()
        .pull(&open(), "other")
        .err()
        .unwrap();
    assert!(matches!(none, RemoteError::NoRelease { .. }));
    let there = Remote::open(&url).unwrap();
    let listing = there.listing("m", 1).unwrap().unwrap();
    let (_to, to) = testing::store();
    let pull = |digest| there.pull_locked(&to, &listing, digest, false, &tell());
    let other = pull(Digest::of(b"other")).unwrap_err().to_string();
    let [found, locked] = [listing.identity(), Digest::of(b"other")];
    assert_eq!(
        other,
        format!("release 1 of `m` in `{url}` is {found}, and {locked} is locked")
    );
    assert!(to.releases().get("m", None).unwrap().is_none());
    assert!(pull(found).unwrap().published);
}
