//! Lookups of records: by prefix, by name, or all of them.

use std::collections::{HashMap, HashSet};

use rusqlite::{Connection, params};

use super::{
    checksum,
    error::StoreError,
    layout::Kind,
    pages::{PAGE, pages},
    records::{Records, indexed},
    rows::{ArtifactRow, ProgramRow},
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program},
};

/// The thing that an ID names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// An artifact, by its artifact key.
    Artifact(Digest),
    /// A program, by its request key.
    Program(Digest),
    /// An object, by the digest of its content.
    Object(Digest),
    /// A failed build, by its key.
    Failure(Digest),
}

impl Found {
    /// Returns the complete ID.
    pub fn id(&self) -> Digest {
        match self {
            Self::Artifact(id) | Self::Program(id) | Self::Object(id) | Self::Failure(id) => *id,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Artifact(_) => "artifact",
            Self::Program(_) => "program",
            Self::Object(_) => "object",
            Self::Failure(_) => "failure",
        }
    }
}

/// A record and its publication time, in seconds since 1970.
pub type Dated<T> = Result<(T, i64), StoreError>;

/// Selects programs of a listing; an empty filter selects all.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Name of the model; absent for programs of all models.
    pub model: Option<String>,
    /// Name of the module; absent for programs of all modules.
    pub module: Option<String>,
    /// As `batch=8 seq=128`.
    pub bucket: Option<String>,
    /// `cpu` or `cuda`.
    pub device: Option<String>,
}

/// The links of some programs in the index, read in one transaction, because each transaction locks the index.
pub struct Known {
    links: HashMap<Digest, Vec<Link>>,
    /// Artifacts and objects that were found sound.
    seen: HashSet<Digest>,
}

/// An artifact of a program, one of its objects, and whether the artifact has a row.
type Link = (Digest, Option<Digest>, bool);

fn links(index: &Connection, program: &Digest) -> rusqlite::Result<Vec<Link>> {
    const LINKS: &str = "SELECT l.artifact, o.object, \
         EXISTS (SELECT 1 FROM artifacts a WHERE a.id=l.artifact) AND NOT EXISTS \
         (SELECT 1 FROM marked m WHERE m.kind='artifacts' AND m.id=l.artifact) \
         FROM program_artifacts l LEFT JOIN artifact_objects o ON o.artifact=l.artifact \
         WHERE l.program=?";
    let mut query = index.prepare_cached(LINKS)?;
    let rows = query.query_map([program], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    rows.collect()
}

impl Records {
    /// Reads the links of these programs from the index, for [`Self::lacks`].
    pub fn known(&self, programs: &[Digest]) -> Result<Known, StoreError> {
        let links = self.base().index.with(|index| {
            let tx = index.unchecked_transaction()?;
            let mut all = HashMap::with_capacity(programs.len());
            for id in programs {
                if indexed(&tx, "programs", id)? {
                    all.insert(*id, links(&tx, id)?);
                }
            }
            Ok(all)
        })?;
        let seen = HashSet::new();
        Ok(Known { links, seen })
    }

    /// Returns the first missing file of a program, with its kind in words: its record, an artifact, or an object of an
    /// artifact. A damaged file counts as missing. Costs a `stat` of each file.
    pub fn lacks(
        &self,
        program: &Digest,
        known: &mut Known,
    ) -> Result<Option<(&'static str, Digest)>, StoreError> {
        let links = match known.links.remove(program) {
            Some(links) if self.has_sound_record::<Program>(program)? => links,
            None if self.has_program(program)? => {
                self.base().index.with(|index| links(index, program))?
            }
            _ => return Ok(Some(("program", *program))),
        };
        let seen = &mut known.seen;
        for (artifact, object, indexed) in links {
            if seen.insert(artifact) {
                let sound = if indexed {
                    self.has_sound_record::<Artifact>(&artifact)?
                } else {
                    self.adopt::<Artifact>(&artifact)?
                };
                if !sound {
                    seen.remove(&artifact);
                    return Ok(Some(("artifact", artifact)));
                }
            }
            if let Some(object) = object
                && !seen.contains(&object)
            {
                if !self.objects.has_sound(&object)? {
                    return Ok(Some(("object", object)));
                }
                seen.insert(object);
            }
        }
        Ok(None)
    }

    /// Returns the thing whose ID begins with `prefix` (4 to 64 hex digits). Fails unless there is exactly one.
    pub fn resolve(&self, prefix: &str) -> Result<Found, StoreError> {
        let bad = || StoreError::BadPrefix(prefix.to_owned());
        if !(4..=64).contains(&prefix.len()) {
            return Err(bad());
        }
        let bound = |fill: &str| -> Result<Digest, StoreError> {
            let text = format!("{prefix}{}", fill.repeat(64 - prefix.len()));
            text.parse().map_err(|_| bad())
        };
        let (low, high) = (bound("0")?, bound("f")?);
        let mut found = Vec::new();
        let mut add = |table: &str, of: fn(Digest) -> Found| -> Result<(), StoreError> {
            // The ID is the first column.
            let query = format!("SELECT * FROM {table} BETWEEN ? AND ? LIMIT 4");
            let ids = (self.base().index).query(&query, [low, high], |row| row.get(0))?;
            found.extend(ids.into_iter().map(of));
            Ok(())
        };
        add("programs WHERE id", Found::Program)?;
        add("artifacts WHERE id", Found::Artifact)?;
        add("objects WHERE digest", Found::Object)?;
        add("failures WHERE id", Found::Failure)?;
        match found[..] {
            [one] => Ok(one),
            [] => Err(StoreError::Unknown(prefix.to_owned())),
            _ => Err(StoreError::Ambiguous {
                prefix: prefix.to_owned(),
                candidates: found
                    .iter()
                    .map(|f| format!("{} {}", f.name(), f.id().short()))
                    .collect(),
            }),
        }
    }

    /// Lists programs by model, module, bucket and ID. Rows are read lazily.
    pub fn programs(
        &self,
        filter: Filter,
    ) -> impl Iterator<Item = Result<ProgramRow, StoreError>> + use<> {
        let query = format!(
            "SELECT {} FROM programs t WHERE (?5 IS NULL OR model=?5) AND (?6 IS NULL OR module=?6) \
             AND (?7 IS NULL OR device=?7) AND (?8 IS NULL OR bucket=?8) AND (model,module,bucket,id)>(?1,?2,?3,?4) \
             ORDER BY model,module,bucket,id LIMIT {PAGE}",
            ProgramRow::columns()
        );
        let base = self.base().clone();
        pages(move |last: Option<&ProgramRow>| {
            let (model, module, bucket) = last.map_or(("", "", ""), |row| {
                (&*row.model, &*row.module, &*row.bucket)
            });
            let id = last.map_or(&[][..], |row| row.id.as_bytes());
            let Filter {
                model: of,
                module: within,
                bucket: at,
                device,
            } = &filter;
            let params = params![model, module, bucket, id, of, within, device, at];
            base.index.query(&query, params, ProgramRow::read)
        })
    }

    /// Lists artifacts by key. Rows are read lazily.
    pub fn artifacts(&self) -> impl Iterator<Item = Result<ArtifactRow, StoreError>> + use<> {
        let query = format!(
            "SELECT {} FROM artifacts t WHERE id>? ORDER BY id LIMIT {PAGE}",
            ArtifactRow::columns()
        );
        let base = self.base().clone();
        pages(move |last: Option<&ArtifactRow>| {
            let after = last.map_or(&[][..], |row| row.id.as_bytes());
            base.index.query(&query, [after], ArtifactRow::read)
        })
    }

    /// Returns the row of a program in the index.
    pub fn program_row(&self, id: &Digest) -> Result<Option<ProgramRow>, StoreError> {
        let query = format!(
            "SELECT {} FROM programs t WHERE id=?",
            ProgramRow::columns()
        );
        let found = self.base().index.query(&query, [id], ProgramRow::read)?;
        Ok(found.into_iter().next())
    }

    /// Lists failures without a later success, each with its time in seconds since 1970. An unreadable record is an
    /// error in its place.
    pub fn failures(&self) -> impl Iterator<Item = Dated<Failure>> + use<> {
        let query = format!("SELECT id,created FROM failures WHERE id>? ORDER BY id LIMIT {PAGE}");
        let base = self.base().clone();
        let ids = pages(move |last: Option<&(Digest, i64)>| {
            let after = last.map_or(&[][..], |(id, _)| id.as_bytes());
            let read = |row: &rusqlite::Row| Ok((row.get(0)?, row.get(1)?));
            base.index.query(&query, [after], read)
        });
        let base = self.base().clone();
        ids.filter_map(move |found| {
            let read = |(id, created)| {
                let path = base.layout.record(Kind::Failure, &id);
                let found = checksum::read::<Failure>(&base.layout, &path)?;
                Ok(found.map(|(failure, _)| (failure, created)))
            };
            found.and_then(read).transpose()
        })
    }

    /// Returns the oldest program that calls this artifact.
    pub fn first_caller(&self, artifact: &Digest) -> Result<Option<Digest>, StoreError> {
        let query = "SELECT p.id FROM program_artifacts l JOIN programs p ON p.id=l.program \
                     WHERE l.artifact=? ORDER BY p.created,p.id LIMIT 1";
        let found = self
            .base()
            .index
            .query(query, [artifact], |row| row.get(0))?;
        Ok(found.into_iter().next())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{rows, testing},
        *,
    };

    #[test]
    fn a_unique_prefix_finds_and_others_say_why_not() {
        let (_dir, store, artifact, program) = testing::filled();
        let hex = artifact.id.hex();
        let find = |prefix: &str| store.records().resolve(prefix);
        for length in [5, 12, 63, 64] {
            assert_eq!(find(&hex[..length]).unwrap(), Found::Artifact(artifact.id));
        }
        let program = (program.id.hex(), Found::Program(program.id));
        let object = (artifact.object.hex(), Found::Object(artifact.object));
        for (hex, found) in [program, object] {
            assert_eq!(find(&hex).unwrap(), found);
        }
        assert_eq!(testing::refused(find("0000")), "Unknown");
        for bad in ["", "abc", "XYZ0", "../..", &"a".repeat(65)] {
            assert_eq!(testing::refused(find(bad)), "BadPrefix", "{bad}");
        }
        // An object that has the digest of the artifact's key.
        let same = store.objects().put_bytes(b"block").unwrap();
        assert_eq!(same, artifact.id);
        assert_eq!(testing::refused(find(&hex[..12])), "Ambiguous");
    }

    #[test]
    fn listings_go_on_over_pages_and_keep_to_the_filter() {
        let (_dir, store) = testing::store();
        let artifact = testing::put_artifact(&store, "block");
        store
            .index()
            .write(|tx| {
                for batch in 0..600 {
                    let model = if batch % 3 == 0 { "a" } else { "b" };
                    let program = testing::program(model, batch, &[artifact.id]);
                    rows::insert_program(tx, &program, &Digest::of(b"checksum"), 1)?;
                }
                Ok(())
            })
            .unwrap();
        let all = store.records().programs(Filter::default());
        let all: Vec<_> = all.map(Result::unwrap).collect();
        assert_eq!(all.len(), 600);
        let whole = |row: &ProgramRow| row.bytes == artifact.size && row.steps == 1;
        assert!(all.iter().all(whole));
        assert!(all.is_sorted_by(|a, b| (&a.model, &a.bucket) < (&b.model, &b.bucket)));
        let some = Filter {
            model: Some("a".into()),
            ..Filter::default()
        };
        assert_eq!(store.records().programs(some).count(), 200);
        let none = Filter {
            device: Some("cuda".into()),
            ..Filter::default()
        };
        assert_eq!(store.records().programs(none).count(), 0);
        let listed = store.records().artifacts().next().unwrap().unwrap();
        assert_eq!(listed.programs, 600);
    }
}
