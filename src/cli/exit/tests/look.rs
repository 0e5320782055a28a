//! Errors of files that others made.

use super::{super::*, io, path};
use crate::inspect::stats;

pub(super) fn inspect_errors() -> Vec<Error> {
    let why = || "it ends too early".to_owned();
    vec![
        ForeignError::Io {
            path: path(),
            source: io(ErrorKind::NotFound),
        }
        .into(),
        ForeignError::NotAFile { path: path() }.into(),
        ForeignError::Unknown { path: path() }.into(),
        ForeignError::Malformed {
            path: path(),
            why: why(),
        }
        .into(),
        ForeignError::TooLarge {
            path: path(),
            why: why(),
        }
        .into(),
        stats::parse(b"[]").unwrap_err().into(),
        CountsError::Schema { found: 9 }.into(),
    ]
}
