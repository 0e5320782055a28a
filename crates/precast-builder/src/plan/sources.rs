//! The sources and packages of the entry, read again without Python.
//!
//! At the first import the worker reports the project's files that the entry imports or reads, and the packages that it
//! imports. The release records them ([`Entry`]). [`refresh`] finds their current state: files by digest, packages by
//! the name of their `.dist-info` folder. A file with an unchanged status is not hashed again ([`StatCache`]).
//!
//! Two changes are not detected, because only an import shows them: a new file that would be imported in place of an
//! old one, and a package that was edited in place under the same version.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use precast_store::{
    Digest, Store, Target,
    record::{Entry, Package, SourceFile},
    target::Torch,
};
use serde::{Deserialize, Serialize};
use walkdir::WalkDir;

use super::{Known, PlanError};
use crate::spec::Spec;

/// A file that changed this shortly before it was hashed may change again without another time stamp.
const SETTLED: i128 = 2_000_000_000;

/// Digests of files, by their status in the file system.
///
/// One JSON file; it may be deleted at any time and costs only time. Like git's index it does not trust a stamp that
/// was young when the file was hashed: such a file is read again.
#[derive(Debug, Default)]
pub struct StatCache {
    file: PathBuf,
    stamps: BTreeMap<PathBuf, Stamp>,
    changed: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Stamp {
    size: u64,
    /// Nanoseconds since 1970. The second one changes whenever anything about the file does, and no program can set it.
    mtime: i128,
    ctime: i128,
    inode: u64,
    device: u64,
    /// Time at which it was hashed.
    hashed: i128,
    digest: Digest,
}

impl Stamp {
    /// Returns the status of a file, without a digest.
    fn of(path: &Path, hashed: i128) -> io::Result<Self> {
        let meta = fs::metadata(path)?;
        Ok(Self {
            size: meta.size(),
            mtime: i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
            ctime: i128::from(meta.ctime()) * 1_000_000_000 + i128::from(meta.ctime_nsec()),
            inode: meta.ino(),
            device: meta.dev(),
            hashed,
            digest: Digest::of(b""),
        })
    }

    /// Adds the status of a further file: a change of any file gives it the latest `ctime`, and a file in the place of
    /// another has another inode.
    fn add(&mut self, other: &Self) {
        /// Distinguishes the order of inodes.
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        self.size = self.size.wrapping_add(other.size);
        self.mtime = self.mtime.max(other.mtime);
        self.ctime = self.ctime.max(other.ctime);
        self.inode = self.inode.wrapping_mul(FACTOR).wrapping_add(other.inode);
        self.device = self.device.wrapping_mul(FACTOR).wrapping_add(other.device);
    }
}

impl StatCache {
    /// Reads the cache at `file`; without a readable one it is empty.
    #[cfg(test)]
    pub fn load(file: &Path) -> Self {
        Self::of(file, fs::File::open(file))
    }

    /// Reads the cache of a store. Returns an empty one if it is missing, unreadable, or writable by other users.
    pub fn in_store(store: &Store) -> Self {
        let file = store.path().join("cache").join("sources.json");
        Self::of(&file, store.open_file(&file))
    }

    fn of(file: &Path, open: io::Result<fs::File>) -> Self {
        let read = |mut file: fs::File| {
            let mut bytes = Vec::new();
            io::Read::read_to_end(&mut file, &mut bytes).map(|_| bytes)
        };
        let stamps = open
            .and_then(read)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Self {
            file: file.to_owned(),
            stamps: stamps.unwrap_or_default(),
            changed: false,
        }
    }

    /// Returns the digest of the file at `path`, reading it only when it may have changed.
    pub fn digest(&mut self, path: &Path) -> io::Result<Digest> {
        self.digest_of(path, &[], || Ok(Digest::of_file(path)?.0))
    }

    /// Returns a digest that depends on the file at `path` and on `more` files. It is computed only when one of them
    /// may have changed.
    pub fn digest_of(
        &mut self,
        path: &Path,
        more: &[PathBuf],
        compute: impl FnOnce() -> io::Result<Digest>,
    ) -> io::Result<Digest> {
        let hashed = nanoseconds(SystemTime::now());
        let mut now = Stamp::of(path, hashed)?;
        for path in more {
            now.add(&Stamp::of(path, hashed)?);
        }
        if let Some(stamp) = self.stamps.get(path) {
            let same = Stamp {
                hashed: stamp.hashed,
                digest: stamp.digest,
                ..now.clone()
            };
            if same == *stamp && stamp.mtime.max(stamp.ctime) + SETTLED < stamp.hashed {
                return Ok(stamp.digest);
            }
        }
        now.digest = compute()?;
        let digest = now.digest;
        self.stamps.insert(path.to_owned(), now);
        self.changed = true;
        Ok(digest)
    }

    /// Writes the cache, if anything was hashed.
    pub fn save(&self) -> io::Result<()> {
        let Some(folder) = self.file.parent().filter(|_| self.changed) else {
            return Ok(());
        };
        // Not more than that, whatever the umask allows: a store that others can write is refused.
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&mut file, &self.stamps)?;
        file.persist(&self.file).map_err(|error| error.error)?;
        Ok(())
    }
}

fn nanoseconds(time: SystemTime) -> i128 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i128::try_from(since.as_nanos()).unwrap_or(i128::MAX),
        Err(_) => 0,
    }
}

/// Returns the parts of keys that are known without Python. Returns none if the model was never built from this entry,
/// or if its torch or the GPU is missing.
///
/// `torch` is the folder of the package for the build. Without it, the torch of the last build counts. A store may have
/// releases for several versions of torch.
pub fn known(spec: &Spec, store: &Store, torch: Option<&Path>) -> Result<Option<Known>, PlanError> {
    let model = &spec.model.name;
    let with_torch = match torch {
        Some(torch) => store
            .releases()
            .find(model, |release| uses(&release.entry, torch))?,
        None => None,
    };
    let other = with_torch.is_none().then_some(torch).flatten();
    let release = match with_torch {
        Some(release) => Some(release),
        None => store.releases().last(model)?,
    };
    let Some(mut entry) = release
        .map(|release| release.entry)
        .filter(|entry| entry.entry == spec.model.entry)
    else {
        return Ok(None);
    };
    if let Some(site) = other.and_then(Path::parent) {
        // Nothing was built with it: the model is the same, in another environment.
        entry.site_packages = vec![site.to_string_lossy().into_owned()];
    }
    known_of(spec, store, &entry)
}

/// Returns the parts of keys with the current state of an entry's files and packages; none if its torch or the GPU is
/// missing.
pub(crate) fn known_of(
    spec: &Spec,
    store: &Store,
    entry: &Entry,
) -> Result<Option<Known>, PlanError> {
    let Some(target) = Target::of_host(spec.target.device, &spec.target.isa, &entry.site_packages)
    else {
        return Ok(None);
    };
    let mut cache = cache(store);
    let entry = refresh(&spec.root, entry, &mut cache)?;
    // A store that can't be written costs the time of hashing again.
    cache.save().ok();
    Ok(Some(Known { entry, target }))
}

/// Returns whether an entry was imported with the package `torch` in this folder.
fn uses(entry: &Entry, torch: &Path) -> bool {
    let version = |folder: &Path| folder.join("version.py").canonicalize().ok();
    let folders = entry.site_packages.iter();
    let own = folders.map(|site| Path::new(site).join("torch"));
    let own = own.filter_map(|folder| version(&folder)).next();
    own.is_some() && own == version(torch)
}

fn cache(store: &Store) -> StatCache {
    StatCache::in_store(store)
}

/// Returns the digest of a file, which is read only when it may have changed.
pub fn file_digest(path: &Path, store: &Store) -> Result<Digest, PlanError> {
    digest_of(path, &[], store, || Ok(Digest::of_file(path)?.0))
}

/// Returns a digest that depends on the file at `path` and on `more` files. It is computed only when one of them may
/// have changed.
pub fn digest_of(
    path: &Path,
    more: &[PathBuf],
    store: &Store,
    compute: impl FnOnce() -> io::Result<Digest>,
) -> Result<Digest, PlanError> {
    let mut cache = cache(store);
    let digest = cache.digest_of(path, more, compute);
    let digest = digest.map_err(|source| PlanError::Source {
        path: path.to_owned(),
        source,
    })?;
    cache.save().ok();
    Ok(digest)
}

/// Returns the entry with the current digests and versions. Leaves out missing files and packages.
pub fn refresh(root: &Path, entry: &Entry, cache: &mut StatCache) -> Result<Entry, PlanError> {
    let mut sources = Vec::new();
    for source in &entry.sources {
        let path = root.join(&source.path);
        match cache.digest(&path) {
            Ok(digest) => sources.push(SourceFile {
                path: source.path.clone(),
                digest,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(PlanError::Source { path, source }),
        }
    }
    Ok(Entry {
        entry: entry.entry.clone(),
        sources,
        packages: packages(&entry.packages, &entry.site_packages),
        declared: entry.declared.clone(),
        site_packages: entry.site_packages.clone(),
    })
}

/// Returns the first source whose bytes differ from `entry`. Reads all of them again.
pub fn changed_source(root: &Path, entry: &Entry) -> Option<String> {
    let same = |source: &SourceFile| {
        Digest::of_file(&root.join(&source.path)).is_ok_and(|(now, _)| now == source.digest)
    };
    entry
        .sources
        .iter()
        .find(|source| !same(source))
        .map(|source| source.path.clone())
}

/// Returns the installed versions of these packages.
fn packages(remembered: &[Package], site_packages: &[String]) -> Vec<Package> {
    let installed = installed(site_packages);
    let torch = Torch::find(site_packages).map(|torch| torch.version);
    let version = |package: &Package| {
        // torch's own version has a build tag (`+cu130`) that its folder's name may lack: either one counts.
        if package.name == "torch" && torch.as_deref() == Some(&package.version) {
            return torch.clone();
        }
        installed.get(&normal(&package.name)).cloned()
    };
    (remembered.iter())
        .filter_map(|package| {
            Some(Package {
                name: package.name.clone(),
                version: version(package)?,
            })
        })
        .collect()
}

/// Returns the version of every installed package by its normal name. Of two equal names the first folder counts.
fn installed(site_packages: &[String]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for folder in site_packages {
        let entries = WalkDir::new(folder)
            .min_depth(1)
            .max_depth(1)
            .sort_by_file_name();
        for entry in entries.into_iter().filter_map(Result::ok) {
            let name = entry.file_name().to_string_lossy();
            let Some(stem) = name
                .strip_suffix(".dist-info")
                .or_else(|| name.strip_suffix(".egg-info"))
            else {
                continue;
            };
            // `name-version`, and for eggs `name-version-py3.11`: neither name nor version has a hyphen.
            let mut parts = stem.split('-');
            if let (Some(name), Some(version)) = (parts.next(), parts.next()) {
                found
                    .entry(normal(name))
                    .or_insert_with(|| version.to_owned());
            }
        }
    }
    found
}

/// Returns a package's name as the packaging standards compare it: lower case, runs of `-`, `_` and `.` as one `-`.
fn normal(name: &str) -> String {
    let parts: Vec<&str> = name
        .split(['-', '_', '.'])
        .filter(|part| !part.is_empty())
        .collect();
    parts.join("-").to_lowercase()
}

/// Returns files of the project that changed after `since` and are not sources, sorted, at most `limit` of them. `why`
/// reports that they had no effect. Hidden folders, `__pycache__` and `skip` are left out.
pub fn bystanders(
    root: &Path,
    entry: &Entry,
    since: SystemTime,
    skip: &[&Path],
    limit: usize,
) -> Vec<String> {
    let wanted = |found: &walkdir::DirEntry| {
        let name = found.file_name().to_string_lossy();
        let hidden = found.depth() > 0 && name.starts_with('.');
        !hidden && name != "__pycache__" && !skip.contains(&found.path())
    };
    let walk = WalkDir::new(root)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(wanted);
    walk.filter_map(Result::ok)
        .filter(|found| found.file_type().is_file())
        .filter(|found| {
            found
                .metadata()
                .ok()
                .and_then(|meta| meta.modified().ok())
                .is_some_and(|time| time > since)
        })
        .filter_map(|found| {
            Some(
                found
                    .path()
                    .strip_prefix(root)
                    .ok()?
                    .to_string_lossy()
                    .into_owned(),
            )
        })
        .filter(|path| !entry.sources.iter().any(|source| source.path == *path))
        .take(limit)
        .collect()
}

#[cfg(test)]
mod tests;
