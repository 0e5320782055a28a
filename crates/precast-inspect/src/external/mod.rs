//! The content of a file that precast did not make. The file is parsed and never run.
//!
//! | file | known by | reported |
//! |---|---|---|
//! | shared object (`.so`) | `\x7fELF` | machine, needed libraries, AOTInductor's entry points, weights, device code and its SM |
//! | package (`.pt2`) | `PK` | members, torch's version, device, ISA and SM, inputs, constants, and the same facts of each uncompressed shared object |
//! | tensors (`.safetensors`) | a length and a `{` | names, dtypes, shapes and sizes; no tensor is read |
//!
//! The file is treated as hostile. Nothing is extracted, and names in it are only printed. Each table, list or member
//! that is held in memory has a maximum size. One `Limit` covers all bytes that are read or unpacked, and with them the
//! time.

mod object;
mod package;
mod tensors;
mod window;

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use serde::Serialize;

pub use object::{ENTRY_POINTS, EntryPoints, Format, Kernels, SharedObject};
pub use package::{Build, Member, Model, Package, PackagedObject};
pub use tensors::{Tensor, Tensors};
use window::{Limit, Window};

/// The content of a file, or the rule that it breaks as a fragment of a sentence.
type Parsed<T> = Result<T, String>;

/// The reason why an external file has no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExternalError {
    /// The operating system refused to open or read the file.
    #[error("can't read `{}`", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The path leads to a folder, device or pipe.
    #[error("`{}` is not a file", path.display())]
    NotAFile {
        /// The path that was given.
        path: PathBuf,
    },
    /// The first bytes are those of no format that is read here.
    #[error("`{}` is neither a shared object, nor a .pt2 package, nor a safetensors file", path.display())]
    Unknown {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file has a known format and breaks its rules.
    #[error("`{}` is damaged or not what it says: {why}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// The broken rule, as a fragment of a sentence.
        why: String,
    },
    /// Reading the file would exceed a limit.
    #[error("`{}` is refused: {why}", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// The limit, as a fragment of a sentence.
        why: String,
    },
}

impl ExternalError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Io { .. } => "check the path, and who may read it",
            Self::Unknown { .. } | Self::NotAFile { .. } => {
                "`precast inspect` reads .so, .pt2 and .safetensors files; for what is in a store, `precast show ID`"
            }
            Self::Malformed { .. } => "compare its size and digest with where it came from",
            Self::TooLarge { .. } => {
                "reading on could take all memory of this host, or hours; a sound file stays far below the limit"
            }
        }
    }
}

/// An external file.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report {
    /// Path as it was given.
    pub path: PathBuf,
    /// Bytes of the file.
    pub size: u64,
    /// Its kind and content.
    #[serde(flatten)]
    pub content: Content,
    /// Problems for a user of the file, one line each.
    pub warnings: Vec<String>,
}

/// The content by kind of file.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Content {
    /// An ELF shared object.
    SharedObject(SharedObject),
    /// A `.pt2` package of torch.export or AOTInductor.
    Package(Package),
    /// A safetensors file.
    Tensors(Tensors),
}

/// Returns the content of the file at `path`.
pub fn inspect(path: &Path) -> Result<Report, ExternalError> {
    let path = path.to_owned();
    let io = |source| ExternalError::Io {
        path: path.clone(),
        source,
    };
    // Opening a pipe would wait for its writer.
    if !std::fs::metadata(&path).map_err(io)?.is_file() {
        return Err(ExternalError::NotAFile { path });
    }
    let file = File::open(&path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    let limit = Limit::of(size);
    let whole = Window::new(&file, size, &limit);
    let magic = whole.bytes(0, 9);
    let magic = magic.map_err(|error| io(io::Error::other(error)))?;
    let content = if magic.starts_with(b"\x7fELF") {
        object::shared_object(whole).map(Content::SharedObject)
    } else if magic.starts_with(b"PK") {
        package::package(whole).map(Content::Package)
    } else if tensors::looks_like(&magic) {
        tensors::tensors(whole).map(Content::Tensors)
    } else {
        return Err(ExternalError::Unknown { path });
    };
    if let Some(why) = limit.refused() {
        return Err(ExternalError::TooLarge { path, why });
    }
    let content = match content {
        Ok(content) => content,
        Err(why) => return Err(ExternalError::Malformed { path, why }),
    };
    let warnings = match &content {
        Content::SharedObject(object) => object.warnings(),
        Content::Package(package) => package.warnings(),
        Content::Tensors(_) => vec![],
    };
    Ok(Report {
        path,
        size,
        content,
        warnings,
    })
}

#[cfg(test)]
mod tests;
