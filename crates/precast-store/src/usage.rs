//! The users of an object (groups of programs and releases), and whether `precast gc --unreleased` would keep it.
//!
//! Objects are looked up one at a time, so that memory does not grow with the store. `gc` makes its own plan of what to
//! delete; a test compares the two.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use serde::Serialize;

use super::{
    base::Base,
    error::StoreError,
    gc::{self, Policy},
    graph,
    leases::Leases,
    reindex, rows,
};
use crate::Digest;

/// How disk usage is grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum GroupBy {
    /// By the model's name.
    Model,
    /// `MODEL MODULE`.
    Module,
    /// `MODEL SEQ`.
    Release,
}

/// A group that needs an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The group's name, in the form that [`GroupBy`] says.
    pub group: String,
    /// How many programs and releases of the group need it.
    pub times: u64,
}

/// Looks up the users of one object at a time.
pub struct ObjectUsage {
    base: Arc<Base>,
    query: String,
    /// The groups that need an object as their weights or their shim.
    direct: HashMap<Digest, BTreeMap<String, u64>>,
    /// The releases that gc keeps.
    kept: BTreeSet<(String, u64)>,
    /// Leased things, logs of failures, and weights and shims of the releases that gc keeps. None where gc refuses to delete
    /// anything.
    held: Option<HashSet<Digest>>,
}

impl ObjectUsage {
    /// Prepares lookups of an object's users. Weights and shims count for models and releases.
    pub(crate) fn new(base: &Arc<Base>, leases: &Leases, by: GroupBy) -> Result<Self, StoreError> {
        let (group, of) = match by {
            GroupBy::Model => ("g.model", "programs g ON g.id=l.program"),
            GroupBy::Module => ("g.model||' '||g.module", "programs g ON g.id=l.program"),
            GroupBy::Release => (
                "g.model||' '||g.seq",
                "release_programs g ON g.program=l.program",
            ),
        };
        let query = format!(
            "SELECT {group},count(*) FROM artifact_objects o \
             JOIN program_artifacts l ON l.artifact=o.artifact JOIN {of} WHERE o.object=? GROUP BY 1"
        );
        let newer = base
            .index
            .with(|index| reindex::newer(&base.layout, index))?;
        let releases = base.index.with(graph::releases)?;
        let kept = gc::kept(&releases, Policy::default().keep_releases);
        let mut held = leases.all_held()?;
        let mut direct: HashMap<Digest, BTreeMap<String, u64>> = HashMap::new();
        for (place, release) in &releases {
            if kept.contains(place) {
                held.extend(&release.objects);
            }
            let group = match by {
                GroupBy::Model => place.0.clone(),
                GroupBy::Module => continue,
                GroupBy::Release => format!("{} {}", place.0, place.1),
            };
            for object in &release.objects {
                let groups = direct.entry(*object).or_default();
                *groups.entry(group.clone()).or_default() += 1;
            }
        }
        base.index.with(|index| {
            let mut logs = index.prepare("SELECT log FROM failures WHERE log IS NOT NULL")?;
            for log in logs.query_map([], |row| rows::digest(row, 0))? {
                held.insert(log?);
            }
            Ok(())
        })?;
        Ok(Self {
            base: base.clone(),
            query,
            direct,
            kept,
            // Records of a newer precast may need any object.
            held: newer.is_none().then_some(held),
        })
    }

    fn keeps(&self, model: &str, seq: i64) -> bool {
        self.kept.contains(&(model.to_owned(), seq as u64))
    }

    /// Returns the groups that need an object, sorted by name.
    pub fn needs(&self, object: &Digest) -> Result<Vec<Need>, StoreError> {
        let mut groups = self.direct.get(object).cloned().unwrap_or_default();
        self.base.index.with(|index| {
            let mut query = index.prepare_cached(&self.query)?;
            let mut rows = query.query([object.as_bytes()])?;
            while let Some(row) = rows.next()? {
                *groups.entry(row.get(0)?).or_default() += row.get::<_, i64>(1)? as u64;
            }
            Ok(())
        })?;
        let needs = groups.into_iter();
        Ok(needs.map(|(group, times)| Need { group, times }).collect())
    }

    /// Returns whether `precast gc --unreleased`, with defaults otherwise, would keep an object.
    pub fn is_kept(&self, object: &Digest) -> Result<bool, StoreError> {
        let Some(held) = &self.held else {
            return Ok(true);
        };
        if held.contains(object) {
            return Ok(true);
        }
        self.base.index.with(|index| {
            let mut query = index.prepare_cached(
                "SELECT o.artifact,l.program,r.model,r.seq FROM artifact_objects o \
                 LEFT JOIN program_artifacts l ON l.artifact=o.artifact \
                 LEFT JOIN release_programs r ON r.program=l.program WHERE o.object=?",
            )?;
            let mut rows = query.query([object.as_bytes()])?;
            while let Some(row) = rows.next()? {
                let program = row.get::<_, Option<[u8; 32]>>(1)?.map(Digest::from_bytes);
                let leased = held.contains(&rows::digest(row, 0)?)
                    || program.is_some_and(|program| held.contains(&program));
                let release = row.get::<_, Option<String>>(2)?.zip(row.get(3)?);
                if leased || release.is_some_and(|(model, seq)| self.keeps(&model, seq)) {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::Store;
    use proptest::prelude::*;

    use super::{super::testing, *};

    #[test]
    fn needs_are_counted_by_group_and_weights_belong_to_releases() {
        let (_dir, store) = testing::store();
        let a = store
            .records()
            .put_artifact(&testing::artifact(&store, "a"))
            .unwrap();
        let b = store
            .records()
            .put_artifact(&testing::artifact(&store, "b"))
            .unwrap();
        let put = |model: &str, batch, artifacts: &[Digest]| {
            let program = testing::program(model, batch, artifacts);
            store.records().put_program(&program).unwrap()
        };
        let one = put("m", 1, &[a.id]);
        let two = put("m", 2, &[a.id, b.id]);
        put("other", 1, &[a.id]);
        let mut release = testing::release("m", None, &[one.id, two.id]);
        release.weights = Some(store.objects().put_bytes(b"weights").unwrap());
        store.releases().put(&release).unwrap();
        let times = |by, group: &str, object: &Digest| {
            let needs = store.object_usage(by).unwrap().needs(object).unwrap();
            needs
                .iter()
                .find(|need| need.group == group)
                .map(|need| need.times)
        };
        let weights = release.weights.unwrap();
        assert_eq!(times(GroupBy::Model, "m", &a.object), Some(2));
        assert_eq!(times(GroupBy::Model, "m", &b.object), Some(1));
        assert_eq!(times(GroupBy::Model, "m", &weights), Some(1));
        assert_eq!(times(GroupBy::Model, "other", &a.object), Some(1));
        assert_eq!(times(GroupBy::Module, "m encode", &a.object), Some(2));
        assert_eq!(times(GroupBy::Module, "m encode", &weights), None);
        assert_eq!(times(GroupBy::Release, "m 1", &a.object), Some(2));
        assert_eq!(times(GroupBy::Release, "m 1", &weights), Some(1));
        assert_eq!(times(GroupBy::Release, "other 1", &a.object), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

        /// Programs call artifacts at random, and some of them are released, again and again.
        #[test]
        fn what_stays_is_what_gc_would_leave(
            programs in prop::collection::vec((0..2usize, prop::collection::vec(0..6usize, 1..4)), 1..8),
            releases in prop::collection::vec((0..2usize, prop::collection::vec(0..8usize, 1..4)), 0..8),
        ) {
            let (_dir, store) = testing::store();
            let artifacts: Vec<_> = (0..6)
                .map(|n| store.records().put_artifact(&testing::artifact(&store, &format!("a{n}"))).unwrap())
                .collect();
            let models = ["m", "n"];
            let put: Vec<_> = (programs.iter().zip(1..))
                .map(|((model, calls), batch)| {
                    let calls: Vec<_> = calls.iter().map(|call| artifacts[*call].id).collect();
                    (*model, store.records().put_program(&testing::program(models[*model], batch, &calls)).unwrap().id)
                })
                .collect();
            for (n, (model, of)) in releases.iter().enumerate() {
                let of: Vec<_> = (of.iter().filter_map(|at| put.get(*at)))
                    .filter(|(of, _)| of == model)
                    .map(|(_, id)| *id)
                    .collect();
                let mut release = testing::release(models[*model], None, &of);
                release.weights = Some(store.objects().put_bytes(format!("weights {n}").as_bytes()).unwrap());
                store.releases().put(&release).unwrap();
            }
            store.objects().put_bytes(b"nobody needs this").unwrap();
            let path = store.path().to_owned();
            drop(store);
            let store = Store::open(path).unwrap();
            let policy = Policy { unreleased: true, ..Policy::default() };
            let goes: HashSet<_> = store.collector().plan(&policy).unwrap().objects.iter().map(|v| v.id).collect();
            let usage = store.object_usage(GroupBy::Model).unwrap();
            for row in store.objects().rows() {
                let object = row.unwrap().digest;
                prop_assert_eq!(usage.is_kept(&object).unwrap(), !goes.contains(&object));
            }
        }
    }
}
