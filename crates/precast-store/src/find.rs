//! Looking things up: by prefix, by name, one by one.

use std::collections::{HashMap, HashSet};

use rusqlite::{Connection, OptionalExtension, params};

use super::{
    checksum::{self, Keyed},
    error::StoreError,
    layout::Kind,
    pages::{PAGE, Pages},
    records::Records,
    rows::{self, ArtifactRow, ProgramRow},
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program},
};

/// What an ID stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// An artifact, by its artifact key.
    Artifact(Digest),
    /// A program, by its request key.
    Program(Digest),
    /// An object, by the digest of its content.
    Object(Digest),
    /// Something that failed to build.
    Failure(Digest),
}

impl Found {
    /// Returns the whole ID.
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

/// A record and when it was published, in seconds since 1970.
pub type Dated<T> = Result<(T, i64), StoreError>;

/// Which programs to list; an empty filter lists all.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Name of the model; programs of all models where it is absent.
    pub model: Option<String>,
    /// Name of the module; programs of all modules where it is absent.
    pub module: Option<String>,
    /// As `batch=8 seq=128`.
    pub bucket: Option<String>,
    /// `cpu` or `cuda`.
    pub device: Option<String>,
}

/// What the index has of some programs, read in one transaction: each transaction costs locks of the index.
pub struct Known {
    links: HashMap<Digest, Vec<Link>>,
    /// Artifacts and objects that are sound.
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
    let rows = query.query_map([program.as_bytes()], |row| {
        let object = row.get::<_, Option<[u8; 32]>>(1)?.map(Digest::from_bytes);
        Ok((rows::digest(row, 0)?, object, row.get(2)?))
    })?;
    rows.collect()
}

impl Records {
    /// Returns whether there is a program with this request key: one look-up and a `stat`.
    pub fn has_program(&self, id: &Digest) -> Result<bool, StoreError> {
        self.has::<Program>("programs", id)
    }

    /// Returns whether there is an artifact with this key: one look-up and a `stat`.
    pub fn has_artifact(&self, id: &Digest) -> Result<bool, StoreError> {
        self.has::<Artifact>("artifacts", id)
    }

    /// What the index does not know may still be there: a crash can come between a record and its row. Then it gets one.
    /// A file that changed since it was published is read.
    fn has<R: Keyed>(&self, table: &str, id: &Digest) -> Result<bool, StoreError> {
        let query = format!(
            "SELECT 1 FROM {table} WHERE id=?1 AND NOT EXISTS \
             (SELECT 1 FROM marked WHERE kind='{table}' AND id=?1)"
        );
        let indexed = (self.base.index)
            .with(|index| index.prepare_cached(&query)?.exists([id.as_bytes()]))?;
        if indexed {
            self.has_sound_record::<R>(id)
        } else {
            self.adopt::<R>(id)
        }
    }

    /// Reads what the index has of these programs, for [`Self::lacks`].
    pub fn known(&self, programs: &[Digest]) -> Result<Known, StoreError> {
        let query = "SELECT 1 FROM programs WHERE id=?1 AND NOT EXISTS \
             (SELECT 1 FROM marked WHERE kind='programs' AND id=?1)";
        let links = self.base.index.with(|index| {
            let tx = index.unchecked_transaction()?;
            let mut there = tx.prepare_cached(query)?;
            let mut all = HashMap::with_capacity(programs.len());
            for id in programs {
                if there.exists([id.as_bytes()])? {
                    all.insert(*id, links(&tx, id)?);
                }
            }
            Ok(all)
        })?;
        let seen = HashSet::new();
        Ok(Known { links, seen })
    }

    /// Returns the first thing that a program lacks, with its kind in words: its record, an artifact, or an object of one.
    /// A damaged file counts as missing. Costs a `stat` of each file.
    pub fn lacks(
        &self,
        program: &Digest,
        known: &mut Known,
    ) -> Result<Option<(&'static str, Digest)>, StoreError> {
        let there = if known.links.contains_key(program) {
            self.has_sound_record::<Program>(program)?
        } else {
            self.has_program(program)?
        };
        if !there {
            return Ok(Some(("program", *program)));
        }
        let links = match known.links.remove(program) {
            Some(links) => links,
            None => self.base.index.with(|index| links(index, program))?,
        };
        let seen = &mut known.seen;
        for (artifact, object, indexed) in links {
            let sound = seen.contains(&artifact)
                || if indexed {
                    self.has_sound_record::<Artifact>(&artifact)?
                } else {
                    self.adopt::<Artifact>(&artifact)?
                };
            if !sound {
                return Ok(Some(("artifact", artifact)));
            }
            seen.insert(artifact);
            if let Some(object) = object {
                if !seen.contains(&object) && !self.objects.has_sound(&object)? {
                    return Ok(Some(("object", object)));
                }
                seen.insert(object);
            }
        }
        Ok(None)
    }

    /// Returns what the one ID that begins with `prefix` (4 to 64 hex digits) stands for.
    pub fn resolve(&self, prefix: &str) -> Result<Found, StoreError> {
        let hex = prefix
            .bytes()
            .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !hex || !(4..=64).contains(&prefix.len()) {
            return Err(StoreError::BadPrefix(prefix.to_owned()));
        }
        let bound = |fill: &str| -> Result<Digest, StoreError> {
            let text = format!("{prefix}{}", fill.repeat(64 - prefix.len()));
            text.parse()
                .map_err(|_| StoreError::BadPrefix(prefix.to_owned()))
        };
        let (low, high) = (bound("0")?, bound("f")?);
        let found: Vec<Found> = self.base.index.with(|index| {
            let mut all = Vec::new();
            type Of = fn(Digest) -> Found;
            let tables: [(&str, Of); 4] = [
                (
                    "SELECT id FROM programs WHERE id BETWEEN ? AND ? LIMIT 4",
                    Found::Program,
                ),
                (
                    "SELECT id FROM artifacts WHERE id BETWEEN ? AND ? LIMIT 4",
                    Found::Artifact,
                ),
                (
                    "SELECT digest FROM objects WHERE digest BETWEEN ? AND ? LIMIT 4",
                    Found::Object,
                ),
                (
                    "SELECT id FROM failures WHERE id BETWEEN ? AND ? LIMIT 4",
                    Found::Failure,
                ),
            ];
            for (query, of) in tables {
                let mut query = index.prepare_cached(query)?;
                let ids = query.query_map([low.as_bytes(), high.as_bytes()], |row| {
                    rows::digest(row, 0)
                })?;
                for id in ids {
                    all.push(of(id?));
                }
            }
            Ok(all)
        })?;
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

    /// Lists programs by model, module, bucket and ID. Rows are read as they are asked for.
    pub fn programs(
        &self,
        filter: Filter,
    ) -> impl Iterator<Item = Result<ProgramRow, StoreError>> + use<> {
        let query = format!(
            "SELECT {} FROM programs p WHERE (?5 IS NULL OR p.model=?5) AND (?6 IS NULL OR p.module=?6) \
             AND (?7 IS NULL OR p.device=?7) AND (?8 IS NULL OR p.bucket=?8) AND (p.model,p.module,p.bucket,p.id)>(?1,?2,?3,?4) \
             ORDER BY p.model,p.module,p.bucket,p.id LIMIT {PAGE}",
            ProgramRow::COLUMNS
        );
        let base = self.base.clone();
        Pages::new(move |last: Option<&ProgramRow>| {
            let (model, module, bucket, id) = match last {
                Some(row) => (
                    &*row.model,
                    &*row.module,
                    &*row.bucket,
                    row.id.as_bytes().to_vec(),
                ),
                None => ("", "", "", Vec::new()),
            };
            base.index.with(|index| {
                index
                    .prepare_cached(&query)?
                    .query_map(
                        params![
                            model,
                            module,
                            bucket,
                            id,
                            filter.model,
                            filter.module,
                            filter.device,
                            filter.bucket
                        ],
                        ProgramRow::read,
                    )?
                    .collect()
            })
        })
    }

    /// Lists artifacts by key. Rows are read as they are asked for.
    pub fn artifacts(&self) -> impl Iterator<Item = Result<ArtifactRow, StoreError>> + use<> {
        let query = format!(
            "SELECT {} FROM artifacts a WHERE a.id>? ORDER BY a.id LIMIT {PAGE}",
            ArtifactRow::COLUMNS
        );
        let base = self.base.clone();
        Pages::new(move |last: Option<&ArtifactRow>| {
            let after = last.map_or(Vec::new(), |row| row.id.as_bytes().to_vec());
            base.index.with(|index| {
                index
                    .prepare_cached(&query)?
                    .query_map([after], ArtifactRow::read)?
                    .collect()
            })
        })
    }

    /// Returns a program as the index has it.
    pub fn program_row(&self, id: &Digest) -> Result<Option<ProgramRow>, StoreError> {
        let query = format!(
            "SELECT {} FROM programs p WHERE p.id=?",
            ProgramRow::COLUMNS
        );
        self.base.index.with(|index| {
            index
                .prepare_cached(&query)?
                .query_row([id.as_bytes()], ProgramRow::read)
                .optional()
        })
    }

    /// Lists what failed and was not built since, with the time of the failure in seconds since 1970. A record that
    /// can't be read is an error in its place.
    pub fn failures(&self) -> impl Iterator<Item = Dated<Failure>> + use<> {
        let base = self.base.clone();
        let ids = Pages::new(move |last: Option<&(Digest, i64)>| {
            let after = last.map_or(Vec::new(), |(id, _)| id.as_bytes().to_vec());
            base.index.with(|index| {
                index
                    .prepare_cached(&format!(
                        "SELECT id,created FROM failures WHERE id>? ORDER BY id LIMIT {PAGE}"
                    ))?
                    .query_map([after], |row| Ok((rows::digest(row, 0)?, row.get(1)?)))?
                    .collect()
            })
        });
        let base = self.base.clone();
        ids.filter_map(move |found| {
            let read = |(id, created)| {
                let path = base.layout.record(Kind::Failure, &id);
                let found = checksum::read::<Failure>(&base.layout, &path)?;
                Ok(found.map(|(failure, _)| (failure, created)))
            };
            found.and_then(read).transpose()
        })
    }

    /// Returns the program that calls this artifact and was built first.
    pub fn first_caller(&self, artifact: &Digest) -> Result<Option<Digest>, StoreError> {
        self.base.index.with(|index| {
            index
                .prepare_cached(
                    "SELECT p.id FROM program_artifacts l JOIN programs p ON p.id=l.program \
                     WHERE l.artifact=? ORDER BY p.created,p.id LIMIT 1",
                )?
                .query_row([artifact.as_bytes()], |row| rows::digest(row, 0))
                .optional()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};

    #[test]
    fn a_unique_prefix_finds_and_others_say_why_not() {
        let (_dir, store, artifact, program) = testing::filled();
        let hex = artifact.id.hex();
        for length in [5, 12, 63, 64] {
            assert_eq!(
                store.records().resolve(&hex[..length]).unwrap(),
                Found::Artifact(artifact.id)
            );
        }
        assert_eq!(
            store.records().resolve(&program.id.hex()).unwrap(),
            Found::Program(program.id)
        );
        assert_eq!(
            store.records().resolve(&artifact.object.hex()).unwrap(),
            Found::Object(artifact.object)
        );
        assert!(matches!(
            store.records().resolve("0000"),
            Err(StoreError::Unknown(_))
        ));
        for bad in ["", "abc", "XYZ0", "../..", &"a".repeat(65)] {
            assert!(
                matches!(store.records().resolve(bad), Err(StoreError::BadPrefix(_))),
                "{bad}"
            );
        }
        // An object that has the digest of the artifact's key.
        let same = store.objects().put_bytes(b"block").unwrap();
        assert_eq!(same, artifact.id);
        assert!(matches!(
            store.records().resolve(&hex[..12]),
            Err(StoreError::Ambiguous { .. })
        ));
    }

    #[test]
    fn listings_go_on_over_pages_and_keep_to_the_filter() {
        let (_dir, store) = testing::store();
        let artifact = store
            .records()
            .put_artifact(&testing::artifact(&store, "block"))
            .unwrap();
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
        let all: Vec<_> = store
            .records()
            .programs(Filter::default())
            .map(Result::unwrap)
            .collect();
        assert_eq!(all.len(), 600);
        assert!(
            all.iter()
                .all(|row| row.bytes == artifact.size && row.steps == 1)
        );
        assert!(
            all.windows(2)
                .all(|w| (&w[0].model, &w[0].bucket) < (&w[1].model, &w[1].bucket))
        );
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
        assert_eq!(
            store
                .records()
                .artifacts()
                .next()
                .unwrap()
                .unwrap()
                .programs,
            600
        );
    }
}
