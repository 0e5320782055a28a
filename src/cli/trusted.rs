//! The user's list of trusted stores of other users, one path per line.
//!
//! Like git's `safe.directory`: the owner of a store decides which code it executes, so the user must name the store
//! once. A list that other users can write is ignored.

use std::{
    fs,
    io::Read,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use super::{exit::warning, folders};

/// The most bytes of the list that are read.
const LIMIT: u64 = 1 << 20;

/// Returns whether the list names a store.
pub(super) fn names(store: &Path) -> bool {
    let (Some(list), Ok(store)) = (folders::trusted(), fs::canonicalize(store)) else {
        return false;
    };
    let Some(text) = read(&list) else {
        return false;
    };
    let mut lines = text.lines().map(str::trim);
    lines.any(|line| {
        let named = Path::new(line);
        named.is_absolute()
            && (named == store || fs::canonicalize(named).is_ok_and(|it| it == store))
    })
}

/// Reads a file of the user's that nobody else can write; another one is a warning.
pub(super) fn read(list: &Path) -> Option<String> {
    let file = fs::File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(list)
        .ok()?;
    let meta = file.metadata().ok()?;
    let me = rustix::process::geteuid().as_raw();
    let others = if meta.gid() == meta.uid() {
        0o002
    } else {
        0o022
    };
    if !meta.is_file() || ![0, me].contains(&meta.uid()) || meta.mode() & others != 0 {
        warning(&format!(
            "`{}` is not read: it is not your own, or others can write it",
            list.display()
        ));
        return None;
    }
    let mut text = String::new();
    file.take(LIMIT).read_to_string(&mut text).ok()?;
    Some(text)
}
