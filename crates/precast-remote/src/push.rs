//! Push: a release of a store goes to a remote.
//!
//! Objects first, then artifacts, programs, the listing, and the release last, which makes it visible: a push that died
//! leaves files that the next one finds. What is there is not sent again. Storage that writes many files at once (the Hub)
//! waits with all of them for the release. Between listing and release the push looks whether a gc has taken something
//! meanwhile.
//!
//! A record's name is its key, and two builds of one key differ (in their times, if in nothing else). The remote's own
//! record stays, as in a store: the pushed release then uses it, with the objects that *it* needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{Cursor, Read},
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
        let all = Wanted {
            programs: &release.programs,
            artifacts: &[],
            objects: &release.objects(),
        };
        let mut goal = self.goal(store, &all)?;
        (tell.plan)(&goal.plan(&own.model, release.seq));
        let mut refuses_twice = None;
        if !dry_run {
            if is_new {
                self.mark()?;
                refuses_twice = Some(probe::refuses_twice(&*self.carrier)?);
            }
            // Also what a release that is there has lost meanwhile, and the list of a push that died behind the release.
            goal = self.send(store, &all, goal, tell)?;
        }
        let identity_there = goal.listing(&own).identity();
        // The newest release has the same content: there is nothing to publish.
        let newest = self.newest(&own.model, release.is_partial())?;
        let same = newest.filter(|newest| newest.identity() == identity_there);
        let mut moved = Moved {
            plan: goal.plan(&own.model, release.seq),
            from: release.seq,
            to: same.map(|same| same.release.seq),
            published: false,
            identity: own.identity(),
            identity_there,
            refuses_twice,
        };
        if dry_run {
            return Ok(moved);
        }
        if moved.to.is_none() {
            let (seq, goal) = self.publish(store, release, &all, &own, goal, tell)?;
            moved.to = Some(seq);
            moved.published = true;
            moved.identity_there = goal.listing(&own).identity();
        }
        self.keep_numbers()?;
        let release = moved.to.map(|seq| release_path(&own.model, seq));
        self.carrier.finish(release.transpose()?.as_deref())?;
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

    /// Sends programs or artifacts with everything that they need. No release names them there: they are found by key.
    pub fn offer(
        &self,
        store: &Store,
        kind: PartKind,
        ids: &[Digest],
        tell: &Tell<'_>,
    ) -> Result<(), RemoteError> {
        // Elsewhere nothing is found but as a part of a release.
        if !self.carrier.is_folder() {
            return Ok(());
        }
        if self.is_new()? {
            self.mark()?;
        }
        let only = |of: PartKind| if kind == of { ids } else { &[] };
        let all = Wanted {
            programs: only(PartKind::Program),
            artifacts: only(PartKind::Artifact),
            objects: only(PartKind::Object),
        };
        let goal = self.goal(store, &all)?;
        self.send(store, &all, goal, tell).map(drop)
    }

    /// Returns programs, artifacts and objects, with everything that they need, as they will be in the remote, and what
    /// has to move for that.
    fn goal(&self, store: &Store, wanted: &Wanted<'_>) -> Result<Goal, RemoteError> {
        let mut goal = Goal::default();
        let programs = self.side(store, &mut goal, PartKind::Program, wanted.programs)?;
        let called = programs.iter().flat_map(|(_, to)| to.artifacts.clone());
        let keys = unique(called.chain(wanted.artifacts.iter().copied()));
        let artifacts = self.side(store, &mut goal, PartKind::Artifact, &keys)?;
        let needed = artifacts.iter().flat_map(|(_, to)| to.objects.clone());
        let objects = unique(needed.chain(wanted.objects.iter().copied()));
        let names = objects
            .iter()
            .map(|id| ListedPart::of(PartKind::Object, *id).path());
        let sizes = self.heads(&names.collect::<Vec<String>>())?;
        for (id, there) in objects.into_iter().zip(sizes) {
            let own = match store.objects().listed(&id) {
                Ok(own) => Some(own),
                Err(StoreError::Missing { .. }) => None,
                Err(error) => return Err(error.into()),
            };
            let part = match (own, there) {
                (own, Some(bytes)) => ListedPart {
                    bytes,
                    ..own.unwrap_or(ListedPart::of(PartKind::Object, id))
                },
                (Some(own), None) => {
                    goal.moves.insert(id);
                    own
                }
                // A record that only the remote has, without its object.
                (None, None) => {
                    let name = ListedPart::of(PartKind::Object, id).path();
                    return Err(RemoteError::Lost { name });
                }
            };
            goal.parts.push(part);
        }
        let records = artifacts.into_iter().chain(programs);
        goal.parts.extend(records.map(|(part, _)| part));
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

    /// Sends what the remote lacks: objects, then artifacts, then programs. Returns what is there now: where another push
    /// has created a record meanwhile, that one stays.
    fn send(
        &self,
        store: &Store,
        wanted: &Wanted<'_>,
        mut goal: Goal,
        tell: &Tell<'_>,
    ) -> Result<Goal, RemoteError> {
        /// Each time, others created records of ours: there are not more of these than that.
        const TRIES: usize = 1000;
        for _ in 0..TRIES {
            if self.send_once(store, &goal, &goal.moves, tell)? {
                return Ok(goal);
            }
            goal = self.goal(store, wanted)?;
        }
        Err(RemoteError::Storage {
            what: "push to",
            name: self.url.clone(),
            why: "others create the same records all the time".to_owned(),
        })
    }

    /// Sends some parts. Returns false if a record was created meanwhile, and is another one.
    fn send_once(
        &self,
        store: &Store,
        goal: &Goal,
        moves: &BTreeSet<Digest>,
        tell: &Tell<'_>,
    ) -> Result<bool, RemoteError> {
        for (kind, width) in [
            (PartKind::Object, work::BIG),
            (PartKind::Artifact, work::SMALL),
            (PartKind::Program, work::SMALL),
        ] {
            let parts = goal.parts.iter();
            let parts: Vec<&ListedPart> = parts
                .filter(|part| part.kind == kind && moves.contains(&part.id))
                .collect();
            let sent = work::all(&parts, width, |part| {
                tell.go_on()?;
                let name = part.path();
                let Some(text) = goal.texts.get(&part.id) else {
                    let mut from = Counted::new(open(store, part)?, tell);
                    (self.carrier).create(&name, &mut from, part.bytes, How::Content)?;
                    return Ok(true);
                };
                let mut from = Cursor::new(text);
                let new = (self.carrier).create(&name, &mut from, part.bytes, How::New)?;
                Ok(new || small(&*self.carrier, &name, LARGEST)?.as_ref() == Some(text))
            })?;
            if sent.contains(&false) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Publishes the release under the next free number. Returns this and what the release consists of.
    fn publish(
        &self,
        store: &Store,
        release: &Release,
        wanted: &Wanted<'_>,
        own: &Listing,
        mut goal: Goal,
        tell: &Tell<'_>,
    ) -> Result<(u64, Goal), RemoteError> {
        const TRIES: u64 = 10_000;
        let model = &release.model;
        let numbers = self.numbers()?.remove(model).unwrap_or_default();
        let first = numbers.last().map_or(1, |last| last + 1);
        for seq in first..first + TRIES {
            let (renumbered, text) = store.releases().renumbered(release, seq)?;
            let listing = Listing {
                release: renumbered,
                ..goal.listing(own)
            };
            // The number is another push's, or of one that died here: a gap hurts nobody.
            if !self.write_new(&listing_path(model, seq)?, &listing.text())? {
                continue;
            }
            // From now on a gc sees what is needed; this is what an earlier one has taken.
            if !self.complete(store, &goal, tell)? {
                let again = self.goal(store, wanted)?;
                goal = self.send(store, wanted, again, tell)?;
                continue;
            }
            // The answer is not the last word: some servers let both of two pushes win, and a write that was tried again
            // meets itself.
            self.write_new(&release_path(model, seq)?, &text)?;
            if self.release(model, seq)?.as_deref() == Some(&text) {
                return Ok((seq, goal));
            }
        }
        Err(RemoteError::Storage {
            what: "publish a release of",
            name: model.clone(),
            why: format!("{TRIES} numbers are taken"),
        })
    }

    /// Sends again what a gc has deleted meanwhile, and waits for one that is about to delete something of the release.
    /// See [`marks`](crate::marks). Returns false if a record has become another one: the listing has the earlier one.
    fn complete(&self, store: &Store, goal: &Goal, tell: &Tell<'_>) -> Result<bool, RemoteError> {
        const EACH: Duration = Duration::from_millis(200);
        let names: Vec<String> = goal.parts.iter().map(ListedPart::path).collect();
        // None: this storage has no gc.
        while let Some(marked) = self.marked()? {
            tell.go_on()?;
            if names.iter().any(|name| marked.contains(name)) {
                thread::sleep(EACH);
                continue;
            }
            let Some(gone) = self.gone(goal)? else {
                return Ok(false);
            };
            if gone.is_empty() {
                break;
            }
            if !self.send_once(store, goal, &gone, tell)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns what is not there any more; none if a record has become another one.
    fn gone(&self, goal: &Goal) -> Result<Option<BTreeSet<Digest>>, RemoteError> {
        let there = work::all(&goal.parts, work::SMALL, |part| {
            let name = part.path();
            let Some(own) = goal.texts.get(&part.id) else {
                return Ok(Some(self.carrier.head(&name)?.is_some()));
            };
            Ok(match small(&*self.carrier, &name, LARGEST)? {
                Some(text) if text != *own => None,
                found => Some(found.is_some()),
            })
        })?;
        let there: Option<Vec<bool>> = there.into_iter().collect();
        Ok(there.map(|there| {
            let gone = goal.parts.iter().zip(there).filter(|(_, there)| !there);
            gone.map(|(part, _)| part.id).collect()
        }))
    }

    fn write_new(&self, name: &str, text: &[u8]) -> Result<bool, RemoteError> {
        (self.carrier).create(name, &mut Cursor::new(text), text.len() as u64, How::New)
    }
}

/// What is to be in the remote, with all that it needs.
struct Wanted<'a> {
    programs: &'a [Digest],
    artifacts: &'a [Digest],
    objects: &'a [Digest],
}

/// What will be in the remote.
#[derive(Default)]
struct Goal {
    parts: Vec<ListedPart>,
    /// The bytes of all records, as they will be in the remote.
    texts: BTreeMap<Digest, Vec<u8>>,
    moves: BTreeSet<Digest>,
}

impl Goal {
    /// Returns the listing of the release as it will be there.
    fn listing(&self, own: &Listing) -> Listing {
        Listing {
            parts: self.parts.clone(),
            ..own.clone()
        }
    }

    fn plan(&self, model: &str, seq: u64) -> Plan {
        let mut plan = Plan {
            model: model.to_owned(),
            seq,
            ..Plan::default()
        };
        for part in &self.parts {
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
