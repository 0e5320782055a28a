//! Disk usage of a store by group: total, shared and reclaimable bytes.

use std::collections::BTreeMap;

use serde::Serialize;

use precast_store::{GroupBy, Store, StoreError};

/// The bytes of a group, or of the whole store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Bytes {
    /// Bytes of content, as if every program and every release had a separate copy of everything that it needs.
    pub logical: u64,
    /// Content of the distinct objects.
    pub content: u64,
    /// Bytes of the same content on disk, compressed.
    pub stored: u64,
    /// The part of `stored` that another group needs too.
    pub shared: u64,
    /// The part of `stored` that `precast gc --unreleased` would free.
    pub reclaimable: u64,
    /// Number of distinct objects.
    pub objects: u64,
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Group {
    /// Name of the group.
    pub name: String,
    /// Bytes that the group needs.
    #[serde(flatten)]
    pub bytes: Bytes,
}

/// The disk usage of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DiskUsage {
    /// All objects. `shared` counts objects of more than one group.
    pub total: Bytes,
    /// Objects that no group needs: logs of failures, leftovers.
    pub rest: Bytes,
    /// Sorted by name.
    pub groups: Vec<Group>,
    /// Bytes of unpacked copies of objects, which loads create and `precast gc` counts.
    pub unpacked: u64,
    /// Bytes of prepacked weights, which loads compute and keep, and `precast gc` counts.
    pub prepacked: u64,
}

impl DiskUsage {
    /// Returns the bytes on disk of objects and of all that loads keep.
    pub fn on_disk(&self) -> u64 {
        self.total.stored + self.unpacked + self.prepacked
    }
}

/// Returns the disk usage by group.
pub fn usage(store: &Store, by: GroupBy) -> Result<DiskUsage, StoreError> {
    let users = store.collector().usage(by)?;
    let (mut total, mut rest) = (Bytes::default(), Bytes::default());
    let mut groups: BTreeMap<String, Bytes> = BTreeMap::new();
    for row in store.objects().rows() {
        let row = row?;
        let needs: Vec<_> = users.needs(&row.digest).collect();
        let one = Bytes {
            logical: 0,
            content: row.size,
            stored: row.stored,
            shared: if needs.len() > 1 { row.stored } else { 0 },
            reclaimable: if users.is_kept(&row.digest) {
                0
            } else {
                row.stored
            },
            objects: 1,
        };
        let times: u64 = needs.iter().map(|(_, times)| times).sum();
        let logical = row.size.saturating_mul(times.max(1));
        total.add(&Bytes { logical, ..one });
        if needs.is_empty() {
            rest.add(&Bytes { logical, ..one });
        }
        for (group, times) in needs {
            let logical = row.size.saturating_mul(times);
            let group = groups.entry(group.to_owned()).or_default();
            group.add(&Bytes { logical, ..one });
        }
    }
    let groups = groups.into_iter();
    Ok(DiskUsage {
        total,
        rest,
        groups: groups.map(|(name, bytes)| Group { name, bytes }).collect(),
        unpacked: store.objects().unpacked_bytes(),
        prepacked: store.prepacked().bytes(),
    })
}

impl Bytes {
    fn add(&mut self, other: &Self) {
        self.logical += other.logical;
        self.content += other.content;
        self.stored += other.stored;
        self.shared += other.shared;
        self.reclaimable += other.reclaimable;
        self.objects += other.objects;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::{Digest, testing};

    #[test]
    fn shared_objects_count_once_in_total_and_in_each_group() {
        let (_dir, store) = testing::store();
        let [a, b] = ["a", "b"].map(|name| testing::put_artifact(&store, name));
        let one = testing::put_program(&store, "m", 1, &[a.id]);
        testing::put_program(&store, "m", 2, &[a.id]);
        testing::put_program(&store, "n", 1, &[a.id, b.id]);
        testing::put_release(&store, None, &[one.id]);
        let log = store
            .objects()
            .put_bytes(b"a log that nobody needs")
            .unwrap();
        // A process holds the objects that it added until it closes the store.
        let path = store.path().to_owned();
        drop(store);
        let store = Store::open(path).unwrap();
        let usage = usage(&store, GroupBy::Model).unwrap();
        let [m, n] = &usage.groups[..] else {
            panic!("{usage:?}")
        };
        let stored = |object: &Digest| store.objects().row(object).unwrap().unwrap().stored;
        let [of_a, of_b, of_log] = [&a.object, &b.object, &log].map(stored);
        assert_eq!(m.bytes.logical, 2 * a.size);
        assert_eq!((m.bytes.stored, m.bytes.shared), (of_a, of_a));
        assert_eq!((n.bytes.objects, n.bytes.shared), (2, of_a));
        assert_eq!(usage.total.content, a.size + b.size + 23);
        assert_eq!(usage.total.stored, of_a + of_b + of_log);
        assert_eq!(usage.rest.objects, 1);
        // `n` is in no release. The object that it shares with `m` is kept.
        assert_eq!(n.bytes.reclaimable, of_b);
        assert_eq!(m.bytes.reclaimable, 0);
        assert_eq!(usage.total.reclaimable, of_b + of_log);
    }
}
