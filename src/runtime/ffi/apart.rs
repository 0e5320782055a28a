//! Libraries that libtorch's CUDA half needs and that need nothing of libtorch: NVIDIA's for matrices, mostly.
//!
//! They are more than half of what loading the CUDA half costs, libcublasLt alone with 350 000 relocations and 6 000
//! initialisers. As they need nothing but the C library and each other, they can be loaded beside libtorch's own
//! initialisers. Which they are, and where, is read off the files, as the loader would.

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
use object::{
    Endianness,
    elf::{self, FileHeader64},
    read::{
        ReadCache, StringTable,
        elf::{Dyn, FileHeader, ProgramHeader},
    },
};

use super::libtorch_folder;

/// What is initialised a moment after the C library is.
const OF_THE_C_LIBRARY: [&str; 7] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
];

/// Loads them, the largest first, and keeps them, until `stop`, asked before each, says that nobody will need them. Says
/// nothing of what can't be loaded: who needs it will.
pub(super) fn load(mut stop: impl FnMut() -> bool) {
    let Some(folder) = libtorch_folder() else {
        return;
    };
    for path in independent(&folder.join("libtorch_cuda.so")) {
        if stop() {
            return;
        }
        // SAFETY: the loader would load this file for libtorch's CUDA half, and run the same initialisers.
        if let Ok(library) = unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            std::mem::forget(library);
        }
    }
}

/// Returns the paths of what a library of libtorch's needs that needs nothing but the C library, and others of these.
/// Each comes after those it needs, as these are looked for where the first one says.
fn independent(library: &Path) -> Vec<PathBuf> {
    let Some(needs) = Needs::read(library) else {
        return vec![];
    };
    // What the process has from its start is about to be initialised, by the main thread.
    let at_start = Needs::read(&library.with_file_name("libtorch_cpu.so")).unwrap_or_default();
    let mut search = Search {
        folders: &needs.folders,
        known: at_start
            .names
            .into_iter()
            .map(|name| (name, None))
            .collect(),
    };
    let mut found = Vec::new();
    for name in &needs.names {
        if search.independent(name) {
            let size = search.path(name).and_then(|path| path.metadata().ok());
            found.push((size.map_or(0, |data| data.len()), name));
        }
    }
    found.sort_by_key(|(size, _)| std::cmp::Reverse(*size));
    let mut ordered = Vec::new();
    for (_, name) in found {
        search.after_its_own(name, &mut ordered);
    }
    ordered
}

struct Search<'a> {
    folders: &'a [PathBuf],
    /// By name; none for what needs something else, and while that is not known.
    known: HashMap<String, Option<(PathBuf, Needs)>>,
}

impl Search<'_> {
    fn path(&self, name: &str) -> Option<&Path> {
        self.known
            .get(name)?
            .as_ref()
            .map(|(path, _)| path.as_path())
    }

    fn independent(&mut self, name: &str) -> bool {
        if let Some(known) = self.known.get(name) {
            return known.is_some();
        }
        self.known.insert(name.to_owned(), None);
        let mut found = None;
        if let Some(path) =
            (self.folders.iter().map(|folder| folder.join(name))).find(|at| at.is_file())
        {
            found = Needs::read(&path)
                .map(|needs| (path, needs))
                .filter(|(_, needs)| {
                    (needs.names.iter()).all(|name| {
                        OF_THE_C_LIBRARY.contains(&name.as_str()) || self.independent(name)
                    })
                });
        }
        let is = found.is_some();
        self.known.insert(name.to_owned(), found);
        is
    }

    fn after_its_own(&self, name: &str, ordered: &mut Vec<PathBuf>) {
        let Some(Some((path, needs))) = self.known.get(name) else {
            return;
        };
        for needed in &needs.names {
            self.after_its_own(needed, ordered);
        }
        if !ordered.contains(path) {
            ordered.push(path.clone());
        }
    }
}

/// What the loader reads in a shared object before it loads others for it.
#[derive(Default)]
struct Needs {
    names: Vec<String>,
    /// Where these are looked for before anywhere else, whatever the environment says (`DT_RPATH`).
    folders: Vec<PathBuf>,
}

impl Needs {
    fn read(path: &Path) -> Option<Self> {
        let cache = ReadCache::new(File::open(path).ok()?);
        let data = &cache;
        let header = FileHeader64::<Endianness>::parse(data).ok()?;
        let endian = header.endian().ok()?;
        let segments = header.program_headers(endian, data).ok()?;
        let entries = (segments.iter()).find_map(|one| one.dynamic(endian, data).ok().flatten())?;
        let value = |tag| {
            let entry = entries.iter().find(|entry| entry.d_tag(endian) == tag)?;
            Some(entry.d_val(endian))
        };
        // The table's address in memory; where in the file that is, its segment says.
        let address = value(elf::DT_STRTAB)?;
        let start = segments.iter().find_map(|one| {
            let within = address.checked_sub(one.p_vaddr(endian))?;
            let holds = one.p_type(endian) == elf::PT_LOAD && within < one.p_filesz(endian);
            holds.then(|| one.p_offset(endian).checked_add(within))?
        })?;
        let end = start.checked_add(value(elf::DT_STRSZ)?)?;
        let strings = StringTable::new(data, start, end);
        let text = |offset: u64| {
            let bytes = strings.get(u32::try_from(offset).ok()?).ok()?;
            Some(str::from_utf8(bytes).ok()?.to_owned())
        };
        let mut needs = Self::default();
        let named = entries
            .iter()
            .filter(|entry| entry.d_tag(endian) == elf::DT_NEEDED);
        for entry in named {
            needs.names.push(text(entry.d_val(endian))?);
        }
        // With both, the loader passes over this one.
        if let (Some(at), None) = (value(elf::DT_RPATH), value(elf::DT_RUNPATH)) {
            let origin = path.parent()?.to_str()?;
            let folders = text(at)?.replace("$ORIGIN", origin);
            needs.folders = folders.split(':').map(PathBuf::from).collect();
        }
        Some(needs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mathematics_needs_nothing_of_libtorch() {
        let folder = libtorch_folder().unwrap();
        let c10 = Needs::read(&folder.join("libc10.so")).unwrap();
        assert!(
            c10.names.iter().any(|name| name == "libstdc++.so.6"),
            "{:?}",
            c10.names
        );
        let half = folder.join("libtorch_cuda.so");
        if !half.is_file() {
            eprintln!(
                "mathematics_needs_nothing_of_libtorch: skipped: libtorch has no CUDA half here"
            );
            return;
        }
        let needs = Needs::read(&half).unwrap();
        if needs.folders.is_empty() {
            eprintln!(
                "mathematics_needs_nothing_of_libtorch: skipped: the loader finds what this libtorch needs by other rules"
            );
            return;
        }
        let found = independent(&half);
        let at = |name: &str| {
            let is = |path: &PathBuf| {
                path.file_name()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .starts_with(name)
            };
            found.iter().position(is)
        };
        assert!(
            at("libcublasLt.so.").unwrap() < at("libcublas.so.").unwrap(),
            "{found:?}"
        );
        assert!(
            at("libnvJitLink.so.").unwrap() < at("libcusparse.so.").unwrap(),
            "{found:?}"
        );
        // Those that need libstdc++ or libtorch, and what the process has from its start.
        for name in [
            "libnccl.",
            "libcudnn.",
            "libcufile.",
            "libtorch",
            "libc10",
            "libc.",
            "libcudart.",
        ] {
            assert_eq!(at(name), None, "{name}: {found:?}");
        }
    }

    #[test]
    fn what_is_no_library_has_none() {
        assert!(independent(Path::new("Cargo.toml")).is_empty());
        assert!(independent(Path::new("missing.so")).is_empty());
        let folder = tempfile::tempdir().unwrap();
        let cut = folder.path().join("cut.so");
        let whole = std::fs::read(libtorch_folder().unwrap().join("libc10.so")).unwrap();
        for length in [0, 16, 64, 100, 4096, 100_000] {
            std::fs::write(&cut, &whole[..length]).unwrap();
            assert!(independent(&cut).is_empty());
        }
    }
}
