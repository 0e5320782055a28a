//! The graph of references between the rows of the index, with all check sums verified: gc must not act on a flipped
//! bit.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    ops::Range,
};

use rusqlite::Connection;

use super::{
    base::Base,
    error::StoreError,
    layout::Kind,
    manifest::{Links, Source},
    prepacked,
    rows::{self, ObjectRow, bad_sum},
};
use crate::Digest;

/// A program or an artifact.
pub(crate) struct Unit {
    /// Model, module and bucket of a program; the target of an artifact.
    pub names: Vec<String>,
    /// Checksum of its record.
    pub checksum: Digest,
    /// Time of the last use, or of the creation if it was never used.
    pub used: i64,
    /// The artifacts of a program, the objects of an artifact.
    pub links: Vec<Digest>,
}

/// The references of a release.
pub(crate) struct Contents {
    /// Its programs, sorted.
    pub programs: Vec<Digest>,
    /// The objects of its shims, sorted, then its weights.
    pub objects: Vec<Digest>,
    pub partial: bool,
}

/// All rows of an index.
pub(crate) struct Graph {
    pub programs: HashMap<Digest, Unit>,
    pub artifacts: HashMap<Digest, Unit>,
    /// Bytes on disk of each object, with its unpacked file.
    pub objects: HashMap<Digest, u64>,
    /// Releases by model and number.
    pub releases: BTreeMap<(String, u64), Contents>,
    /// Log and time of each failure.
    pub failures: HashMap<Digest, (Option<Digest>, i64)>,
}

impl Graph {
    pub fn load(base: &Base) -> Result<Self, StoreError> {
        let mut graph = base.index.with(|index| {
            // One transaction, so that nothing changes between two queries.
            let tx = index.unchecked_transaction()?;
            // A damaged B-tree can hide rows: gc would delete the things that they refer to.
            let checked: String =
                tx.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
            if checked != "ok" {
                return Err(bad_sum("sqlite_schema"));
            }
            Self::read(&tx)
        })?;
        for (id, bytes) in &mut graph.objects {
            let unpacked = fs::symlink_metadata(base.layout.ready(id));
            *bytes += unpacked.map_or(0, |meta| meta.len()) + prepacked::bytes_of(base, id);
        }
        Ok(graph)
    }

    /// Reads all rows. Fails if a check sum of a row or of its references is wrong.
    pub fn read(from: &Connection) -> rusqlite::Result<Self> {
        let mut objects = from.prepare("SELECT * FROM objects")?;
        let objects = objects.query_map([], ObjectRow::read)?;
        let objects = objects.map(|row| row.map(|row| (row.digest, row.stored)));
        let mut failures = from.prepare("SELECT * FROM failures")?;
        let failures = failures.query_map([], |row| {
            rows::check(row, "failures", 4)?;
            Ok((row.get(0)?, (row.get(2)?, row.get(3)?)))
        })?;
        Ok(Self {
            programs: units(from, "programs", 10, 2..5, "program_artifacts")?,
            artifacts: units(from, "artifacts", 7, 3..4, "artifact_objects")?,
            objects: objects.collect::<Result<_, _>>()?,
            releases: releases(from)?,
            failures: failures.collect::<Result<_, _>>()?,
        })
    }
}

impl Source for Graph {
    fn links(&self, kind: Kind, id: &Digest) -> Result<Option<Links>, StoreError> {
        let units = if kind == Kind::Program {
            &self.programs
        } else {
            &self.artifacts
        };
        Ok(units.get(id).map(|unit| Links {
            checksum: unit.checksum,
            to: unit.links.clone(),
        }))
    }

    fn has_object(&self, digest: &Digest) -> bool {
        self.objects.contains_key(digest)
    }
}

/// Reads all programs or all artifacts. `sum` is the last column of the table. The time and the references are before
/// it.
fn units(
    from: &Connection,
    table: &'static str,
    sum: usize,
    names: Range<usize>,
    below: &str,
) -> rusqlite::Result<HashMap<Digest, Unit>> {
    let mut links: HashMap<Digest, Vec<Digest>> = HashMap::new();
    let mut query = from.prepare(&format!("SELECT * FROM {below} ORDER BY 1,2"))?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        links.entry(row.get(0)?).or_default().push(row.get(1)?);
    }
    let mut query = from.prepare(&format!("SELECT t.*,{} FROM {table} t", rows::USED))?;
    let mut rows = query.query([])?;
    let mut all = HashMap::new();
    while let Some(row) = rows.next()? {
        rows::check(row, table, sum)?;
        let id = row.get(0)?;
        let unit = Unit {
            names: (names.clone())
                .map(|at| row.get(at))
                .collect::<Result<_, _>>()?,
            checksum: row.get(1)?,
            used: rows::used(row, sum + 1)?
                .unwrap_or(0)
                .max(row.get(sum - 2)?),
            links: links.remove(&id).unwrap_or_default(),
        };
        if rows::links(&unit.links) != row.get::<_, i64>(sum - 1)? {
            return Err(bad_sum(table));
        }
        all.insert(id, unit);
    }
    Ok(all)
}

fn releases(from: &Connection) -> rusqlite::Result<BTreeMap<(String, u64), Contents>> {
    let below = |table, column| {
        from.prepare(&format!(
            "SELECT {column} FROM {table} WHERE model=? AND seq=? ORDER BY 1"
        ))
    };
    let mut programs = below("release_programs", "program")?;
    let mut shims = below("release_objects", "object")?;
    let mut query = from.prepare("SELECT * FROM releases")?;
    let mut rows = query.query([])?;
    let mut all = BTreeMap::new();
    while let Some(row) = rows.next()? {
        rows::check(row, "releases", 8)?;
        let (model, seq): (String, i64) = (row.get(0)?, row.get(1)?);
        let place = (&model, seq);
        let programs = programs.query_map(place, |row| row.get(0))?;
        let programs = programs.collect::<rusqlite::Result<Vec<Digest>>>()?;
        let objects = shims.query_map(place, |row| row.get(0))?;
        let mut objects = objects.collect::<rusqlite::Result<Vec<Digest>>>()?;
        let links = rows::links(&[&programs[..], &objects].concat());
        if links != row.get::<_, i64>(7)? {
            return Err(bad_sum("releases"));
        }
        objects.extend(row.get::<_, Option<Digest>>(4)?);
        let contents = Contents {
            programs,
            objects,
            partial: row.get(6)?,
        };
        all.insert((model, seq as u64), contents);
    }
    Ok(all)
}
