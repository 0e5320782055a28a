//! The previous program of each module and bucket.
//!
//! Releases are the history: they are numbered, and each one lists the programs that were current. File times would be
//! too coarse, and wrong after a copy. Variants of a module share its name; the names of their inputs distinguish them.

use std::collections::{BTreeSet, HashSet};

use precast_store::{Digest, Filter, ProgramRow, Store, StoreError, record::Program};

use super::readable;

/// The module, bucket and device that successive programs are for.
#[derive(Clone, Debug, Default)]
pub struct Place<'a> {
    /// Name of the module, or its title if it has variants.
    pub module: &'a str,
    /// As `batch=8 seq=128`, `dynamic` or `eager`.
    pub bucket: &'a str,
    /// `cpu` or `cuda`.
    pub device: &'a str,
    /// The names of the inputs; none if they are not known.
    pub inputs: Option<BTreeSet<String>>,
    /// The inputs of the module's other variants.
    pub siblings: Vec<BTreeSet<String>>,
}

/// The history of one model. Releases are read lazily, each one once.
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
        let newest = store.releases().get(model, None)?;
        Ok(Self {
            store,
            model,
            read: Vec::new(),
            next: newest.map_or(0, |release| release.seq),
        })
    }

    /// Returns the program that stood in this place: before `than` did, or last of all.
    ///
    /// A program that no release has is newer than every release. Where no release has any (no build ever finished),
    /// the newest program in the store is it. A program with other inputs stood in this place when it is of no other
    /// variant and none with the same inputs did: then the inputs were changed.
    pub fn previous(
        &mut self,
        place: &Place<'_>,
        than: Option<&Digest>,
    ) -> Result<Option<Digest>, StoreError> {
        let filter = Filter {
            model: Some(self.model.to_owned()),
            module: Some(place.module.to_owned()),
            bucket: Some(place.bucket.to_owned()),
            device: Some(place.device.to_owned()),
        };
        let mut rows = self
            .store
            .records()
            .programs(filter)
            .collect::<Result<Vec<_>, _>>()?;
        rows.retain(|row| Some(&row.id) != than);
        if let Some(inputs) = &place.inputs
            && !place.siblings.is_empty()
        {
            let mut same = Vec::new();
            let mut other = Vec::new();
            for row in rows {
                match readable(self.store, &row.id)?.map(|program| names(&program)) {
                    Some(names) if names == *inputs => same.push(row),
                    Some(names) if !place.siblings.contains(&names) => other.push(row),
                    _ => {}
                }
            }
            return match self.last(same, than)? {
                Some(found) => Ok(Some(found)),
                None => self.last(other, than),
            };
        }
        self.last(rows, than)
    }

    /// Returns the names of the inputs of the other variants in the release of `program`.
    pub fn siblings(&self, program: &Program) -> Result<Vec<BTreeSet<String>>, StoreError> {
        let release = match self.store.releases().released(&program.id)? {
            Some(seq) => self.store.releases().at(self.model, seq)?,
            None => None,
        };
        let filter = Filter {
            model: Some(self.model.to_owned()),
            module: Some(program.module.clone()),
            bucket: Some(program.bucket()),
            ..Filter::default()
        };
        let own = names(program);
        let mut found = Vec::new();
        for row in self.store.records().programs(filter) {
            let id = row?.id;
            let beside = release
                .as_ref()
                .is_some_and(|release| release.programs.contains(&id));
            if beside && let Some(other) = self.store.records().program(&id)? {
                found.push(names(&other));
            }
        }
        found.retain(|names| *names != own);
        Ok(found)
    }

    /// Returns the newest of `rows`, all for the same program of the spec, or the newest one before `than`.
    fn last(
        &mut self,
        rows: Vec<ProgramRow>,
        than: Option<&Digest>,
    ) -> Result<Option<Digest>, StoreError> {
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
            if let Some(release) = self.store.releases().at(self.model, self.next)? {
                self.read.push(release.programs.into_iter().collect());
            }
            self.next -= 1;
        }
        Ok(self.read.get(position))
    }
}

/// Returns the names of a program's inputs.
pub fn names(program: &Program) -> BTreeSet<String> {
    program
        .inputs
        .iter()
        .map(|input| input.name.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::record::bucket_name;
    use precast_store::testing;

    /// Puts a program of the same module and bucket, other only in its key.
    fn put(store: &Store, key: &str) -> Digest {
        let mut program = testing::program("m", 8, &[]);
        program.id = Digest::of(key.as_bytes());
        store.records().put_program(&program).unwrap().id
    }

    fn release(store: &Store, programs: &[Digest]) {
        let release = testing::release("m", None, programs);
        store.releases().put(&release).unwrap();
    }

    #[test]
    fn releases_say_what_came_before_what() {
        let (_dir, store) = testing::store();
        let sizes = testing::program("m", 8, &[]).sizes;
        let bucket = bucket_name(&sizes);
        let place = |module, device| Place {
            module,
            bucket: &bucket,
            device,
            ..Place::default()
        };
        let ask = |than: Option<&Digest>| {
            let mut history = History::new(&store, "m").unwrap();
            history.previous(&place("encode", "cpu"), than).unwrap()
        };
        assert_eq!(ask(None), None);
        let a = put(&store, "a");
        assert_eq!((ask(None), ask(Some(&a))), (Some(a), None));
        release(&store, &[a]);
        let (b, c) = (put(&store, "b"), put(&store, "c"));
        release(&store, &[b]);
        release(&store, &[]);
        let all = || [ask(None), ask(Some(&a)), ask(Some(&b))];
        assert_eq!(all(), [Some(b), None, Some(a)]);
        // One that was not released is newer than all releases.
        assert_eq!(ask(Some(&c)), Some(b));
        // Back to an older state: its predecessor is the program before its first release.
        release(&store, &[a]);
        assert_eq!(all(), [Some(a), None, Some(a)]);
        let mut history = History::new(&store, "m").unwrap();
        for other in [place("encode", "cuda"), place("other", "cpu")] {
            assert_eq!(history.previous(&other, None).unwrap(), None);
        }
    }

    #[test]
    fn variants_are_distinguished_by_the_names_of_their_inputs() {
        let (_dir, store) = testing::store();
        let put = |key: &str, inputs: &[&str]| {
            let mut program = testing::program("m", 8, &[]);
            program.id = Digest::of(key.as_bytes());
            let first = program.inputs[0].clone();
            let named = |name: &&str| precast_store::record::Input {
                name: (*name).to_owned(),
                ..first.clone()
            };
            program.inputs = inputs.iter().map(named).collect();
            store.records().put_program(&program).unwrap()
        };
        let set = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let (image, text) = (put("a", &["ids", "image"]), put("b", &["ids"]));
        release(&store, &[image.id, text.id]);
        let bucket = image.bucket();
        let ask = |inputs: &[&str], siblings: &[&[&str]], than: Option<&Digest>| {
            let place = Place {
                module: "encode",
                bucket: &bucket,
                device: "cpu",
                inputs: Some(set(inputs)),
                siblings: siblings.iter().map(|names| set(names)).collect(),
            };
            let mut history = History::new(&store, "m").unwrap();
            history.previous(&place, than).unwrap()
        };
        assert_eq!(ask(&["ids", "image"], &[&["ids"]], None), Some(image.id));
        assert_eq!(ask(&["ids"], &[&["ids", "image"]], None), Some(text.id));
        // An input was renamed: the predecessor is the variant that no other program matches.
        assert_eq!(ask(&["tokens"], &[&["ids", "image"]], None), Some(text.id));

        let later = put("c", &["ids"]);
        release(&store, &[image.id, later.id]);
        let history = History::new(&store, "m").unwrap();
        let siblings = history.siblings(&later).unwrap();
        assert_eq!(siblings, [names(&image)]);
        let before = ask(&["ids"], &[&["ids", "image"]], Some(&later.id));
        assert_eq!(before, Some(text.id));
    }
}
