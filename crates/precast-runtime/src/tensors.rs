//! Tensors from and to safetensors files, for the command line and the gate.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    fs, io,
    path::Path,
};

use precast_store::record::Dtype;
use safetensors::{SafeTensorError, SafeTensors, tensor::View};

use super::{Tensor, TorchError};

/// An error of reading or writing tensors.
#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    /// The bytes are no safetensors file.
    #[error("not a safetensors file: {0}")]
    Format(#[from] safetensors::SafeTensorError),
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

/// Reads every tensor of a safetensors file onto the CPU; nothing refers to `bytes` afterwards.
pub fn read(bytes: &[u8]) -> Result<BTreeMap<String, Tensor>, TensorFileError> {
    let file = SafeTensors::deserialize(bytes)?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.tensors() {
        let dtype = view.dtype();
        let dtype = dtype_of(dtype).ok_or_else(|| TensorFileError::Dtype {
            name: name.clone(),
            dtype: format!("{dtype:?}"),
        })?;
        let shape: Vec<i64> = view.shape().iter().map(|size| *size as i64).collect();
        let tensor = Tensor::from_bytes(view.data(), &shape, dtype)
            .map_err(|error| refused(&name, error))?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// Writes tensors on any device as one safetensors file: whole or not at all, unless `path` is a device or a pipe.
pub fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), TensorFileError> {
    let blobs = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.clone(), Blob::new(name, tensor)?)));
    let blobs = blobs.collect::<Result<Vec<_>, TensorFileError>>()?;
    let special = fs::metadata(path).is_ok_and(|meta| !meta.is_file());
    let written = if special {
        // A rename into its place would remove it.
        safetensors::serialize(blobs, None).and_then(|bytes| Ok(fs::write(path, bytes)?))
    } else {
        safetensors::serialize_to_file(blobs, None, path)
    };
    written.map_err(|error| match error {
        SafeTensorError::IoError(error) => TensorFileError::Write(error),
        other => TensorFileError::Format(other),
    })
}

/// Returns tensors on any device as the bytes of a safetensors file.
pub fn serialize(
    tensors: &[(String, Tensor)],
    metadata: Option<HashMap<String, String>>,
) -> Result<Vec<u8>, TensorFileError> {
    let blobs = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.clone(), Blob::new(name, tensor)?)));
    let blobs = blobs.collect::<Result<Vec<_>, TensorFileError>>()?;
    Ok(safetensors::serialize(blobs, metadata)?)
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

struct Blob {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Blob {
    fn new(name: &str, tensor: &Tensor) -> Result<Self, TensorFileError> {
        let dtype = tensor.dtype().ok_or_else(|| TensorFileError::Dtype {
            name: name.to_owned(),
            dtype: tensor.dtype_name(),
        })?;
        let data = tensor.to_bytes().map_err(|error| refused(name, error))?;
        let shape = tensor.shape().iter().map(|size| *size as usize).collect();
        Ok(Self {
            dtype: dtype_to(dtype),
            shape,
            data,
        })
    }
}

impl View for Blob {
    fn dtype(&self) -> safetensors::Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
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
        let back = read(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(back.len(), tensors.len());
        for (name, tensor) in &tensors {
            assert_eq!(back[name].dtype(), tensor.dtype(), "{name}");
            assert_eq!(back[name].shape(), tensor.shape(), "{name}");
            let (got, want) = (back[name].to_bytes(), tensor.to_bytes());
            assert_eq!(got.unwrap(), want.unwrap(), "{name}");
        }
        assert_eq!(back["turned"].to_vec::<i64>().unwrap(), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn other_bytes_and_dtypes_are_refused() {
        assert!(matches!(read(b"no"), Err(TensorFileError::Format(_))));
        let file = safetensors::serialize([("c", Complex)], None).unwrap();
        let error = read(&file).unwrap_err().to_string();
        assert_eq!(error, "tensor `c` has dtype C64, which modules don't take");
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
