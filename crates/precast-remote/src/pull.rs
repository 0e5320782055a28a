//! Pull: a release of a remote comes into a store.
//!
//! The listing comes first: it says how much will come and whether this host can run it. Then the records that the store
//! lacks, then the objects that these need, each hashed before it is visible, then the records, and the release last, under
//! the number that it has in the remote. A pull that died leaves objects that the next one finds.
//!
//! Where the store has a build of its own for a key, that one stays and answers: nothing of the remote's is moved for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::AtomicBool,
};

use precast_store::{
    Digest, ListedPart, Listing, PartKind, References, Store, StoreError,
    transfer::{Moved, Plan},
};

use crate::{
    error::RemoteError,
    event::{Counted, Tell},
    remote::{Remote, Wanted, foreign},
    work,
};

impl Remote {
    /// Pulls the newest release of a model that this machine can run, whatever its torch, or `MODEL@7` or `MODEL@NAME`.
    /// Returns the store, which then answers for the model.
    pub fn pull(&self, store: &Store, model: &str) -> Result<Store, RemoteError> {
        let tell = Tell {
            plan: &|_| {},
            moved: &|_| {},
            stop: &AtomicBool::new(false),
        };
        let listing = match model.rsplit_once('@') {
            Some((model, which)) => self.find(model, Some(which), &Wanted::Any)?,
            None => self.find(model, None, &Wanted::this_machine())?,
        };
        self.pull_release(store, &listing, false, &tell)?;
        Ok(store.clone())
    }

    /// Pulls the release of this number, if it is the one with this digest.
    pub fn pull_locked(
        &self,
        store: &Store,
        listing: &Listing,
        locked: Digest,
        dry_run: bool,
        tell: &Tell<'_>,
    ) -> Result<Moved, RemoteError> {
        let found = listing.identity();
        if found != locked {
            return Err(RemoteError::Unlocked {
                url: self.url.clone(),
                model: listing.model.clone(),
                seq: listing.release.seq,
                locked,
                found,
            });
        }
        self.pull_release(store, listing, dry_run, tell)
    }

    /// Pulls a release. With `dry_run` nothing is written.
    pub fn pull_release(
        &self,
        store: &Store,
        listing: &Listing,
        dry_run: bool,
        tell: &Tell<'_>,
    ) -> Result<Moved, RemoteError> {
        let (model, seq) = (&listing.model, listing.release.seq);
        if let Some(had) = there(store, listing)? {
            (tell.plan)(&had.plan);
            return Ok(had);
        }
        // Said before anything moves.
        let other = store.releases().at(model, seq)?;
        let had = other.as_ref() == Some(&listing.release);
        if other.is_some() && !had {
            return Err(StoreError::TakenNumber {
                model: model.clone(),
                seq,
            }
            .into());
        }
        let text = self.release(model, seq)?;
        let text = text.ok_or_else(|| RemoteError::NoRelease {
            url: self.url.clone(),
            what: format!("release {seq} of `{model}`"),
        })?;
        let listed: BTreeMap<(PartKind, Digest), &ListedPart> = (listing.parts.iter())
            .map(|part| ((part.kind, part.id), part))
            .collect();
        // Of the store's own: protected from gc while it is open.
        store
            .leases()
            .keep(&listing.parts.iter().map(|part| part.id).collect::<Vec<_>>())?;
        let records = self.missing(store, listing)?;
        let mut needed: BTreeSet<Digest> = listing.release.objects().into_iter().collect();
        for record in &records {
            needed.extend(&record.needs.objects);
        }
        let mut objects = Vec::new();
        for id in needed {
            let part = listed.get(&(PartKind::Object, id)).copied();
            match part {
                Some(part) if store.records().has_part(part)? => {}
                Some(part) => objects.push(part),
                None if store.objects().has_sound(&id)? => {}
                None => {
                    let name = precast_store::listing_path(model, seq)?;
                    return Err(RemoteError::damaged(&name, format!("it lacks object {id}")));
                }
            }
        }
        let moving = objects.iter().map(|part| part.bytes);
        let moving = moving.chain(records.iter().map(|record| record.part.bytes));
        let bytes = moving.fold(0, u64::saturating_add);
        let moves = objects.len() + records.len();
        let plan = Plan {
            model: model.clone(),
            seq,
            moves,
            bytes,
            there: listing.parts.len() - moves,
            there_bytes: listing.bytes() - bytes,
        };
        (tell.plan)(&plan);
        let identity = listing.identity();
        let mut moved = Moved {
            plan,
            from: seq,
            to: None,
            published: false,
            identity,
            identity_there: identity,
            refuses_twice: None,
        };
        if dry_run {
            return Ok(moved);
        }
        work::all(&objects, work::BIG, |part| self.object(store, part, tell))?;
        for Arrived { part, text, .. } in &records {
            tell.go_on()?;
            store.records().receive(part, text).map_err(foreign)?;
        }
        let own = store.releases().receive(&text, listing).map_err(foreign)?;
        moved.identity_there = own.identity();
        moved.to = Some(seq);
        moved.published = !had;
        Ok(moved)
    }

    /// Returns the records that the store lacks, in the order of the listing.
    fn missing<'a>(
        &self,
        store: &Store,
        listing: &'a Listing,
    ) -> Result<Vec<Arrived<'a>>, RemoteError> {
        /// More than the records of any release.
        const MOST: u64 = 1 << 30;
        let mut parts = Vec::new();
        for part in &listing.parts {
            let has = match part.kind {
                PartKind::Object => continue,
                // With all that it needs, or it is taken again.
                PartKind::Artifact => store.records().keep_artifact(&part.id)?,
                PartKind::Program => store.records().has_part(part)?,
            };
            if !has {
                parts.push(part);
            }
        }
        let sizes = parts.iter().map(|part| part.bytes);
        if sizes.fold(0, u64::saturating_add) > MOST {
            let name = precast_store::listing_path(&listing.model, listing.release.seq)?;
            return Err(RemoteError::damaged(
                &name,
                "its records have more than 1 GiB",
            ));
        }
        let texts = self.records(&parts)?;
        let found = parts.into_iter().zip(texts).map(|(part, text)| {
            let text = text.ok_or_else(|| RemoteError::damaged(&part.path(), "it is missing"))?;
            let (found, needs) =
                ListedPart::of_record(part.kind, part.id, &text).map_err(foreign)?;
            if found.digest != part.digest {
                return Err(RemoteError::damaged(
                    &part.path(),
                    "it is another record than was listed",
                ));
            }
            Ok(Arrived { part, text, needs })
        });
        found.collect()
    }

    /// Takes an object into the store.
    fn object(&self, store: &Store, part: &ListedPart, tell: &Tell<'_>) -> Result<(), RemoteError> {
        tell.go_on()?;
        let name = part.path();
        let body = self.carrier.get(&name)?;
        let body = body.ok_or_else(|| RemoteError::damaged(&name, "it is missing"))?;
        let mut from = Counted::new(body.read, tell);
        store.objects().receive(part, &mut from).map_err(foreign)?;
        tell.go_on()
    }
}

/// A record of the remote, which is the listed one.
struct Arrived<'a> {
    part: &'a ListedPart,
    text: Vec<u8>,
    needs: References,
}

/// Returns the release of the store that is equal to a listed one, if it has one: of its number, or the newest.
fn there(store: &Store, listing: &Listing) -> Result<Option<Moved>, RemoteError> {
    let (model, identity) = (&listing.model, listing.identity());
    // An older one is no answer: a load would take the newest. So a rollback of the remote arrives as one.
    let newest = store.releases().get(model, None)?;
    let same = store.releases().at(model, listing.release.seq)?;
    for release in same.into_iter().chain(newest) {
        if !release.same_content(&listing.release) {
            continue;
        }
        // Neither is one that lacks a part.
        let Ok(own) = store.releases().listing(&release) else {
            continue;
        };
        let mut objects = own
            .parts
            .iter()
            .filter(|part| part.kind == PartKind::Object);
        let is_whole = objects.all(|part| store.objects().has_sound(&part.id).unwrap_or(false));
        if own.identity() != identity || !is_whole {
            continue;
        }
        return Ok(Some(Moved {
            plan: Plan {
                model: model.clone(),
                seq: listing.release.seq,
                there: listing.parts.len(),
                there_bytes: listing.bytes(),
                ..Plan::default()
            },
            from: listing.release.seq,
            to: Some(release.seq),
            published: false,
            identity,
            identity_there: identity,
            refuses_twice: None,
        }));
    }
    Ok(None)
}
