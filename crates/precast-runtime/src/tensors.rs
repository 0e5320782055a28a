//! Tensors from and to safetensors files, for the command line and the gate.

use std::{
    borrow::Cow,
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use precast_store::record::Dtype;
use safetensors::{
    SafeTensorError,
    tensor::{Metadata, View},
};
use tempfile::TempDir;

use super::{Tensor, TorchError};

/// An error of reading or writing tensors.
#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    /// The bytes are no safetensors file.
    #[error("not a safetensors file: {0}")]
    Format(#[from] safetensors::SafeTensorError),
    /// The file could not be read.
    #[error("the operating system refused to read it")]
    Read(#[source] io::Error),
    /// The file could not be written.
    #[error("the operating system refused to write it")]
    Write(#[source] io::Error),
    /// A tensor has a dtype that no module takes.
    #[error("tensor `{name}` has dtype {dtype}, which modules don't take")]
    Dtype {
        /// Name of the tensor.
        name: String,
        /// Its dtype in the file.
        dtype: String,
    },
    /// libtorch failed to create or copy a tensor.
    #[error("tensor `{name}` can't be made: {reason}")]
    Torch {
        /// Name of the tensor.
        name: String,
        /// The message of libtorch.
        reason: TorchError,
    },
}

impl TensorFileError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Format(_) => {
                "`safetensors.torch.save_file` writes such a file; `precast inspect FILE` says what is in it"
            }
            Self::Read(error) => match error.kind() {
                io::ErrorKind::IsADirectory => "give a file: this is a folder",
                _ => "check who may read it, and the disk",
            },
            Self::Write(error) => match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "the disk is full: free some space, or write to another one"
                }
                io::ErrorKind::NotFound => "its folder must be there already",
                _ => "check who may write there",
            },
            Self::Dtype { .. } => {
                "convert it; `precast show ID` lists the inputs of a program and their dtypes"
            }
            Self::Torch { .. } => "libtorch refused it: there may be too little memory",
        }
    }
}

/// The largest header of a safetensors file.
const HEADER: u64 = 100_000_000;

/// A safetensors file whose header was read. Tensors are read one after the other: beside them it takes the memory of
/// one.
pub struct TensorFile<R> {
    /// The bytes before the tensors.
    head: Vec<u8>,
    rest: R,
    header: Metadata,
}

impl<R: Read> TensorFile<R> {
    /// Reads the header.
    pub fn open(mut from: R) -> Result<Self, TensorFileError> {
        let mut head = take(&mut from, 8)?;
        let length = head[..]
            .try_into()
            .map_err(|_| SafeTensorError::HeaderTooSmall)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER {
            return Err(SafeTensorError::HeaderTooLarge.into());
        }
        let header = take(&mut from, length)?;
        if (header.len() as u64) < length {
            return Err(SafeTensorError::InvalidHeaderLength.into());
        }
        head.extend(&header);
        let text = str::from_utf8(&header).map_err(SafeTensorError::InvalidHeader)?;
        let header = serde_json::from_str(text);
        let header = header.map_err(SafeTensorError::InvalidHeaderDeserialization)?;
        Ok(Self {
            head,
            rest: from,
            header,
        })
    }

    /// Returns the bytes before the tensors.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Returns whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.header.info(name).is_some()
    }

    /// Returns a text of the header.
    pub fn text(&self, key: &str) -> Option<&str> {
        let texts = self.header.metadata().as_ref()?;
        texts.get(key).map(String::as_str)
    }

    /// Reads every tensor onto the CPU.
    pub fn tensors(self) -> Result<BTreeMap<String, Tensor>, TensorFileError> {
        self.tensors_and(|_| ())
    }

    /// Reads every tensor onto the CPU, and shows all bytes after the header to `see`.
    pub fn tensors_and(
        mut self,
        mut see: impl FnMut(&[u8]),
    ) -> Result<BTreeMap<String, Tensor>, TensorFileError> {
        let mut tensors = BTreeMap::new();
        // In the order of their bytes, which have no gaps.
        for name in self.header.offset_keys() {
            let Some(info) = self.header.info(&name) else {
                continue;
            };
            let dtype = dtype_of(info.dtype).ok_or_else(|| TensorFileError::Dtype {
                name: name.clone(),
                dtype: format!("{:?}", info.dtype),
            })?;
            let (begin, end) = info.data_offsets;
            let bytes = take(&mut self.rest, (end - begin) as u64)?;
            if bytes.len() < end - begin {
                return Err(SafeTensorError::MetadataIncompleteBuffer.into());
            }
            see(&bytes);
            let shape: Vec<i64> = info.shape.iter().map(|size| *size as i64).collect();
            let tensor = Tensor::from_bytes(&bytes, &shape, dtype);
            tensors.insert(name.clone(), tensor.map_err(|error| refused(&name, error))?);
        }
        match take(&mut self.rest, 1)?.is_empty() {
            true => Ok(tensors),
            false => Err(SafeTensorError::MetadataIncompleteBuffer.into()),
        }
    }
}

/// Reads so many bytes, or as many as there are.
fn take(from: impl Read, count: u64) -> Result<Vec<u8>, TensorFileError> {
    let mut bytes = vec![];
    from.take(count)
        .read_to_end(&mut bytes)
        .map_err(TensorFileError::Read)?;
    Ok(bytes)
}

/// Reads every tensor of a safetensors file onto the CPU.
pub fn read(from: impl Read) -> Result<BTreeMap<String, Tensor>, TensorFileError> {
    TensorFile::open(from)?.tensors()
}

/// Writes tensors on any device as one safetensors file: whole or not at all, unless `path` is a device or a pipe.
pub fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), TensorFileError> {
    if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        // A rename into its place would remove it. Nothing is written before all bytes are there.
        let bytes = with_blobs(tensors, |blobs| safetensors::serialize(blobs, None))?;
        return fs::write(path, bytes).map_err(TensorFileError::Write);
    }
    Draft::write(path, tensors, None)?.publish(path, false)
}

/// A file that gets its name when it is complete. It is in a folder beside its place, with what else is needed to write
/// it, and removed with the returned value. A process that is killed leaves the folder, whose name begins with
/// [`Draft::PREFIX`].
pub struct Draft {
    path: PathBuf,
    _folder: TempDir,
}

impl Draft {
    /// Begins the names of such folders.
    pub const PREFIX: &'static str = ".tensors-";

    /// Writes tensors, with texts in the header, for a place at `path`.
    pub fn write(
        path: &Path,
        tensors: &[(String, Tensor)],
        texts: Option<HashMap<String, String>>,
    ) -> Result<Self, TensorFileError> {
        let made = tempfile::Builder::new()
            .prefix(Self::PREFIX)
            .tempdir_in(folder(path));
        let made = made.map_err(TensorFileError::Write)?;
        let draft = Self {
            path: made.path().join("draft"),
            _folder: made,
        };
        with_blobs(tensors, |blobs| {
            safetensors::serialize_to_file(blobs, texts, &draft.path)
        })?;
        Ok(draft)
    }

    /// Returns the path until it is published.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name, in the place of an earlier file; with `durable`, also if the machine stops.
    pub fn publish(self, path: &Path, durable: bool) -> Result<(), TensorFileError> {
        let sync = |path: &Path| match durable {
            true => File::open(path)?.sync_all(),
            false => Ok(()),
        };
        let published = sync(&self.path)
            .and_then(|()| fs::rename(&self.path, path))
            .and_then(|()| sync(folder(path)));
        published.map_err(TensorFileError::Write)
    }
}

fn folder(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    folder.unwrap_or(Path::new("."))
}

/// Has tensors written, each as it is needed: beside the tensors there are the bytes of one.
fn with_blobs<T>(
    tensors: &[(String, Tensor)],
    write: impl FnOnce(Vec<(&str, Blob<'_>)>) -> Result<T, SafeTensorError>,
) -> Result<T, TensorFileError> {
    let failed = RefCell::new(None);
    let blobs = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), Blob::new(name, tensor, &failed)?)));
    let written = write(blobs.collect::<Result<_, TensorFileError>>()?);
    match (failed.into_inner(), written) {
        (Some(error), _) => Err(error),
        (None, Err(SafeTensorError::IoError(error))) => Err(TensorFileError::Write(error)),
        (None, written) => Ok(written?),
    }
}

/// Returns whether elements, as their bytes, are numbers: no exponent of a float has all of its bits set.
pub fn is_finite(dtype: safetensors::Dtype, bytes: &[u8]) -> bool {
    fn all<const N: usize>(bytes: &[u8], exponent: u64) -> bool {
        bytes.as_chunks::<N>().0.iter().all(|chunk| {
            let mut bits = [0; 8];
            bits[..N].copy_from_slice(chunk);
            u64::from_le_bytes(bits) & exponent != exponent
        })
    }
    match dtype {
        safetensors::Dtype::F16 => all::<2>(bytes, 0x7c00),
        safetensors::Dtype::BF16 => all::<2>(bytes, 0x7f80),
        safetensors::Dtype::F32 => all::<4>(bytes, 0x7f80_0000),
        safetensors::Dtype::F64 => all::<8>(bytes, 0x7ff0_0000_0000_0000),
        _ => true,
    }
}

/// A tensor that is written.
struct Blob<'a> {
    name: &'a str,
    tensor: &'a Tensor,
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    /// The first tensor whose bytes can't be made: zeros are in their place, and the file is refused.
    failed: &'a RefCell<Option<TensorFileError>>,
}

impl<'a> Blob<'a> {
    fn new(
        name: &'a str,
        tensor: &'a Tensor,
        failed: &'a RefCell<Option<TensorFileError>>,
    ) -> Result<Self, TensorFileError> {
        let dtype = tensor.dtype().ok_or_else(|| TensorFileError::Dtype {
            name: name.to_owned(),
            dtype: tensor.dtype_name(),
        })?;
        let shape = tensor.shape().iter().map(|size| *size as usize).collect();
        Ok(Self {
            name,
            tensor,
            dtype: dtype_to(dtype),
            shape,
            failed,
        })
    }
}

impl View for Blob<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.tensor.to_bytes().unwrap_or_else(|error| {
            let mut failed = self.failed.borrow_mut();
            failed.get_or_insert_with(|| refused(self.name, error));
            vec![0; self.data_len()]
        });
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.tensor.numel() * self.dtype.bitsize() / 8
    }
}

fn refused(name: &str, reason: TorchError) -> TensorFileError {
    TensorFileError::Torch {
        name: name.to_owned(),
        reason,
    }
}

const PAIRS: [(Dtype, safetensors::Dtype); 10] = [
    (Dtype::Float64, safetensors::Dtype::F64),
    (Dtype::Float32, safetensors::Dtype::F32),
    (Dtype::Float16, safetensors::Dtype::F16),
    (Dtype::Bfloat16, safetensors::Dtype::BF16),
    (Dtype::Int64, safetensors::Dtype::I64),
    (Dtype::Int32, safetensors::Dtype::I32),
    (Dtype::Int16, safetensors::Dtype::I16),
    (Dtype::Int8, safetensors::Dtype::I8),
    (Dtype::Uint8, safetensors::Dtype::U8),
    (Dtype::Bool, safetensors::Dtype::BOOL),
];

/// Returns the dtype that safetensors calls this, if a module can take it.
pub fn dtype_of(dtype: safetensors::Dtype) -> Option<Dtype> {
    PAIRS
        .iter()
        .find(|(_, other)| *other == dtype)
        .map(|(own, _)| *own)
}

fn dtype_to(dtype: Dtype) -> safetensors::Dtype {
    PAIRS
        .iter()
        .find(|(own, _)| *own == dtype)
        .map_or(safetensors::Dtype::U8, |(_, other)| *other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_round_trips_and_strided_tensors_are_written_dense() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let base = Tensor::from_slice(&[0i64, 1, 2, 3, 4, 5], &[2, 3]).unwrap();
        let mut tensors: Vec<(String, Tensor)> = Dtype::ALL
            .iter()
            .map(|dtype| (dtype.name().to_owned(), base.to_dtype(*dtype).unwrap()))
            .collect();
        tensors.push(("turned".to_owned(), base.transpose(0, 1).unwrap()));
        write(&path, &tensors).unwrap();
        let back = read(File::open(&path).unwrap()).unwrap();
        assert_eq!(back.len(), tensors.len());
        for (name, tensor) in &tensors {
            assert_eq!(back[name].dtype(), tensor.dtype(), "{name}");
            assert_eq!(back[name].shape(), tensor.shape(), "{name}");
            let (got, want) = (back[name].to_bytes(), tensor.to_bytes());
            assert_eq!(got.unwrap(), want.unwrap(), "{name}");
        }
        assert_eq!(back["turned"].to_vec::<i64>().unwrap(), [0, 3, 1, 4, 2, 5]);
    }

    fn refused(bytes: &[u8]) -> bool {
        matches!(read(bytes), Err(TensorFileError::Format(_)))
    }

    #[test]
    fn other_bytes_and_dtypes_are_refused() {
        assert!(refused(b"no"));
        let file = safetensors::serialize([("c", Complex)], None).unwrap();
        let error = read(&file[..]).unwrap_err().to_string();
        assert_eq!(error, "tensor `c` has dtype C64, which modules don't take");
    }

    #[test]
    fn a_file_that_is_cut_or_too_long_is_refused() {
        let tensor = Tensor::from_slice(&[1f32, 2.0, 3.0], &[3]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let texts = HashMap::from([("key".to_owned(), "text".to_owned())]);
        let draft = Draft::write(&path, &[("x".to_owned(), tensor)], Some(texts)).unwrap();
        draft.publish(&path, true).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let whole = fs::read(&path).unwrap();
        let file = TensorFile::open(&whole[..]).unwrap();
        assert_eq!((file.text("key"), file.text("other")), (Some("text"), None));
        assert_eq!(file.tensors().unwrap().len(), 1);
        let long = [&whole[..], b"!"].concat();
        for bytes in (0..whole.len()).map(|end| &whole[..end]).chain([&long[..]]) {
            assert!(refused(bytes), "{}", bytes.len());
        }
        for length in [HEADER + 1, u64::MAX, 1 << 20] {
            let bytes = [&length.to_le_bytes()[..], &whole[8..]].concat();
            assert!(refused(&bytes), "{length}");
        }
    }

    /// One complex number.
    struct Complex;

    impl View for Complex {
        fn dtype(&self) -> safetensors::Dtype {
            safetensors::Dtype::C64
        }

        fn shape(&self) -> &[usize] {
            &[1]
        }

        fn data(&self) -> Cow<'_, [u8]> {
            vec![0; 8].into()
        }

        fn data_len(&self) -> usize {
            8
        }
    }
}
