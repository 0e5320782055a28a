//! Gc of a remote: files go that no release needs, and that are older than a grace time.
//!
//! | goes | when it is older than the grace time, and |
//! |---|---|
//! | a release | there are as many newer whole ones of its model as are to be kept |
//! | an object or a record | no release needs it, no young record refers to it, and no push is about to publish it |
//! | a listing | it has no release, and is older than a day: its push died |
//! | a file in `tmp/`, `leases/` | it is older than a day |
//!
//! Other files are not precast's and stay. Age is by the clock of the storage. Nothing is deleted while the plan is out
//! of date: releases and listings are listed again just before, and a new one ends it. How a push and a gc see each
//! other is in [`marks`](crate::marks).

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use precast_store::{
    Digest, ListedPart, Listing, PartKind, References, listing_path, release_path,
    transfer::{GoneRelease, RemoteGc},
};

use crate::{
    carrier::{Found, LARGEST, small},
    error::RemoteError,
    event::Tell,
    marks::Mark,
    remote::{Numbers, Remote, foreign},
    work,
};

/// What gc looks at, in the order of the deletion: nothing that is there refers to what is gone.
const FOLDERS: [&str; 7] = [
    "releases/",
    "cache/listings/",
    "programs/",
    "artifacts/",
    "objects/",
    "leases/",
    "tmp/",
];
const RELEASES: usize = 0;
const LISTINGS: usize = 1;
const LEASES: usize = 5;
const TMP: usize = 6;
/// The age up to which a listing without a release, a lease or a temporary file may be of a process that goes on, in
/// seconds.
const LIVE: i64 = 24 * 60 * 60;

/// What goes, and what a gc relies on.
struct Plan {
    gc: RemoteGc,
    /// The files of all releases and listings when the plan was made.
    seen: BTreeSet<String>,
}

impl Remote {
    /// Deletes what no release needs and is `grace` seconds old, and with `keep` all but so many of the newest whole
    /// releases of each model. Without `apply` nothing is deleted.
    pub fn gc(
        &self,
        grace: i64,
        keep: Option<usize>,
        apply: bool,
        tell: &Tell<'_>,
    ) -> Result<RemoteGc, RemoteError> {
        // Where nothing says how old it is, nothing is written for a clock either.
        let Plan { mut gc, mut seen } = self.plan(local_now(), grace, keep)?;
        if apply && !gc.files.is_empty() {
            Plan { gc, seen } = self.plan(self.clock()?, grace, keep)?;
        }
        if !apply || gc.files.is_empty() {
            return Ok(gc);
        }
        let mark = Mark::put(self, gc.files.clone())?;
        let done = self.sweep(&gc.files, &seen, &mark, tell);
        let ended = mark.end(self);
        let kept = if gc.releases.is_empty() {
            Ok(())
        } else {
            self.keep_numbers()
        };
        done?;
        ended?;
        kept?;
        gc.applied = true;
        Ok(gc)
    }

    fn plan(&self, now: i64, grace: i64, keep: Option<usize>) -> Result<Plan, RemoteError> {
        let found = self.carrier.found("")?.ok_or_else(|| RemoteError::NoGc {
            url: self.url.clone(),
            why: "this storage does not say how old its files are".to_owned(),
            hint: "use the rules of the storage itself, as a registry's retention",
        })?;
        let mut gc = RemoteGc {
            before: total(&found),
            ..RemoteGc::default()
        };
        let ours = found
            .into_iter()
            .filter(|one| rank(&one.name) < FOLDERS.len());
        let files = Files {
            all: ours.map(|one| (one.name.clone(), one)).collect(),
            now,
            grace,
        };
        let numbers = self.numbers()?;
        let mut gone = BTreeSet::new();
        for (model, seq) in self.outdated(&numbers, keep)? {
            let path = release_path(&model, seq)?;
            if files.is_old(&path) {
                gone.insert(listing_path(&model, seq)?);
                gone.insert(path);
                gc.releases.push(GoneRelease { model, seq });
            }
        }
        let mut needed = self.of_releases(&numbers, &gone)?;
        self.of_pushes(&files, &gone, &mut needed)?;
        let names = files.all.keys().map(String::as_str);
        let young: Vec<&str> = names.filter(|name| !files.is_old(name)).collect();
        self.of_records(&young, &mut needed)?;
        let left = files.all.values().filter(|one| !needed.contains(&one.name));
        // A release that is not to go is needed, or none of ours.
        let (mut going, young): (Vec<Found>, Vec<Found>) = left.cloned().partition(|one| {
            gone.contains(&one.name) || (rank(&one.name) != RELEASES && files.is_old(&one.name))
        });
        going.sort_by_key(|one| (rank(&one.name), one.name.clone()));
        gc.young = young.len();
        gc.bytes = total(&going);
        gc.files = going.into_iter().map(|one| one.name).collect();
        let seen = files.all.into_keys().filter(|name| rank(name) <= LISTINGS);
        Ok(Plan {
            seen: seen.collect(),
            gc,
        })
    }

    /// Returns the files that releases need, but those of releases that go.
    fn of_releases(
        &self,
        numbers: &Numbers,
        gone: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, RemoteError> {
        let (mut needed, mut kept) = (BTreeSet::new(), Vec::new());
        for (model, numbers) in numbers {
            for seq in numbers {
                if !gone.contains(&listing_path(model, *seq)?) {
                    kept.push((model, *seq));
                }
            }
        }
        for group in kept.chunks(work::SMALL) {
            let read = |(model, seq): &(&String, u64)| self.listing(model, *seq);
            let listings = work::all(group, work::SMALL, read)?;
            for ((model, seq), listing) in group.iter().zip(listings) {
                let listing = listing.ok_or_else(|| RemoteError::NoGc {
                    url: self.url.clone(),
                    why: format!("release {seq} of `{model}` is there without its listing"),
                    hint: "push the release again from a store that has it, or delete its file",
                })?;
                needed.extend(listing.parts.iter().map(ListedPart::path));
                needed.extend([listing_path(model, *seq)?, release_path(model, *seq)?]);
            }
        }
        Ok(needed)
    }

    /// Adds the files of releases that are about to be published: their listings are there.
    fn of_pushes(
        &self,
        files: &Files,
        gone: &BTreeSet<String>,
        needed: &mut BTreeSet<String>,
    ) -> Result<(), RemoteError> {
        for name in files.all.keys() {
            let is_known = needed.contains(name) || gone.contains(name);
            if rank(name) != LISTINGS || is_known || files.is_old(name) {
                continue;
            }
            if let Some(text) = small(&*self.carrier, name, LARGEST)? {
                let listing = Listing::parse(&text, Path::new(name)).map_err(foreign)?;
                needed.extend(listing.parts.iter().map(ListedPart::path));
                needed.insert(name.clone());
            }
        }
        Ok(())
    }

    /// Returns the releases with enough newer whole ones of their models.
    fn outdated(
        &self,
        numbers: &Numbers,
        keep: Option<usize>,
    ) -> Result<Vec<(String, u64)>, RemoteError> {
        let mut outdated = Vec::new();
        let Some(keep) = keep else {
            return Ok(outdated);
        };
        for (model, numbers) in numbers {
            let mut whole = 0;
            for seq in numbers.iter().rev() {
                if whole >= keep.max(1) {
                    outdated.push((model.clone(), *seq));
                    continue;
                }
                let listing = self.listing(model, *seq)?;
                if listing.is_some_and(|listing| !listing.release.is_partial()) {
                    whole += 1;
                }
            }
        }
        Ok(outdated)
    }

    /// Adds what the records among these files refer to, and the records: they may be of a release that comes.
    pub(crate) fn of_records(
        &self,
        young: &[&str],
        needed: &mut BTreeSet<String>,
    ) -> Result<(), RemoteError> {
        // What is needed has come with all that it refers to.
        let unknown = |folder: &str| -> BTreeSet<Digest> {
            let names = young.iter().filter(|name| name.starts_with(folder));
            names
                .filter(|name| !needed.contains(**name))
                .filter_map(|name| id(name))
                .collect()
        };
        let (programs, mut artifacts) = (unknown("programs/"), unknown("artifacts/"));
        for (path, to) in self.references(PartKind::Program, &programs)? {
            needed.insert(path);
            artifacts.extend(to.artifacts);
        }
        artifacts.retain(|id| !needed.contains(&ListedPart::of(PartKind::Artifact, *id).path()));
        for (path, to) in self.references(PartKind::Artifact, &artifacts)? {
            needed.insert(path);
            let objects = to.objects.into_iter();
            needed.extend(objects.map(|id| ListedPart::of(PartKind::Object, id).path()));
        }
        Ok(())
    }

    /// Returns what records refer to. One that can't be read is of no use to anybody, and left out.
    fn references(
        &self,
        kind: PartKind,
        ids: &BTreeSet<Digest>,
    ) -> Result<Vec<(String, References)>, RemoteError> {
        let ids: Vec<Digest> = ids.iter().copied().collect();
        let found = work::all(&ids, work::SMALL, |id| {
            let path = ListedPart::of(kind, *id).path();
            let text = small(&*self.carrier, &path, LARGEST)?;
            let read = text.and_then(|text| ListedPart::of_record(kind, *id, &text).ok());
            Ok(read.map(|(_, to)| (path, to)))
        })?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Deletes files, unless a release or a listing is new.
    fn sweep(
        &self,
        files: &[String],
        seen: &BTreeSet<String>,
        mark: &Mark,
        tell: &Tell<'_>,
    ) -> Result<(), RemoteError> {
        /// Files between two looks at the time.
        const SOME: usize = 64;
        let stop = |why: &str| RemoteError::NoGc {
            url: self.url.clone(),
            why: why.to_owned(),
            hint: "run it again",
        };
        for folder in &FOLDERS[..2] {
            let now = self
                .carrier
                .list(folder.trim_end_matches('/'))?
                .unwrap_or_default();
            if now.iter().any(|name| !seen.contains(name)) {
                return Err(stop("another release has come since the plan was made"));
            }
        }
        for kind in files.chunk_by(|a, b| rank(a) == rank(b)) {
            for some in kind.chunks(SOME) {
                if mark.is_late() {
                    return Err(stop(
                        "it took too long, and the plan is old; the rest is left",
                    ));
                }
                tell.go_on()?;
                work::all(some, work::SMALL, |name| self.carrier.delete(name))?;
            }
        }
        Ok(())
    }
}

/// The files that gc looks at.
struct Files {
    all: BTreeMap<String, Found>,
    now: i64,
    grace: i64,
}

impl Files {
    /// Returns whether a file is old enough to go.
    fn is_old(&self, name: &str) -> bool {
        let age = match rank(name) {
            LISTINGS | LEASES | TMP => self.grace.max(LIVE),
            _ => self.grace,
        };
        let file = self.all.get(name);
        file.is_some_and(|file| self.now - file.modified >= age)
    }
}

fn total(files: &[Found]) -> u64 {
    files
        .iter()
        .map(|one| one.bytes)
        .fold(0, u64::saturating_add)
}

/// Returns the place of a file's folder in the order of the deletion.
fn rank(name: &str) -> usize {
    let mut folders = FOLDERS.iter();
    folders
        .position(|folder| name.starts_with(folder))
        .unwrap_or(FOLDERS.len())
}

/// Returns the key in the name of a record's file.
fn id(name: &str) -> Option<Digest> {
    name.rsplit('/').next()?.strip_suffix(".json")?.parse().ok()
}

/// Returns the time by the clock of this machine: good enough for a plan that deletes nothing.
fn local_now() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX))
}
