//! Reasons for a deletion by gc.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason for a deletion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Reason {
    /// Not used for this many days.
    Age {
        /// The limit of the policy.
        days: i64,
    },
    /// The store exceeds its limit, and this was not used for the longest time.
    Size,
    /// No release has it.
    NotReleased,
    /// There are enough newer releases.
    Superseded,
    /// Nothing that is kept refers to it.
    Unreferenced,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Age { days } => write!(f, "not used for {days} days"),
            Self::Size => f.write_str("over the size limit"),
            Self::NotReleased => f.write_str("not in any release"),
            Self::Superseded => f.write_str("newer releases are kept"),
            Self::Unreferenced => f.write_str("nothing refers to it"),
        }
    }
}
