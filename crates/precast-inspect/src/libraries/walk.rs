//! The walk from the libraries that the runtime opens to everything that they need.

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    path::{Path, PathBuf},
};

use globset::Glob;
use precast_store::elf::DynamicSection;

use super::{
    Asked, CPU, CUDA, HOST, HostLibrary, Library, LibraryError, MissingLibrary, Needs, OPENED,
    WHOLE, dynamic,
};

/// The name of the runtime, which opens the first libraries.
const PROGRAM: &str = "precast";

/// Where the loader looks, besides the search paths in the libraries.
#[derive(Clone, Debug, Default)]
pub(super) struct Search {
    /// The folders of `LD_LIBRARY_PATH`.
    pub library_path: Vec<PathBuf>,
    /// The folders in which it looks last.
    pub system: Vec<PathBuf>,
    /// Takes files from this folder alone, as on a machine that has no others.
    pub within: Option<PathBuf>,
}

/// Returns the libraries that a host needs for `asked`, with the libtorch in `folder` (see [`super::torch_folder`]).
pub(super) fn needs(folder: &Path, asked: &Asked, search: &Search) -> Result<Needs, LibraryError> {
    let mut walk = Walk {
        search,
        entries: vec![],
        places: HashMap::new(),
        followed: 0,
    };
    let mut objects = asked.objects.iter();
    let whole = objects.any(|object| object.dynamic.needed.iter().any(|name| name == WHOLE));
    // The runtime opens these by their paths, each with all that it needs.
    for (name, opens) in [(CPU, true), (CUDA, asked.cuda), (WHOLE, whole)] {
        if opens {
            walk.request_at(folder, name, PROGRAM, false)?;
            walk.follow()?;
        }
    }
    for object in &asked.objects {
        walk.entries.push(Entry {
            name: object.name.clone(),
            needed_by: vec![],
            opened: false,
            parent: None,
            found: Some(Found::Object(object.dynamic.clone())),
        });
        walk.follow()?;
    }
    // All linked libraries are known now: the ones added here are opened at run time only.
    let mut at = 0;
    while at < walk.entries.len() {
        walk.open(at)?;
        walk.follow()?;
        at += 1;
    }
    Ok(walk.finish())
}

struct Walk<'a> {
    search: &'a Search,
    entries: Vec<Entry>,
    /// Name of a library -> its index in `entries`.
    places: HashMap<String, usize>,
    /// How many entries have had their needs added.
    followed: usize,
}

/// A library that was asked for, or an object of the store.
struct Entry {
    name: String,
    needed_by: Vec<String>,
    opened: bool,
    /// The entry that asked for it first.
    parent: Option<usize>,
    /// None before it is searched for.
    found: Option<Found>,
}

enum Found {
    File {
        folder: PathBuf,
        bytes: u64,
        dynamic: DynamicSection,
    },
    Object(DynamicSection),
    Host(Option<PathBuf>),
    Nowhere(Vec<PathBuf>),
}

impl Entry {
    /// Returns the libraries that it needs.
    fn needed(&self) -> Vec<String> {
        match &self.found {
            Some(Found::File { dynamic, .. } | Found::Object(dynamic)) => dynamic.needed.clone(),
            _ => vec![],
        }
    }

    /// Returns the folders of its own `DT_RPATH` and `DT_RUNPATH`.
    fn paths(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        match &self.found {
            Some(Found::File {
                folder,
                dynamic: own,
                ..
            }) => (dynamic::rpath(own, folder), dynamic::runpath(own, folder)),
            _ => (vec![], vec![]),
        }
    }
}

impl Walk<'_> {
    /// Adds a library, or a further user of a known one.
    fn request(&mut self, name: &str, by: &str, parent: Option<usize>, opened: bool) -> usize {
        if let Some(&known) = self.places.get(name) {
            let needed_by = &mut self.entries[known].needed_by;
            if !needed_by.iter().any(|other| other == by) {
                needed_by.push(by.to_owned());
            }
            return known;
        }
        self.entries.push(Entry {
            name: name.to_owned(),
            needed_by: vec![by.to_owned()],
            opened,
            parent,
            found: None,
        });
        self.places.insert(name.to_owned(), self.entries.len() - 1);
        self.entries.len() - 1
    }

    /// Adds a library that is opened by its path in `folder`.
    fn request_at(
        &mut self,
        folder: &Path,
        name: &str,
        by: &str,
        opened: bool,
    ) -> Result<(), LibraryError> {
        let at = self.request(name, by, None, opened);
        if self.entries[at].found.is_none() {
            self.entries[at].found = Some(if folder.join(name).exists() {
                file(folder, name)?
            } else {
                Found::Nowhere(vec![folder.to_owned()])
            });
        }
        Ok(())
    }

    /// Finds all added libraries, and adds their needs in turn.
    fn follow(&mut self) -> Result<(), LibraryError> {
        while self.followed < self.entries.len() {
            let at = self.followed;
            if self.entries[at].found.is_none() {
                self.entries[at].found = Some(self.find(at)?);
            }
            let entry = &self.entries[at];
            let (name, opened) = (entry.name.clone(), entry.opened);
            for library in entry.needed() {
                self.request(&library, &name, Some(at), opened);
            }
            self.followed += 1;
        }
        Ok(())
    }

    /// Adds the files that a library opens while a program runs.
    fn open(&mut self, at: usize) -> Result<(), LibraryError> {
        let Some(Found::File { folder, .. }) = &self.entries[at].found else {
            return Ok(());
        };
        let (folder, name) = (folder.clone(), self.entries[at].name.clone());
        let patterns = OPENED.iter().filter(|(opener, _)| matches(opener, &name));
        let patterns: Vec<_> = patterns.flat_map(|(_, files)| *files).collect();
        if patterns.is_empty() {
            return Ok(());
        }
        let read = fs::read_dir(&folder).and_then(|entries| {
            let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            names.collect::<io::Result<BTreeSet<String>>>()
        });
        let mut files = read.map_err(|source| LibraryError::Io {
            path: folder.clone(),
            source,
        })?;
        files.retain(|file| patterns.iter().any(|pattern| matches(pattern, file)));
        for file in files {
            self.request_at(&folder, &file, &name, true)?;
        }
        Ok(())
    }

    /// Looks for a library in the folders in which the loader does.
    fn find(&self, at: usize) -> Result<Found, LibraryError> {
        let entry = &self.entries[at];
        let of_system = || {
            let folders = self.search.system.iter();
            let mut paths = folders.map(|folder| folder.join(&entry.name));
            paths.find(|path| path.exists())
        };
        if HOST.iter().any(|pattern| matches(pattern, &entry.name)) {
            return Ok(Found::Host(of_system()));
        }
        let mut folders = Vec::new();
        let own = entry.parent.map(|parent| self.entries[parent].paths());
        let (own, runpath) = own.unwrap_or_default();
        folders.extend(own);
        // The folders of DT_RPATH are inherited, unless the library that asks has DT_RUNPATH.
        let mut above = entry.parent.filter(|_| runpath.is_empty());
        while let Some(parent) = above.and_then(|above| self.entries[above].parent) {
            folders.extend(self.entries[parent].paths().0);
            above = Some(parent);
        }
        folders.extend(self.search.library_path.iter().cloned());
        folders.extend(runpath);
        let mut seen = BTreeSet::new();
        let within = self.search.within.as_ref();
        folders.retain(|folder| {
            let allowed = within.is_none_or(|within| folder.starts_with(within));
            allowed && seen.insert(folder.clone())
        });
        let mut found = folders.iter();
        match found.find(|folder| folder.join(&entry.name).exists()) {
            // A folder of the system that is named twice is one of the system.
            Some(folder) if !self.search.system.contains(folder) => file(folder, &entry.name),
            _ => Ok(match of_system() {
                Some(path) => Found::Host(Some(path)),
                None => Found::Nowhere(folders),
            }),
        }
    }

    fn finish(self) -> Needs {
        let mut needs = Needs::default();
        for entry in self.entries {
            let Entry {
                name,
                needed_by,
                opened,
                ..
            } = entry;
            match entry.found {
                Some(Found::File { folder, bytes, .. }) => needs.files.push(Library {
                    path: folder.join(&name),
                    name,
                    bytes,
                    needed_by,
                    opened,
                }),
                Some(Found::Host(path)) => needs.host.push(HostLibrary {
                    name,
                    path,
                    needed_by,
                }),
                Some(Found::Nowhere(searched)) => needs.missing.push(MissingLibrary {
                    name,
                    needed_by,
                    searched,
                }),
                Some(Found::Object(_)) | None => {}
            }
        }
        needs.host.sort_by(|a, b| a.name.cmp(&b.name));
        needs
    }
}

fn file(folder: &Path, name: &str) -> Result<Found, LibraryError> {
    let (dynamic, bytes) = dynamic::of_file(&folder.join(name))?;
    Ok(Found::File {
        folder: folder.to_owned(),
        bytes,
        dynamic,
    })
}

/// Returns whether a file's name is one of a pattern's.
fn matches(pattern: &str, name: &str) -> bool {
    Glob::new(pattern).is_ok_and(|glob| glob.compile_matcher().is_match(name))
}
