//! The look at each file of a store that `verify` takes.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, Metadata},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use super::{
    checksum::{Keyed, record_file},
    chunks,
    defect::Defect,
    error::{At, StoreError},
    layout::{Kind, Layout},
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

/// One look at all files, and what it found so far.
pub(crate) struct Files<'a> {
    own: &'a Layout,
    /// Opens also what others could have written: that is a defect of its own.
    layout: Layout,
    uid: u32,
    pub defects: Vec<Defect>,
    pub objects: u64,
    pub bytes: u64,
    pub records: u64,
    pub quarantined: u64,
    /// Sound objects and the size of their content.
    sound: HashMap<Digest, u64>,
    /// Sound records, and what they refer to.
    artifacts: HashMap<Digest, Links>,
    programs: HashMap<Digest, Links>,
    /// What releases and failures refer to: programs and objects, by file.
    roots: Vec<(PathBuf, Vec<Digest>, Vec<Digest>)>,
}

impl<'a> Files<'a> {
    pub fn new(own: &'a Layout) -> Self {
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
            self.object(&path, &digest, hash);
        }
        for (path, digest) in self.shards("ready", "")? {
            self.ready(&path, &digest, hash);
        }
        for (path, _) in self.shards("artifacts", ".json")? {
            self.record::<Artifact>(&path, |files, by, artifact, checksum| {
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
            self.record::<Program>(&path, |files, _, program, checksum| {
                let to = program.artifacts();
                files.programs.insert(program.id, Links { checksum, to });
            });
        }
        for (path, _) in self.shards("failures", ".json")? {
            self.record::<Failure>(&path, |files, by, failure, _| {
                files
                    .roots
                    .push((by, vec![], failure.log.into_iter().collect()));
            });
        }
        self.releases()?;
        self.references();
        self.working()
    }

    /// Reports every reference to something that is not there.
    fn references(&mut self) {
        let mut walk = Walk::new(self);
        let mut defects = Vec::new();
        let mut report = |missing: Vec<Missing>, root: &Path| {
            defects.extend(missing.into_iter().map(|missing| {
                let by = match missing.by {
                    Some((kind, id)) => Layout::record_name(kind, &id),
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

    /// Looks once more at one file that had wrong bytes.
    pub fn recheck(mut self, path: &Path) -> Option<Defect> {
        let full = self.own.root.join(path);
        if fs::symlink_metadata(&full).is_err() {
            // gc removed it.
            return None;
        }
        if path.starts_with("objects") {
            self.object(&full, &named(path, ".zst")?, true);
        } else {
            let digest = named(path, "")?;
            self.sound.insert(digest, 0);
            self.ready(&full, &digest, true);
        }
        let wrong =
            |defect: &Defect| matches!(defect, Defect::Object { .. } | Defect::Ready { .. });
        self.defects.into_iter().find(wrong)
    }

    fn root(&mut self) -> Result<(), StoreError> {
        for (path, meta) in self.list(&self.own.root)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if Layout::FOLDERS.iter().any(|folder| *folder == name) {
                if !meta.is_dir() {
                    self.not_plain(&path, &meta);
                } else {
                    self.folder(&path, &meta);
                }
            } else if !Layout::FILES.iter().any(|file| *file == name) {
                self.defects.push(Defect::Foreign {
                    path: self.inside(&path),
                });
            } else if !meta.is_file() {
                self.not_plain(&path, &meta);
            }
        }
        if !self.own.tag_is_right() {
            self.defects.push(Defect::Tag {
                path: Layout::TAG.into(),
            });
        }
        Ok(())
    }

    /// Lists the files of a folder with two-digit folders in it, and reports everything there that is no such file.
    fn shards(&mut self, folder: &str, suffix: &str) -> Result<Vec<(PathBuf, Digest)>, StoreError> {
        let mut all = Vec::new();
        let top = self.own.root.join(folder);
        for (shard, meta) in self.list(&top)? {
            let prefix = shard
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let hex = prefix.len() == 2
                && prefix
                    .bytes()
                    .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            if !hex {
                self.defects.push(Defect::Foreign {
                    path: self.inside(&shard),
                });
                continue;
            }
            if !meta.is_dir() {
                self.not_plain(&shard, &meta);
                continue;
            }
            self.folder(&shard, &meta);
            for (path, meta) in self.list(&shard)? {
                let Some(digest) = named(&path, suffix) else {
                    self.defects.push(Defect::Foreign {
                        path: self.inside(&path),
                    });
                    continue;
                };
                if !digest.hex().starts_with(&prefix) {
                    self.defects.push(Defect::Misplaced {
                        path: self.inside(&path),
                    });
                } else if self.plain(&path, &meta) {
                    all.push((path, digest));
                }
            }
        }
        all.sort();
        Ok(all)
    }

    /// Checks who owns a folder, and who may write it.
    fn folder(&mut self, path: &Path, meta: &Metadata) {
        let path = self.inside(path);
        match self.own.judge(meta) {
            Some(Distrust::Owner(uid)) => self.defects.push(Defect::Owner { path, uid }),
            Some(_) => self.defects.push(Defect::Mode {
                path,
                mode: meta.mode() & 0o7777,
            }),
            None => {}
        }
    }

    /// Checks everything about a published file but its bytes; returns whether it is a file at all.
    fn plain(&mut self, path: &Path, meta: &Metadata) -> bool {
        if !meta.is_file() {
            self.not_plain(path, meta);
            return false;
        }
        let mode = meta.permissions().mode() & 0o7777;
        if mode != 0o444 {
            self.defects.push(Defect::Mode {
                path: self.inside(path),
                mode,
            });
        }
        if meta.nlink() != 1 {
            let links = meta.nlink();
            self.defects.push(Defect::Linked {
                path: self.inside(path),
                links,
            });
        }
        if meta.uid() != self.uid {
            self.defects.push(Defect::Owner {
                path: self.inside(path),
                uid: meta.uid(),
            });
        }
        true
    }

    fn object(&mut self, path: &Path, digest: &Digest, hash: bool) {
        match self.check_object(path, digest, hash) {
            Ok(size) => {
                self.objects += 1;
                self.bytes += size;
                self.sound.insert(*digest, size);
            }
            Err(e) => {
                let why = why(&e);
                self.defects.push(Defect::Object {
                    path: self.inside(path),
                    why,
                });
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

    fn ready(&mut self, path: &Path, digest: &Digest, hash: bool) {
        let sound = self.layout.open(path).and_then(|file| {
            if hash {
                chunks::check_whole(&file, digest)
            } else {
                Ok(true)
            }
        });
        let why = match sound {
            Err(e) => e.to_string(),
            Ok(false) => "its content has another digest".into(),
            Ok(true) if !self.sound.contains_key(digest) => "its object is gone".into(),
            Ok(true) => return,
        };
        self.defects.push(Defect::Ready {
            path: self.inside(path),
            why,
        });
    }

    fn record<R: Keyed>(&mut self, path: &Path, add: impl FnOnce(&mut Self, PathBuf, R, Digest)) {
        self.records += 1;
        let inside = self.inside(path);
        match record_file::<R>(&self.layout, path) {
            Ok((record, checksum, _)) => add(self, inside, record, checksum),
            Err(e) => {
                // It is there for what refers to it. Its own references are not known here.
                if let (StoreError::Newer { .. }, Some(id)) = (&e, named(path, ".json")) {
                    let (checksum, to) = (id, vec![]);
                    match R::KIND {
                        Kind::Artifact => drop(self.artifacts.insert(id, Links { checksum, to })),
                        Kind::Program => drop(self.programs.insert(id, Links { checksum, to })),
                        _ => {}
                    }
                }
                self.bad_record(inside, &e);
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
        for (folder, meta) in self.list(&self.own.folder(Kind::Release))? {
            if !meta.is_dir() {
                self.not_plain(&folder, &meta);
                continue;
            }
            self.folder(&folder, &meta);
            for (path, meta) in self.list(&folder)? {
                if path.extension().is_none_or(|end| end != "json") {
                    self.defects.push(Defect::Foreign {
                        path: self.inside(&path),
                    });
                } else if self.plain(&path, &meta) {
                    self.release(&path);
                }
            }
        }
        Ok(())
    }

    fn release(&mut self, path: &Path) {
        self.records += 1;
        let inside = self.inside(path);
        match record_file::<Release>(&self.layout, path) {
            Ok((release, ..)) => {
                let objects = release.objects();
                self.roots.push((inside, release.programs, objects));
            }
            Err(e) => self.bad_record(inside, &e),
        }
    }

    /// Looks at the folders of live processes: `tmp`, `leases`, `locks`, and at `quarantine`.
    fn working(&mut self) -> Result<(), StoreError> {
        let root = self.own.root.clone();
        // Before the leases: the lease of a live process is older than its folder.
        let tmp = self.list(&root.join("tmp"))?;
        let mut live = HashSet::new();
        for (path, _) in self.list(&root.join("leases"))? {
            if !is_lease(&path) {
                self.defects.push(Defect::Foreign {
                    path: self.inside(&path),
                });
                continue;
            }
            match self
                .layout
                .open(&path)
                .map(|file| file.try_lock_shared().is_ok())
            {
                Ok(false) => drop(live.insert(path.file_stem().map(ToOwned::to_owned))),
                Ok(true) => self.defects.push(Defect::DeadLease {
                    path: self.inside(&path),
                }),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // Who may only read can't know whether its process lives.
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                    live.insert(path.file_stem().map(ToOwned::to_owned));
                }
                Err(_) => self.defects.push(Defect::Foreign {
                    path: self.inside(&path),
                }),
            }
        }
        for (path, _) in tmp {
            if !live.contains(&path.file_name().map(ToOwned::to_owned))
                && fs::symlink_metadata(&path).is_ok()
            {
                self.defects.push(Defect::Stale {
                    path: self.inside(&path),
                });
            }
        }
        for (path, meta) in self.list(&root.join("locks"))? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let right = match &*name {
                "gate" | "use" | "add" => meta.is_file(),
                "keys" => meta.is_dir(),
                _ => false,
            };
            if !right {
                self.defects.push(Defect::Foreign {
                    path: self.inside(&path),
                });
            }
        }
        self.quarantined = self.list(&root.join("quarantine"))?.len() as u64;
        Ok(())
    }

    /// Lists a folder; what goes while it is listed is left out, and so is a folder that is not there.
    fn list(&self, folder: &Path) -> Result<Vec<(PathBuf, Metadata)>, StoreError> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(Vec::new());
            }
            Err(e) => return Err(e).at("list", folder),
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry.at("list", folder)?.path();
            match fs::symlink_metadata(&path) {
                Ok(meta) => all.push((path, meta)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).at("look at", &path),
            }
        }
        all.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(all)
    }

    fn not_plain(&mut self, path: &Path, meta: &Metadata) {
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
        self.defects.push(Defect::NotPlain {
            path: self.inside(path),
            what: what.to_owned(),
        });
    }

    fn inside(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.own.root).unwrap_or(path).to_owned()
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

/// Returns the reason without the path, which the defect has.
fn why(error: &StoreError) -> String {
    match error {
        StoreError::Corrupt { why, .. } | StoreError::Record { why, .. } => why.clone(),
        StoreError::Io { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}
