//! A remote: releases at a place, under the names that they have in a store.
//!
//! ```text
//! precast-store.json                       marks it, with the version of its layout
//! objects/3f/3f9c….zst  artifacts/…  programs/…   as in a store, byte for byte
//! cache/listings/MODEL/00000007.json       what a release consists of, with sizes: written before the release
//! releases/MODEL/00000007.json             the release: it is there when this file is
//! cache/releases.json                      the numbers of all releases, for storage without lists
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Cursor,
    path::Path,
};

use precast_store::{
    ListedPart, Listing, StoreError, Target, listing_path, marker, release_path,
    target::{DeviceKind, Torch},
    transfer::Flaw,
};
use serde::{Deserialize, Serialize};

use crate::{
    carrier::{Carrier, How, LARGEST, MARKER, small},
    error::RemoteError,
    place::{self, For},
    work,
};

const NUMBERS: &str = "cache/releases.json";

/// The numbers of all releases, by model.
pub type Numbers = BTreeMap<String, BTreeSet<u64>>;

/// The list of releases as a file.
#[derive(Serialize, Deserialize)]
struct Kept {
    schema: u32,
    models: Numbers,
}

/// Releases at a place.
pub struct Remote {
    pub(crate) url: String,
    pub(crate) carrier: Box<dyn Carrier>,
}

impl Remote {
    /// Opens a remote to read it.
    pub fn open(url: &str) -> Result<Self, RemoteError> {
        let remote = Self {
            url: url.to_owned(),
            carrier: place::open(url, For::Reading)?,
        };
        if remote.is_new()? {
            return Err(RemoteError::NotARemote {
                url: url.to_owned(),
            });
        }
        Ok(remote)
    }

    /// Opens a remote to push to it. It may be empty.
    pub fn open_to_write(url: &str) -> Result<Self, RemoteError> {
        Ok(Self {
            url: url.to_owned(),
            carrier: place::open(url, For::Writing)?,
        })
    }

    /// Opens a remote to see what a push would do: read only, and it may be empty.
    pub fn open_if_there(url: &str) -> Result<Self, RemoteError> {
        Ok(Self {
            url: url.to_owned(),
            carrier: place::open(url, For::Looking)?,
        })
    }

    /// Returns whether nothing was pushed there yet. Fails if a newer precast wrote it.
    pub(crate) fn is_new(&self) -> Result<bool, RemoteError> {
        let Some(text) = small(&*self.carrier, MARKER, 1 << 16)? else {
            return Ok(true);
        };
        match marker::layout(&text) {
            None => Err(RemoteError::damaged(MARKER, "it is no marker of a store")),
            Some(found) if found > marker::LAYOUT => Err(RemoteError::Newer {
                url: self.url.clone(),
                found,
                known: marker::LAYOUT,
            }),
            Some(_) => Ok(false),
        }
    }

    /// Marks an empty place as a remote.
    pub(crate) fn mark(&self) -> Result<(), RemoteError> {
        let text = marker::text();
        let bytes = text.len() as u64;
        let mut from = Cursor::new(text);
        (self.carrier)
            .create(MARKER, &mut from, bytes, How::New)
            .map(|_| ())
    }

    /// Returns the numbers of all releases, by model: from the storage, or from the list that a push left where the
    /// storage has no lists.
    pub fn numbers(&self) -> Result<Numbers, RemoteError> {
        if let Some(names) = self.carrier.list("releases")? {
            let mut numbers = Numbers::new();
            for name in names {
                if let Some((model, seq)) = precast_store::release_at(&name)
                    && precast_store::is_foreign_number(seq)
                {
                    numbers.entry(model).or_default().insert(seq);
                }
            }
            return Ok(numbers);
        }
        self.kept()
    }

    /// Returns what the list of releases says.
    pub(crate) fn kept(&self) -> Result<Numbers, RemoteError> {
        let Some(text) = small(&*self.carrier, NUMBERS, LARGEST)? else {
            return Ok(Numbers::new());
        };
        let kept: Kept = serde_json::from_slice(&text)
            .map_err(|e| RemoteError::damaged(NUMBERS, e.to_string()))?;
        let mut models = kept.models;
        for numbers in models.values_mut() {
            numbers.retain(|seq| precast_store::is_foreign_number(*seq));
        }
        Ok(models)
    }

    /// Writes the list of releases where it does not say what the storage does. Others push too, so it looks again.
    pub(crate) fn keep_numbers(&self) -> Result<(), RemoteError> {
        const TRIES: usize = 8;
        // Nobody reads one there, unless a folder was copied with its list.
        if !self.carrier.is_folder() && self.carrier.head(NUMBERS)?.is_none() {
            return Ok(());
        }
        let mut models = self.numbers()?;
        for _ in 0..TRIES {
            // One that can't be read is written again.
            if self.kept().is_ok_and(|kept| kept == models) {
                break;
            }
            let mut text = serde_json::to_vec(&Kept {
                schema: 1,
                models: models.clone(),
            })
            .unwrap_or_default();
            text.push(b'\n');
            let bytes = text.len() as u64;
            (self.carrier).create(NUMBERS, &mut Cursor::new(text), bytes, How::Any)?;
            models = self.numbers()?;
        }
        Ok(())
    }

    /// Returns the listing of a release.
    pub fn listing(&self, model: &str, seq: u64) -> Result<Option<Listing>, RemoteError> {
        let name = listing_path(model, seq)?;
        let Some(text) = small(&*self.carrier, &name, LARGEST)? else {
            return Ok(None);
        };
        let listing = Listing::parse(&text, Path::new(&name)).map_err(foreign)?;
        if listing.model != model || listing.release.seq != seq {
            return Err(RemoteError::damaged(&name, "it is of another release"));
        }
        Ok(Some(listing))
    }

    /// Returns the bytes of a release's file.
    pub(crate) fn release(&self, model: &str, seq: u64) -> Result<Option<Vec<u8>>, RemoteError> {
        small(&*self.carrier, &release_path(model, seq)?, LARGEST)
    }

    /// Returns the models and numbers of all releases in groups, which are read at once and held at once.
    pub(crate) fn groups(&self) -> Result<Vec<Vec<(String, u64)>>, RemoteError> {
        let all = self.numbers()?.into_iter();
        let all = all
            .flat_map(|(model, numbers)| numbers.into_iter().map(move |seq| (model.clone(), seq)));
        let all: Vec<(String, u64)> = all.collect();
        Ok(all.chunks(work::SMALL).map(<[_]>::to_vec).collect())
    }

    /// Returns the listings of releases with the bytes of the releases' files, or what is wrong with one of them.
    pub(crate) fn whole(&self, releases: &[(String, u64)]) -> Result<Vec<Whole>, RemoteError> {
        work::all(releases, work::SMALL, |(model, seq)| {
            let lacks = |name, why: &str| {
                let why = why.to_owned();
                Ok(Err(Flaw { name, why }))
            };
            let read = || {
                let listing = self.listing(model, *seq)?;
                let text = self.release(model, *seq)?;
                if let (Some(listing), Some(text)) = (&listing, &text) {
                    listing.check_release(text).map_err(foreign)?;
                }
                Ok((listing, text))
            };
            match read() {
                Ok((Some(listing), Some(text))) => Ok(Ok((listing, text))),
                Ok((None, _)) => lacks(listing_path(model, *seq)?, "it is missing"),
                Ok((_, None)) => lacks(release_path(model, *seq)?, "it is missing"),
                Err(RemoteError::Damaged { name, why }) => lacks(name, &why),
                Err(error) => Err(error),
            }
        })
    }

    /// Finds a release of a model: number or name `which`, or the newest whole one that is wanted.
    pub fn find(
        &self,
        model: &str,
        which: Option<&str>,
        wanted: &Wanted,
    ) -> Result<Listing, RemoteError> {
        let none = |what: String| RemoteError::NoRelease {
            url: self.url.clone(),
            what,
        };
        let numbers = self.numbers()?.remove(model).unwrap_or_default();
        let asked: Option<u64> = which.and_then(|which| which.parse().ok());
        let mut unfit = None;
        for seq in numbers.into_iter().rev() {
            if asked.is_some_and(|asked| asked != seq) {
                continue;
            }
            let Some(listing) = self.listing(model, seq)? else {
                if asked.is_some() || which.is_none() {
                    return Err(RemoteError::damaged(
                        &listing_path(model, seq)?,
                        "the release is there without its listing",
                    ));
                }
                continue;
            };
            let is_other = match which {
                _ if asked.is_some() => false,
                _ if listing.release.is_partial() => true,
                Some(name) => listing.release.name.as_deref() != Some(name),
                None => false,
            };
            if is_other {
                continue;
            }
            match wanted.misfit(&listing) {
                None => return Ok(listing),
                Some(why) => unfit = unfit.or(Some(format!("release {seq} {why}"))),
            }
        }
        Err(match (unfit, which) {
            (Some(why), _) => RemoteError::Unfit {
                model: model.to_owned(),
                why,
            },
            (None, Some(which)) => none(format!("release `{which}` of `{model}`")),
            (None, None) => none(format!("release of `{model}`")),
        })
    }

    /// Returns the sizes of files, none for those that are not there.
    pub(crate) fn heads(&self, names: &[String]) -> Result<Vec<Option<u64>>, RemoteError> {
        work::all(names, work::SMALL, |name| self.carrier.head(name))
    }

    /// Reads the records of some parts, those that are there.
    pub(crate) fn records(
        &self,
        wanted: &[&ListedPart],
    ) -> Result<Vec<Option<Vec<u8>>>, RemoteError> {
        work::all(wanted, work::SMALL, |part| {
            small(&*self.carrier, &part.path(), part.bytes)
        })
    }
}

/// A release: its listing and the bytes of its file.
pub(crate) type Whole = Result<(Listing, Vec<u8>), Flaw>;

/// Which releases are of use.
#[derive(Debug)]
pub enum Wanted {
    /// All.
    Any,
    /// Those that a host can run that is one of these.
    Hosts(Vec<Target>),
    /// Those for the target of this name.
    Target(String),
}

impl Wanted {
    /// Returns what this machine can run, under any torch.
    pub fn this_machine() -> Self {
        let torch = Torch {
            version: String::new(),
            git: String::new(),
            cuda: None,
            cxx11_abi: true,
        };
        let kinds = [DeviceKind::Cpu, DeviceKind::Cuda];
        let targets = kinds.map(|kind| Target::with_torch(kind, "native", &torch));
        let is_there = |target: &Target| target.device == DeviceKind::Cpu || target.sm.is_some();
        Self::Hosts(targets.into_iter().filter(is_there).collect())
    }

    /// Returns why a release is of no use; none if it is. Another torch on the same machine is no reason: a release can
    /// have passed its gates under several.
    fn misfit(&self, listing: &Listing) -> Option<String> {
        let names: Vec<String> = listing.targets.iter().map(Target::name).collect();
        let is_for = |why: &str| Some(format!("is for {}{why}", names.join(", ")));
        match self {
            _ if names.is_empty() => None,
            Self::Any => None,
            Self::Target(name) if names.contains(name) => None,
            Self::Target(_) => is_for(""),
            Self::Hosts(hosts) => {
                let against = |target: &Target, host: &Target| {
                    let mismatches = target.mismatches(host).into_iter();
                    mismatches
                        .filter(|one| !one.is_of_torch())
                        .collect::<Vec<_>>()
                };
                let mut least: Option<Vec<_>> = None;
                for target in &listing.targets {
                    for host in hosts {
                        let found = against(target, host);
                        if found.is_empty() {
                            return None;
                        }
                        if least.as_ref().is_none_or(|least| found.len() < least.len()) {
                            least = Some(found);
                        }
                    }
                }
                let why: Vec<String> = least?.iter().map(ToString::to_string).collect();
                is_for(&format!(": {}", why.join(", ")))
            }
        }
    }
}

/// Returns the error for a document of the remote that the store can't read.
pub(crate) fn foreign(error: StoreError) -> RemoteError {
    match error {
        StoreError::Record { path, why } => RemoteError::damaged(&path.to_string_lossy(), why),
        StoreError::Corrupt { path, why, .. } => RemoteError::damaged(&path.to_string_lossy(), why),
        other => other.into(),
    }
}
