//! Push: a release of a store goes to a remote.
//!
//! Objects first, then artifacts, programs, the listing, and the release last, which makes it visible: a push that died
//! leaves files that the next one finds. What is there is not sent again. Between listing and release the push looks
//! whether a gc has taken something meanwhile.
//!
//! A record's name is its key, and two builds of one key differ (in their times, if in nothing else). The remote's own
//! record stays, as in a store: the pushed release then uses it, with the objects that *it* needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    thread,
    time::Duration,
};

use precast_store::{
    Digest, ListedPart, Listing, PartKind, Store, StoreError, listing_path,
    record::Release,
    release_path,
    transfer::{Moved, Plan},
};

use crate::{
    carrier::{How, LARGEST, small},
    error::RemoteError,
    event::{Counted, Tell},
    probe,
    remote::{Remote, foreign},
    work,
};

impl Remote {
    /// Pushes a release. With `dry_run` nothing is written.
    pub fn push_release(
        &self,
        store: &Store,
        release: &Release,
        dry_run: bool,
        tell: &Tell<'_>,
    ) -> Result<Moved, RemoteError> {
        let _hold = store.releases().hold(release)?;
        let own = store.releases().listing(release)?;
        let is_new = self.is_new()?;
        let goal = self.goal(store, &own)?;
        let plan = goal.plan(&own);
        (tell.plan)(&plan);
        let newest = self.newest(&own.model, release.is_partial())?;
        let mut moved = Moved {
            plan,
            from: release.seq,
            to: None,
            published: false,
            identity: own.identity(),
            identity_there: goal.listing.identity(),
            refuses_twice: None,
        };
        // The newest release has the same content: there is nothing to publish.
        let same = newest.filter(|there| there.identity() == moved.identity_there);
        moved.to = same.map(|there| there.release.seq);
        if dry_run {
            return Ok(moved);
        }
        if is_new {
            self.mark()?;
            moved.refuses_twice = Some(probe::refuses_twice(&*self.carrier)?);
        }
        // Also what a release that is there has lost meanwhile, and the list of a push that died behind the release.
        self.send(store, &goal, &goal.moves, tell)?;
        if moved.to.is_none() {
            moved.to = Some(self.publish(store, release, &goal, tell)?);
            moved.published = true;
        }
        self.keep_numbers()?;
        Ok(moved)
    }

    /// Returns the newest whole release, or with `partial` the newest of all.
    fn newest(&self, model: &str, partial: bool) -> Result<Option<Listing>, RemoteError> {
        let numbers = self.numbers()?.remove(model).unwrap_or_default();
        for seq in numbers.into_iter().rev() {
            let listing = self.listing(model, seq)?;
            if let Some(listing) = listing.filter(|it| partial || !it.release.is_partial()) {
                return Ok(Some(listing));
            }
        }
        Ok(None)
    }

    /// Returns the release as it will be in the remote, and what has to move for that.
    fn goal(&self, store: &Store, own: &Listing) -> Result<Goal, RemoteError> {
        let known: BTreeMap<Digest, &ListedPart> =
            own.parts.iter().map(|part| (part.id, part)).collect();
        let mut goal = Goal {
            listing: Listing {
                parts: Vec::new(),
                ..own.clone()
            },
            texts: BTreeMap::new(),
            moves: BTreeSet::new(),
        };
        let programs = self.side(store, &mut goal, PartKind::Program, &own.release.programs)?;
        let keys: Vec<Digest> = unique(programs.iter().flat_map(|(_, to)| to.artifacts.clone()));
        let artifacts = self.side(store, &mut goal, PartKind::Artifact, &keys)?;
        let objects = artifacts.iter().flat_map(|(_, to)| to.objects.clone());
        let objects = unique(objects.chain(own.release.objects()));
        let objects: Vec<ListedPart> = (objects.into_iter())
            .map(|id| match known.get(&id) {
                Some(part) => (*part).clone(),
                None => ListedPart::of(PartKind::Object, id),
            })
            .collect();
        let names: Vec<String> = objects.iter().map(ListedPart::path).collect();
        for (mut part, there) in objects.into_iter().zip(self.heads(&names)?) {
            match there {
                Some(bytes) => part.bytes = bytes,
                None if known.contains_key(&part.id) => {
                    goal.moves.insert(part.id);
                }
                // A record that only the remote has, without its object.
                None => return Err(RemoteError::Lost { name: part.path() }),
            }
            goal.listing.parts.push(part);
        }
        let records = artifacts.into_iter().chain(programs);
        goal.listing.parts.extend(records.map(|(part, _)| part));
        Ok(goal)
    }

    /// Returns the records of these keys as they will be in the remote: its own, or else the store's, which then move.
    fn side(
        &self,
        store: &Store,
        goal: &mut Goal,
        kind: PartKind,
        ids: &[Digest],
    ) -> Result<Vec<(ListedPart, precast_store::References)>, RemoteError> {
        let found = work::all(ids, work::SMALL, |id| {
            let name = ListedPart::of(kind, *id).path();
            // A damaged record of the remote is an error: it can't be replaced, and the release would have it.
            if let Some(text) = small(&*self.carrier, &name, LARGEST)? {
                let found = ListedPart::of_record(kind, *id, &text).map_err(foreign)?;
                return Ok((found, text, false));
            }
            let mut text = Vec::new();
            let file = store.open_file(&store.path().join(&name));
            let read = file.and_then(|file| file.take(LARGEST).read_to_end(&mut text));
            read.map_err(|_| RemoteError::Lost { name })?;
            Ok((ListedPart::of_record(kind, *id, &text)?, text, true))
        })?;
        let mut all = Vec::new();
        for (id, (found, text, is_own)) in ids.iter().zip(found) {
            if is_own {
                goal.moves.insert(*id);
            }
            goal.texts.insert(*id, text);
            all.push(found);
        }
        Ok(all)
    }

    /// Sends what the remote lacks: objects, then artifacts, then programs.
    fn send(
        &self,
        store: &Store,
        goal: &Goal,
        moves: &BTreeSet<Digest>,
        tell: &Tell<'_>,
    ) -> Result<(), RemoteError> {
        for (kind, width) in [
            (PartKind::Object, work::BIG),
            (PartKind::Artifact, work::SMALL),
            (PartKind::Program, work::SMALL),
        ] {
            let parts = goal.listing.parts.iter();
            let parts: Vec<&ListedPart> = parts
                .filter(|part| part.kind == kind && moves.contains(&part.id))
                .collect();
            work::all(&parts, width, |part| {
                tell.go_on()?;
                let name = part.path();
                if let Some(text) = goal.texts.get(&part.id) {
                    // Another push may have been quicker: its record stays.
                    let new = (self.carrier).create(&name, &mut &text[..], part.bytes, How::New)?;
                    if !new {
                        self.is_this(part)?;
                    }
                } else {
                    let read = open(store, part)?;
                    let mut from = Counted { read, tell };
                    (self.carrier).create(&name, &mut from, part.bytes, How::Content)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Fails if a record was created meanwhile, and is another one.
    fn is_this(&self, part: &ListedPart) -> Result<(), RemoteError> {
        let name = part.path();
        let text = small(&*self.carrier, &name, LARGEST)?;
        let text = text.ok_or_else(|| RemoteError::Lost { name: name.clone() })?;
        let (there, _) = ListedPart::of_record(part.kind, part.id, &text).map_err(foreign)?;
        if there.digest == part.digest {
            return Ok(());
        }
        Err(RemoteError::Storage {
            what: "publish",
            name,
            why: "another push has created it meanwhile, from a build of its own".to_owned(),
        })
    }

    /// Publishes the release under the next free number, which it returns.
    fn publish(
        &self,
        store: &Store,
        release: &Release,
        goal: &Goal,
        tell: &Tell<'_>,
    ) -> Result<u64, RemoteError> {
        const TRIES: u64 = 10_000;
        let model = &release.model;
        let numbers = self.numbers()?.remove(model).unwrap_or_default();
        let first = numbers.last().map_or(1, |last| last + 1);
        for seq in first..first + TRIES {
            let (renumbered, text) = store.releases().renumbered(release, seq)?;
            let listing = Listing {
                release: renumbered,
                ..goal.listing.clone()
            };
            // The number is another push's, or of one that died here: a gap hurts nobody.
            if !self.write_new(&listing_path(model, seq)?, &listing.text())? {
                continue;
            }
            // From now on a gc sees what is needed; this is what an earlier one has taken.
            self.complete(store, goal, tell)?;
            // The answer is not the last word: some servers let both of two pushes win, and a write that was tried again
            // meets itself.
            self.write_new(&release_path(model, seq)?, &text)?;
            if self.release(model, seq)?.as_deref() == Some(&text) {
                return Ok(seq);
            }
        }
        Err(RemoteError::Storage {
            what: "publish a release of",
            name: model.clone(),
            why: format!("{TRIES} numbers are taken"),
        })
    }

    /// Sends again what a gc has deleted meanwhile, and waits for one that is about to delete something of the release.
    /// See [`marks`](crate::marks).
    fn complete(&self, store: &Store, goal: &Goal, tell: &Tell<'_>) -> Result<(), RemoteError> {
        const EACH: Duration = Duration::from_millis(200);
        let parts = &goal.listing.parts;
        let names: Vec<String> = parts.iter().map(ListedPart::path).collect();
        // None: this storage has no gc.
        while let Some(marked) = self.marked()? {
            tell.go_on()?;
            if names.iter().any(|name| marked.contains(name)) {
                thread::sleep(EACH);
                continue;
            }
            let gone = self.gone(goal)?;
            if gone.is_empty() {
                break;
            }
            self.send(store, goal, &gone, tell)?;
        }
        Ok(())
    }

    /// Returns what is not there any more. A record that has become another one is an error.
    fn gone(&self, goal: &Goal) -> Result<BTreeSet<Digest>, RemoteError> {
        let parts: Vec<&ListedPart> = goal.listing.parts.iter().collect();
        let there = work::all(&parts, work::SMALL, |part| {
            let name = part.path();
            let Some(own) = goal.texts.get(&part.id) else {
                return Ok(self.carrier.head(&name)?.is_some());
            };
            match small(&*self.carrier, &name, LARGEST)? {
                Some(text) if text != *own => self.is_this(part).map(|()| true),
                found => Ok(found.is_some()),
            }
        })?;
        let gone = parts.into_iter().zip(there).filter(|(_, there)| !there);
        Ok(gone.map(|(part, _)| part.id).collect())
    }

    fn write_new(&self, name: &str, text: &[u8]) -> Result<bool, RemoteError> {
        (self.carrier).create(name, &mut &text[..], text.len() as u64, How::New)
    }
}

/// A release as it will be in the remote.
struct Goal {
    listing: Listing,
    /// The bytes of all records, as they will be in the remote.
    texts: BTreeMap<Digest, Vec<u8>>,
    moves: BTreeSet<Digest>,
}

impl Goal {
    fn plan(&self, own: &Listing) -> Plan {
        let mut plan = Plan {
            model: own.model.clone(),
            seq: own.release.seq,
            ..Plan::default()
        };
        for part in &self.listing.parts {
            let (count, bytes) = if self.moves.contains(&part.id) {
                (&mut plan.moves, &mut plan.bytes)
            } else {
                (&mut plan.there, &mut plan.there_bytes)
            };
            *count += 1;
            *bytes = bytes.saturating_add(part.bytes);
        }
        plan
    }
}

/// Returns these digests in order, each once.
fn unique(all: impl IntoIterator<Item = Digest>) -> Vec<Digest> {
    let mut seen = BTreeSet::new();
    all.into_iter().filter(|id| seen.insert(*id)).collect()
}

/// Opens the file of an object, whose bytes are checked first: what is damaged is not spread.
fn open(store: &Store, part: &ListedPart) -> Result<File, RemoteError> {
    store.objects().read_into(&part.id, &mut std::io::sink())?;
    let path = store.path().join(part.path());
    let file = store.open_file(&path);
    Ok(file.map_err(|source| StoreError::Io {
        what: "read",
        path,
        source,
    })?)
}
