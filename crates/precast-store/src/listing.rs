//! Listings: the manifest of a release with sizes, as a document that travels before the release.
//!
//! ```text
//! {"schema":1,"model":"minilm","targets":[…],"parts":[{"kind":"object","id":"3f…","digest":"3f…","bytes":812,"content":4096},…],
//!  "release":{…}}
//! ```
//!
//! Another store needs to know what it will get before it asks for the first byte: how much it is, whether this host can
//! run it, and how long a file may be. A file is named by its kind and ID, never by a path: the listing may come from
//! anywhere.
//!
//! [`Listing::identity`] is the same for equal releases of any two stores: their numbers and sizes are no part of it.
//!
//! Two builds of one key differ in bytes (times of compiles, for one), and the first record in a store stays. So a release
//! that moves to a store with builds of its own may have another identity there; who moves it compares the two.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{
    canon,
    checksum::{self, Record},
    error::{At, StoreError},
    layout::{Kind, StoreLayout, check_name, name_of},
    object,
    objects::Objects,
    records::Records,
    releases::{Releases, sequence},
};
use crate::{
    Digest, Target,
    record::{Artifact, Program, Release, SCHEMA},
};

/// Maximum bytes of a listing. One of 100,000 parts has 30 MB.
const LIMIT: usize = 256 << 20;

const TOO_LARGE: &str = "its file is larger than the listing says";

/// What a part of a release is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartKind {
    /// Content by its digest.
    Object,
    /// The record of an artifact.
    Artifact,
    /// The record of a program.
    Program,
}

/// A part of a release that is not the release itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListedPart {
    /// What it is.
    pub kind: PartKind,
    /// Digest of an object's content, or the key of a record.
    pub id: Digest,
    /// Digest of an object's content, or of a record's line.
    pub digest: Digest,
    /// Size of its file.
    pub bytes: u64,
    /// Size of an object's content, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<u64>,
}

/// What a record refers to directly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Digests of objects.
    pub objects: Vec<Digest>,
    /// Keys of artifacts.
    pub artifacts: Vec<Digest>,
}

impl ListedPart {
    /// Returns a part of unknown size, to name its file.
    pub fn of(kind: PartKind, id: Digest) -> Self {
        Self {
            kind,
            id,
            digest: id,
            bytes: 0,
            content: None,
        }
    }

    /// Returns the part for a record whose file has these bytes, and what it refers to. Fails if it is no such record.
    pub fn of_record(
        kind: PartKind,
        id: Digest,
        text: &[u8],
    ) -> Result<(Self, References), StoreError> {
        let mut part = Self::of(kind, id);
        part.bytes = text.len() as u64;
        let place = PathBuf::from(part.path());
        let mut references = References::default();
        let (found, checksum) = match kind {
            PartKind::Object => return Err(other(&place)),
            PartKind::Artifact => {
                let (artifact, checksum) = decode::<Artifact>(text, &place)?;
                references.objects = artifact.objects();
                (artifact.id, checksum)
            }
            PartKind::Program => {
                let (program, checksum) = decode::<Program>(text, &place)?;
                check_name(&program.model).map_err(|e| StoreError::Record {
                    path: place.clone(),
                    why: e.to_string(),
                })?;
                references.artifacts = program.artifacts();
                (program.id, checksum)
            }
        };
        if found != id {
            return Err(other(&place));
        }
        part.digest = checksum;
        Ok((part, references))
    }

    /// Returns the program whose record has these bytes.
    pub fn program(&self, text: &[u8]) -> Result<Program, StoreError> {
        Ok(checksum::decode(text, &PathBuf::from(self.path()))?.0)
    }

    /// Fails if these are not the bytes of the listed record.
    pub fn check_record(&self, text: &[u8]) -> Result<References, StoreError> {
        let (found, needs) = Self::of_record(self.kind, self.id, text)?;
        if found.digest != self.digest {
            return Err(other(&PathBuf::from(self.path())));
        }
        Ok(needs)
    }

    /// Checks every byte of an object of another store, whose file has `bytes` bytes, without keeping it.
    pub fn check_object(&self, from: &mut dyn Read, bytes: u64) -> Result<(), StoreError> {
        let place = PathBuf::from(self.path());
        if bytes > self.most().1 {
            return Err(object::damaged(&self.id, &place, TOO_LARGE));
        }
        object::check_stream(from, bytes, self.content, &self.id, &place).map(drop)
    }

    /// Returns the most bytes of an object's content, and of its file.
    fn most(&self) -> (u64, u64) {
        // Zeros become a thousandth and less; what is more than that says so in the listing.
        let most = self.bytes.saturating_mul(1024).saturating_add(1 << 30);
        let content = self.content.unwrap_or(most);
        // Another store may have written the same content in another form: compressed or not.
        let limit = content.saturating_add(content / 16).saturating_add(1 << 20);
        (content, limit.max(self.bytes))
    }

    /// Returns the path of its file in a store, with `/` between the names.
    pub fn path(&self) -> String {
        let path = match self.kind {
            PartKind::Object => StoreLayout::object_name(&self.id),
            PartKind::Artifact => StoreLayout::record_name(Kind::Artifact, &self.id),
            PartKind::Program => StoreLayout::record_name(Kind::Program, &self.id),
        };
        path.to_string_lossy().into_owned()
    }
}

/// Everything that a release consists of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listing {
    /// Version of this form.
    pub schema: u32,
    /// Name of the model.
    pub model: String,
    /// Hosts that its programs run on.
    pub targets: Vec<Target>,
    /// All parts. A part comes after everything that it refers to.
    pub parts: Vec<ListedPart>,
    /// The release, with its number in the store that the listing is for.
    pub release: Release,
}

impl Listing {
    /// Reads a listing. `path` is its place, for errors.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self, StoreError> {
        let wrong = |why: String| StoreError::Record {
            path: path.to_owned(),
            why,
        };
        if text.len() > LIMIT {
            return Err(wrong("it is larger than any listing".to_owned()));
        }
        let listing: Self = serde_json::from_slice(text).map_err(|e| wrong(e.to_string()))?;
        if listing.schema > SCHEMA {
            return Err(StoreError::Newer {
                path: path.to_owned(),
                found: listing.schema.into(),
                known: SCHEMA.into(),
            });
        }
        if listing.model != listing.release.model {
            return Err(wrong(format!(
                "it lists a release of `{}`",
                listing.release.model
            )));
        }
        Ok(listing)
    }

    /// Returns the bytes of its file.
    pub fn text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec(self).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// Returns the digest that equal releases have in common.
    pub fn identity(&self) -> Digest {
        let parts = self.parts.iter();
        // Without their order, which depends on the records that a store has.
        let parts: BTreeMap<_, _> = parts.map(|part| (part.path(), part.digest.hex())).collect();
        let mut release = json!(self.release);
        if let Some(fields) = release.as_object_mut() {
            // What belongs to one store.
            for name in ["schema", "seq", "rollback", "provenance"] {
                fields.remove(name);
            }
            // Packages lie elsewhere on each machine.
            if let Some(entry) = fields.get_mut("entry").and_then(|it| it.as_object_mut()) {
                entry.remove("site_packages");
            }
        }
        canon::digest(&json!({"parts": parts, "release": release}))
    }

    /// Fails if these are not the bytes of the file of its release.
    pub fn check_release(&self, text: &[u8]) -> Result<(), StoreError> {
        let place = PathBuf::from(release_path(&self.model, self.release.seq)?);
        let (release, _) = decode::<Release>(text, &place)?;
        if release != self.release || !is_foreign_number(release.seq) {
            return Err(other(&place));
        }
        Ok(())
    }

    /// Returns the size of all files.
    pub fn bytes(&self) -> u64 {
        self.parts
            .iter()
            .fold(0, |sum: u64, part| sum.saturating_add(part.bytes))
    }
}

/// Returns the path of a listing in a store, with `/` between the names: what is lost there is computed again.
pub fn listing_path(model: &str, seq: u64) -> Result<String, StoreError> {
    Ok(format!("cache/listings/{}", in_model(model, seq)?))
}

/// Returns the path of a release in a store, with `/` between the names.
pub fn release_path(model: &str, seq: u64) -> Result<String, StoreError> {
    Ok(format!("releases/{}", in_model(model, seq)?))
}

/// Returns whether a release of another store may have this number: after it there must be room for many of this one.
pub fn is_foreign_number(seq: u64) -> bool {
    (1..=u32::MAX.into()).contains(&seq)
}

/// Returns model and number of the release at a path in a store; none for other paths.
pub fn release_at(path: &str) -> Option<(String, u64)> {
    let (model, file) = path.strip_prefix("releases/")?.split_once('/')?;
    Some((name_of(model)?, sequence(file)?))
}

fn in_model(model: &str, seq: u64) -> Result<String, StoreError> {
    let layout = StoreLayout::nowhere();
    let path = layout.release(model, seq)?;
    let path = path.strip_prefix("releases").unwrap_or(&path);
    Ok(path.to_string_lossy().into_owned())
}

impl Releases {
    /// Returns the listing of a release. Fails if a part is missing.
    pub fn listing(&self, release: &Release) -> Result<Listing, StoreError> {
        let manifest = self.manifest(release)?;
        let (mut parts, mut targets) = (Vec::new(), Vec::<Target>::new());
        let size = |path: &Path| Ok::<_, StoreError>(fs::metadata(path).at("look at", path)?.len());
        for id in manifest.objects() {
            parts.push(self.records.objects.listed(&id)?);
        }
        let records = [
            (Kind::Artifact, PartKind::Artifact),
            (Kind::Program, PartKind::Program),
        ];
        for (kind, listed) in records {
            for (id, digest) in manifest.checksums(kind) {
                let bytes = size(&self.base().layout.record(kind, &id))?;
                parts.push(ListedPart {
                    kind: listed,
                    id,
                    digest,
                    bytes,
                    content: None,
                });
            }
        }
        for id in &release.programs {
            let program = self.records.program(id)?;
            let target = program.map(|program| program.target);
            targets.extend(target.filter(|target| !targets.contains(target)));
        }
        Ok(Listing {
            schema: SCHEMA,
            model: release.model.clone(),
            targets,
            parts,
            release: release.clone(),
        })
    }

    /// Returns the bytes of a release's file under another number, as another store would write them. A rollback names
    /// a number of this store, so it is left out.
    pub fn renumbered(
        &self,
        release: &Release,
        seq: u64,
    ) -> Result<(Release, Vec<u8>), StoreError> {
        let release = Release {
            seq,
            rollback: None,
            ..release.clone()
        };
        let path = self.base().layout.release(&release.model, seq)?;
        let (text, _) = checksum::encode(&release, &path)?;
        Ok((release, text))
    }

    /// Publishes a release of another store, whose parts have been received, under its own number. Fails if another
    /// release has that number. Returns its listing in this store.
    pub fn receive(&self, text: &[u8], listing: &Listing) -> Result<Listing, StoreError> {
        listing.check_release(text)?;
        self.put_numbered(&listing.release)?;
        self.listing(&listing.release)
    }
}

impl Records {
    /// Publishes the record of another store, whose file has these bytes. Everything that it refers to must be in this
    /// store. An earlier record of the same key stays.
    pub fn receive(&self, part: &ListedPart, text: &[u8]) -> Result<(), StoreError> {
        let place = PathBuf::from(part.path());
        part.check_record(text)?;
        match part.kind {
            PartKind::Artifact => {
                let artifact = decode::<Artifact>(text, &place)?.0;
                let (mut file, path) = object::open(&self.base().layout, &artifact.object)?;
                let size = object::head(&mut file, &artifact.object, &path)?.size;
                if size != artifact.size {
                    let says = artifact.size;
                    return Err(StoreError::Record {
                        path: place,
                        why: format!("it says that its object has {says} bytes, which has {size}"),
                    });
                }
                self.put_artifact(&artifact)?;
            }
            _ => {
                self.put_program(&decode::<Program>(text, &place)?.0)?;
            }
        }
        Ok(())
    }

    /// Returns whether this store has a part of a listing: the same content, or a record with this key.
    pub fn has_part(&self, part: &ListedPart) -> Result<bool, StoreError> {
        match part.kind {
            PartKind::Object => self.objects.has_sound(&part.id),
            PartKind::Artifact => self.has_artifact(&part.id),
            PartKind::Program => self.has_program(&part.id),
        }
    }
}

impl Objects {
    /// Returns an object with its sizes. Fails if it is missing.
    pub fn listed(&self, id: &Digest) -> Result<ListedPart, StoreError> {
        let (mut file, path) = object::open(&self.base().layout, id)?;
        let head = object::head(&mut file, id, &path)?;
        Ok(ListedPart {
            bytes: head.stored,
            content: Some(head.size),
            ..ListedPart::of(PartKind::Object, *id)
        })
    }

    /// Stores an object of another store, whose file `from` reads, unless this store has it. No more than the listed bytes are read, and every
    /// byte is checked before the object is visible.
    pub fn receive(&self, part: &ListedPart, from: &mut dyn Read) -> Result<(), StoreError> {
        if self.present(&part.id)? {
            return Ok(());
        }
        let place = PathBuf::from(part.path());
        let (content, limit) = part.most();
        let mut pending = self.leases().pending_file()?;
        let mut file = io::BufWriter::with_capacity(1 << 18, pending.file());
        let mut start = object::Tee::new((&mut *from).take(content));
        let read = io::copy(&mut start, &mut file).at("receive", &place)?;
        let arrived = start.digest();
        let rest = limit.saturating_add(1) - read;
        let read = read + io::copy(&mut from.take(rest), &mut file).at("receive", &place)?;
        file.flush().at("receive", &place)?;
        drop(file);
        if read > limit {
            return Err(object::damaged(&part.id, &place, TOO_LARGE));
        }
        self.publish_copy(pending, &part.id, Some(content), Some(arrived), &place)
    }
}

/// Checks and parses the bytes of another store's record, which no newer precast may have written.
fn decode<R: Record>(text: &[u8], place: &Path) -> Result<(R, Digest), StoreError> {
    let (record, checksum) = checksum::decode::<R>(text, place)?;
    if record.schema() > SCHEMA {
        return Err(StoreError::Newer {
            path: place.to_owned(),
            found: record.schema().into(),
            known: SCHEMA.into(),
        });
    }
    Ok((record, checksum))
}

/// Returns the error for a record that is not the listed one.
fn other(place: &Path) -> StoreError {
    StoreError::Record {
        path: place.to_owned(),
        why: "it is another record than was listed".to_owned(),
    }
}
