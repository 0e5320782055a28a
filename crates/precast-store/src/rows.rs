//! The rows of the index, each computed from a record.
//!
//! The last column of a table is a check sum over the other columns of the row, so that a flipped bit is an error and
//! not a wrong answer.

use rusqlite::{
    Connection, OptionalExtension, Row, ToSql, params, params_from_iter,
    types::{FromSql, FromSqlResult, ToSqlOutput, Type, Value, ValueRef},
};
use serde::Serialize;

use crate::{
    Digest,
    digest::Hasher,
    record::{Artifact, Failure, Program, Release, sorted},
};

/// The row of an object in the index.
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

/// The row of a program in the index.
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
    /// Number of artifact calls of one run; 0 if eager runs it.
    pub steps: u64,
    /// Seconds since 1970.
    pub created: i64,
    /// Time of the last use, in seconds since 1970; none if it was not used since the index was created.
    pub used: Option<i64>,
    /// Bytes of the distinct shared objects that it calls.
    pub bytes: u64,
}

/// The row of an artifact in the index.
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
    /// Time of the last use, in seconds since 1970; none if it was not used since the index was created.
    pub used: Option<i64>,
}

impl ToSql for Digest {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        self.as_bytes().to_sql()
    }
}

impl FromSql for Digest {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        FromSql::column_result(value).map(Self::from_bytes)
    }
}

impl From<&Digest> for Value {
    fn from(digest: &Digest) -> Self {
        Self::Blob(digest.as_bytes().to_vec())
    }
}

/// The check sum of a row did not match.
#[derive(Debug, thiserror::Error)]
#[error("a row of `{0}` has a wrong check sum")]
pub(crate) struct BadSum(pub &'static str);

/// Returns the error for a row of `table` whose check sum is wrong.
pub(crate) fn bad_sum(table: &'static str) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Integer, Box::new(BadSum(table)))
}

/// Returns the check sum of a row: over the table's name, then each value with its length before it.
fn sum<'v>(table: &'v str, values: impl IntoIterator<Item = ValueRef<'v>>) -> i64 {
    let mut hasher = Hasher::default();
    for value in [ValueRef::Text(table.as_bytes())].into_iter().chain(values) {
        let number;
        let (length, bytes) = match value {
            ValueRef::Null => (u64::MAX, &[][..]),
            ValueRef::Integer(value) => {
                number = value.to_le_bytes();
                (8, &number[..])
            }
            ValueRef::Real(value) => {
                number = value.to_le_bytes();
                (8, &number[..])
            }
            ValueRef::Text(bytes) | ValueRef::Blob(bytes) => (bytes.len() as u64, bytes),
        };
        hasher.update(&length.to_le_bytes());
        hasher.update(bytes);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finish().as_bytes()[..8]);
    i64::from_le_bytes(first)
}

/// Fails if the check sum of a row is wrong. It is in the column `at`, after all others of the table.
pub(crate) fn check(row: &Row, table: &'static str, at: usize) -> rusqlite::Result<()> {
    let values = (0..at).map(|column| row.get_ref(column));
    let values = values.collect::<rusqlite::Result<Vec<_>>>()?;
    let expected: i64 = row.get(at)?;
    if sum(table, values) == expected {
        Ok(())
    } else {
        Err(bad_sum(table))
    }
}

/// Returns the check sum over the references of a row.
pub(crate) fn links(to: &[Digest]) -> i64 {
    let blobs = to.iter().map(|digest| ValueRef::Blob(digest.as_bytes()));
    sum("links", blobs)
}

/// Inserts a row with its check sum. Removes the mark of a deletion that gc has begun.
fn insert(to: &Connection, table: &str, row: Vec<Value>) -> rusqlite::Result<()> {
    to.prepare_cached("DELETE FROM marked WHERE kind=? AND id=?")?
        .execute(params![table, row[0]])?;
    let sum = sum(table, row.iter().map(ValueRef::from));
    let places = "?,".repeat(row.len());
    let insert = format!("INSERT OR REPLACE INTO {table} VALUES ({places}?)");
    to.prepare_cached(&insert)?
        .execute(params_from_iter(row.into_iter().chain([sum.into()])))
        .map(drop)
}

/// Inserts the references of the row with the key `from`.
fn link(to: &Connection, table: &str, from: &[Value], ids: &[Digest]) -> rusqlite::Result<()> {
    let places = "?,".repeat(from.len());
    let insert = format!("INSERT OR IGNORE INTO {table} VALUES ({places}?)");
    let mut insert = to.prepare_cached(&insert)?;
    for id in ids {
        insert.execute(params_from_iter(from.iter().cloned().chain([id.into()])))?;
    }
    Ok(())
}

/// Stores `at` as the time of the last use of `id`.
pub(crate) fn insert_use(to: &Connection, id: &Digest, at: i64) -> rusqlite::Result<()> {
    insert(to, "uses", vec![id.into(), at.into()])
}

/// Returns the IDs of damaged last-use stamps.
pub(crate) fn bad_uses(from: &Connection) -> rusqlite::Result<Vec<Vec<u8>>> {
    let mut query = from.prepare("SELECT * FROM uses")?;
    let mut rows = query.query([])?;
    let mut bad = Vec::new();
    while let Some(row) = rows.next()? {
        if check(row, "uses", 2).is_err() {
            bad.push(row.get(0)?);
        }
    }
    Ok(bad)
}

/// The columns that [`used`] reads, of a table `t` with IDs.
pub(crate) const USED: &str =
    "(SELECT at FROM uses WHERE uses.id=t.id),(SELECT sum FROM uses WHERE uses.id=t.id)";

/// Reads the last use of the ID in the first column, from the column `at` and the next.
pub(crate) fn used(row: &Row, at: usize) -> rusqlite::Result<Option<i64>> {
    let used: Option<i64> = row.get(at)?;
    if used.is_some()
        && Some(sum("uses", [row.get_ref(0)?, row.get_ref(at)?])) != row.get(at + 1)?
    {
        return Err(bad_sum("uses"));
    }
    Ok(used)
}

impl ObjectRow {
    pub(crate) fn insert(&self, to: &Connection) -> rusqlite::Result<()> {
        let (size, stored) = (self.size as i64, self.stored as i64);
        let id = (&self.digest).into();
        insert(
            to,
            "objects",
            vec![id, size.into(), stored.into(), self.created.into()],
        )
    }

    pub(crate) fn find(from: &Connection, digest: &Digest) -> rusqlite::Result<Option<Self>> {
        from.prepare_cached("SELECT * FROM objects WHERE digest=?")?
            .query_row([digest], Self::read)
            .optional()
    }

    pub(crate) fn read(row: &Row) -> rusqlite::Result<Self> {
        check(row, "objects", 4)?;
        Ok(Self {
            digest: row.get(0)?,
            size: row.get::<_, i64>(1)? as u64,
            stored: row.get::<_, i64>(2)? as u64,
            created: row.get(3)?,
        })
    }
}

/// Inserts the row of an artifact whose record has this checksum and was published at `created`.
pub(crate) fn insert_artifact(
    to: &Connection,
    artifact: &Artifact,
    checksum: &Digest,
    created: i64,
) -> rusqlite::Result<()> {
    let objects = artifact.objects();
    let row: Vec<Value> = vec![
        (&artifact.id).into(),
        checksum.into(),
        (artifact.size as i64).into(),
        artifact.target.name().into(),
        artifact.target.device.to_string().into(),
        created.into(),
        links(&objects).into(),
    ];
    let id = [row[0].clone()];
    insert(to, "artifacts", row)?;
    link(to, "artifact_objects", &id, &objects)
}

impl ArtifactRow {
    /// The columns that [`ArtifactRow::read`] reads, of the table `artifacts t`.
    pub(crate) fn columns() -> String {
        format!("t.*,{USED},(SELECT count(*) FROM program_artifacts p WHERE p.artifact=t.id)")
    }

    pub(crate) fn read(row: &Row) -> rusqlite::Result<Self> {
        check(row, "artifacts", 7)?;
        Ok(Self {
            id: row.get(0)?,
            size: row.get::<_, i64>(2)? as u64,
            target: row.get(3)?,
            device: row.get(4)?,
            created: row.get(5)?,
            used: used(row, 8)?,
            programs: row.get::<_, i64>(10)? as u64,
        })
    }
}

/// Inserts the row of a program whose record has this checksum and was published at `created`.
pub(crate) fn insert_program(
    to: &Connection,
    program: &Program,
    checksum: &Digest,
    created: i64,
) -> rusqlite::Result<()> {
    let artifacts = program.artifacts();
    let row: Vec<Value> = vec![
        (&program.id).into(),
        checksum.into(),
        program.model.clone().into(),
        program.module.clone().into(),
        program.bucket().into(),
        program.target.name().into(),
        program.target.device.to_string().into(),
        (program.steps.len() as i64).into(),
        created.into(),
        links(&artifacts).into(),
    ];
    let id = [row[0].clone()];
    insert(to, "programs", row)?;
    link(to, "program_artifacts", &id, &artifacts)
}

impl ProgramRow {
    /// The columns that [`ProgramRow::read`] reads, of the table `programs t`.
    pub(crate) fn columns() -> String {
        format!(
            "t.*,{USED},(SELECT total(a.size) FROM program_artifacts l JOIN artifacts a ON a.id=l.artifact \
             WHERE l.program=t.id)"
        )
    }

    pub(crate) fn read(row: &Row) -> rusqlite::Result<Self> {
        check(row, "programs", 10)?;
        Ok(Self {
            id: row.get(0)?,
            model: row.get(2)?,
            module: row.get(3)?,
            bucket: row.get(4)?,
            target: row.get(5)?,
            device: row.get(6)?,
            steps: row.get::<_, i64>(7)? as u64,
            created: row.get(8)?,
            used: used(row, 11)?,
            bytes: row.get::<_, f64>(13)? as u64,
        })
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
    let row: Vec<Value> = vec![
        release.model.clone().into(),
        (release.seq as i64).into(),
        release.name.clone().into(),
        checksum.into(),
        release.weights.as_ref().map(Value::from).into(),
        created.into(),
        release.is_partial().into(),
        links(&[&programs[..], &objects].concat()).into(),
    ];
    let place = [row[0].clone(), row[1].clone()];
    insert(to, "releases", row)?;
    link(to, "release_programs", &place, &programs)?;
    link(to, "release_objects", &place, &objects)
}

/// Inserts the row of a failure.
pub(crate) fn insert_failure(
    to: &Connection,
    failure: &Failure,
    checksum: &Digest,
    created: i64,
) -> rusqlite::Result<()> {
    let id = (&failure.id).into();
    let log = failure.log.as_ref().map(Value::from);
    insert(
        to,
        "failures",
        vec![id, checksum.into(), log.into(), created.into()],
    )
}
