//! Which program stood for a module and bucket before.
//!
//! Releases are the history: they count up, and each one names the programs that were current. Times of files would be
//! too coarse, and wrong after a copy.

use std::collections::HashSet;

use crate::{
    Digest,
    store::{Filter, Store, StoreError},
};

/// The history of one model. Releases are read when they are asked for, each one once.
pub struct History<'a> {
    store: &'a Store,
    model: &'a str,
    /// Their programs, newest first.
    read: Vec<HashSet<Digest>>,
    /// The next one to read, counting down; zero when all are read.
    next: u64,
}

impl<'a> History<'a> {
    /// Starts at the model's newest release.
    pub fn new(store: &'a Store, model: &'a str) -> Result<Self, StoreError> {
        let newest = store.release(model, None)?;
        Ok(Self {
            store,
            model,
            read: Vec::new(),
            next: newest.map_or(0, |release| release.seq),
        })
    }

    /// Returns the program that stood for this module and bucket on this kind of device (`cpu` or `cuda`): before
    /// `than` did, or last of all.
    ///
    /// A program that no release has is newer than every release. Where no release has any (no build ever finished),
    /// the newest program in the store is it.
    pub fn previous(
        &mut self,
        module: &str,
        bucket: &str,
        device: &str,
        than: Option<&Digest>,
    ) -> Result<Option<Digest>, StoreError> {
        let filter = Filter {
            model: Some(self.model.to_owned()),
            module: Some(module.to_owned()),
            bucket: Some(bucket.to_owned()),
            device: Some(device.to_owned()),
        };
        let mut rows = self.store.programs(filter).collect::<Result<Vec<_>, _>>()?;
        rows.retain(|row| Some(&row.id) != than);
        if rows.is_empty() {
            return Ok(None);
        }
        // Releases from the newest down to the first that has `than` are not before it.
        let mut skip = 0;
        if let Some(than) = than {
            let mut position = 0;
            while let Some(programs) = self.release(position)? {
                position += 1;
                if programs.contains(than) {
                    skip = position;
                }
            }
        }
        let mut position = skip;
        while let Some(programs) = self.release(position)? {
            if let Some(row) = rows.iter().find(|row| programs.contains(&row.id)) {
                return Ok(Some(row.id));
            }
            position += 1;
        }
        if skip > 0 {
            return Ok(None);
        }
        Ok(rows.iter().max_by_key(|row| row.created).map(|row| row.id))
    }

    /// Returns the programs of a release, counting from the newest one.
    fn release(&mut self, position: usize) -> Result<Option<&HashSet<Digest>>, StoreError> {
        while self.read.len() <= position && self.next > 0 {
            // A number may be missing: releases can be deleted.
            if let Some(release) = self.store.release_at(self.model, self.next)? {
                self.read.push(release.programs.into_iter().collect());
            }
            self.next -= 1;
        }
        Ok(self.read.get(position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::bucket_name;
    use crate::store::testing;

    /// Puts a program of the same module and bucket, other only in its key.
    fn put(store: &Store, key: &str) -> Digest {
        let mut program = testing::program("m", 8, &[]);
        program.id = Digest::of(key.as_bytes());
        store.put_program(&program).unwrap().id
    }

    #[test]
    fn releases_say_what_came_before_what() {
        let (_dir, store) = testing::store();
        let sizes = testing::program("m", 8, &[]).sizes;
        let ask = |than: Option<&Digest>| {
            let mut history = History::new(&store, "m").unwrap();
            history
                .previous("encode", &bucket_name(&sizes), "cpu", than)
                .unwrap()
        };
        assert_eq!(ask(None), None);
        let a = put(&store, "a");
        assert_eq!((ask(None), ask(Some(&a))), (Some(a), None));
        store
            .put_release(&testing::release("m", None, &[a]))
            .unwrap();
        let (b, c) = (put(&store, "b"), put(&store, "c"));
        store
            .put_release(&testing::release("m", None, &[b]))
            .unwrap();
        store
            .put_release(&testing::release("m", None, &[]))
            .unwrap();
        assert_eq!(
            (ask(None), ask(Some(&a)), ask(Some(&b))),
            (Some(b), None, Some(a))
        );
        assert_eq!(
            ask(Some(&c)),
            Some(b),
            "not released: newer than all releases"
        );
        // Back to an older state: what was before it is what was before its first release.
        store
            .put_release(&testing::release("m", None, &[a]))
            .unwrap();
        assert_eq!(
            (ask(None), ask(Some(&a)), ask(Some(&b))),
            (Some(a), None, Some(a))
        );
        let mut history = History::new(&store, "m").unwrap();
        assert_eq!(
            history
                .previous("encode", &bucket_name(&sizes), "cuda", None)
                .unwrap(),
            None
        );
        assert_eq!(
            history
                .previous("other", &bucket_name(&sizes), "cpu", None)
                .unwrap(),
            None
        );
    }
}
