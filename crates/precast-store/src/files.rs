//! The checks of single files in `verify`.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{
    checksum::{Keyed, record_file},
    chunks,
    defect::Defect,
    error::{At, StoreError},
    layout::{Kind, StoreLayout},
    leases::is_lease,
    manifest::{Links, Missing, Source, Walk},
    object,
    permissions::Distrust,
    reindex::named,
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program, Release},
};

/// One pass over all files, with its results so far. Paths are relative to the store.
pub(crate) struct Files<'a> {
    own: &'a StoreLayout,
    /// Also opens files that other users could have written: that is a defect of its own.
    layout: StoreLayout,
    uid: u32,
    pub defects: Vec<Defect>,
    pub objects: u64,
    pub bytes: u64,
    pub records: u64,
    pub quarantined: u64,
    /// Sound objects and the size of their content.
    sound: HashMap<Digest, u64>,
    /// Sound records, and their references.
    artifacts: HashMap<Digest, Links>,
    programs: HashMap<Digest, Links>,
    /// References of releases and failures: programs and objects, by file.
    roots: Vec<(PathBuf, Vec<Digest>, Vec<Digest>)>,
}

impl<'a> Files<'a> {
    pub fn new(own: &'a StoreLayout) -> Self {
        Self {
            own,
            layout: own.unchecked(),
            uid: fs::metadata(&own.root).map_or(0, |meta| meta.uid()),
            defects: Vec::new(),
            objects: 0,
            bytes: 0,
            records: 0,
            quarantined: 0,
            sound: HashMap::new(),
            artifacts: HashMap::new(),
            programs: HashMap::new(),
            roots: Vec::new(),
        }
    }

    /// Walks over all files; `hash` selects whether contents are hashed.
    pub fn everything(&mut self, hash: bool) -> Result<(), StoreError> {
        self.root()?;
        for (path, digest) in self.shards("objects", ".zst")? {
            self.object(path, &digest, hash);
        }
        for (path, digest) in self.shards("ready", "")? {
            self.ready(path, &digest, hash);
        }
        for (path, _) in self.shards("artifacts", ".json")? {
            self.record::<Artifact>(path, |files, by, artifact, checksum| {
                if let Some(&is) = files.sound.get(&artifact.object)
                    && is != artifact.size
                {
                    let says = artifact.size;
                    files.defects.push(Defect::Size { by, says, is });
                }
                let to = artifact.objects();
                files.artifacts.insert(artifact.id, Links { checksum, to });
            });
        }
        for (path, _) in self.shards("programs", ".json")? {
            self.record::<Program>(path, |files, _, program, checksum| {
                let to = program.artifacts();
                files.programs.insert(program.id, Links { checksum, to });
            });
        }
        for (path, _) in self.shards("failures", ".json")? {
            self.record::<Failure>(path, |files, by, failure, _| {
                let log = failure.log.into_iter().collect();
                files.roots.push((by, vec![], log));
            });
        }
        self.releases()?;
        self.references();
        self.working()
    }

    /// Reports every reference to a missing thing.
    fn references(&mut self) {
        let mut walk = Walk::new(self);
        let mut defects = Vec::new();
        let mut report = |missing: Vec<Missing>, root: &Path| {
            defects.extend(missing.into_iter().map(|missing| {
                let by = match missing.by {
                    Some((kind, id)) => StoreLayout::record_name(kind, &id),
                    None => root.to_owned(),
                };
                let id = missing.id;
                match missing.kind {
                    None => Defect::NoObject { by, digest: id },
                    Some(Kind::Artifact) => Defect::NoArtifact { by, id },
                    Some(_) => Defect::NoProgram { by, id },
                }
            }));
        };
        for (kind, records) in [
            (Kind::Artifact, &self.artifacts),
            (Kind::Program, &self.programs),
        ] {
            walk.records(None, kind, &Vec::from_iter(records.keys().copied()));
        }
        report(std::mem::take(&mut walk.missing), Path::new(""));
        for (path, programs, objects) in &self.roots {
            walk.release(programs, objects);
            report(std::mem::take(&mut walk.missing), path);
        }
        self.defects.extend(defects);
    }

    /// Checks a file with wrong bytes again. Returns none if it is sound, or if gc removed it.
    pub fn recheck(mut self, path: &Path) -> Option<Defect> {
        fs::symlink_metadata(self.full(path)).ok()?;
        if path.starts_with("objects") {
            self.object(path.to_owned(), &named(path, ".zst")?, true);
        } else {
            let digest = named(path, "")?;
            self.sound.insert(digest, 0);
            self.ready(path.to_owned(), &digest, true);
        }
        self.defects.pop()
    }

    fn root(&mut self) -> Result<(), StoreError> {
        for (path, meta) in self.list(Path::new(""))? {
            if StoreLayout::FOLDERS
                .iter()
                .any(|folder| path == Path::new(folder))
            {
                self.folder(path, &meta);
            } else if !StoreLayout::FILES
                .iter()
                .any(|file| path == Path::new(file))
            {
                self.defects.push(Defect::Foreign { path });
            } else if !meta.is_file() {
                self.not_plain(path, &meta);
            }
        }
        if !self.own.tag_is_right() {
            let path = StoreLayout::TAG.into();
            self.defects.push(Defect::Tag { path });
        }
        Ok(())
    }

    /// Lists the files of a folder with two-digit folders in it, and reports everything else there.
    fn shards(&mut self, folder: &str, suffix: &str) -> Result<Vec<(PathBuf, Digest)>, StoreError> {
        let mut all = Vec::new();
        for (shard, meta) in self.list(Path::new(folder))? {
            let prefix = name(&shard);
            let is_hex = |b| matches!(b, b'0'..=b'9' | b'a'..=b'f');
            if prefix.len() != 2 || !prefix.bytes().all(is_hex) {
                self.defects.push(Defect::Foreign { path: shard });
                continue;
            }
            if !self.folder(shard.clone(), &meta) {
                continue;
            }
            for (path, meta) in self.list(&shard)? {
                match named(&path, suffix) {
                    None => self.defects.push(Defect::Foreign { path }),
                    Some(digest) if !digest.hex().starts_with(&prefix) => {
                        self.defects.push(Defect::Misplaced { path });
                    }
                    Some(digest) => {
                        if self.plain(&path, &meta) {
                            all.push((path, digest));
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    /// Checks the owner and the mode of a folder. Returns whether it is a folder.
    fn folder(&mut self, path: PathBuf, meta: &Metadata) -> bool {
        if !meta.is_dir() {
            self.not_plain(path, meta);
            return false;
        }
        let mode = meta.mode() & 0o7777;
        match self.own.check_trust(meta) {
            Some(Distrust::Owner(uid)) => self.defects.push(Defect::Owner { path, uid }),
            Some(_) => self.defects.push(Defect::Mode { path, mode }),
            None => {}
        }
        true
    }

    /// Checks a published file, except its bytes. Returns whether it is a file.
    fn plain(&mut self, path: &Path, meta: &Metadata) -> bool {
        let path = path.to_owned();
        if !meta.is_file() {
            self.not_plain(path, meta);
            return false;
        }
        let (mode, links, uid) = (meta.mode() & 0o7777, meta.nlink(), meta.uid());
        if mode != 0o444 {
            let path = path.clone();
            self.defects.push(Defect::Mode { path, mode });
        }
        if links != 1 {
            let path = path.clone();
            self.defects.push(Defect::Linked { path, links });
        }
        if uid != self.uid {
            self.defects.push(Defect::Owner { path, uid });
        }
        true
    }

    fn object(&mut self, path: PathBuf, digest: &Digest, hash: bool) {
        match self.check_object(&self.full(&path), digest, hash) {
            Ok(size) => {
                self.objects += 1;
                self.bytes += size;
                self.sound.insert(*digest, size);
            }
            Err(e) => {
                let why = why(&e);
                self.defects.push(Defect::Object { path, why });
            }
        }
    }

    fn check_object(&self, path: &Path, digest: &Digest, hash: bool) -> Result<u64, StoreError> {
        let mut file = self.layout.open(path).at("read", path)?;
        if hash {
            object::decode(&mut file, digest, path, &mut io::sink())
        } else {
            Ok(object::head(&mut file, digest, path)?.size)
        }
    }

    fn ready(&mut self, path: PathBuf, digest: &Digest, hash: bool) {
        let sound = self.layout.open(&self.full(&path));
        let why = match sound.and_then(|file| Ok(!hash || chunks::check_whole(&file, digest)?)) {
            Err(e) => e.to_string(),
            Ok(false) => "its content has another digest".into(),
            Ok(true) if !self.sound.contains_key(digest) => "its object is gone".into(),
            Ok(true) => return,
        };
        self.defects.push(Defect::Ready { path, why });
    }

    fn record<R: Keyed>(&mut self, path: PathBuf, add: impl FnOnce(&mut Self, PathBuf, R, Digest)) {
        self.records += 1;
        match record_file::<R>(&self.layout, &self.full(&path)) {
            Ok((record, checksum, _)) => add(self, path, record, checksum),
            Err(e) => {
                // Other records may refer to a newer record. Its own references are unknown.
                if let (StoreError::Newer { .. }, Some(id)) = (&e, named(&path, ".json")) {
                    let (checksum, to) = (id, vec![]);
                    match R::KIND {
                        Kind::Artifact => drop(self.artifacts.insert(id, Links { checksum, to })),
                        Kind::Program => drop(self.programs.insert(id, Links { checksum, to })),
                        _ => {}
                    }
                }
                self.bad_record(path, &e);
            }
        }
    }

    fn bad_record(&mut self, path: PathBuf, error: &StoreError) {
        self.defects.push(match error {
            StoreError::Newer { .. } => Defect::Newer { path },
            e => Defect::Record { path, why: why(e) },
        });
    }

    fn releases(&mut self) -> Result<(), StoreError> {
        for (folder, meta) in self.list(Path::new(Kind::Release.folder()))? {
            if !self.folder(folder.clone(), &meta) {
                continue;
            }
            for (path, meta) in self.list(&folder)? {
                if path.extension().is_none_or(|end| end != "json") {
                    self.defects.push(Defect::Foreign { path });
                } else if self.plain(&path, &meta) {
                    self.records += 1;
                    match record_file::<Release>(&self.layout, &self.full(&path)) {
                        Ok((release, ..)) => {
                            let objects = release.objects();
                            self.roots.push((path, release.programs, objects));
                        }
                        Err(e) => self.bad_record(path, &e),
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks the folders of live processes (`tmp`, `leases`, `locks`) and `quarantine`.
    fn working(&mut self) -> Result<(), StoreError> {
        // `tmp` is listed before the leases: the lease of a live process is older than its folder.
        let tmp = self.list(Path::new("tmp"))?;
        let live = self.leases()?;
        for (path, _) in tmp {
            let is_live = live.contains(path.file_name().unwrap_or_default());
            if !is_live && fs::symlink_metadata(self.full(&path)).is_ok() {
                self.defects.push(Defect::Stale { path });
            }
        }
        for (path, meta) in self.list(Path::new("locks"))? {
            let right = match &*name(&path) {
                "gate" | "use" | "add" => meta.is_file(),
                "keys" => meta.is_dir(),
                _ => false,
            };
            if !right {
                self.defects.push(Defect::Foreign { path });
            }
        }
        self.quarantined = self.list(Path::new("quarantine"))?.len() as u64;
        Ok(())
    }

    /// Returns the names of the leases of live processes, and reports the others.
    fn leases(&mut self) -> Result<HashSet<OsString>, StoreError> {
        let mut live = HashSet::new();
        for (path, _) in self.list(Path::new("leases"))? {
            let stem = path.file_stem().unwrap_or_default().to_owned();
            let lease = self.layout.open(&self.full(&path));
            match lease.map(|file| file.try_lock_shared().is_ok()) {
                _ if !is_lease(&path) => self.defects.push(Defect::Foreign { path }),
                Ok(false) => drop(live.insert(stem)),
                Ok(true) => self.defects.push(Defect::DeadLease { path }),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // A user without write access can't know whether the process is alive.
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => drop(live.insert(stem)),
                Err(_) => self.defects.push(Defect::Foreign { path }),
            }
        }
        Ok(live)
    }

    /// Lists a folder, sorted; a missing one is empty. Leaves out files that are removed meanwhile.
    fn list(&self, inside: &Path) -> Result<Vec<(PathBuf, Metadata)>, StoreError> {
        let folder = self.full(inside);
        let none = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
        let entries = match fs::read_dir(&folder) {
            Err(e) if none.contains(&e.kind()) => return Ok(Vec::new()),
            entries => entries.at("list", &folder)?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let entry = entry.at("list", &folder)?;
            let path = entry.path();
            match fs::symlink_metadata(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                meta => all.push((inside.join(entry.file_name()), meta.at("look at", &path)?)),
            }
        }
        all.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(all)
    }

    fn not_plain(&mut self, path: PathBuf, meta: &Metadata) {
        let kind = meta.file_type();
        let what = if kind.is_symlink() {
            "symbolic link"
        } else if kind.is_dir() {
            "folder"
        } else if kind.is_file() {
            "file"
        } else {
            "device, pipe or socket"
        };
        let what = what.to_owned();
        self.defects.push(Defect::NotPlain { path, what });
    }

    fn full(&self, inside: &Path) -> PathBuf {
        self.own.root.join(inside)
    }
}

impl Source for Files<'_> {
    fn links(&self, kind: Kind, id: &Digest) -> Result<Option<Links>, StoreError> {
        let records = if kind == Kind::Program {
            &self.programs
        } else {
            &self.artifacts
        };
        Ok(records.get(id).cloned())
    }

    fn has_object(&self, digest: &Digest) -> bool {
        self.sound.contains_key(digest)
    }
}

fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the reason of an error, without the path: the defect has it.
fn why(error: &StoreError) -> String {
    match error {
        StoreError::Corrupt { why, .. } | StoreError::Record { why, .. } => why.clone(),
        StoreError::Io { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}
