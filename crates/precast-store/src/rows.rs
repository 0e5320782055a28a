//! The rows of the index, each computed from a record.

use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;

use super::sum::{self, Sum};
use crate::{
    Digest,
    record::{Artifact, Failure, Program, Release, sorted},
};

/// An object, as the index has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ObjectRow {
    /// Digest of the content, which is the object's name.
    pub digest: Digest,
    /// Bytes of content.
    #[serde(rename = "bytes")]
    pub size: u64,
    /// Bytes of the file.
    pub stored: u64,
    /// Seconds since 1970.
    pub created: i64,
}

/// A program, as the index has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramRow {
    /// The request key.
    pub id: Digest,
    /// Name of the model that it was built for.
    pub model: String,
    /// Name of the module in the spec.
    pub module: String,
    /// As `batch=8 seq=128`.
    pub bucket: String,
    /// The target's name.
    pub target: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// How many artifacts one run calls; 0 where eager runs it.
    pub steps: u64,
    /// Seconds since 1970.
    pub created: i64,
    /// Seconds since 1970; none if it was never used since the index was made.
    pub used: Option<i64>,
    /// Bytes of the distinct shared objects that it calls.
    pub bytes: u64,
}

/// An artifact, as the index has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ArtifactRow {
    /// The artifact key.
    pub id: Digest,
    /// The target's name.
    pub target: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// The number of programs that call it.
    pub programs: u64,
    /// Bytes of its object's content.
    #[serde(rename = "bytes")]
    pub size: u64,
    /// Seconds since 1970.
    pub created: i64,
    /// Seconds since 1970; none if it was never used since the index was made.
    pub used: Option<i64>,
}

/// Reads a column that holds a digest.
pub(crate) fn digest(row: &Row, at: usize) -> rusqlite::Result<Digest> {
    Ok(Digest::from_bytes(row.get(at)?))
}

/// Records that `id` was used at `at`.
pub(crate) fn insert_use(to: &Connection, id: &Digest, at: i64) -> rusqlite::Result<()> {
    to.prepare_cached("INSERT OR REPLACE INTO uses VALUES (?,?,?)")?
        .execute(params![id.as_bytes(), at, use_sum(id, at)])
        .map(drop)
}

/// Returns the IDs of last-use stamps that are damaged.
pub(crate) fn bad_uses(from: &Connection) -> rusqlite::Result<Vec<Vec<u8>>> {
    let mut query = from.prepare("SELECT id,at,sum FROM uses")?;
    let mut rows = query.query([])?;
    let mut bad = Vec::new();
    while let Some(row) = rows.next()? {
        let id: Vec<u8> = row.get(0)?;
        let sum = <[u8; 32]>::try_from(&id[..])
            .map(|raw| use_sum(&Digest::from_bytes(raw), row.get(1).unwrap_or(0)));
        if sum.ok() != row.get(2)? {
            bad.push(id);
        }
    }
    Ok(bad)
}

fn use_sum(id: &Digest, at: i64) -> i64 {
    Sum::new("uses").field(id.as_bytes()).int(at).finish()
}

/// Reads when `id` was last used from the columns `at` and the next.
fn used(row: &Row, at: usize, id: &Digest) -> rusqlite::Result<Option<i64>> {
    let (used, sum): (Option<i64>, Option<i64>) = (row.get(at)?, row.get(at + 1)?);
    if let Some(used) = used {
        check(use_sum(id, used), sum.unwrap_or(0), "uses")?;
    }
    Ok(used)
}

/// Returns the check sum over what a row refers to.
pub(crate) fn links(of: &[Digest]) -> i64 {
    let mut sum = Sum::new("links");
    for digest in of {
        sum = sum.field(digest.as_bytes());
    }
    sum.finish()
}

impl ObjectRow {
    fn sum(&self) -> Sum {
        Sum::new("objects")
            .field(self.digest.as_bytes())
            .int(self.size as i64)
            .int(self.stored as i64)
            .int(self.created)
    }

    pub(crate) fn insert(&self, to: &Connection) -> rusqlite::Result<()> {
        unmark(to, "objects", &self.digest)?;
        to.prepare_cached("INSERT OR REPLACE INTO objects VALUES (?,?,?,?,?)")?
            .execute(params![
                self.digest.as_bytes(),
                self.size as i64,
                self.stored as i64,
                self.created,
                self.sum().finish()
            ])
            .map(drop)
    }

    pub(crate) fn find(from: &Connection, digest: &Digest) -> rusqlite::Result<Option<Self>> {
        from.prepare_cached("SELECT digest,size,stored,created,sum FROM objects WHERE digest=?")?
            .query_row([digest.as_bytes()], Self::read)
            .optional()
    }

    /// Reads `digest, size, stored, created, sum`.
    pub(crate) fn read(row: &Row) -> rusqlite::Result<Self> {
        let found = Self {
            digest: digest(row, 0)?,
            size: row.get::<_, i64>(1)? as u64,
            stored: row.get::<_, i64>(2)? as u64,
            created: row.get(3)?,
        };
        check(found.sum().finish(), row.get(4)?, "objects")?;
        Ok(found)
    }
}

/// Inserts the row of an artifact whose record has this checksum and was published at `created`.
pub(crate) fn insert_artifact(
    to: &Connection,
    artifact: &Artifact,
    checksum: &Digest,
    created: i64,
) -> rusqlite::Result<()> {
    unmark(to, "artifacts", &artifact.id)?;
    let (target, device) = (artifact.target.name(), artifact.target.device.to_string());
    let objects = artifact.objects();
    let links = links(&objects);
    let size = artifact.size as i64;
    let sum = artifact_sum(
        &artifact.id,
        checksum,
        size,
        &target,
        &device,
        created,
        links,
    );
    to.prepare_cached("INSERT OR REPLACE INTO artifacts VALUES (?,?,?,?,?,?,?,?)")?
        .execute(params![
            artifact.id.as_bytes(),
            checksum.as_bytes(),
            size,
            target,
            device,
            created,
            links,
            sum
        ])?;
    let mut link = to.prepare_cached("INSERT OR IGNORE INTO artifact_objects VALUES (?,?)")?;
    for object in &objects {
        link.execute([artifact.id.as_bytes(), object.as_bytes()])?;
    }
    Ok(())
}

fn artifact_sum(
    id: &Digest,
    checksum: &Digest,
    size: i64,
    target: &str,
    device: &str,
    created: i64,
    links: i64,
) -> i64 {
    Sum::new("artifacts")
        .field(id.as_bytes())
        .field(checksum.as_bytes())
        .int(size)
        .text(target)
        .text(device)
        .int(created)
        .int(links)
        .finish()
}

impl ArtifactRow {
    /// The columns that [`ArtifactRow::read`] reads.
    pub(crate) const COLUMNS: &str = "a.id,a.seal,a.size,a.target,a.device,a.created,a.links,a.sum,\
        (SELECT at FROM uses WHERE uses.id=a.id),(SELECT sum FROM uses WHERE uses.id=a.id),\
        (SELECT count(*) FROM program_artifacts p WHERE p.artifact=a.id)";

    pub(crate) fn read(row: &Row) -> rusqlite::Result<Self> {
        let found = Self {
            id: digest(row, 0)?,
            size: row.get::<_, i64>(2)? as u64,
            target: row.get(3)?,
            device: row.get(4)?,
            created: row.get(5)?,
            used: None,
            programs: row.get::<_, i64>(10)? as u64,
        };
        let checksum = digest(row, 1)?;
        let (size, links) = (row.get(2)?, row.get(6)?);
        let sum = artifact_sum(
            &found.id,
            &checksum,
            size,
            &found.target,
            &found.device,
            found.created,
            links,
        );
        check(sum, row.get(7)?, "artifacts")?;
        let used = used(row, 8, &found.id)?;
        Ok(Self { used, ..found })
    }
}

/// Inserts the row of a program whose record has this checksum and was published at `created`.
pub(crate) fn insert_program(
    to: &Connection,
    program: &Program,
    checksum: &Digest,
    created: i64,
) -> rusqlite::Result<()> {
    unmark(to, "programs", &program.id)?;
    let artifacts = program.artifacts();
    let row = ProgramRow {
        id: program.id,
        model: program.model.clone(),
        module: program.module.clone(),
        bucket: program.bucket(),
        target: program.target.name(),
        device: program.target.device.to_string(),
        steps: program.steps.len() as u64,
        created,
        used: None,
        bytes: 0,
    };
    let links = links(&artifacts);
    to.prepare_cached("INSERT OR REPLACE INTO programs VALUES (?,?,?,?,?,?,?,?,?,?,?)")?
        .execute(params![
            row.id.as_bytes(),
            checksum.as_bytes(),
            row.model,
            row.module,
            row.bucket,
            row.target,
            row.device,
            row.steps as i64,
            created,
            links,
            row.sum(checksum, links)
        ])?;
    let mut link = to.prepare_cached("INSERT OR IGNORE INTO program_artifacts VALUES (?,?)")?;
    for artifact in &artifacts {
        link.execute([program.id.as_bytes(), artifact.as_bytes()])?;
    }
    Ok(())
}

impl ProgramRow {
    /// The columns that [`ProgramRow::read`] reads.
    pub(crate) const COLUMNS: &str = "p.id,p.seal,p.model,p.module,p.bucket,p.target,p.device,p.steps,p.created,p.links,\
        p.sum,(SELECT at FROM uses WHERE uses.id=p.id),(SELECT sum FROM uses WHERE uses.id=p.id),\
        (SELECT total(a.size) FROM program_artifacts l JOIN artifacts a ON a.id=l.artifact WHERE l.program=p.id)";

    pub(crate) fn read(row: &Row) -> rusqlite::Result<Self> {
        let found = Self {
            id: digest(row, 0)?,
            model: row.get(2)?,
            module: row.get(3)?,
            bucket: row.get(4)?,
            target: row.get(5)?,
            device: row.get(6)?,
            steps: row.get::<_, i64>(7)? as u64,
            created: row.get(8)?,
            used: None,
            bytes: row.get::<_, f64>(13)? as u64,
        };
        check(
            found.sum(&digest(row, 1)?, row.get(9)?),
            row.get(10)?,
            "programs",
        )?;
        let used = used(row, 11, &found.id)?;
        Ok(Self { used, ..found })
    }

    fn sum(&self, checksum: &Digest, links: i64) -> i64 {
        Sum::new("programs")
            .field(self.id.as_bytes())
            .field(checksum.as_bytes())
            .text(&self.model)
            .text(&self.module)
            .text(&self.bucket)
            .text(&self.target)
            .text(&self.device)
            .int(self.steps as i64)
            .int(self.created)
            .int(links)
            .finish()
    }
}

/// Inserts the row of a release.
pub(crate) fn insert_release(
    to: &Connection,
    release: &Release,
    checksum: &Digest,
    created: i64,
) -> rusqlite::Result<()> {
    let programs = sorted(release.programs.iter().copied());
    let objects = sorted(release.shim_objects());
    let links = links(&[&programs[..], &objects].concat());
    let sum = release_sum(
        &release.model,
        release.seq,
        release.name.as_deref(),
        checksum,
        release.weights.as_ref(),
        created,
        links,
        release.is_partial(),
    );
    let seq = release.seq as i64;
    to.prepare_cached("INSERT OR REPLACE INTO releases VALUES (?,?,?,?,?,?,?,?,?)")?
        .execute(params![
            release.model,
            seq,
            release.name,
            checksum.as_bytes(),
            release.weights.as_ref().map(Digest::as_bytes),
            created,
            links,
            sum,
            release.is_partial(),
        ])?;
    let mut link = to.prepare_cached("INSERT OR IGNORE INTO release_programs VALUES (?,?,?)")?;
    for program in &programs {
        link.execute(params![release.model, seq, program.as_bytes()])?;
    }
    let mut link = to.prepare_cached("INSERT OR IGNORE INTO release_objects VALUES (?,?,?)")?;
    for object in &objects {
        link.execute(params![release.model, seq, object.as_bytes()])?;
    }
    Ok(())
}

/// Returns the check sum of a release's row.
#[allow(clippy::too_many_arguments)]
pub(crate) fn release_sum(
    model: &str,
    seq: u64,
    name: Option<&str>,
    checksum: &Digest,
    weights: Option<&Digest>,
    created: i64,
    links: i64,
    partial: bool,
) -> i64 {
    Sum::new("releases")
        .text(model)
        .int(seq as i64)
        .int(name.is_some().into())
        .text(name.unwrap_or_default())
        .field(checksum.as_bytes())
        .field(weights.map_or(&[][..], |w| w.as_bytes()))
        .int(created)
        .int(links)
        .int(partial.into())
        .finish()
}

/// Inserts the row of a failure.
pub(crate) fn insert_failure(
    to: &Connection,
    failure: &Failure,
    checksum: &Digest,
    created: i64,
) -> rusqlite::Result<()> {
    unmark(to, "failures", &failure.id)?;
    let sum = failure_sum(&failure.id, checksum, failure.log.as_ref(), created);
    to.prepare_cached("INSERT OR REPLACE INTO failures VALUES (?,?,?,?,?)")?
        .execute(params![
            failure.id.as_bytes(),
            checksum.as_bytes(),
            failure.log.as_ref().map(Digest::as_bytes),
            created,
            sum
        ])
        .map(drop)
}

/// Returns the check sum of a failure's row.
pub(crate) fn failure_sum(
    id: &Digest,
    checksum: &Digest,
    log: Option<&Digest>,
    created: i64,
) -> i64 {
    Sum::new("failures")
        .field(id.as_bytes())
        .field(checksum.as_bytes())
        .field(log.map_or(&[][..], |log| log.as_bytes()))
        .int(created)
        .finish()
}

/// Takes back a mark: the thing is there again, and whole.
pub(crate) fn unmark(to: &Connection, kind: &str, id: &Digest) -> rusqlite::Result<()> {
    to.prepare_cached("DELETE FROM marked WHERE kind=? AND id=?")?
        .execute(params![kind, id.as_bytes()])
        .map(drop)
}

fn check(sum: i64, stored: i64, table: &'static str) -> rusqlite::Result<()> {
    if sum == stored {
        Ok(())
    } else {
        Err(sum::bad_sum(table))
    }
}
