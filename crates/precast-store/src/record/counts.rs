//! Counts of a runtime: calls by module, request sizes and answer.

use serde::{Deserialize, Serialize};

use super::Sizes;

/// Counts of one process for one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    /// Version of this document.
    pub schema: u32,
    /// Name of the model.
    pub model: String,
    /// Time of the start of counting, in seconds since 1970.
    pub since: i64,
    /// Time of writing, in seconds since 1970.
    pub until: i64,
    /// Counted calls, grouped by request and answer.
    pub calls: Vec<Calls>,
}

/// Calls with the same request and the same answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Calls {
    /// Name of the module in the spec.
    pub module: String,
    /// The requested sizes; empty if requests of many sizes are counted together.
    pub sizes: Sizes,
    /// The bucket that answered, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<Sizes>,
    /// `exact`, `padded`, `dynamic`, `eager`, or `refused` when nothing answered.
    pub rung: String,
    /// Number of calls.
    pub count: u64,
}

impl Counts {
    /// Adds the counts of another process for the same model.
    pub fn add(&mut self, other: Self) {
        self.since = self.since.min(other.since);
        self.until = self.until.max(other.until);
        for calls in other.calls {
            let same = |known: &&mut Calls| {
                (&known.module, &known.sizes, &known.bucket, &known.rung)
                    == (&calls.module, &calls.sizes, &calls.bucket, &calls.rung)
            };
            match self.calls.iter_mut().find(same) {
                Some(known) => known.count = known.count.saturating_add(calls.count),
                None => self.calls.push(calls),
            }
        }
    }
}
