//! Differences between the keys of two programs or artifacts, or between the programs of two releases or stores.

use std::collections::BTreeMap;

use precast_builder::plan::{self, Field, Reason};
use precast_store::{Digest, Filter, Store, StoreError, record::Release};
use serde::Serialize;
use serde_json::Value;

use super::graph::{self, Graph};

/// The difference of two explained keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Keys {
    /// The reasons, most specific first.
    pub reasons: Vec<Reason>,
    /// Every field that differs.
    pub fields: Vec<Field>,
}

/// Compares two explained keys.
pub fn keys(old: &Value, new: &Value) -> Keys {
    Keys {
        reasons: plan::reasons(old, new),
        fields: plan::diff(old, new),
    }
}

/// Programs by `MODEL MODULE BUCKET DEVICE`.
pub type Programs = BTreeMap<String, Digest>;

/// The difference of two sets of programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sets {
    /// Names that only the first has.
    pub removed: Vec<Named>,
    /// Names that only the second has.
    pub added: Vec<Named>,
    /// Names with a different program in the second, with the reasons.
    pub changed: Vec<Changed>,
    /// Number of programs in both.
    pub same: u64,
}

/// A program and its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Named {
    /// Module and bucket, as `encode batch=8 seq=128`.
    pub name: String,
    /// The request key.
    pub id: Digest,
}

/// A name with a different program in the second set.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Changed {
    /// Module and bucket, as `encode batch=8 seq=128`.
    pub name: String,
    /// Request key in the first set.
    pub old: Digest,
    /// Request key in the second set.
    pub new: Digest,
    /// Empty when one of the two records can't be read.
    pub reasons: Vec<Reason>,
    /// The change of the captured graph, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph: Option<Graph>,
}

/// Returns the programs of a release. Missing ones have their ID as a name.
pub fn of_release(store: &Store, release: &Release) -> Result<Programs, StoreError> {
    let mut found = Programs::new();
    for id in &release.programs {
        let name = match store.records().program_row(id)? {
            Some(row) => name(&row.model, &row.module, &row.bucket, &row.device),
            None => format!("{} (gone) {}", release.model, id.short()),
        };
        found.insert(name, *id);
    }
    Ok(found)
}

fn name(model: &str, module: &str, bucket: &str, device: &str) -> String {
    format!("{model} {module} {bucket} {device}")
}

/// Compares two sets of programs; each store has the records of its own set.
pub fn sets(
    (old_store, old): (&Store, &Programs),
    (new_store, new): (&Store, &Programs),
) -> Result<Sets, StoreError> {
    let mut found = Sets::default();
    for (name, id) in old {
        if !new.contains_key(name) {
            found.removed.push(Named::new(name, *id));
        }
    }
    for (name, id) in new {
        match old.get(name) {
            None => found.added.push(Named::new(name, *id)),
            Some(before) => found.both(name, (old_store, *before), (new_store, *id))?,
        }
    }
    Ok(found)
}

/// Returns the newest program of each name in a store.
pub fn of_store(store: &Store) -> Result<Programs, StoreError> {
    let mut newest = BTreeMap::new();
    for row in store.records().programs(Filter::default()) {
        let row = row?;
        let name = name(&row.model, &row.module, &row.bucket, &row.device);
        let best = newest.entry(name).or_insert((row.created, row.id));
        *best = (*best).max((row.created, row.id));
    }
    Ok(newest
        .into_iter()
        .map(|(name, (_, id))| (name, id))
        .collect())
}

impl Named {
    fn new(name: &str, id: Digest) -> Self {
        Self {
            name: name.to_owned(),
            id,
        }
    }
}

impl Sets {
    /// Adds a name that both have.
    fn both(
        &mut self,
        name: &str,
        (old_store, old): (&Store, Digest),
        (new_store, new): (&Store, Digest),
    ) -> Result<(), StoreError> {
        if old == new {
            self.same += 1;
            return Ok(());
        }
        let (reasons, graph) = match (
            old_store.records().program(&old)?,
            new_store.records().program(&new)?,
        ) {
            (Some(old), Some(new)) => (
                plan::reasons(&old.request, &new.request),
                graph::graph((old_store, &old), (new_store, &new))?,
            ),
            _ => (vec![], None),
        };
        self.changed.push(Changed {
            name: name.to_owned(),
            old,
            new,
            reasons,
            graph,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use precast_store::testing;

    #[test]
    fn stores_differ_by_the_newest_program_of_each_name() {
        let store = |batches: &[(i64, &str)]| {
            let (dir, store) = testing::store();
            let artifact = testing::put_artifact(&store, "a");
            for (batch, source) in batches {
                let mut program = testing::program("m", *batch, &[artifact.id]);
                program.id = Digest::of(format!("{batch} {source}").as_bytes());
                program.request = json!({"sizes": batch, "source": source});
                store.records().put_program(&program).unwrap();
            }
            (dir, store)
        };
        let (_a, a) = store(&[(1, "x"), (2, "x"), (4, "x")]);
        let (_b, b) = store(&[(2, "x"), (4, "y"), (8, "x")]);
        let (_empty, empty) = store(&[]);
        let names = |old: &Store, new: &Store| {
            let (olds, news) = (of_store(old).unwrap(), of_store(new).unwrap());
            let found = sets((old, &olds), (new, &news)).unwrap();
            let names = |all: &[Named]| all.iter().map(|n| n.name.clone()).collect::<Vec<_>>();
            let changed = found.changed.iter().map(|c| c.name.clone()).collect();
            let (removed, added) = (names(&found.removed), names(&found.added));
            (removed, added, changed, found.same)
        };
        let at = |batch: &str| vec![format!("m encode batch={batch} cpu")];
        assert_eq!(names(&a, &b), (at("1"), at("8"), at("4"), 1));
        assert_eq!(names(&b, &a), (at("8"), at("1"), at("4"), 1));
        assert_eq!(names(&a, &a), (vec![], vec![], vec![], 3));
        assert_eq!(names(&a, &empty).0.len(), 3);
        assert_eq!(names(&empty, &b).1.len(), 3);
    }
}
