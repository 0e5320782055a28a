//! States after a power loss: writes without a sync may be lost, truncated or reordered.
//!
//! The shim records every write, sync and change of names. A state is generated from a moment of that record and a
//! seed:
//!
//! - Bytes before an fsync of their file are kept. Any other write is kept, lost (zeros if a later write made the file
//!   longer), or truncated.
//! - Names before an fsync of their folder are kept. Of the others, either all up to some moment are kept (a file system
//!   with a journal), or any of them (one without).
//!
//! Then the store is opened, checked and built again, as after a kill.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{
    actor::{self, Act},
    crash,
    report::Tally,
    scene::{self, Random},
    spread,
};

/// A call. Files are numbers.
#[derive(Clone, Debug)]
enum Op {
    New(usize, PathBuf),
    /// A file that was there is opened for writing.
    Open(PathBuf),
    /// Bytes from a position.
    Put(usize, usize, Vec<u8>),
    /// To a length.
    Cut(usize, usize),
    SyncFile(usize),
    SyncFolder(PathBuf),
    Mkdir(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Unlink(PathBuf),
    Ack(String),
}

/// A run of an actor: its start and its calls.
pub struct Record {
    /// Files that were there before: path -> number of the file.
    names: BTreeMap<PathBuf, usize>,
    folders: Vec<PathBuf>,
    /// Their bytes, by number.
    bytes: Vec<Vec<u8>>,
    ops: Vec<Op>,
    name: &'static str,
}

impl Record {
    /// Runs `name` and records it.
    pub fn of(name: &'static str) -> Self {
        let dir = scene::scratch();
        let root = dir.path().join("store");
        crash::prepare(name, &root);
        let _ = fs::remove_file(root.with_extension("ack"));
        let mut record = Self {
            names: BTreeMap::new(),
            folders: vec![],
            bytes: vec![],
            ops: vec![],
            name,
        };
        let mut inodes = HashMap::new();
        let mut folders = HashMap::new();
        if root.exists() {
            record.snapshot(&root, &root, &mut inodes);
        }
        let out = dir.path().join("trace");
        let shim = vec![("MODE", "trace".into()), ("OUT", out.display().to_string())];
        actor::well(&Act::new(name, &root).under(shim).run()).unwrap();
        // Folders are synced by number too; they keep theirs.
        for folder in walk_folders(&root) {
            folders.insert(fs::metadata(&folder).unwrap().ino(), inside(&folder, &root));
        }
        record.parse(&fs::read(out).unwrap(), &root, inodes, &folders);
        record
    }

    fn snapshot(&mut self, folder: &Path, root: &Path, inodes: &mut HashMap<u64, usize>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                self.folders.push(inside(&path, root));
                self.snapshot(&path, root, inodes);
            } else {
                let number = self.bytes.len();
                inodes.insert(fs::metadata(&path).unwrap().ino(), number);
                self.bytes.push(fs::read(&path).unwrap());
                self.names.insert(inside(&path, root), number);
            }
        }
        self.folders.sort();
    }

    fn parse(
        &mut self,
        mut text: &[u8],
        root: &Path,
        mut inodes: HashMap<u64, usize>,
        folders: &HashMap<u64, PathBuf>,
    ) {
        while !text.is_empty() {
            let end = text.iter().position(|b| *b == b'\n').unwrap();
            let line = String::from_utf8(text[..end].to_vec()).unwrap();
            let fields: Vec<&str> = line.split('\t').collect();
            let (inode, number): (u64, usize) =
                (fields[1].parse().unwrap(), fields[2].parse().unwrap());
            let path = |text: &str| inside(Path::new(text), root);
            let length: usize = fields[5].parse().unwrap();
            let data = text[end + 1..end + 1 + length].to_vec();
            text = &text[end + 1 + length..];
            let file = inodes.get(&inode).copied();
            let (first, second) = (path(fields[3]), path(fields[4]));
            self.ops.push(match fields[0] {
                "new" => {
                    let file = self.bytes.len();
                    self.bytes.push(Vec::new());
                    inodes.insert(inode, file);
                    Op::New(file, first)
                }
                "open" => Op::Open(first),
                "put" => Op::Put(file.unwrap(), number, data),
                "cut" => Op::Cut(file.unwrap(), number),
                "sync" => match (file, folders.get(&inode)) {
                    (_, Some(path)) => Op::SyncFolder(path.clone()),
                    (Some(file), None) => Op::SyncFile(file),
                    // A folder that is gone by the end.
                    (None, None) => continue,
                },
                "mkdir" => Op::Mkdir(first),
                "rename" => Op::Rename(first, second),
                "link" => Op::Link(first, second),
                "unlink" => Op::Unlink(first),
                "ack" => Op::Ack(String::from_utf8(data).unwrap()),
                other => panic!("what is `{other}`"),
            });
        }
    }

    /// Returns how many files were published, and every write to one of them, or opening for it, after it had its final
    /// name.
    pub fn writes_after_publishing(&self) -> (u64, Vec<String>) {
        let folders = ["objects", "artifacts", "programs", "releases", "ready"];
        let immutable = |path: &Path| folders.iter().any(|folder| path.starts_with(folder));
        let mut names = self.names.clone();
        let mut published: HashMap<usize, PathBuf> = HashMap::new();
        let mut bad = Vec::new();
        for op in &self.ops {
            match op {
                Op::New(file, path) => drop(names.insert(path.clone(), *file)),
                Op::Rename(from, to) => {
                    let file = names.remove(from);
                    if immutable(to) {
                        published.extend(file.map(|file| (file, to.clone())));
                        let there = names.contains_key(to).then_some(to);
                        bad.extend(there.map(|to| format!("{} was replaced", to.display())));
                    }
                    names.extend(file.map(|file| (to.clone(), file)));
                }
                Op::Unlink(path) => drop(names.remove(path)),
                Op::Open(path) if immutable(path) => {
                    bad.push(format!("{} was opened for writing", path.display()));
                }
                Op::Put(file, ..) | Op::Cut(file, _) => {
                    let path = published.get(file);
                    bad.extend(path.map(|path| format!("{} was written", path.display())));
                }
                _ => {}
            }
        }
        (published.len() as u64, bad)
    }

    /// Makes the state of a moment and a seed, and checks the next process's view.
    fn state(&self, moment: usize, seed: u64) -> Result<()> {
        let dir = scene::scratch();
        let root = dir.path().join("store");
        let mut random = Random(seed);
        self.write(moment, &mut random, &root);
        let acks = self.ops[..moment].iter().map(|op| match op {
            Op::Ack(text) => text.as_str(),
            _ => "",
        });
        crash::survives(&root, &acks.collect::<String>(), false)
            .with_context(|| format!("{} after call {moment}, seed {seed}", self.name))
    }

    fn write(&self, moment: usize, random: &mut Random, root: &Path) {
        let ops = &self.ops[..moment];
        let bytes = self.contents(ops, random);
        let (names, folders) = self.tree(ops, random);
        fs::create_dir(root).unwrap();
        for folder in &folders {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for (path, file) in &names {
            let path = root.join(path);
            if path.parent().is_some_and(Path::is_dir) {
                fs::write(&path, &bytes[*file]).unwrap();
                let record = path
                    .extension()
                    .is_some_and(|end| end == "zst" || end == "json");
                if record || path.iter().any(|part| part == "ready") {
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
                }
            }
        }
    }

    /// Returns the content of each file: synced writes, and a seeded choice of the others.
    fn contents(&self, ops: &[Op], random: &mut Random) -> Vec<Vec<u8>> {
        let mut all = self.bytes.clone();
        let mut synced: HashMap<usize, usize> = HashMap::new();
        for (n, op) in ops.iter().enumerate() {
            if let Op::SyncFile(file) = op {
                synced.insert(*file, n);
            }
        }
        for (n, op) in ops.iter().enumerate() {
            let sure = |file: &usize| synced.get(file).is_some_and(|sync| n < *sync);
            match op {
                Op::Put(file, at, bytes) => {
                    let kept = match random.below(10) {
                        _ if sure(file) => bytes.len(),
                        0..=4 => bytes.len(),
                        5..=7 => 0,
                        _ => random.below(bytes.len()),
                    };
                    let content = &mut all[*file];
                    // The length may have been written without the bytes.
                    let longer = kept > 0 || random.below(2) == 0;
                    if longer && content.len() < at + bytes.len() {
                        content.resize(at + bytes.len(), 0);
                    }
                    let start = (*at).min(content.len());
                    for (to, from) in content[start..].iter_mut().zip(&bytes[..kept]) {
                        *to = *from;
                    }
                }
                Op::Cut(file, length) if sure(file) || random.below(2) == 0 => {
                    all[*file].resize(*length, 0);
                }
                _ => {}
            }
        }
        all
    }

    /// Returns the names: synced ones, and a seeded choice of the others.
    fn tree(&self, ops: &[Op], random: &mut Random) -> (BTreeMap<PathBuf, usize>, Vec<PathBuf>) {
        let journal = random.below(2) == 0;
        let mut last: HashMap<&Path, usize> = HashMap::new();
        for (n, op) in ops.iter().enumerate() {
            if let Op::SyncFolder(path) = op {
                last.insert(path, n);
            }
        }
        let sure = |n: usize, path: &Path| {
            let folder = path.parent().unwrap_or(Path::new(""));
            last.get(folder).is_some_and(|sync| n < *sync)
        };
        let target = |op: &Op| match op {
            Op::New(_, path) | Op::Mkdir(path) | Op::Unlink(path) => Some(path.clone()),
            Op::Rename(_, to) | Op::Link(_, to) => Some(to.clone()),
            _ => None,
        };
        let lasted = |n: &usize| target(&ops[*n]).is_some_and(|path| sure(*n, &path));
        let newest_sure = (0..ops.len()).rfind(lasted).map_or(0, |n| n + 1);
        let until = newest_sure + random.below(ops.len() + 1 - newest_sure);
        let mut names = self.names.clone();
        let mut folders = self.folders.clone();
        // Every file has a number even when its first name was lost: a later rename that lasted still names it.
        let mut known = self.names.clone();
        for (n, op) in ops.iter().enumerate() {
            let Some(path) = target(op) else { continue };
            let there = match journal {
                true => n < until || sure(n, &path),
                false => sure(n, &path) || random.below(2) == 0,
            };
            match op {
                Op::New(file, path) => {
                    known.insert(path.clone(), *file);
                    if there {
                        names.insert(path.clone(), *file);
                    }
                }
                Op::Mkdir(path) if there => folders.push(path.clone()),
                Op::Rename(from, to) => {
                    let file = known.remove(from);
                    if let Some(file) = file {
                        known.insert(to.clone(), file);
                    }
                    if there {
                        names.remove(from);
                        names.extend(file.map(|file| (to.clone(), file)));
                    }
                }
                Op::Link(from, to) => {
                    if let Some(file) = known.get(from).copied() {
                        known.insert(to.clone(), file);
                        if there {
                            names.insert(to.clone(), file);
                        }
                    }
                }
                Op::Unlink(path) => {
                    known.remove(path);
                    if there {
                        names.remove(path);
                        folders.retain(|folder| folder != path);
                    }
                }
                _ => {}
            }
        }
        (names, folders)
    }

    /// Makes `count` seeded states, spread over all moments.
    pub fn sweep(&self, seed: u64, count: u64, tried: &mut Tally) {
        let moments = self.ops.len() + 1;
        tried.add("points", moments as u64);
        tried.add("states", count);
        let states: Vec<u64> = (0..count).collect();
        tried.bad.extend(spread::each(&states, |n| {
            let moment = (*n as usize * 7919) % moments;
            self.state(moment, seed.wrapping_add(*n))
        }));
    }
}

fn inside(path: &Path, root: &Path) -> PathBuf {
    path.strip_prefix(root).unwrap_or(path).to_owned()
}

fn walk_folders(root: &Path) -> Vec<PathBuf> {
    let all = walkdir::WalkDir::new(root)
        .into_iter()
        .map(|entry| entry.unwrap());
    let folders = all.filter(|entry| entry.file_type().is_dir());
    folders.map(|entry| entry.into_path()).collect()
}
