//! Fetch: programs and artifacts by key, without a release. A build asks for what it would make otherwise.
//!
//! Records come first: they say which objects are needed. What the store has stays, and what the remote has only in part
//! is as good as absent.

use std::collections::{BTreeMap, BTreeSet};

use precast_store::{
    Digest, ListedPart, PartKind, References, Store,
    record::{Program, Release},
};

use crate::{
    carrier::{LARGEST, small},
    error::RemoteError,
    event::{Counted, Tell},
    remote::{Remote, foreign},
    work,
};

/// Most bytes of an object that no listing limits.
const MOST: u64 = 64 << 30;

/// A record that arrived.
struct Arrived {
    part: ListedPart,
    text: Vec<u8>,
    needs: References,
}

impl Remote {
    /// Brings what these keys name into a store, with everything that it needs. Returns those keys that the store has
    /// now.
    pub fn fetch(
        &self,
        store: &Store,
        kind: PartKind,
        ids: &[Digest],
        tell: &Tell<'_>,
    ) -> Result<Vec<Digest>, RemoteError> {
        let (mut programs, mut artifacts, mut objects) =
            (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        match kind {
            PartKind::Program => programs = self.arrived(PartKind::Program, ids)?,
            PartKind::Artifact => artifacts.extend(ids),
            PartKind::Object => objects.extend(ids),
        }
        artifacts.extend(programs.values().flat_map(|one| &one.needs.artifacts));
        let mut lacked = Vec::new();
        for id in artifacts {
            if !store.records().keep_artifact(id)? {
                lacked.push(*id);
            }
        }
        let artifacts = self.arrived(PartKind::Artifact, &lacked)?;
        let records = || artifacts.values().chain(programs.values());
        objects.extend(records().flat_map(|one| &one.needs.objects));
        let mut wanted = Vec::new();
        for id in objects {
            if !store.objects().has_sound(id)? {
                wanted.push(*id);
            }
        }
        work::all(&wanted, work::BIG, |id| {
            self.object_by_key(store, *id, tell)
        })?;
        let mut has = Vec::new();
        for one in artifacts.values().chain(programs.values()) {
            tell.go_on()?;
            let mut whole = true;
            for id in &one.needs.objects {
                whole = whole && store.objects().has_sound(id)?;
            }
            for id in &one.needs.artifacts {
                whole = whole && store.records().keep_artifact(id)?;
            }
            if whole {
                store
                    .records()
                    .receive(&one.part, &one.text)
                    .map_err(foreign)?;
            }
        }
        for id in ids {
            if store.records().has_part(&ListedPart::of(kind, *id))? {
                has.push(*id);
            }
        }
        Ok(has)
    }

    /// Reads records by key, those that are there.
    fn arrived(
        &self,
        kind: PartKind,
        ids: &[Digest],
    ) -> Result<BTreeMap<Digest, Arrived>, RemoteError> {
        let found = work::all(ids, work::SMALL, |id| {
            let Some(text) = small(&*self.carrier, &ListedPart::of(kind, *id).path(), LARGEST)?
            else {
                return Ok(None);
            };
            let (part, needs) = ListedPart::of_record(kind, *id, &text).map_err(foreign)?;
            Ok(Some((*id, Arrived { part, text, needs })))
        })?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Takes an object into the store, if the remote has it.
    fn object_by_key(&self, store: &Store, id: Digest, tell: &Tell<'_>) -> Result<(), RemoteError> {
        let mut part = ListedPart::of(PartKind::Object, id);
        let name = part.path();
        let Some(body) = self.carrier.get(&name)? else {
            return Ok(());
        };
        if body.bytes > MOST {
            return Err(RemoteError::damaged(&name, "it has more than 64 GiB"));
        }
        part.bytes = body.bytes;
        let mut from = Counted::new(body.read, tell);
        store.objects().receive(&part, &mut from).map_err(foreign)
    }

    /// Returns the newest releases of a model, the newest one first, at most `most`.
    pub fn releases(&self, model: &str, most: usize) -> Result<Vec<Release>, RemoteError> {
        let numbers = self.numbers()?.remove(model).unwrap_or_default();
        let mut releases = Vec::new();
        for seq in numbers.into_iter().rev().take(most) {
            releases.extend(self.listing(model, seq)?.map(|listing| listing.release));
        }
        Ok(releases)
    }

    /// Reads the records of programs, those that are there.
    pub fn programs(&self, ids: &[Digest]) -> Result<Vec<Program>, RemoteError> {
        let found = self.arrived(PartKind::Program, ids)?;
        let programs = found.into_values();
        let programs = programs.map(|one| one.part.program(&one.text).map_err(foreign));
        programs.collect()
    }
}
