//! The documents of a release in a registry: manifests, the index over them, and tags. No network here.
//!
//! ```text
//! tag minilm-r7 ─ index ─ manifest of a target ─ layers, each a file of the store with its name as title
//! ```
//!
//! | file | media type of its layer |
//! |---|---|
//! | `precast-store.json` | `application/vnd.precast.store.v1+json` |
//! | an object | `application/vnd.precast.object.v1`: the file of the store, which is zstd for the most part |
//! | the weights of the release | `application/vnd.cncf.model.weight.v1.raw`, that of ModelPack |
//! | the record of an artifact or a program | `application/vnd.precast.record.v1+json` |
//! | the listing | `application/vnd.precast.listing.v1+json` |
//! | the release | `application/vnd.precast.release.v1+json` |
//!
//! The content of a document may come from anywhere. A name is only ever looked up; it is no path of this machine. One that
//! could be a path elsewhere is refused all the same, as no push writes it.

use std::collections::BTreeMap;

use precast_store::{Digest, Target};
use serde::{Deserialize, Serialize};

use crate::error::RemoteError;

/// What a manifest or an index of ours says that it is.
pub const ARTIFACT: &str = "application/vnd.precast.release.v1";
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Maximum bytes of a document: what registries take, at least.
pub const LARGEST: usize = 4 << 20;
/// The content of the configuration that a manifest must have and a release does not.
pub const NO_CONFIG: &[u8] = b"{}";

const TITLE: &str = "org.opencontainers.image.title";
const MODEL: &str = "precast.model";
const RELEASE: &str = "precast.release";
const TARGET: &str = "precast.target";
/// Maximum number of manifests in an index.
const MOST_MANIFESTS: usize = 256;

/// What a registry keeps of a file: bytes by their digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    pub digest: Digest,
    pub bytes: u64,
}

impl Blob {
    pub fn of(content: &[u8]) -> Self {
        Self {
            digest: Digest::of(content),
            bytes: content.len() as u64,
        }
    }

    /// Returns the digest as registries write it.
    pub fn name(&self) -> String {
        name(&self.digest)
    }
}

/// Returns a digest as registries write it.
pub fn name(digest: &Digest) -> String {
    format!("sha256:{digest}")
}

/// Files by their names in a store.
pub type Files = BTreeMap<String, Blob>;

/// A document of a registry.
#[derive(Debug, PartialEq)]
pub enum Found {
    /// Something that precast did not write.
    Foreign,
    /// The manifests of a release.
    Index(Vec<Digest>),
    /// The files of a release for a target.
    Manifest(Files),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    schema_version: u32,
    media_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    artifact_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config: Option<Descriptor>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    layers: Option<Vec<Descriptor>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    artifact_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    platform: Option<Platform>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// As much of a document as tells whose it is.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kind {
    media_type: Option<String>,
    artifact_type: Option<String>,
}

/// Reads a document. `tag` is the tag that led to it, for errors.
pub fn parse(text: &[u8], tag: &str) -> Result<Found, RemoteError> {
    let kind: Kind = serde_json::from_slice(text)
        .map_err(|e| RemoteError::damaged(tag, format!("it is no document: {e}")))?;
    match kind.artifact_type.as_deref() {
        Some(ARTIFACT) => parse_own(text, tag),
        // Tools that copy an index leave out this field of a newer standard: its manifests tell whose it is.
        None if kind.media_type.as_deref() == Some(INDEX) => {
            Ok(parse_own(text, tag).unwrap_or(Found::Foreign))
        }
        _ => Ok(Found::Foreign),
    }
}

fn parse_own(text: &[u8], tag: &str) -> Result<Found, RemoteError> {
    let damaged = |why: String| RemoteError::damaged(tag, why);
    let document: Document = serde_json::from_slice(text).map_err(|e| damaged(e.to_string()))?;
    let digest = |of: &Descriptor| {
        let hex = of.digest.strip_prefix("sha256:");
        let digest = hex.and_then(|hex| hex.parse::<Digest>().ok());
        digest.ok_or_else(|| damaged(format!("`{}` is no SHA-256", shown(&of.digest))))
    };
    match (&*document.media_type, document.layers, document.manifests) {
        (INDEX, None, Some(manifests)) if manifests.len() <= MOST_MANIFESTS => {
            let mut digests = Vec::new();
            for entry in &manifests {
                match &*entry.media_type {
                    MANIFEST => digests.push(digest(entry)?),
                    INDEX => return Err(damaged("an index is in its index".to_owned())),
                    // What others add, such as signatures.
                    _ => {}
                }
            }
            Ok(Found::Index(digests))
        }
        (INDEX, None, Some(manifests)) => {
            Err(damaged(format!("it has {} manifests", manifests.len())))
        }
        (MANIFEST, Some(layers), None) => {
            let mut files = Files::new();
            for layer in &layers {
                let Some(title) = layer.annotations.get(TITLE) else {
                    continue;
                };
                if !is_safe(title) {
                    return Err(damaged(format!("a layer is named `{}`", shown(title))));
                }
                let blob = Blob {
                    digest: digest(layer)?,
                    bytes: layer.size,
                };
                add(&mut files, title, blob, tag)?;
            }
            Ok(Found::Manifest(files))
        }
        (other, ..) => Err(damaged(format!("it is no `{}`", shown(other)))),
    }
}

/// Adds a file. Fails if there is another one of its name.
pub fn add(files: &mut Files, name: &str, blob: Blob, tag: &str) -> Result<(), RemoteError> {
    match files.insert(name.to_owned(), blob) {
        Some(other) if other != blob => {
            let why = format!("two layers are named `{name}`, and differ");
            Err(RemoteError::damaged(tag, why))
        }
        _ => Ok(()),
    }
}

/// Returns whether a name can be that of a file in a store.
fn is_safe(name: &str) -> bool {
    let is_plain = |part: &str| !part.is_empty() && !part.starts_with('.');
    name.len() <= 512
        && name.split('/').all(is_plain)
        && name.chars().all(|c| !c.is_control() && c != '\\')
}

/// Returns the start of a text of somebody else.
fn shown(text: &str) -> String {
    text.chars()
        .take(100)
        .flat_map(char::escape_debug)
        .collect()
}

/// Returns the manifest of files. `weights` is the name of the one with the weights of the release.
pub fn manifest(files: &Files, weights: Option<&str>) -> Vec<u8> {
    let layers = files.iter().map(|(name, blob)| Descriptor {
        annotations: BTreeMap::from([(TITLE.to_owned(), name.clone())]),
        ..Descriptor::new(media_type(name, weights), *blob)
    });
    let empty = "application/vnd.oci.empty.v1+json";
    text(&Document {
        schema_version: 2,
        media_type: MANIFEST.to_owned(),
        artifact_type: Some(ARTIFACT.to_owned()),
        config: Some(Descriptor::new(empty, Blob::of(NO_CONFIG))),
        layers: Some(layers.collect()),
        manifests: None,
        annotations: BTreeMap::new(),
    })
}

fn media_type(name: &str, weights: Option<&str>) -> &'static str {
    match name.split('/').next() {
        _ if weights == Some(name) => "application/vnd.cncf.model.weight.v1.raw",
        Some("objects") => "application/vnd.precast.object.v1",
        Some("artifacts" | "programs") => "application/vnd.precast.record.v1+json",
        Some("cache") => "application/vnd.precast.listing.v1+json",
        Some("releases") => "application/vnd.precast.release.v1+json",
        _ => "application/vnd.precast.store.v1+json",
    }
}

/// Returns the index over the manifests of a release.
pub fn index(model: &str, seq: u64, manifests: &[(Option<&Target>, Blob)]) -> Vec<u8> {
    let manifests = manifests.iter().map(|(target, blob)| Descriptor {
        artifact_type: Some(ARTIFACT.to_owned()),
        platform: target.map(|target| Platform {
            architecture: architecture(&target.arch).to_owned(),
            os: target.os.clone(),
        }),
        annotations: target
            .map(|target| (TARGET.to_owned(), target.name()))
            .into_iter()
            .collect(),
        ..Descriptor::new(MANIFEST, *blob)
    });
    text(&Document {
        schema_version: 2,
        media_type: INDEX.to_owned(),
        artifact_type: Some(ARTIFACT.to_owned()),
        config: None,
        layers: None,
        manifests: Some(manifests.collect()),
        annotations: BTreeMap::from([
            (MODEL.to_owned(), model.to_owned()),
            (RELEASE.to_owned(), seq.to_string()),
        ]),
    })
}

impl Descriptor {
    fn new(media_type: &str, blob: Blob) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest: blob.name(),
            size: blob.bytes,
            artifact_type: None,
            platform: None,
            annotations: BTreeMap::new(),
        }
    }
}

fn text(document: &Document) -> Vec<u8> {
    serde_json::to_vec(document).unwrap_or_default()
}

/// Returns an architecture under the name that registries have for it.
fn architecture(rust: &str) -> &str {
    match rust {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails panics")]

    use serde_json::{Value, json};

    use super::*;

    const HEX: &str = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";

    fn good() -> Value {
        json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": ARTIFACT,
            "config": {"mediaType": "x/y", "digest": format!("sha256:{HEX}"), "size": 2},
            "layers": [{
                "mediaType": "x/y", "digest": format!("sha256:{HEX}"), "size": 2,
                "annotations": {TITLE: "objects/44/4413.zst", "added": "by a copy"},
            }],
        })
    }

    fn index_of(entries: Value) -> Value {
        json!({"schemaVersion": 2, "mediaType": INDEX, "artifactType": ARTIFACT, "manifests": entries})
    }

    fn parsed(document: &Value) -> Result<Found, RemoteError> {
        parse(document.to_string().as_bytes(), "m-r1")
    }

    #[test]
    fn what_is_written_is_read() {
        let blobs = [Blob::of(b"a"), Blob::of(b"bc")];
        let names = ["releases/m/00000001.json", "objects/61/6162.zst"];
        let files: Files = names.map(str::to_owned).into_iter().zip(blobs).collect();
        let first = manifest(&files, Some(names[1]));
        assert_eq!(parse(&first, "m-r1").unwrap(), Found::Manifest(files));
        let shown = String::from_utf8(first.clone()).unwrap();
        for (title, kind) in [
            (names[0], "application/vnd.precast.release.v1+json"),
            (names[1], "application/vnd.cncf.model.weight.v1.raw"),
        ] {
            let layer = shown.split("{\"mediaType\":").find(|it| it.contains(title));
            assert!(layer.unwrap().contains(kind), "{shown}");
        }
        let target = precast_store::testing::target();
        let first = Blob::of(&first);
        let text = index("m", 1, &[(Some(&target), first), (None, blobs[0])]);
        let digests = vec![first.digest, blobs[0].digest];
        assert_eq!(parse(&text, "m-r1").unwrap(), Found::Index(digests));
        let text = String::from_utf8(text).unwrap();
        assert!(
            text.contains("\"architecture\":\"amd64\",\"os\":\"linux\""),
            "{text}"
        );
    }

    #[test]
    fn what_is_wrong_is_an_error_that_names_it() {
        let layer = |field: &str, value: Value| {
            let mut document = good();
            document["layers"][0][field] = value;
            document
        };
        let titled = |title: &str| layer("annotations", json!({TITLE: title}));
        let mut twice = good();
        let mut other = twice["layers"][0].clone();
        other["size"] = json!(3);
        twice["layers"].as_array_mut().unwrap().push(other);
        let entry =
            |kind: &str| json!({"mediaType": kind, "digest": format!("sha256:{HEX}"), "size": 2});
        let cases = [
            (titled("../../x"), "a layer is named `../../x`"),
            (titled("/etc/passwd"), "a layer is named `/etc/passwd`"),
            (titled("objects/../../x"), "`objects/../../x`"),
            (titled("a\nb"), "`a\\nb`"),
            (titled(&"a/".repeat(100_000)), "a layer is named `a/a/"),
            (layer("size", json!(-1)), "integer `-1`"),
            (layer("size", json!(1e30)), "floating point"),
            (
                layer("digest", json!("sha256:44")),
                "`sha256:44` is no SHA-256",
            ),
            (
                layer("digest", json!(format!("sha512:{HEX}"))),
                "is no SHA-256",
            ),
            (
                layer("digest", json!(format!("sha256:{}", HEX.to_uppercase()))),
                "is no SHA-256",
            ),
            (twice, "two layers are named `objects/44/4413.zst`"),
            (index_of(json!([entry(INDEX)])), "an index is in its index"),
            (
                index_of(json!(vec![entry(MANIFEST); 257])),
                "it has 257 manifests",
            ),
            (index_of(json!({})), "invalid type: map"),
            (json!({"artifactType": ARTIFACT}), "missing field"),
            (json!([]), "invalid"),
        ];
        for (document, why) in cases {
            let error = parsed(&document).unwrap_err().to_string();
            assert!(
                error.starts_with("`m-r1` of the remote is damaged: "),
                "{error}"
            );
            assert!(error.contains(why) && error.len() < 300, "{error}");
        }
        for text in [&b""[..], b"\xff", b"{", &[b'['; 1000]] {
            assert!(matches!(
                parse(text, "m-r1"),
                Err(RemoteError::Damaged { .. })
            ));
        }
    }

    #[test]
    fn changed_documents_end_in_a_result() {
        let good = good().to_string().into_bytes();
        let mut random = 1u64;
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..3 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let at = (random >> 33) as usize % bad.len();
                bad[at] = (random >> 20) as u8;
            }
            if let Ok(Found::Manifest(files)) = parse(&bad, "m-r1") {
                assert!(files.keys().all(|name| is_safe(name)));
            }
        }
    }

    #[test]
    fn what_others_wrote_is_foreign_and_what_they_added_is_left_out() {
        let mut image = good();
        image["artifactType"] = json!("application/vnd.other");
        assert_eq!(parsed(&image).unwrap(), Found::Foreign);
        image.as_object_mut().unwrap().remove("artifactType");
        assert_eq!(parsed(&image).unwrap(), Found::Foreign);
        let mut untitled = good();
        untitled["layers"][0]["annotations"] = json!({});
        assert_eq!(parsed(&untitled).unwrap(), Found::Manifest(Files::new()));
        let signature = json!({"mediaType": "x/y", "digest": "?", "size": 2});
        let mut only = index_of(json!([signature]));
        assert_eq!(parsed(&only).unwrap(), Found::Index(vec![]));
        // As `skopeo` copies it.
        only.as_object_mut().unwrap().remove("artifactType");
        assert_eq!(parsed(&only).unwrap(), Found::Index(vec![]));
        only["manifests"] = json!(7);
        assert_eq!(parsed(&only).unwrap(), Found::Foreign);
    }
}
