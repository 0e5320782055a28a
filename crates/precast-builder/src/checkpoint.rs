//! The files of a weight set, as a user has them: one safetensors file, or a checkpoint in several.
//!
//! | `weights` in the spec | read |
//! |---|---|
//! | `x.safetensors` | that file, to the byte |
//! | `x.safetensors.index.json` | the files that the index names, in its folder |
//! | a folder | `model.safetensors` or `model.safetensors.index.json` in it, else its only file or index of another name |
//!
//! The store has one object for a weight set. So the tensors of several files become one safetensors file while they
//! are copied into the store, in the order of [`TensorLayout`]. No other copy is written.
//!
//! The header of every file is checked before Python starts. Index and files must have the same tensors, each once.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, ErrorKind, Read, Seek, SeekFrom, Write},
    path::{Component, Path, PathBuf},
};

use precast_store::{Digest, Store, StoreError, TensorLayout, digest::Hasher};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde::Deserialize;

use super::BuildError;
use crate::plan::{PlanError, digest_of, file_digest};

/// The suffix of an index.
const INDEX: &str = ".safetensors.index.json";
const FILE: &str = ".safetensors";
/// Maximum bytes of an index, and of a header: the limit of the safetensors format.
const HEADER_LIMIT: u64 = 100_000_000;
/// Bytes of the length before a header.
const LENGTH: u64 = 8;
const KNOWN: [Dtype; 10] = [
    Dtype::F64,
    Dtype::F32,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I64,
    Dtype::I32,
    Dtype::I16,
    Dtype::I8,
    Dtype::U8,
    Dtype::BOOL,
];

/// The weight set in the files that a spec names. All headers were read and agree with each other.
pub struct Checkpoint {
    /// The path in the spec.
    path: PathBuf,
    layouts: Layouts,
    content: Content,
}

enum Content {
    /// The bytes of a file.
    Whole(PathBuf),
    Merged(Merged),
}

/// A header, and the data of each tensor in the order of the header.
struct Merged {
    index: PathBuf,
    header: Vec<u8>,
    files: Vec<PathBuf>,
    pieces: Vec<Piece>,
}

/// A part of a file.
struct Piece {
    /// Index into [`Merged::files`].
    file: usize,
    start: u64,
    length: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The dtype and the shape of a tensor.
type Layout = (Dtype, Vec<usize>);

/// The tensors of a weight set, by name.
pub type Layouts = BTreeMap<String, Layout>;

/// The header of one file.
struct Header {
    tensors: BTreeMap<String, TensorInfo>,
    /// The position of the first tensor's data.
    data: u64,
}

impl Checkpoint {
    /// Finds the files of the weight set at `path`, and checks their headers.
    pub fn open(path: &Path) -> Result<Self, BuildError> {
        Self::read(path).map_err(|message| BuildError::BadWeights {
            path: path.to_owned(),
            message,
        })
    }

    fn read(path: &Path) -> Result<Self, String> {
        let found = find(path)?;
        let inside = |message| in_file(path, &found, message);
        let name = found.to_string_lossy();
        let (layouts, content) = if name.ends_with(INDEX) {
            let (layouts, merged) = merged(&found).map_err(inside)?;
            (layouts, Content::Merged(merged))
        } else {
            let header = header(&found).map_err(inside)?;
            (layouts(&header.tensors), Content::Whole(found))
        };
        Ok(Self {
            path: path.to_owned(),
            layouts,
            content,
        })
    }

    /// Returns the dtype and the shape of each tensor.
    pub fn layouts(&self) -> &Layouts {
        &self.layouts
    }

    /// Returns the path in the spec.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the safetensors files.
    pub fn files(&self) -> &[PathBuf] {
        match &self.content {
            Content::Whole(file) => std::slice::from_ref(file),
            Content::Merged(merged) => &merged.files,
        }
    }

    /// Returns the digest of the weight set. Its files are read only when one of them may have changed.
    pub fn digest(&self, store: &Store) -> Result<Digest, PlanError> {
        match &self.content {
            Content::Whole(file) => file_digest(file, store),
            Content::Merged(merged) => digest_of(&merged.index, &merged.files, store, || {
                let mut hasher = Hasher::default();
                merged.write(&mut hasher)?;
                Ok(hasher.finish())
            }),
        }
    }

    /// Puts the weight set into a store, unless the store has it. Returns its digest.
    pub fn put_once(&self, store: &Store) -> Result<Digest, BuildError> {
        let mut put = Ok(());
        let (name, more) = match &self.content {
            Content::Whole(file) => (file, &[][..]),
            Content::Merged(merged) => (&merged.index, &merged.files[..]),
        };
        let digest = digest_of(name, more, store, || match self.put(store) {
            Ok((digest, _)) => Ok(digest),
            Err(error) => {
                put = Err(error);
                Err(ErrorKind::Other.into())
            }
        });
        put?;
        let digest = digest?;
        let objects = store.objects();
        if objects.unpacked_file(&digest).is_some() && objects.has_sound(&digest)? {
            // Holds it, as a put does.
            store.leases().keep(&[digest])?;
            return Ok(digest);
        }
        Ok(self.put(store)?.0)
    }

    /// Puts the weight set into a store. Returns its digest, and its size in bytes.
    pub fn put(&self, store: &Store) -> Result<(Digest, u64), StoreError> {
        match &self.content {
            Content::Whole(file) => store.objects().put_unpacked(file, &mut |out| {
                io::copy(&mut File::open(file)?, out).map(drop)
            }),
            Content::Merged(merged) => {
                (store.objects()).put_unpacked(&merged.index, &mut |out| merged.write(out))
            }
        }
    }
}

impl Merged {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut files = Vec::new();
        for path in &self.files {
            files.push(File::open(path)?);
        }
        out.write_all(&self.header)?;
        for piece in &self.pieces {
            let file = &mut files[piece.file];
            file.seek(SeekFrom::Start(piece.start))?;
            if io::copy(&mut file.take(piece.length), out)? != piece.length {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}

/// Returns the file or the index at a path of the spec.
fn find(path: &Path) -> Result<PathBuf, String> {
    let meta = fs::metadata(path).map_err(|error| missing(&error))?;
    if !meta.is_dir() {
        return Ok(path.to_owned());
    }
    let usual = [FILE, INDEX].map(|suffix| path.join(format!("model{suffix}")));
    if let Some(found) = usual.into_iter().find(|file| file.is_file()) {
        return Ok(found);
    }
    let names = fs::read_dir(path).map_err(|error| error.to_string())?;
    let mut names: Vec<String> = names
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    for suffix in [INDEX, FILE] {
        let mut found = names.iter().filter(|name| name.ends_with(suffix));
        match (found.next(), found.next()) {
            (Some(name), None) => return Ok(path.join(name)),
            (Some(one), Some(other)) => {
                return Err(format!(
                    "the folder has `{one}` and `{other}`: name one of them"
                ));
            }
            (None, _) => {}
        }
    }
    Err("the folder has no safetensors file and no index of several".to_owned())
}

fn missing(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "it is not there".to_owned(),
        _ => error.to_string(),
    }
}

/// Adds the name of a file to a message, where the spec names the folder of that file.
fn in_file(path: &Path, file: &Path, message: String) -> String {
    match file.file_name() {
        Some(name) if path != file => format!("`{}`: {message}", name.display()),
        _ => message,
    }
}

/// Returns the layouts of the tensors of an index, and their places.
fn merged(index: &Path) -> Result<(Layouts, Merged), String> {
    let folder = index.parent().unwrap_or(Path::new("."));
    let map = read_index(index)?;
    let names: Vec<&String> = (map.values().collect::<BTreeSet<_>>())
        .into_iter()
        .collect();
    names.iter().try_for_each(|name| inside(name))?;
    let mut places: BTreeMap<String, Placed> = BTreeMap::new();
    let mut files = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let path = folder.join(name);
        let header = header(&path).map_err(|message| format!("`{name}`: {message}"))?;
        for (tensor, info) in header.tensors {
            match map.get(&tensor) {
                Some(file) if file == *name => {}
                Some(file) => {
                    return Err(format!(
                        "tensor `{tensor}` is in `{name}`, and the index has it in `{file}`"
                    ));
                }
                None => {
                    return Err(format!(
                        "`{name}` has tensor `{tensor}`, which the index lacks"
                    ));
                }
            }
            let start = header.data + info.data_offsets.0 as u64;
            let length = (info.data_offsets.1 - info.data_offsets.0) as u64;
            let piece = Piece {
                file: number,
                start,
                length,
            };
            places.insert(tensor, ((info.dtype, info.shape), piece));
        }
        files.push(path);
    }
    if let Some((tensor, file)) = map.iter().find(|(tensor, _)| !places.contains_key(*tensor)) {
        return Err(format!(
            "tensor `{tensor}` is not in `{file}`, where the index has it"
        ));
    }
    in_order(index.to_owned(), files, places)
}

/// The layout of a tensor, and its data.
type Placed = (Layout, Piece);

/// Refuses a name in an index that is no file of the same folder.
fn inside(name: &str) -> Result<(), String> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(part)), None)
            if part == name && name.ends_with(FILE) && !name.contains('\0') =>
        {
            Ok(())
        }
        _ => Err(format!(
            "the index names `{}`, which is no safetensors file of its folder",
            name.escape_debug()
        )),
    }
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, String> {
    let mut bytes = Vec::new();
    let read = File::open(path)
        .and_then(|file| file.take(HEADER_LIMIT + 1).read_to_end(&mut bytes))
        .map_err(|error| missing(&error))?;
    if read as u64 > HEADER_LIMIT {
        return Err(format!("the index has more than {HEADER_LIMIT} bytes"));
    }
    let index: Index = serde_json::from_slice(&bytes).map_err(|error| {
        format!(
            "it is no index of a checkpoint, with the file of each tensor in `weight_map`: {error}"
        )
    })?;
    if index.weight_map.is_empty() {
        return Err("the index names no tensor".to_owned());
    }
    Ok(index.weight_map)
}

/// Returns one header for tensors of several files, and the parts of the files in its order.
fn in_order(
    index: PathBuf,
    files: Vec<PathBuf>,
    mut places: BTreeMap<String, Placed>,
) -> Result<(Layouts, Merged), String> {
    let layouts: Layouts = places
        .iter()
        .map(|(name, (layout, _))| (name.clone(), layout.clone()))
        .collect();
    let written = TensorLayout::new(layouts.clone(), None).map_err(|error| error.to_string())?;
    let pieces = written.order.iter();
    let pieces = pieces.filter_map(|name| places.remove(name).map(|(_, piece)| piece));
    let merged = Merged {
        index,
        header: written.head,
        files,
        pieces: pieces.collect(),
    };
    Ok((layouts, merged))
}

fn layouts(tensors: &BTreeMap<String, TensorInfo>) -> Layouts {
    let layout =
        |(name, info): (&String, &TensorInfo)| (name.clone(), (info.dtype, info.shape.clone()));
    tensors.iter().map(layout).collect()
}

/// Reads and checks the header of one safetensors file.
fn header(path: &Path) -> Result<Header, String> {
    let no_safetensors = || "it is no safetensors file".to_owned();
    let mut file = File::open(path).map_err(|error| missing(&error))?;
    let meta = file.metadata().map_err(|error| error.to_string())?;
    if !meta.is_file() {
        return Err("it is a folder or another special file".to_owned());
    }
    let mut length = [0; LENGTH as usize];
    file.read_exact(&mut length).map_err(|_| no_safetensors())?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT || length > meta.len() - LENGTH {
        return Err(no_safetensors());
    }
    let mut header = Vec::new();
    (file.take(length).read_to_end(&mut header)).map_err(|error| error.to_string())?;
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| format!("{}: {error}", no_safetensors()))?;
    let ends = LENGTH + length + header.data_len() as u64;
    if ends != meta.len() {
        let has = meta.len();
        let cut = if has < ends { "it was cut off: " } else { "" };
        return Err(format!(
            "{cut}its tensors end at byte {ends}, the file at byte {has}"
        ));
    }
    let tensors: BTreeMap<String, TensorInfo> = (header.tensors().into_iter())
        .map(|(name, info)| (name, info.clone()))
        .collect();
    match tensors
        .iter()
        .find(|(_, info)| !KNOWN.contains(&info.dtype))
    {
        Some((name, info)) => Err(format!(
            "tensor `{name}` is {}, which no weight set can hold",
            info.dtype
        )),
        None => Ok(Header {
            tensors,
            data: LENGTH + length,
        }),
    }
}

#[cfg(test)]
mod tests;
