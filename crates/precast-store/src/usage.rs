//! The users of objects, and the objects that `precast gc --unreleased` would delete. Both follow from the graph that
//! gc reads.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;

use super::{
    error::StoreError,
    gc::{Collector, Policy},
    graph::Graph,
};
use crate::Digest;

/// The grouping of disk usage.
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

/// The users of the objects of a store.
pub struct ObjectUsage {
    groups: HashMap<Digest, BTreeMap<String, u64>>,
    unreleased: HashSet<Digest>,
}

impl Collector {
    /// Returns the users of all objects. Weights and shims count for models and releases.
    pub fn usage(&self, by: GroupBy) -> Result<ObjectUsage, StoreError> {
        let graph = Graph::load(self.base())?;
        let policy = Policy {
            unreleased: true,
            ..Policy::default()
        };
        let unreleased = match self.plan_of(&graph, &policy) {
            Ok(plan) => plan.objects.iter().map(|victim| victim.id).collect(),
            // Records of a newer precast may need any object.
            Err(StoreError::Newer { .. }) => HashSet::new(),
            Err(e) => return Err(e),
        };
        let mut usage = ObjectUsage {
            groups: HashMap::new(),
            unreleased,
        };
        for ((model, seq), release) in &graph.releases {
            let group = match by {
                GroupBy::Model => model.clone(),
                GroupBy::Module => continue,
                GroupBy::Release => format!("{model} {seq}"),
            };
            usage.add(&release.objects, &group);
            if by == GroupBy::Release {
                for program in &release.programs {
                    usage.add_program(&graph, program, &group);
                }
            }
        }
        for (id, unit) in &graph.programs {
            match by {
                GroupBy::Model => usage.add_program(&graph, id, &unit.names[0]),
                GroupBy::Module => usage.add_program(&graph, id, &unit.names[..2].join(" ")),
                GroupBy::Release => {}
            }
        }
        Ok(usage)
    }
}

impl ObjectUsage {
    fn add_program(&mut self, graph: &Graph, program: &Digest, group: &str) {
        let artifacts = graph.programs.get(program).into_iter();
        for artifact in artifacts.flat_map(|program| &program.links) {
            if let Some(artifact) = graph.artifacts.get(artifact) {
                self.add(&artifact.links, group);
            }
        }
    }

    fn add(&mut self, objects: &[Digest], group: &str) {
        for object in objects {
            let groups = self.groups.entry(*object).or_default();
            *groups.entry(group.to_owned()).or_default() += 1;
        }
    }

    /// Returns the groups that need an object, sorted by name, each with its number of programs and releases that need
    /// it.
    pub fn needs(&self, object: &Digest) -> impl Iterator<Item = (&str, u64)> {
        let groups = self.groups.get(object).into_iter().flatten();
        groups.map(|(group, times)| (&**group, *times))
    }

    /// Returns whether `precast gc --unreleased`, with defaults otherwise, would keep an object.
    pub fn is_kept(&self, object: &Digest) -> bool {
        !self.unreleased.contains(object)
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
        let [a, b] = ["a", "b"].map(|name| testing::put_artifact(&store, name));
        let one = testing::put_program(&store, "m", 1, &[a.id]);
        let two = testing::put_program(&store, "m", 2, &[a.id, b.id]);
        testing::put_program(&store, "other", 1, &[a.id]);
        let mut release = testing::release("m", None, &[one.id, two.id]);
        release.weights = Some(store.objects().put_bytes(b"weights").unwrap());
        store.releases().put(&release).unwrap();
        let times = |by, group: &str, object: &Digest| {
            let usage = store.collector().usage(by).unwrap();
            let found = usage.needs(object).find(|(name, _)| *name == group);
            found.map(|(_, times)| times)
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

        /// Programs call random artifacts, and some programs are released repeatedly.
        #[test]
        fn what_stays_is_what_gc_would_leave(
            programs in prop::collection::vec((0..2usize, prop::collection::vec(0..6usize, 1..4)), 1..8),
            releases in prop::collection::vec((0..2usize, prop::collection::vec(0..8usize, 1..4)), 0..8),
        ) {
            let (_dir, store) = testing::store();
            let artifacts: Vec<_> = (0..6).map(|n| testing::put_artifact(&store, &format!("a{n}"))).collect();
            let models = ["m", "n"];
            let put: Vec<_> = (programs.iter().zip(1..))
                .map(|((model, calls), batch)| {
                    let calls: Vec<_> = calls.iter().map(|call| artifacts[*call].id).collect();
                    (*model, testing::put_program(&store, models[*model], batch, &calls).id)
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
            let usage = store.collector().usage(GroupBy::Model).unwrap();
            for row in store.objects().rows() {
                let object = row.unwrap().digest;
                prop_assert_eq!(usage.is_kept(&object), !goes.contains(&object));
            }
        }
    }
}
