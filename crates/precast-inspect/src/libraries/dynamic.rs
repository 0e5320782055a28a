//! What a shared object asks of the loader. Program headers are read, as the loader does; sections may be missing.

use std::{
    fs::File,
    io,
    path::{Component, Path, PathBuf},
};

use object::{
    Endianness,
    elf::{self, FileHeader64},
    read::{
        ReadCache, ReadRef, StringTable,
        elf::{Dyn, FileHeader, ProgramHeader},
    },
};

use super::LibraryError;

/// The part of a shared object that names other libraries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Dynamic {
    /// `DT_NEEDED`, in order.
    pub needed: Vec<String>,
    /// Folders of `DT_RPATH`, as written.
    pub rpath: Vec<String>,
    /// Folders of `DT_RUNPATH`, as written; none without one.
    pub runpath: Option<Vec<String>>,
}

impl Dynamic {
    /// Reads the file at `path`; returns also its size in bytes.
    pub fn of_file(path: &Path) -> Result<(Self, u64), LibraryError> {
        let io = |source: io::Error| LibraryError::Io {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let read = Self::read(&ReadCache::new(file));
        let dynamic = read.map_err(|error| malformed(format!("`{}`", path.display()), &error))?;
        Ok((dynamic, bytes))
    }

    /// Reads the object `name`.
    pub fn of_bytes(bytes: &[u8], name: &str) -> Result<Self, LibraryError> {
        Self::read(bytes).map_err(|error| malformed(name.to_owned(), &error))
    }

    fn read<'d, R: ReadRef<'d>>(data: R) -> Result<Self, object::Error> {
        let header = FileHeader64::<Endianness>::parse(data)?;
        let endian = header.endian()?;
        let segments = header.program_headers(endian, data)?;
        let mut entries: &[_] = &[];
        for segment in segments {
            if let Some(found) = segment.dynamic(endian, data)? {
                entries = found;
            }
        }
        let end = entries
            .iter()
            .position(|entry| entry.tag(endian) == elf::DT_NULL);
        let entries = &entries[..end.unwrap_or(entries.len())];
        let value = |tag| {
            let mut found = entries.iter().filter(|entry| entry.tag(endian) == tag);
            found.next().map(|entry| entry.val(endian))
        };
        let (Some(table), Some(size)) = (value(elf::DT_STRTAB), value(elf::DT_STRSZ)) else {
            return Ok(Self::default());
        };
        // The table's address is one of memory: the segment that is loaded there says where it is in the file.
        let start = segments.iter().find_map(|segment| {
            let inside = table.checked_sub(segment.p_vaddr(endian))?;
            let loaded =
                segment.p_type(endian) == elf::PT_LOAD && inside < segment.p_filesz(endian);
            loaded.then(|| segment.p_offset(endian).checked_add(inside))?
        });
        let start = start.unwrap_or(u64::MAX);
        let strings = StringTable::new(data, start, start.saturating_add(size));
        let mut found = Self::default();
        for entry in entries {
            let folders = |text: String| {
                text.split(':')
                    .filter(|part| !part.is_empty())
                    .map(str::to_owned)
                    .collect()
            };
            match entry.tag(endian) {
                elf::DT_NEEDED => found.needed.push(text(entry.string(endian, strings)?)),
                elf::DT_RPATH => found.rpath = folders(text(entry.string(endian, strings)?)),
                elf::DT_RUNPATH => {
                    found.runpath = Some(folders(text(entry.string(endian, strings)?)));
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Returns the folders of `DT_RPATH` for a library in `origin`; none where it has `DT_RUNPATH`.
    pub fn rpath(&self, origin: &Path) -> Vec<PathBuf> {
        match self.runpath {
            Some(_) => vec![],
            None => self
                .rpath
                .iter()
                .map(|folder| expand(folder, origin))
                .collect(),
        }
    }

    /// Returns the folders of `DT_RUNPATH` for a library in `origin`.
    pub fn runpath(&self, origin: &Path) -> Vec<PathBuf> {
        let folders = self.runpath.iter().flatten();
        folders.map(|folder| expand(folder, origin)).collect()
    }
}

/// Puts the library's folder in the place of `$ORIGIN`, and resolves `..` where the folder exists.
fn expand(folder: &str, origin: &Path) -> PathBuf {
    let origin = origin.to_string_lossy();
    let folder = folder
        .replace("${ORIGIN}", &origin)
        .replace("$ORIGIN", &origin);
    let folder = PathBuf::from(folder);
    folder.canonicalize().unwrap_or_else(|_| plain(&folder))
}

/// Removes `..` and the part before it, for a folder that does not exist.
fn plain(folder: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in folder.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

fn malformed(name: String, error: &object::Error) -> LibraryError {
    let why = error.to_string().to_lowercase();
    LibraryError::Malformed { name, why }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
