//! Reads the dynamic segment of a library, and resolves the folders in it.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use precast_store::elf::{DynamicSection, Elf, ElfError, ReadCache};

use super::LibraryError;

/// Reads the file at `path`. Returns also its size in bytes.
pub(super) fn of_file(path: &Path) -> Result<(DynamicSection, u64), LibraryError> {
    let io = |source: io::Error| LibraryError::Io {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    let read = Elf::parse(&ReadCache::new(file)).and_then(|elf| elf.dynamic());
    let dynamic = read.map_err(|why| malformed(format!("`{}`", path.display()), why))?;
    Ok((dynamic, bytes))
}

/// Reads the object `name`.
pub(super) fn of_bytes(bytes: &[u8], name: &str) -> Result<DynamicSection, LibraryError> {
    let read = Elf::parse(bytes).and_then(|elf| elf.dynamic());
    read.map_err(|why| malformed(name.to_owned(), why))
}

fn malformed(name: String, why: ElfError) -> LibraryError {
    LibraryError::Malformed {
        name,
        why: why.into(),
    }
}

/// Returns the folders of `DT_RPATH` for a library in `origin`. None for a library with `DT_RUNPATH`.
pub(super) fn rpath(dynamic: &DynamicSection, origin: &Path) -> Vec<PathBuf> {
    let folders = dynamic.rpath.iter().filter(|_| dynamic.runpath.is_none());
    let folders = folders.flatten();
    folders.map(|folder| expand(folder, origin)).collect()
}

/// Returns the folders of `DT_RUNPATH` for a library in `origin`.
pub(super) fn runpath(dynamic: &DynamicSection, origin: &Path) -> Vec<PathBuf> {
    let folders = dynamic.runpath.iter().flatten();
    folders.map(|folder| expand(folder, origin)).collect()
}

/// Replaces `$ORIGIN` by the library's folder, and resolves `..` where the folder exists.
fn expand(folder: &str, origin: &Path) -> PathBuf {
    let origin = origin.to_string_lossy();
    let folder = folder
        .replace("${ORIGIN}", &origin)
        .replace("$ORIGIN", &origin);
    let folder = PathBuf::from(folder);
    folder.canonicalize().unwrap_or(folder)
}
