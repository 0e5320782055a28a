//! How two things differ: the keys of two programs or artifacts, or the programs of two releases or stores.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::{
    Digest,
    plan::{self, Field, Reason},
    record::Release,
    store::{Filter, Store, StoreError},
};

/// How two explained keys differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Keys {
    /// In words, most telling first.
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

/// How two sets of programs differ.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sets {
    /// Names that only the first has.
    pub removed: Vec<Named>,
    /// Names that only the second has.
    pub added: Vec<Named>,
    pub changed: Vec<Changed>,
    /// How many are the same in both.
    pub same: u64,
}

/// A program and its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Named {
    pub name: String,
    pub id: Digest,
}

/// One name that stands for another program on the other side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changed {
    pub name: String,
    pub old: Digest,
    pub new: Digest,
    /// Empty when one of the two records can't be read.
    pub reasons: Vec<Reason>,
}

/// Returns the programs of a release. What is gone from the store is listed by its ID.
pub fn of_release(store: &Store, release: &Release) -> Result<Programs, StoreError> {
    let mut found = Programs::new();
    for id in &release.programs {
        let name = match store.program_row(id)? {
            Some(row) => name(&row.model, &row.module, &row.bucket, &row.device),
            None => format!("{} (gone) {}", release.model, id.short()),
        };
        found.insert(name, *id);
    }
    Ok(found)
}

/// Returns the programs of a store: under each name the one that was built last.
pub fn of_store(store: &Store) -> Result<Programs, StoreError> {
    let mut newest: BTreeMap<String, (i64, Digest)> = BTreeMap::new();
    for row in store.programs(Filter::default()) {
        let row = row?;
        let best = newest
            .entry(name(&row.model, &row.module, &row.bucket, &row.device))
            .or_insert((row.created, row.id));
        *best = (*best).max((row.created, row.id));
    }
    Ok(newest
        .into_iter()
        .map(|(name, (_, id))| (name, id))
        .collect())
}

fn name(model: &str, module: &str, bucket: &str, device: &str) -> String {
    format!("{model} {module} {bucket} {device}")
}

/// Compares two sets of programs; each store has the records of its own set.
pub fn sets(
    (old_store, old): (&Store, &Programs),
    (new_store, new): (&Store, &Programs),
) -> Result<Sets, StoreError> {
    let only = |these: &Programs, others: &Programs| {
        let only = these.iter().filter(|(name, _)| !others.contains_key(*name));
        only.map(|(name, id)| Named {
            name: name.clone(),
            id: *id,
        })
        .collect()
    };
    let mut found = Sets {
        removed: only(old, new),
        added: only(new, old),
        ..Sets::default()
    };
    for (name, id) in new {
        match old.get(name) {
            None => {}
            Some(before) if before == id => found.same += 1,
            Some(before) => found.changed.push(Changed {
                name: name.clone(),
                old: *before,
                new: *id,
                reasons: match (old_store.program(before)?, new_store.program(id)?) {
                    (Some(old), Some(new)) => plan::reasons(&old.request, &new.request),
                    _ => vec![],
                },
            }),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::testing;

    #[test]
    fn releases_differ_by_what_was_added_removed_and_changed() {
        let (_dir, store) = testing::store();
        let artifact = store.put_artifact(&testing::artifact(&store, "a")).unwrap();
        let put = |batch: i64, source: &str| {
            let mut program = testing::program("m", batch, &[artifact.id]);
            program.request =
                json!({"common": {"sources": {"model.py": Digest::of(source.as_bytes())}}});
            program.id = Digest::of(format!("{batch} {source}").as_bytes());
            store.put_program(&program).unwrap().id
        };
        let (same, gone, was) = (put(1, "one"), put(2, "one"), put(4, "one"));
        let (is, new) = (put(4, "two"), put(8, "two"));
        let first = store
            .put_release(&testing::release("m", None, &[same, gone, was]))
            .unwrap();
        let second = store
            .put_release(&testing::release("m", None, &[same, is, new]))
            .unwrap();
        let (first, second) = (
            of_release(&store, &first).unwrap(),
            of_release(&store, &second).unwrap(),
        );
        let found = sets((&store, &first), (&store, &second)).unwrap();
        assert_eq!(found.same, 1);
        assert_eq!(found.removed[0].id, gone);
        assert_eq!(found.added[0].id, new);
        let [changed] = &found.changed[..] else {
            panic!("{found:?}")
        };
        assert_eq!((changed.old, changed.new), (was, is));
        assert_eq!(
            changed.reasons,
            [Reason::SourceChanged {
                path: "model.py".into()
            }]
        );
        assert_eq!(of_store(&store).unwrap().len(), 4);
    }
}
