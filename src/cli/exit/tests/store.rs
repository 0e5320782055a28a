//! Errors of the store.

use super::{super::*, io, path};

pub(super) fn store_errors() -> Vec<StoreError> {
    let (digest, why) = (Digest::of(b"x"), "it is too short".to_owned());
    let raw = io::Error::from_raw_os_error;
    let refused = |source| StoreError::Io {
        what: "write",
        path: path(),
        source,
    };
    let index = |code| StoreError::Index {
        path: path(),
        source: rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None),
    };
    vec![
        StoreError::NotAStore {
            path: path(),
            why: "it is a file",
        },
        StoreError::NotEmpty {
            path: path(),
            found: "x".into(),
        },
        StoreError::Newer {
            path: path(),
            found: 9,
            known: 1,
        },
        StoreError::Unsafe {
            path: path(),
            why: "anybody can write it".into(),
        },
        StoreError::Unsafe {
            path: path(),
            why: "it is a link".into(),
        },
        StoreError::Stranger {
            path: path(),
            uid: 1001,
        },
        StoreError::Busy {
            to: "delete from the store",
            path: path(),
            owner: "pid 7 (sleep)".to_owned(),
            seconds: 60,
        },
        StoreError::Interrupted {
            to: "delete from the store",
        },
        refused(io(ErrorKind::StorageFull)),
        refused(io(ErrorKind::PermissionDenied)),
        refused(io(ErrorKind::ReadOnlyFilesystem)),
        refused(raw(libc::EMFILE)),
        refused(raw(libc::EIO)),
        StoreError::ReadOnly {
            what: "publish",
            path: path(),
        },
        StoreError::Missing {
            digest,
            path: path(),
        },
        StoreError::Corrupt {
            digest,
            path: path(),
            why: why.clone(),
        },
        StoreError::Record { path: path(), why },
        StoreError::Index {
            path: path(),
            source: rusqlite::Error::InvalidQuery,
        },
        index(rusqlite::ffi::SQLITE_FULL),
        index(rusqlite::ffi::SQLITE_READONLY),
        StoreError::Older {
            path: path(),
            found: 0,
            known: 1,
        },
        StoreError::Schema { path: path() },
        StoreError::Row {
            path: path(),
            table: "objects",
        },
        StoreError::OldSqlite {
            found: "3.0.0".into(),
            needed: "3.51.3",
        },
        StoreError::BadPrefix("xyz".into()),
        StoreError::Unknown("abcd".into()),
        StoreError::Ambiguous {
            prefix: "abcd".into(),
            candidates: vec!["program abcde".into()],
        },
        StoreError::Dangling {
            what: "a program".into(),
            kind: "artifact",
            id: digest,
        },
        StoreError::NoRelease {
            model: "m".into(),
            seq: 3,
        },
        StoreError::TakenNumber {
            model: "m".into(),
            seq: 3,
        },
        StoreError::Partial {
            model: "m".into(),
            seq: 3,
            lacks: 2,
        },
        StoreError::NumberName("7".into()),
        StoreError::BadName("\n".into()),
        StoreError::Changed { path: path() },
    ]
}
