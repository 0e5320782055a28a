//! Releases in a registry, which is honest or not.

use std::{collections::BTreeMap, fs, io::Cursor, path::PathBuf};

use serde_json::{Value, json};

use super::*;

/// A registry whose files can be changed: see `tests/registry.py`.
struct Registry {
    folder: TempDir,
    server: Server,
}

impl Registry {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(include_str!("../../tests/registry.py"), folder.path());
        Self { folder, server }
    }

    fn url(&self, tag: &str) -> String {
        format!("oci://{}/models{tag}", self.server.host)
    }

    fn to_write(&self) -> Remote {
        Remote::open_to_write(&self.url("")).unwrap()
    }

    fn pull(&self, tag: &str) -> Result<(TempDir, Store, Moved), RemoteError> {
        let (dir, to) = testing::store();
        let moved = pull(&Remote::open(&self.url(tag))?, &to, None)?;
        is_sound(&to);
        Ok((dir, to, moved))
    }

    fn document(&self, name: &str) -> PathBuf {
        self.folder.path().join("documents").join(name)
    }

    fn read(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.document(name)).unwrap()).unwrap()
    }

    fn write(&self, name: &str, document: &Value) {
        fs::write(self.document(name), document.to_string()).unwrap();
    }

    /// Returns how many requests begin with this text.
    fn requests(&self, start: &str) -> usize {
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap();
        log.lines().filter(|line| line.starts_with(start)).count()
    }
}

#[test]
fn a_release_goes_to_a_registry_and_comes_back() {
    let registry = Registry::new();
    let there = registry.to_write();
    let (_from, from, first) = source("a");
    let pushed = push(&there, &from, &first).unwrap();
    assert_eq!(
        (pushed.to, pushed.published, pushed.refuses_twice),
        (Some(1), true, Some(false))
    );
    let again = push(&registry.to_write(), &from, &first).unwrap();
    assert_eq!(
        (again.to, again.published, again.plan.moves),
        (Some(1), false, 0)
    );
    // Nothing but the files of the release, and one tag.
    let (_dir, to, pulled) = registry.pull("").unwrap();
    assert_eq!(
        (pulled.from, pulled.identity, pulled.identity_there),
        (1, pushed.identity, pushed.identity)
    );
    assert_eq!(
        to.releases().at("m", 1).unwrap().unwrap().weights,
        first.weights
    );
    let parts = from.releases().listing(&first).unwrap().parts;
    let blobs = fs::read_dir(registry.folder.path().join("blobs")).unwrap();
    // With the marker, the listing, the release, and the empty configuration.
    assert_eq!(blobs.count(), parts.len() + 4);
    let index = registry.read("m-r1");
    let manifest = registry.read(index["manifests"][0]["digest"].as_str().unwrap());
    let titles: BTreeMap<&str, &Value> = (manifest["layers"].as_array().unwrap().iter())
        .map(|layer| {
            (
                layer["annotations"]["org.opencontainers.image.title"]
                    .as_str()
                    .unwrap(),
                layer,
            )
        })
        .collect();
    assert_eq!(titles.len(), parts.len() + 3);
    for part in &parts {
        let content = fs::read(from.path().join(part.path())).unwrap();
        let layer = titles[&*part.path()];
        assert_eq!(layer["digest"], format!("sha256:{}", Digest::of(&content)));
        assert_eq!(layer["size"], part.bytes);
        let is_weights = layer["mediaType"] == "application/vnd.cncf.model.weight.v1.raw";
        assert_eq!(is_weights, first.weights == Some(part.id));
    }
    // The names of others are no releases.
    registry.write("latest", &json!({"schemaVersion": 2}));
    registry.write(
        "other-r9",
        &json!({"schemaVersion": 2, "artifactType": "x/y"}),
    );
    registry.pull("").unwrap();
    let foreign = registry.pull(":latest").err().unwrap().to_string();
    assert!(
        foreign.contains("its tag `latest` is of something else"),
        "{foreign}"
    );
    let nothing = registry.pull(":none").err().unwrap();
    assert!(
        matches!(nothing, RemoteError::NotARemote { .. }),
        "{nothing}"
    );
}

#[test]
fn a_tag_of_the_url_follows_pushes_and_shows_one_release() {
    let registry = Registry::new();
    let (_from, from, first) = source("a");
    let (_b, b, second) = source("b");
    let tagged = || Remote::open_to_write(&registry.url(":prod")).unwrap();
    assert_eq!(push(&tagged(), &from, &first).unwrap().to, Some(1));
    assert_eq!(push(&registry.to_write(), &b, &second).unwrap().to, Some(2));
    assert_eq!(registry.pull("").unwrap().2.from, 2);
    assert_eq!(registry.pull(":prod").unwrap().2.from, 1);
    let one = Remote::open(&registry.url(":prod")).unwrap();
    assert_eq!(
        one.numbers().unwrap(),
        [("m".to_owned(), [1].into())].into()
    );
    assert!(!push(&tagged(), &b, &second).unwrap().published);
    assert_eq!(registry.pull(":prod").unwrap().2.from, 2);
    // Not the tag of a release, nor that of something else.
    let taken = Remote::open_to_write(&registry.url(":m-r1")).err().unwrap();
    assert!(taken.to_string().contains("that of a release"), "{taken}");
    registry.write("web", &json!({"schemaVersion": 2}));
    let foreign = Remote::open_to_write(&registry.url(":web")).err().unwrap();
    assert!(
        foreign.to_string().contains("of something else"),
        "{foreign}"
    );
    // A copy has lost the fields of a newer standard.
    let mut copy = registry.read("m-r1");
    copy.as_object_mut().unwrap().remove("artifactType");
    copy["manifests"][0]
        .as_object_mut()
        .unwrap()
        .remove("artifactType");
    registry.write("copy", &copy);
    registry.write(
        "one",
        &registry.read(copy["manifests"][0]["digest"].as_str().unwrap()),
    );
    assert_eq!(registry.pull(":copy").unwrap().2.from, 1);
    assert_eq!(registry.pull(":one").unwrap().2.from, 1);
}

#[test]
fn a_release_for_two_targets_has_two_manifests() {
    let registry = Registry::new();
    let (_dir, from) = testing::store();
    let [shared, own] = ["shared", "own"].map(|name| put_artifact(&from, name));
    let first = put_program(&from, "m", 1, &[shared.id]);
    let mut second = testing::program("m", 2, &[shared.id, own.id]);
    second.target.arch = "aarch64".into();
    let second = from.records().put_program(&second).unwrap();
    let release = testing::release("m", None, &[first.id, second.id]);
    let release = from.releases().put(&release).unwrap().0;
    push(&registry.to_write(), &from, &release).unwrap();
    registry.pull("").unwrap();
    let index = registry.read("m-r1");
    let of = |at: usize| {
        let entry = &index["manifests"][at];
        let manifest = registry.read(entry["digest"].as_str().unwrap()).to_string();
        let has = |kind, id| manifest.contains(&precast_store::ListedPart::of(kind, id).path());
        let programs = [first.id, second.id].map(|id| has(PartKind::Program, id));
        let artifacts = [shared.id, own.id].map(|id| has(PartKind::Artifact, id));
        (
            entry["platform"]["architecture"].clone(),
            programs,
            artifacts,
        )
    };
    assert_eq!(of(0), (json!("amd64"), [true, false], [true, false]));
    assert_eq!(of(1), (json!("arm64"), [false, true], [true, true]));
}

#[test]
fn a_push_that_died_at_any_call_shows_nothing_and_its_blobs_are_not_sent_again() {
    let (_from, from, release) = source("a");
    let open = |registry: &Registry| Oci::open(&registry.url(""), true, false).unwrap();
    let mut ended = false;
    for at in (0..400).step_by(7) {
        let registry = Registry::new();
        let first = push(
            &remote(faulty(open(&registry), Some(at), at)),
            &from,
            &release,
        );
        if registry.to_write().numbers().unwrap().is_empty() {
            assert!(first.is_err());
        } else {
            registry.pull("").unwrap();
        }
        let sent = || registry.requests("PUT /v2/models/blobs/");
        let before = fs::read_dir(registry.folder.path().join("blobs"))
            .unwrap()
            .count();
        let (put, _) = (sent(), push(&registry.to_write(), &from, &release).unwrap());
        let blobs = fs::read_dir(registry.folder.path().join("blobs"))
            .unwrap()
            .count();
        assert_eq!(sent() - put, blobs - before, "at {at}");
        registry.pull("").unwrap();
        if first.is_ok() {
            ended = true;
            break;
        }
    }
    assert!(ended, "no push came to its end");
}

/// A file that became shorter after it was hashed.
struct Short(Cursor<Vec<u8>>, Digest);

impl Read for Short {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Source for Short {
    fn digest(&mut self) -> io::Result<Digest> {
        Ok(self.1)
    }

    fn rewind(&mut self) -> io::Result<()> {
        self.0.set_position(0);
        Ok(())
    }
}

#[test]
fn a_large_blob_is_sent_once_and_what_a_registry_has_lost_is_sent_again() {
    let registry = Registry::new();
    let oci = Oci::open(&registry.url(""), true, false).unwrap();
    let bytes: Vec<u8> = (0..20u32 << 20)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let (name, size) = ("objects/large", bytes.len() as u64);
    for _ in 0..2 {
        // One that ends early is not there.
        let mut short = Short(Cursor::new(bytes[..9 << 20].to_vec()), Digest::of(&bytes));
        let short = oci.create(name, &mut short, size, How::Content);
        assert!(matches!(short, Err(RemoteError::Read { .. })));
    }
    let create = |oci: &Oci| oci.create(name, &mut Cursor::new(&bytes), size, How::Content);
    assert!(create(&oci).unwrap());
    assert!(!create(&oci).unwrap());
    let mut body = oci.get(name).unwrap().unwrap();
    let read = Digest::of_reader(&mut body.read).unwrap();
    assert_eq!(read, (Digest::of(&bytes), size));
    // It goes on where it broke off, until nothing more comes.
    let cut = registry.folder.path().join("cut");
    for (after, good) in [("8000000", true), ("0", false)] {
        fs::write(&cut, after).unwrap();
        let mut body = oci.get(name).unwrap().unwrap();
        let again = Digest::of_reader(&mut body.read);
        assert_eq!(again.ok(), good.then_some(read));
    }
    assert!(registry.requests(&format!("GET /v2/models/blobs/sha256:{}", read.0)) >= 1 + 3 + 6);
    fs::remove_file(cut).unwrap();
    let other = Oci::open(&registry.url(""), true, false).unwrap();
    assert!(create(&other).unwrap());
    assert_eq!(registry.requests("PUT /v2/models/blobs/uploads/1?"), 3);
    // Of a release.
    let (_from, from, release) = source("a");
    push(&registry.to_write(), &from, &release).unwrap();
    let part = from.releases().listing(&release).unwrap().parts[0].path();
    let digest = Digest::of(&fs::read(from.path().join(&part)).unwrap());
    fs::remove_file(registry.folder.path().join("blobs").join(digest.hex())).unwrap();
    let lost = registry.pull("").err().unwrap().to_string();
    assert_eq!(
        lost,
        format!("`{part}` of the remote is damaged: it is missing")
    );
    let again = push(&registry.to_write(), &from, &release).unwrap();
    assert_eq!((again.published, again.plan.moves), (false, 1));
    registry.pull("").unwrap();
}

#[test]
fn what_a_registry_refuses_for_a_while_is_asked_for_again() {
    let registry = Registry::new();
    let (_from, from, release) = source("a");
    for (busy, good) in [("2", true), ("1000", false)] {
        fs::write(registry.folder.path().join("busy"), busy).unwrap();
        let there = Remote::open_to_write(&registry.url("")).unwrap();
        let pushed = push(&there, &from, &release);
        assert_eq!(pushed.is_ok(), good, "{pushed:?}");
        if let Err(error) = pushed {
            assert!(error.to_string().contains("503"), "{error}");
        }
    }
}

#[test]
fn a_registry_that_lies_is_an_error_that_names_what_is_wrong() {
    let registry = Registry::new();
    let (_from, from, release) = source("a");
    push(&registry.to_write(), &from, &release).unwrap();
    let index = registry.read("m-r1");
    let digest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    let manifest = registry.read(&digest);
    let refused = |why: &str| {
        for tag in ["", ":m-r1"] {
            let error = registry.pull(tag).err().unwrap().to_string();
            assert!(error.contains(why) && error.len() < 400, "{why}: {error}");
        }
    };
    // Puts another manifest into the index.
    let with = |change: &dyn Fn(&mut Value)| {
        let mut manifest = manifest.clone();
        change(&mut manifest);
        let text = manifest.to_string();
        let name = format!("sha256:{}", Digest::of(text.as_bytes()));
        registry.write(&name, &manifest);
        let mut index = index.clone();
        index["manifests"][0]["digest"] = json!(name);
        registry.write("m-r1", &index);
    };
    let title = "org.opencontainers.image.title";
    with(&|manifest| manifest["layers"][0]["annotations"][title] = json!("../../x"));
    refused("`m-r1` of the remote is damaged: a layer is named `../../x`");
    with(&|manifest| manifest["layers"][0]["size"] = json!(1u64 << 60));
    refused("its manifest says 1152921504606846976 bytes, and it has");
    with(&|manifest| {
        manifest["layers"][0]["digest"] = json!(format!("sha256:{}", Digest::of(b"")))
    });
    refused("it is missing");
    with(&|manifest| {
        let layer = manifest["layers"][0].clone();
        manifest["layers"] = json!(vec![layer; 40_000]);
    });
    refused("it has more than 4194304 bytes");
    with(&|manifest| *manifest = index.clone());
    refused("an index is in its index");
    // An index that says that it is in itself, which no digest can.
    let mut own = index.clone();
    own["manifests"][0]["digest"] = json!(format!("sha256:{}", "0".repeat(64)));
    registry.write("m-r1", &own);
    registry.write(&format!("sha256:{}", "0".repeat(64)), &own);
    refused("its content has another digest");
    registry.write(
        "m-r1",
        &json!({"artifactType": index["artifactType"], "manifests": "x".repeat(5 << 20)}),
    );
    refused("it has more than 4194304 bytes");
    fs::write(registry.document("m-r1"), "<html>").unwrap();
    refused("it is no document");
    registry.write("m-r1", &index);
    registry.pull("").unwrap();
    // A blob with other bytes.
    let part = manifest["layers"][0]["digest"]
        .as_str()
        .unwrap()
        .replace("sha256:", "");
    let path = registry.folder.path().join("blobs").join(part);
    let mut bytes = fs::read(&path).unwrap();
    bytes[0] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert!(registry.pull("").is_err());
    // A damaged release of another model is in nobody's way.
    bytes[0] ^= 1;
    fs::write(&path, &bytes).unwrap();
    fs::write(registry.document("a-r1"), "<html>").unwrap();
    registry.pull("").unwrap();
    let (_b, b, second) = source("b");
    assert_eq!(push(&registry.to_write(), &b, &second).unwrap().to, Some(2));
}

#[test]
fn a_release_is_deleted_by_its_tag_where_the_registry_deletes() {
    let registry = Registry::new();
    let (_from, from, release) = source("a");
    push(&registry.to_write(), &from, &release).unwrap();
    let oci = Oci::open(&registry.url(""), true, false).unwrap();
    let part = from.releases().listing(&release).unwrap().parts[0].path();
    let used = oci.delete(&part).unwrap_err().to_string();
    assert!(
        used.contains("a release has it: delete the releases"),
        "{used}"
    );
    assert!(oci.delete("objects/none").is_ok());
    let path = precast_store::release_path("m", 1).unwrap();
    fs::write(registry.folder.path().join("keeps"), "").unwrap();
    let kept = oci.delete(&path).unwrap_err().to_string();
    assert!(kept.contains("allow it there"), "{kept}");
    fs::remove_file(registry.folder.path().join("keeps")).unwrap();
    for _ in 0..2 {
        oci.delete(&path).unwrap();
    }
    assert_eq!(oci.list("releases").unwrap().unwrap(), [""; 0]);
    assert!(Remote::open(&registry.url("")).is_err());
}

#[test]
fn two_records_of_one_key_are_each_those_of_their_release() {
    let registry = Registry::new();
    let (_a, a, first) = source("a");
    let (_b, b, second) = source("b");
    let one = push(&registry.to_write(), &a, &first).unwrap();
    // As if both had been pushed at once: the second push does not see the first release.
    let index = registry.read("m-r1");
    registry.write("m-r1", &json!({"schemaVersion": 2}));
    let two = push(&registry.to_write(), &b, &second).unwrap();
    registry.write("m-r1", &index);
    assert_eq!((one.to, two.to), (Some(1), Some(2)));
    let there = Remote::open(&registry.url("")).unwrap();
    for (which, pushed) in [("2", &two), ("1", &one), ("2", &two)] {
        let (_to, to) = testing::store();
        let pulled = pull(&there, &to, Some(which)).unwrap();
        assert_eq!(
            (pulled.identity, pulled.identity_there),
            (pushed.identity, pushed.identity)
        );
        is_sound(&to);
    }
    // A third release takes one of the two records, and not a mixture.
    let (_c, c, third) = source("c");
    let pushed = push(&registry.to_write(), &c, &third).unwrap();
    let (_, _, pulled) = registry.pull("").unwrap();
    assert_eq!((pulled.from, pulled.identity), (3, pushed.identity_there));
}
