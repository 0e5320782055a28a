//! A registry: releases as OCI artifacts, `oci://HOST/REPOSITORY[:TAG]`.
//!
//! A registry keeps blobs by their digest and documents by tags, and has no files with names. So a release is an index under a
//! tag of its own, as `minilm-r7`, with a manifest for each target, whose layers are the files of the store byte for byte,
//! each with its name as title ([`documents`]). Any tool that copies an index copies a release.
//!
//! - **A push** sends blobs, and keeps in mind which file each is. The file of the release comes last: with it come the
//!   manifests, then the index under the tag, which makes the release visible. Blobs that a push left which died are found
//!   by their digest.
//! - **A pull** finds files in the manifests of releases: first in the release that it asked for last, as two releases can
//!   have two records of one key, then in the others.
//! - **A tag in the URL**: a pull sees the one release that it names, a push moves it to its release. So a copy under another
//!   tag is pulled, and a deployment can follow a tag.
//!
//! **Not promised**: a registry creates no tag only if there is none. A push looks, writes, and reads again; two at once can
//! take one number, and the last one stays. A push to a new repository says so.

mod blob;
mod documents;
mod login;
mod refusal;
mod registry;
mod releases;
mod tags;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use oci_client::Reference;
use precast_store::{
    Digest, ListedPart, Listing, PartKind, Target, listing_path, release_at, release_path,
};
use serde::Deserialize;

use self::{
    documents::{Blob, Files, Found},
    registry::Registry,
    releases::{Named, Releases},
};
use crate::{
    carrier::{Body, Carrier, How, LARGEST, MARKER, Source, small},
    error::RemoteError,
    work,
};

/// A repository of a registry.
pub struct Oci {
    releases: Releases,
    /// The tag of the URL.
    tag: Option<String>,
    /// Whether it is opened to push. Otherwise a tag of the URL shows its release alone.
    writes: bool,
    coming: Mutex<Coming>,
}

/// What a push knows of its release.
#[derive(Default)]
struct Coming {
    /// Files that were sent, and files that were found in other releases: what was seen once is what the release has.
    files: Files,
    listing: Option<Listing>,
}

/// The parts of a release that a target needs.
type OfTarget<'a> = (Option<&'a Target>, Vec<&'a ListedPart>);

impl Oci {
    /// Opens the repository of a URL, to read or to push. A `local` registry is one of this machine, without TLS.
    pub fn open(url: &str, local: bool, reads: bool) -> Result<Self, RemoteError> {
        let wrong = |why: String| RemoteError::Url {
            url: url.to_owned(),
            why,
        };
        let (at, tag) = parse(url).map_err(wrong)?;
        if !reads && tag.as_deref().and_then(tags::release_of).is_some() {
            return Err(wrong(
                "its tag is that of a release, which a push gives itself".to_owned(),
            ));
        }
        let oci = Self {
            releases: Releases::new(Registry::open(at, local, !reads)?),
            tag,
            writes: !reads,
            coming: Mutex::default(),
        };
        if let Some(tag) = &oci.tag
            && matches!(oci.releases.read(tag)?, Named::Foreign)
        {
            return Err(wrong(format!("its tag `{tag}` is of something else")));
        }
        Ok(oci)
    }

    fn registry(&self) -> &Registry {
        &self.releases.registry
    }

    fn coming(&self) -> MutexGuard<'_, Coming> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the release that the tag of the URL names is the only one.
    fn is_one(&self) -> bool {
        self.tag.is_some() && !self.writes
    }

    /// Finds a file: that of a release and its listing under the tag of the release as it is now, others in what was read.
    fn find(&self, name: &str) -> Result<Option<Blob>, RemoteError> {
        if self.is_one() {
            return Ok(self.releases.find(name));
        }
        if let Some((model, seq)) = numbered(name) {
            return Ok(match self.releases.read(&tags::tag_of(&model, seq)?)? {
                Named::Release(release) => release.files.get(name).copied(),
                Named::Nothing | Named::Foreign => None,
            });
        }
        let coming = self.coming().files.get(name).copied();
        if coming.is_some() {
            return Ok(coming);
        }
        let mut found = self.releases.find(name);
        if found.is_none() {
            match name {
                MARKER => self.releases.read_one_with(name)?,
                _ => self.releases.read_all()?,
            }
            found = self.releases.find(name);
        }
        if let Some(blob) = found
            && self.writes
        {
            self.coming().files.insert(name.to_owned(), blob);
        }
        Ok(found)
    }

    /// Writes the manifests of a release, and its tag.
    fn publish(&self, model: &str, seq: u64) -> Result<(), RemoteError> {
        let (listed, own) = (listing_path(model, seq)?, release_path(model, seq)?);
        let listing = self.coming().listing.take();
        let listing = listing.filter(|it| it.model == model && it.release.seq == seq);
        let listing = listing.ok_or_else(|| lost(&listed))?;
        let weights = listing.release.weights;
        let weights = weights.map(|id| ListedPart::of(PartKind::Object, id).path());
        let nothing = "the configuration";
        self.registry().put_small(nothing, documents::NO_CONFIG)?;
        let mut manifests = Vec::new();
        for (target, parts) in self.by_target(&listing)? {
            let mut files = Files::new();
            for name in [MARKER, &listed, &own] {
                let blob = self.coming().files.get(name).copied();
                files.insert(name.to_owned(), blob.ok_or_else(|| lost(name))?);
            }
            for part in parts {
                let name = part.path();
                let blob = self.find(&name)?.ok_or_else(|| lost(&name))?;
                files.insert(name, blob);
            }
            let text = documents::manifest(&files, weights.as_deref());
            if text.len() > documents::LARGEST {
                return Err(RemoteError::Storage {
                    what: "publish a release of",
                    name: model.to_owned(),
                    why: format!(
                        "its manifest has {} bytes, and registries take 4 MiB",
                        text.len()
                    ),
                });
            }
            let blob = Blob::of(&text);
            (self.registry()).put_document(&blob.name(), documents::MANIFEST, &text)?;
            manifests.push((target, blob));
        }
        let index = documents::index(model, seq, &manifests);
        let tag = tags::tag_of(model, seq)?;
        (self.registry()).put_document(&tag, documents::INDEX, &index)
    }

    /// Returns the parts of a release for each of its targets. Those of the release itself are for all.
    fn by_target<'a>(&self, listing: &'a Listing) -> Result<Vec<OfTarget<'a>>, RemoteError> {
        #[derive(Deserialize)]
        struct Targeted {
            target: Target,
        }
        if listing.targets.len() < 2 {
            let all = listing.parts.iter().collect();
            return Ok(vec![(listing.targets.first(), all)]);
        }
        let records = listing
            .parts
            .iter()
            .filter(|part| part.kind != PartKind::Object);
        let records: Vec<&ListedPart> = records.collect();
        let read = work::all(&records, work::SMALL, |part| {
            let text = small(self, &part.path(), LARGEST)?;
            let text = text.ok_or_else(|| lost(&part.path()))?;
            let (_, needs) = ListedPart::of_record(part.kind, part.id, &text)?;
            let mut lines = serde_json::Deserializer::from_slice(&text).into_iter::<Targeted>();
            let target = lines.next().and_then(Result::ok).map(|it| it.target);
            Ok((part.id, (needs, target)))
        })?;
        let read: BTreeMap<_, _> = read.into_iter().collect();
        let needs = |id: &Digest| read.get(id).map(|(needs, _)| needs);
        let of_target = |target: &'a Target| {
            let mut wanted: BTreeSet<Digest> = listing.release.objects().into_iter().collect();
            for program in &listing.release.programs {
                let its = read.get(program).and_then(|(_, its)| its.as_ref());
                if its != Some(target) {
                    continue;
                }
                wanted.insert(*program);
                for artifact in needs(program).iter().flat_map(|needs| &needs.artifacts) {
                    wanted.insert(*artifact);
                    wanted.extend(needs(artifact).iter().flat_map(|needs| &needs.objects));
                }
            }
            let parts = listing
                .parts
                .iter()
                .filter(|part| wanted.contains(&part.id));
            (Some(target), parts.collect())
        };
        Ok(listing.targets.iter().map(of_target).collect())
    }
}

impl Carrier for Oci {
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
        let Some(blob) = self.find(name)? else {
            return Ok(None);
        };
        let has = self.registry().has(name, &blob)?;
        Ok(has.then_some(blob.bytes))
    }

    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
        match self.find(name)? {
            Some(blob) => self.registry().open_blob(name, &blob),
            None => Ok(None),
        }
    }

    fn create(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
        how: How,
    ) -> Result<bool, RemoteError> {
        match numbered(name) {
            // Whatever has the tag keeps it.
            Some((model, seq)) => {
                let tag = tags::tag_of(&model, seq)?;
                if !matches!(self.releases.read(&tag)?, Named::Nothing) {
                    return Ok(false);
                }
            }
            None if how != How::Any && self.head(name)?.is_some() => return Ok(false),
            None => {}
        }
        let wrong = |source| RemoteError::Read {
            name: name.to_owned(),
            source,
        };
        let blob = if how == How::Content {
            let digest = from.digest().map_err(wrong)?;
            let blob = Blob { digest, bytes };
            // From a push that died.
            if !self.registry().has(name, &blob)? {
                self.registry().put(name, &blob, from)?;
            }
            blob
        } else {
            if bytes > LARGEST {
                return Err(RemoteError::damaged(name, format!("it has {bytes} bytes")));
            }
            let mut content = Vec::new();
            let read = from.take(bytes).read_to_end(&mut content);
            read.map_err(wrong)?;
            if name.starts_with(LISTINGS) {
                self.coming().listing = Some(Listing::parse(&content, Path::new(name))?);
            }
            self.registry().put_small(name, &content)?
        };
        self.coming().files.insert(name.to_owned(), blob);
        if let Some((model, seq)) = release_at(name) {
            self.publish(&model, seq)?;
        }
        Ok(true)
    }

    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
        if self.is_one() {
            return Ok(Some(self.releases.names(folder)));
        }
        if folder == "releases" {
            let tags = self.releases.tags()?.into_iter();
            let releases = tags.filter_map(|tag| tags::release_of(&tag));
            let names = releases.filter_map(|(model, seq)| release_path(&model, seq).ok());
            return Ok(Some(names.collect()));
        }
        self.releases.read_all()?;
        Ok(Some(self.releases.names(folder)))
    }

    fn delete(&self, name: &str) -> Result<(), RemoteError> {
        if let Some((model, seq)) = release_at(name) {
            let tag = tags::tag_of(&model, seq)?;
            self.registry().delete(&tag)?;
            self.releases.forget(&tag);
            return Ok(());
        }
        self.coming().files.remove(name);
        if self.find(name)?.is_none() {
            return Ok(());
        }
        Err(RemoteError::Storage {
            what: "delete",
            name: name.to_owned(),
            why: "a release has it: delete the releases, and the registry's own cleaning removes their files".to_owned(),
        })
    }

    fn refuses_twice(&self) -> Option<bool> {
        Some(false)
    }

    fn is_folder(&self) -> bool {
        false
    }

    /// Moves the tag of the URL to the release.
    fn finish(&self, release: Option<&str>) -> Result<(), RemoteError> {
        let (Some(tag), Some((model, seq))) = (&self.tag, release.and_then(release_at)) else {
            return Ok(());
        };
        let own = tags::tag_of(&model, seq)?;
        let text = self.registry().document(&own)?.ok_or_else(|| lost(&own))?;
        if self.registry().document(tag)?.as_ref() == Some(&text) {
            return Ok(());
        }
        let media_type = match documents::parse(&text, &own)? {
            Found::Manifest(_) => documents::MANIFEST,
            _ => documents::INDEX,
        };
        self.registry().put_document(tag, media_type, &text)
    }
}

const LISTINGS: &str = "cache/listings/";

/// Returns model and number of the release whose file or listing this is; none for other files.
fn numbered(name: &str) -> Option<(String, u64)> {
    let listed = name.strip_prefix(LISTINGS);
    let listed = listed.map(|rest| format!("releases/{rest}"));
    release_at(listed.as_deref().unwrap_or(name))
}

fn lost(name: &str) -> RemoteError {
    RemoteError::Lost {
        name: name.to_owned(),
    }
}

/// Returns the repository of a URL, and its tag; else what is wrong.
fn parse(url: &str) -> Result<(Reference, Option<String>), String> {
    let rest = url.strip_prefix("oci://").unwrap_or(url);
    let Some((host, path)) = rest.split_once('/') else {
        return Err("it names no repository: `oci://HOST/REPOSITORY`".to_owned());
    };
    if path.contains('@') {
        return Err("it has a digest: name a tag".to_owned());
    }
    let (repository, tag) = match path.rsplit_once(':') {
        Some((repository, tag)) => (repository, Some(tag.to_owned())),
        None => (path.trim_end_matches('/'), None),
    };
    let whole = format!("{host}/{repository}:{}", tag.as_deref().unwrap_or("latest"));
    let at: Reference = whole.parse().map_err(|e| format!("{e}"))?;
    // Docker reads such a host as a part of a repository of its own registry.
    if at.registry() != host {
        return Err(format!(
            "`{host}` is no host of a registry: it has no dot and no port"
        ));
    }
    Ok((at, tag))
}
