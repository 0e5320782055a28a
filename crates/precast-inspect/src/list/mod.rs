//! The programs of a store, filtered and sorted, one row at a time.
//!
//! Rows stream in the order of the index (model, module, bucket). Another order sorts all matching rows in memory,
//! about 400 bytes each.

mod order;
mod rows;

use std::{collections::BTreeSet, fmt};

use globset::{GlobBuilder, GlobMatcher};
use precast_store::{Digest, Store, StoreError};
use serde::Serialize;

pub use self::order::{ORDERS, Order, bucket_order};
use self::rows::rows;

/// The state of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// In the newest release of its model, which a plain load gets.
    Live,
    /// Only in older releases.
    Old,
    /// Only in a partial release, which is loaded by its number only.
    Partial,
    /// In no release.
    Loose,
    /// The last attempt to build it failed, and it is not there.
    Failed,
}

impl State {
    /// Every state with its name, in the order of their declaration.
    pub const ALL: [(&'static str, Self); 5] = [
        ("live", Self::Live),
        ("old", Self::Old),
        ("partial", Self::Partial),
        ("loose", Self::Loose),
        ("failed", Self::Failed),
    ];
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL[*self as usize].0)
    }
}

/// One program that is in the store, or that failed to get there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Row {
    /// The request key.
    pub id: Digest,
    /// Name of the model that it was built for.
    pub model: String,
    /// Name of the module in the spec.
    pub module: String,
    /// As `batch=8 seq=128`.
    pub bucket: String,
    /// The releases that hold it, if any.
    pub state: State,
    /// The target's name; empty for a failure.
    pub target: String,
    /// `cpu` or `cuda`; empty for a failure.
    pub device: String,
    /// Number of artifact calls of one run; 0 if eager runs it, or if it failed.
    pub steps: u64,
    /// Bytes of the distinct shared objects that it calls.
    pub bytes: u64,
    /// Time of the build or of the failure, in seconds since 1970.
    pub created: i64,
    /// Time of the last use, if it was used.
    pub used: Option<i64>,
}

/// A selection of programs and their order. The empty query lists all.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// Only modules whose name matches.
    pub module: Option<Pattern>,
    /// Only the model of this name.
    pub model: Option<String>,
    /// Only these.
    pub programs: Option<BTreeSet<Digest>>,
    /// As `batch=8 *`.
    pub bucket: Option<Pattern>,
    /// Only this device: `cpu` or `cuda`.
    pub device: Option<String>,
    /// Only this state.
    pub state: Option<State>,
    /// Built at this time or before, in seconds since 1970.
    pub until: Option<i64>,
    /// Built at this time or after.
    pub since: Option<i64>,
    /// The order of the rows; absent for the store's own order.
    pub sort: Option<Order>,
    /// Whether to reverse the order.
    pub descending: bool,
}

/// A glob over a whole name: `*` matches anything, `?` one character.
#[derive(Clone, Debug)]
pub struct Pattern(GlobMatcher);

impl Pattern {
    /// Parses a glob.
    pub fn new(text: &str) -> Result<Self, globset::Error> {
        let glob = GlobBuilder::new(text).literal_separator(false).build()?;
        Ok(Self(glob.compile_matcher()))
    }
}

impl Query {
    fn matches(&self, row: &Row) -> bool {
        let is = |wanted: &Option<String>, it: &str| wanted.as_deref().is_none_or(|w| w == it);
        let fits =
            |glob: &Option<Pattern>, it: &str| glob.as_ref().is_none_or(|g| g.0.is_match(it));
        let those = |programs: &BTreeSet<Digest>| programs.contains(&row.id);
        self.programs.as_ref().is_none_or(those)
            && is(&self.model, &row.model)
            && is(&self.device, &row.device)
            && fits(&self.module, &row.module)
            && fits(&self.bucket, &row.bucket)
            && self.state.is_none_or(|state| state == row.state)
            && self.until.is_none_or(|until| row.created <= until)
            && self.since.is_none_or(|since| row.created >= since)
    }
}

/// Lists programs. An unreadable one is an error in its place, or after the others if the rows are sorted. The listing
/// continues after it if the index allows.
pub fn list(store: &Store, query: &Query) -> Box<dyn Iterator<Item = Result<Row, StoreError>>> {
    let all = rows(store, query);
    let Some(order) = query.sort else {
        return Box::new(all);
    };
    let (mut sorted, mut broken) = (Vec::new(), Vec::new());
    for row in all {
        match row {
            Ok(row) => sorted.push(row),
            Err(error) => broken.push(error),
        }
    }
    sorted.sort_by(|a, b| {
        let (first, second) = if query.descending { (b, a) } else { (a, b) };
        order(first, second).then_with(|| a.id.cmp(&b.id))
    });
    let sorted = sorted.into_iter().map(Ok);
    Box::new(sorted.chain(broken.into_iter().map(Err)))
}

#[cfg(test)]
mod tests;
