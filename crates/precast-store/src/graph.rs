//! The graph of references between rows of the index, with checksums verified: gc must not act on a flipped bit.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
};

use rusqlite::Connection;

use super::{
    base::Base,
    error::StoreError,
    layout::Kind,
    manifest::{Links, Source},
    rows::{self, ArtifactRow, ObjectRow, ProgramRow, links},
    sum::bad_sum,
};
use crate::Digest;

/// A program or an artifact.
pub(crate) struct Unit {
    pub name: String,
    /// Checksum of its record.
    pub checksum: Digest,
    /// When it was last used, or made if it never was.
    pub used: i64,
    /// The artifacts of a program, the objects of an artifact.
    pub links: Vec<Digest>,
}

/// Releases by model and number.
pub(crate) type Releases = BTreeMap<(String, u64), Contents>;

/// What a release has.
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
    pub releases: Releases,
    /// Log and time of each failure.
    pub failures: HashMap<Digest, (Option<Digest>, i64)>,
}

impl Graph {
    pub fn load(base: &Base) -> Result<Self, StoreError> {
        let mut graph = base.index.with(|index| {
            // One transaction, so that nothing changes between two queries.
            let tx = index.unchecked_transaction()?;
            // A tree that is damaged can hide rows whose absence would let gc delete what they need.
            let checked: String =
                tx.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
            if checked != "ok" {
                return Err(bad_sum("sqlite_schema"));
            }
            Self::read(&tx)
        })?;
        for (id, bytes) in &mut graph.objects {
            *bytes += ready_bytes(base, id);
        }
        Ok(graph)
    }

    /// Checks the sums of all rows and of what they refer to.
    pub fn check(from: &Connection) -> rusqlite::Result<()> {
        Self::read(from).map(drop)
    }

    fn read(from: &Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            programs: programs(from)?,
            artifacts: artifacts(from)?,
            objects: objects(from)?,
            releases: releases(from)?,
            failures: failures(from)?,
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

fn programs(from: &Connection) -> rusqlite::Result<HashMap<Digest, Unit>> {
    let mut below = pairs(
        from,
        "SELECT program,artifact FROM program_artifacts ORDER BY 1,2",
    )?;
    let query = format!("SELECT {} FROM programs p", ProgramRow::COLUMNS);
    let mut query = from.prepare(&query)?;
    let mut rows = query.query([])?;
    let mut all = HashMap::new();
    while let Some(row) = rows.next()? {
        let found = ProgramRow::read(row)?;
        let unit = Unit {
            name: format!("{} {} {}", found.model, found.module, found.bucket),
            used: found.used.unwrap_or(0).max(found.created),
            checksum: rows::digest(row, 1)?,
            links: checked(below.remove(&found.id), row.get(9)?, "programs")?,
        };
        all.insert(found.id, unit);
    }
    Ok(all)
}

fn artifacts(from: &Connection) -> rusqlite::Result<HashMap<Digest, Unit>> {
    let mut below = pairs(
        from,
        "SELECT artifact,object FROM artifact_objects ORDER BY 1,2",
    )?;
    let query = format!("SELECT {} FROM artifacts a", ArtifactRow::COLUMNS);
    let mut query = from.prepare(&query)?;
    let mut rows = query.query([])?;
    let mut all = HashMap::new();
    while let Some(row) = rows.next()? {
        let found = ArtifactRow::read(row)?;
        let unit = Unit {
            name: found.target.clone(),
            used: found.used.unwrap_or(0).max(found.created),
            checksum: rows::digest(row, 1)?,
            links: checked(below.remove(&found.id), row.get(6)?, "artifacts")?,
        };
        all.insert(found.id, unit);
    }
    Ok(all)
}

fn objects(from: &Connection) -> rusqlite::Result<HashMap<Digest, u64>> {
    let mut query = from.prepare("SELECT digest,size,stored,created,sum FROM objects")?;
    let rows = query.query_map([], ObjectRow::read)?;
    rows.map(|row| row.map(|row| (row.digest, row.stored)))
        .collect()
}

/// Reads the releases, checked.
pub(crate) fn releases(from: &Connection) -> rusqlite::Result<Releases> {
    let mut query =
        from.prepare("SELECT model,seq,name,seal,weights,created,links,sum,partial FROM releases")?;
    let mut below = from
        .prepare("SELECT program FROM release_programs WHERE model=? AND seq=? ORDER BY program")?;
    let mut shims =
        from.prepare("SELECT object FROM release_objects WHERE model=? AND seq=? ORDER BY object")?;
    let mut rows = query.query([])?;
    let mut all = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let (model, seq): (String, i64) = (row.get(0)?, row.get(1)?);
        let name: Option<String> = row.get(2)?;
        let weights = row.get::<_, Option<[u8; 32]>>(4)?.map(Digest::from_bytes);
        let ids = |query: &mut rusqlite::Statement| -> rusqlite::Result<Vec<Digest>> {
            query
                .query_map((&model, seq), |row| rows::digest(row, 0))?
                .collect()
        };
        let (programs, mut objects) = (ids(&mut below)?, ids(&mut shims)?);
        let (links, partial) = (row.get(6)?, row.get(8)?);
        let checksum = rows::digest(row, 3)?;
        let sum = rows::release_sum(
            &model,
            seq as u64,
            name.as_deref(),
            &checksum,
            weights.as_ref(),
            row.get(5)?,
            links,
            partial,
        );
        if sum != row.get::<_, i64>(7)? {
            return Err(bad_sum("releases"));
        }
        checked(Some([&programs[..], &objects].concat()), links, "releases")?;
        objects.extend(weights);
        let contents = Contents {
            programs,
            objects,
            partial,
        };
        all.insert((model, seq as u64), contents);
    }
    Ok(all)
}

fn failures(from: &Connection) -> rusqlite::Result<HashMap<Digest, (Option<Digest>, i64)>> {
    let mut query = from.prepare("SELECT id,seal,log,created,sum FROM failures")?;
    let mut rows = query.query([])?;
    let mut all = HashMap::new();
    while let Some(row) = rows.next()? {
        let (id, checksum) = (rows::digest(row, 0)?, rows::digest(row, 1)?);
        let log = row.get::<_, Option<[u8; 32]>>(2)?.map(Digest::from_bytes);
        let created = row.get(3)?;
        if rows::failure_sum(&id, &checksum, log.as_ref(), created) != row.get::<_, i64>(4)? {
            return Err(bad_sum("failures"));
        }
        all.insert(id, (log, created));
    }
    Ok(all)
}

/// Returns what a row refers to, when it is what the row's check sum says.
fn checked(
    found: Option<Vec<Digest>>,
    sum: i64,
    table: &'static str,
) -> rusqlite::Result<Vec<Digest>> {
    let found = found.unwrap_or_default();
    if links(&found) == sum {
        Ok(found)
    } else {
        Err(bad_sum(table))
    }
}

/// Returns the bytes of the unpacked file of an object.
fn ready_bytes(base: &Base, id: &Digest) -> u64 {
    fs::symlink_metadata(base.layout.ready(id)).map_or(0, |meta| meta.len())
}

/// Reads rows of two digests as a map from the first to all of the second.
fn pairs(from: &Connection, query: &str) -> rusqlite::Result<HashMap<Digest, Vec<Digest>>> {
    let mut all: HashMap<Digest, Vec<Digest>> = HashMap::new();
    let mut query = from.prepare(query)?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        let (from, to) = (rows::digest(row, 0)?, rows::digest(row, 1)?);
        all.entry(from).or_default().push(to);
    }
    Ok(all)
}
