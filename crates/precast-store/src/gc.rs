//! The plan of a garbage collection. It can be printed and serialised; [`Collector::collect`] carries it out.
//!
//! | root | kept because |
//! |---|---|
//! | the newest N releases of each model with different content | someone may load or roll back to them |
//! | a partial release that is newer than every whole one | its builder may continue it |
//! | everything that a live process holds (`lease`) | it is being read or built |
//! | programs and artifacts that the policy does not select | they are recent, or the store is below its limit |
//! | logs of failures | the failure is still recorded |
//!
//! Everything that no root refers to is deleted: releases, then programs, artifacts and objects. An empty policy
//! deletes only unreferenced files.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
};

use serde::{Deserialize, Serialize};

use super::{
    base::Base,
    error::StoreError,
    graph::{Contents, Graph, Unit},
    layout::Kind,
    manifest::Walk,
    quarantine::{self, Damaged},
    reason::Reason,
    reindex,
    releases::Releases,
    time::now,
};
use crate::Digest;

const DAY: i64 = 24 * 60 * 60;

/// The rules of a collection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Policy {
    /// Deletes programs and artifacts without a use for this many days.
    pub keep_days: Option<u32>,
    /// Deletes the programs and artifacts with the oldest use, until the store has at most this many bytes.
    pub max_size: Option<u64>,
    /// Deletes programs and artifacts that are in no release.
    pub unreleased: bool,
    /// Number of releases of each model to keep, at least one. Releases with equal content count once.
    pub keep_releases: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            keep_days: None,
            max_size: None,
            unreleased: false,
            keep_releases: 3,
        }
    }
}

/// A release to delete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct OldRelease {
    /// Name of the model.
    pub model: String,
    /// Number of the release within its model.
    pub seq: u64,
    /// The reason for the deletion.
    pub reason: Reason,
}

/// A program, artifact, object or failure to delete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Victim {
    /// Request key, artifact key, or digest of an object's content.
    pub id: Digest,
    /// Its readable name; empty for an object or a failure.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Bytes that its own deletion frees. Bytes of objects are counted at the object.
    pub bytes: u64,
    /// The reason for the deletion.
    pub reason: Reason,
}

/// The plan of a collection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GcPlan {
    /// Version of this document.
    pub schema: u32,
    /// The rules that the plan follows.
    pub policy: Policy,
    /// Releases to delete. They are deleted before the programs that only they hold.
    pub releases: Vec<OldRelease>,
    /// Programs to delete.
    pub programs: Vec<Victim>,
    /// Artifacts to delete.
    pub artifacts: Vec<Victim>,
    /// Objects to delete, with their unpacked files.
    pub objects: Vec<Victim>,
    /// Records of failed builds to delete.
    pub failures: Vec<Victim>,
    /// Damaged files to delete. Their bytes are not in `before`.
    pub quarantine: Vec<Damaged>,
    /// Bytes of all objects and unpacked files before the collection.
    pub before: u64,
    /// Bytes of all objects and unpacked files after the collection.
    pub after: u64,
}

impl GcPlan {
    /// Returns whether the plan deletes nothing.
    pub fn is_empty(&self) -> bool {
        self.releases.is_empty()
            && self.quarantine.is_empty()
            && self.victims().all(|list| list.is_empty())
    }

    fn victims(&self) -> impl Iterator<Item = &Vec<Victim>> {
        [
            &self.programs,
            &self.artifacts,
            &self.objects,
            &self.failures,
        ]
        .into_iter()
    }

    /// Returns the bytes above the size limit that the plan can't free, because the remaining objects are held or
    /// released.
    pub fn over_limit(&self) -> u64 {
        self.after
            .saturating_sub(self.policy.max_size.unwrap_or(u64::MAX))
    }
}

impl fmt::Display for GcPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for release in &self.releases {
            writeln!(
                f,
                "release  {} {}  {}",
                release.model, release.seq, release.reason
            )?;
        }
        let kinds = ["program ", "artifact", "object  ", "failure "];
        for (kind, list) in kinds.into_iter().zip(self.victims()) {
            for victim in list {
                write!(f, "{kind} {}", victim.id.short())?;
                if !victim.name.is_empty() {
                    write!(f, "  {}", victim.name)?;
                }
                writeln!(f, "  {}", victim.reason)?;
            }
        }
        for one in &self.quarantine {
            writeln!(f, "damaged   {}  {}", one.name.escape_debug(), one.reason)?;
        }
        let freed = self.before - self.after;
        write!(f, "{freed} of {} bytes would be freed", self.before)
    }
}

/// The garbage collector of a store.
pub struct Collector {
    pub(crate) releases: Releases,
}

impl Collector {
    pub(crate) fn base(&self) -> &Base {
        self.releases.base()
    }

    /// Returns the plan of `policy` for the current state of the store. Changes nothing. Fails if the store has records
    /// of a newer precast, because their references are unknown.
    pub fn plan(&self, policy: &Policy) -> Result<GcPlan, StoreError> {
        self.plan_of(&Graph::load(self.base())?, policy)
    }

    /// Like [`Self::plan`], with a graph that was read before.
    pub(crate) fn plan_of(&self, graph: &Graph, policy: &Policy) -> Result<GcPlan, StoreError> {
        let newer = (self.base().index).with(|index| reindex::newer(&self.base().layout, index))?;
        if let Some(newer) = newer {
            return Err(newer);
        }
        let leased = self.releases.leases().all_held()?;
        let mut plan = Planner::new(graph, policy, &leased).plan(now());
        plan.quarantine = quarantine::old(self.base().path(), now())?;
        Ok(plan)
    }
}

struct Planner<'a> {
    graph: &'a Graph,
    policy: &'a Policy,
    leased: &'a HashSet<Digest>,
    /// Everything that a lease or a kept release protects.
    rooted: HashSet<Digest>,
    /// Number of live references to each thing.
    references: HashMap<Digest, usize>,
    plan: GcPlan,
}

impl<'a> Planner<'a> {
    fn new(graph: &'a Graph, policy: &'a Policy, leased: &'a HashSet<Digest>) -> Self {
        let before = graph.objects.values().sum();
        Self {
            graph,
            policy,
            leased,
            rooted: HashSet::new(),
            references: HashMap::new(),
            plan: GcPlan {
                schema: 1,
                policy: policy.clone(),
                releases: Vec::new(),
                programs: Vec::new(),
                artifacts: Vec::new(),
                objects: Vec::new(),
                failures: Vec::new(),
                quarantine: Vec::new(),
                before,
                after: before,
            },
        }
    }

    fn plan(mut self, now: i64) -> GcPlan {
        self.releases();
        self.failures(now);
        let graph = self.graph;
        for unit in graph.programs.values().chain(graph.artifacts.values()) {
            for id in &unit.links {
                *self.references.entry(*id).or_default() += 1;
            }
        }
        // Unreferenced objects are deleted under every policy.
        let loose: Vec<_> = graph
            .objects
            .keys()
            .filter(|id| !self.needed(id))
            .copied()
            .collect();
        for id in loose {
            self.drop_object(&id);
        }
        self.by_age_and_release(now);
        self.by_size();
        self.plan.objects.sort_by_key(|victim| victim.id);
        self.plan
    }

    /// Keeps the newest releases of each model, the leased things, and everything that they refer to.
    fn releases(&mut self) {
        let kept = kept(&self.graph.releases, self.policy.keep_releases);
        let mut walk = Walk::new(self.graph);
        for ((model, seq), release) in &self.graph.releases {
            if kept.contains(&(model.clone(), *seq)) {
                walk.release(&release.programs, &release.objects);
            } else {
                self.plan.releases.push(OldRelease {
                    model: model.clone(),
                    seq: *seq,
                    reason: Reason::Superseded,
                });
            }
        }
        // A lease has IDs of all kinds.
        let leased: Vec<Digest> = self.leased.iter().copied().collect();
        walk.records(None, Kind::Program, &leased);
        walk.records(None, Kind::Artifact, &leased);
        self.rooted.extend(leased);
        self.rooted.extend(walk.found.iter().map(|node| node.id));
    }

    fn failures(&mut self, now: i64) {
        for (id, (log, created)) in &self.graph.failures {
            let days = (now - created) / DAY;
            let old = self
                .policy
                .keep_days
                .is_some_and(|keep| days >= keep.into());
            if old && !self.rooted.contains(id) {
                self.plan.failures.push(Victim {
                    id: *id,
                    name: String::new(),
                    bytes: 0,
                    reason: Reason::Age { days },
                });
            } else if let Some(log) = log {
                self.rooted.insert(*log);
            }
        }
    }

    fn needed(&self, id: &Digest) -> bool {
        self.rooted.contains(id) || self.references.get(id).is_some_and(|count| *count > 0)
    }

    fn by_age_and_release(&mut self, now: i64) {
        for (id, unit) in self.oldest_first() {
            let days = (now - unit.used) / DAY;
            let reason = if self.policy.unreleased {
                Reason::NotReleased
            } else if self
                .policy
                .keep_days
                .is_some_and(|keep| days >= keep.into())
            {
                Reason::Age { days }
            } else {
                continue;
            };
            self.drop_unit(&id, &reason);
        }
    }

    fn by_size(&mut self) {
        let Some(limit) = self.policy.max_size else {
            return;
        };
        for (id, _) in self.oldest_first() {
            if self.plan.after <= limit {
                return;
            }
            self.drop_unit(&id, &Reason::Size);
        }
    }

    /// Returns the programs, and the artifacts that no program calls, sorted by last use.
    fn oldest_first(&self) -> Vec<(Digest, &'a Unit)> {
        let programs = self.graph.programs.iter();
        let artifacts = self
            .graph
            .artifacts
            .iter()
            .filter(|(id, _)| !self.needed(id));
        let mut all: Vec<_> = programs
            .chain(artifacts)
            .map(|(id, unit)| (*id, unit))
            .collect();
        all.sort_by_key(|(id, unit)| (unit.used, *id));
        all
    }

    fn drop_unit(&mut self, id: &Digest, reason: &Reason) {
        if self.rooted.contains(id) {
            return;
        }
        // Later rules skip it.
        self.rooted.insert(*id);
        let victim = |unit: &Unit, reason: &Reason| Victim {
            id: *id,
            name: unit.names.join(" "),
            bytes: 0,
            reason: reason.clone(),
        };
        if let Some(unit) = self.graph.programs.get(id) {
            self.plan.programs.push(victim(unit, reason));
            for artifact in &unit.links {
                if self.let_go(artifact) {
                    self.drop_unit(artifact, &Reason::Unreferenced);
                }
            }
        } else if let Some(unit) = self.graph.artifacts.get(id) {
            self.plan.artifacts.push(victim(unit, reason));
            for object in &unit.links {
                if self.let_go(object) {
                    self.drop_object(object);
                }
            }
        }
    }

    /// Removes one reference. Returns whether it was the last one.
    fn let_go(&mut self, id: &Digest) -> bool {
        if let Some(count) = self.references.get_mut(id) {
            *count -= 1;
        }
        !self.needed(id)
    }

    fn drop_object(&mut self, id: &Digest) {
        let bytes = self.graph.objects.get(id).copied().unwrap_or(0);
        self.plan.after -= bytes;
        self.plan.objects.push(Victim {
            id: *id,
            name: String::new(),
            bytes,
            reason: Reason::Unreferenced,
        });
    }
}

/// Returns the releases to keep: of each model the newest ones with at most `keep` different contents, and the newest
/// partial one if it is newer than all whole ones.
fn kept(releases: &BTreeMap<(String, u64), Contents>, keep: usize) -> BTreeSet<(String, u64)> {
    let mut kept = BTreeSet::new();
    // The contents of whole releases of the current model, and whether it had a partial one.
    let (mut at, mut contents, mut partial) = (None, HashSet::new(), false);
    for (place, release) in releases.iter().rev() {
        if at != Some(&place.0) {
            at = Some(&place.0);
            contents.clear();
            partial = false;
        }
        let stays = if release.partial {
            !std::mem::replace(&mut partial, true) && contents.is_empty()
        } else {
            contents.insert((&release.programs, &release.objects));
            contents.len() <= keep.max(1)
        };
        if stays {
            kept.insert(place.clone());
        }
    }
    kept
}
