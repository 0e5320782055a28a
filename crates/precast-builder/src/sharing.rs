//! What a build takes from its remote, and how several builds share their work through it.
//!
//! It is asked when something is missing, and by key: for programs before a worker starts, and again when the model is
//! open, because a fresh machine does not know its sources before; for artifacts after each capture. What comes is in the
//! store as if it had been built here. The releases of the remote say what a model was imported from, so that a machine
//! without any release of it can compute request keys without Python.
//!
//! **Several builds of one spec share the work**, each on a machine of its own: before a build captures a program, it takes
//! its lease, and leaves programs to others that have theirs. It holds as many as it has workers, and one more, so that
//! others find some. At the end it waits for what others make and fetches it; where one of them has died, it builds the
//! rest. Artifacts have leases too: programs of several machines may have one in common. A lost lease costs work, never
//! correctness: the first record of a key stays.
//!
//! A remote that fails costs a build nothing else: the caller reports it, and asks it no more after a few failures.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{Mutex, PoisonError},
};

use precast_store::{
    Digest, PartKind, Store, StoreError,
    record::{Entry, Program, Release, Shim, SourceFile},
};

use super::{
    options::Outcome,
    progress::{Event, Progress},
    remote::{Remote, Turn},
    shims,
};
use crate::{
    plan::{self, Item, Known, Plan, PlanError, Reason, State, reasons},
    spec::Spec,
};

/// What a remote has of a model, and what came from it.
pub(super) struct FromRemote<'a> {
    pub remote: &'a dyn Remote,
    store: &'a Store,
    /// The newest one first.
    releases: Vec<Release>,
    /// The programs of the newest release.
    programs: Vec<Program>,
    progress: &'a dyn Progress,
    came: Mutex<Came>,
}

/// The keys that came in this build.
#[derive(Clone, Debug, Default)]
pub(super) struct Came {
    pub programs: HashSet<Digest>,
    pub artifacts: HashSet<Digest>,
}

impl<'a> FromRemote<'a> {
    /// Asks for the releases of the model.
    pub fn ask(
        remote: &'a dyn Remote,
        spec: &Spec,
        store: &'a Store,
        progress: &'a dyn Progress,
    ) -> Self {
        let (releases, programs) = remote.releases(&spec.model.name);
        Self {
            remote,
            store,
            releases,
            programs,
            progress,
            came: Mutex::default(),
        }
    }

    /// Returns what came so far.
    pub fn came(&self) -> Came {
        self.came
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Returns the parts of keys that are known without Python, from the newest release of this entry and the torch of
    /// this build.
    pub fn known(
        &self,
        spec: &Spec,
        torch: Option<&std::path::Path>,
    ) -> Result<Option<Known>, PlanError> {
        let mut releases = self.releases.iter();
        let release = releases.find(|release| release.entry.entry == spec.model.entry);
        let site = torch.and_then(std::path::Path::parent);
        let (Some(release), Some(site)) = (release, site) else {
            return Ok(None);
        };
        // Whoever wrote the remote names files of the project, and no others.
        let is_inside = |source: &SourceFile| {
            let mut parts = std::path::Path::new(&source.path).components();
            parts.all(|part| matches!(part, std::path::Component::Normal(_)))
        };
        if !release.entry.sources.iter().all(is_inside) {
            return Ok(None);
        }
        let entry = Entry {
            site_packages: vec![site.to_string_lossy().into_owned()],
            ..release.entry.clone()
        };
        plan::known_of(spec, self.store, &entry)
    }

    /// Fetches the missing programs of a plan. Returns whether any came.
    pub fn fetch_programs(&self, plan: &Plan) -> bool {
        let all = plan.missing().chain(plan.beyond.iter().filter(is_missing));
        let asked: Vec<Digest> = all.filter_map(key_of).collect();
        !self.fetch(PartKind::Program, &asked).is_empty()
    }

    /// Leaves out what a release leaves out, so that no worker has to find out the same again: programs with these keys
    /// can't be built, and their modules work without them.
    pub fn leave_out(&self, plan: &mut Plan) {
        let remote = self.remote.name();
        for item in &mut plan.items {
            let Some(key) = key_of(item) else { continue };
            let mut releases = self.releases.iter();
            if let Some(release) = releases.find(|release| release.left_out.contains(&key)) {
                let why = format!("release {} of {remote} leaves it out", release.seq);
                item.state = State::Skipped { key, why };
            }
        }
    }

    /// Fetches a program that another build made. Returns whether it came.
    pub fn fetch_program(&self, id: &Digest) -> bool {
        self.fetch(PartKind::Program, &[*id]).contains(id)
    }

    /// Fetches artifacts. Returns those that are in the store now.
    pub fn fetch_artifacts(&self, keys: &[Digest]) -> Vec<Digest> {
        self.fetch(PartKind::Artifact, keys)
    }

    fn fetch(&self, kind: PartKind, ids: &[Digest]) -> Vec<Digest> {
        if ids.is_empty() {
            return vec![];
        }
        let came = self.bring(kind, ids);
        let mut all = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        let (set, what) = match kind {
            PartKind::Program => (&mut all.programs, "program"),
            _ => (&mut all.artifacts, "artifact"),
        };
        let before = set.len();
        set.extend(&came);
        let count = set.len() - before;
        drop(all);
        if count > 0 {
            let remote = self.remote.name();
            self.progress.event(&Event::Fetched {
                remote,
                what,
                count,
            });
        }
        came
    }

    /// Returns the outcome of a program that came.
    pub fn outcome(&self, id: Digest) -> Outcome {
        Outcome::Hit {
            id,
            from: Some(self.remote.name().to_owned()),
        }
    }

    /// Sends a program, if this build shares its work.
    pub fn offer(&self, id: Digest) {
        self.remote.offer(PartKind::Program, &[id]);
    }

    /// Waits for programs that other builds make. Returns the outcomes, or none where one of these builds has ended without
    /// its program.
    pub fn wait(
        &self,
        taken: &[(usize, Digest)],
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Option<Vec<(usize, Outcome)>> {
        if !taken.is_empty() {
            let programs = if taken.len() == 1 {
                "program"
            } else {
                "programs"
            };
            let message = format!("waiting for {} {programs} of other builds", taken.len());
            self.progress.event(&Event::Note { message: &message });
        }
        let wait = |(index, id): &(usize, Digest)| {
            let turn = self.remote.lease(PartKind::Program, id, true, stop);
            let came = matches!(turn, Some(Turn::Made)) && self.fetch_program(id);
            came.then(|| (*index, self.outcome(*id)))
        };
        taken.iter().map(wait).collect()
    }

    /// Fetches what these keys name. It is protected from gc before it is here, for as long as the store is open.
    fn bring(&self, kind: PartKind, ids: &[Digest]) -> Vec<Digest> {
        match self.store.leases().keep(ids) {
            Ok(()) => self.remote.fetch(kind, ids),
            // A store that can't be written takes nothing.
            Err(_) => vec![],
        }
    }

    /// Returns a release of the same sources, with its weights in the store; none if there is none.
    pub fn same_entry(&self, plan: &Plan, entry: &Entry) -> Result<Option<Release>, StoreError> {
        let hits: HashSet<Digest> = plan.hits().into_iter().collect();
        let same = |release: &&Release| {
            // The packages of another machine are in other folders.
            let there = Entry {
                site_packages: entry.site_packages.clone(),
                ..release.entry.clone()
            };
            there == *entry && release.programs.iter().any(|id| hits.contains(id))
        };
        let Some(release) = self.releases.iter().find(same) else {
            return Ok(None);
        };
        if let Some(weights) = release.weights {
            if !self.store.objects().has_sound(&weights)?
                && self.bring(PartKind::Object, &[weights]).is_empty()
            {
                return Ok(None);
            }
            let (remote, seq, short) = (self.remote.name(), release.seq, weights.short());
            let message = format!("weights {short} are those of release {seq} of {remote}");
            self.progress.event(&Event::Note { message: &message });
        }
        Ok(Some(release.clone()))
    }

    /// Returns a shim for a target, which is in the store now; none if there is none.
    pub fn shim(&self, known: &Known) -> Option<Shim> {
        let mut shims = self.releases.iter().flat_map(|release| &release.shims);
        let shim = shims.find(|shim| shims::fits(shim, &known.target))?;
        let objects: Vec<Digest> = shim.objects().collect();
        let came = self.bring(PartKind::Object, &objects).len() == objects.len();
        came.then(|| shim.clone())
    }

    /// Says why programs that are still missing did not come, in one line.
    pub fn explain(&self, spec: &Spec, plan: &Plan) {
        let missing = plan.missing().filter(|item| key_of(item).is_some());
        let missing: Vec<&Item> = missing.collect();
        let remote = self.remote.name();
        let message = match (&missing[..], &self.releases[..]) {
            ([], _) => return,
            (_, []) => format!("{remote} has no release of `{}`", spec.model.name),
            (missing, _) => {
                let differ = missing
                    .iter()
                    .filter_map(|item| self.difference(spec, item));
                let differ: BTreeSet<String> = differ.map(|reason| reason.to_string()).collect();
                match &differ.into_iter().collect::<Vec<_>>()[..] {
                    [] => format!(
                        "{remote} never had {} of the missing programs",
                        missing.len()
                    ),
                    [why] => why.clone(),
                    [why, more @ ..] => format!("{why}; and {} other reasons", more.len()),
                }
            }
        };
        self.progress.event(&Event::Note { message: &message });
    }

    /// Returns in what the program of the newest release differs from a missing one; none if it has none in its place.
    pub fn difference(&self, spec: &Spec, item: &Item) -> Option<Reason> {
        let State::Miss {
            key: Some((_, explained)),
            ..
        } = &item.state
        else {
            return None;
        };
        let (module, bucket) = (&spec.modules[item.module].name, item.form.name());
        let mut programs = self.programs.iter();
        let near =
            programs.find(|program| program.module == *module && program.bucket() == bucket)?;
        Some(Reason::OtherInRemote {
            remote: self.remote.name().to_owned(),
            reasons: reasons(&near.request, explained),
        })
    }
}

fn is_missing(item: &&Item) -> bool {
    matches!(item.state, State::Miss { .. })
}

fn key_of(item: &Item) -> Option<Digest> {
    match &item.state {
        State::Miss { key, .. } => key.as_ref().map(|(id, _)| *id),
        _ => None,
    }
}
