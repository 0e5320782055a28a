//! Errors of external files, and of libraries.

use super::{super::*, io, path};
use crate::inspect::stats;

pub(super) fn inspect_errors() -> Vec<Error> {
    let why = || "it ends too early".to_owned();
    vec![
        ExternalError::Io {
            path: path(),
            source: io(ErrorKind::NotFound),
        }
        .into(),
        ExternalError::NotAFile { path: path() }.into(),
        ExternalError::Unknown { path: path() }.into(),
        ExternalError::Malformed {
            path: path(),
            why: why(),
        }
        .into(),
        ExternalError::TooLarge {
            path: path(),
            why: why(),
        }
        .into(),
        LibraryError::Io {
            path: path(),
            source: io(ErrorKind::PermissionDenied),
        }
        .into(),
        LibraryError::Malformed {
            name: "`a/path`".to_owned(),
            why: why(),
        }
        .into(),
        LibraryError::Store(StoreError::Unknown("abcd".into())).into(),
        stats::parse(b"[]").unwrap_err().into(),
        CountsError::Schema { found: 9 }.into(),
    ]
}
