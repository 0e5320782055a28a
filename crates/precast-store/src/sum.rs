//! Checksums of rows of the index, over a row's own fields: a flipped bit is an error and not a wrong answer.

use rusqlite::types::Type;

use crate::digest::Hasher;

/// The check sum of a row did not match.
#[derive(Debug, thiserror::Error)]
#[error("a row of `{0}` has a wrong check sum")]
pub(crate) struct BadSum(pub &'static str);

/// Returns the error for a row of `table` whose check sum is wrong.
pub(crate) fn bad_sum(table: &'static str) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Integer, Box::new(BadSum(table)))
}

/// Builds the check sum of one row: its table, then every field with its length before it.
pub(crate) struct Sum(Hasher);

impl Sum {
    pub fn new(table: &str) -> Self {
        Self(Hasher::default()).field(table.as_bytes())
    }

    pub fn field(mut self, bytes: &[u8]) -> Self {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    pub fn text(self, text: &str) -> Self {
        self.field(text.as_bytes())
    }

    pub fn int(self, value: i64) -> Self {
        self.field(&value.to_le_bytes())
    }

    /// Returns the sum as SQLite keeps it.
    pub fn finish(self) -> i64 {
        let digest = self.0.finish();
        let mut first = [0; 8];
        first.copy_from_slice(&digest.as_bytes()[..8]);
        i64::from_le_bytes(first)
    }
}
