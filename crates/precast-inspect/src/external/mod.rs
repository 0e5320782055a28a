//! The content of an external file (one that precast did not make), found by parsing and never by running it.
//!
//! | file | known by | reported |
//! |---|---|---|
//! | shared object (`.so`) | `\x7fELF` | libraries it needs, what it exports, AOTInductor entry points it lacks, kernels inside it and their SM |
//! | package (`.pt2`) | `PK` | members, the builder's device, ISA and SM, torch's version, and each shared object inside it as above |
//! | tensors (`.safetensors`) | a length and a `{` | names, dtypes, shapes and sizes; no tensor is read |
//!
//! The file is treated as hostile. Nothing is extracted, and names in it are only printed. Every count and length is
//! checked against the real size before memory is allocated for it. One `budget` limits work, memory and time.

mod archive;
mod budget;
mod cuda;
mod elf;
mod part;
mod tensors;

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::Serialize;

pub use archive::{Build, Library, Member, Package};
pub use cuda::{Format, Kernel};
pub use elf::{ENTRY_POINTS, EntryPoints, Section, SharedObject};
pub use tensors::{Tensor, Tensors};

use budget::{Budget, Counted};
use part::Part;

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
    /// Reading the file would take more memory or time than is allowed.
    #[error("`{}` is refused: {why}", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// The limit, as a fragment of a sentence.
        why: String,
    },
}

impl ExternalError {
    /// Returns what to do about it.
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

/// What stopped one part, before the path is known.
#[derive(Debug)]
enum ParseError {
    Malformed(String),
    TooLarge(String),
    Io(io::Error),
}

impl From<io::Error> for ParseError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Malformed("it ends too early".to_owned()),
            _ => Self::Io(error),
        }
    }
}

impl ParseError {
    fn of(self, path: &Path) -> ExternalError {
        let path = path.to_owned();
        match self {
            Self::Malformed(why) => ExternalError::Malformed { path, why },
            Self::TooLarge(why) => ExternalError::TooLarge { path, why },
            Self::Io(source) => ExternalError::Io { path, source },
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
    /// Its kind, and what that kind of file says.
    #[serde(flatten)]
    pub content: Content,
    /// What a reader should know before using it: one line each.
    pub warnings: Vec<String>,
}

/// What the file is.
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

/// Tells what is inside the file at `path`.
pub fn inspect(path: &Path) -> Result<Report, ExternalError> {
    let io = |source| ExternalError::Io {
        path: path.to_owned(),
        source,
    };
    // Opening a pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(ExternalError::NotAFile {
            path: path.to_owned(),
        });
    }
    let file = File::open(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    let mut magic = Vec::new();
    Part::new(&file, 0, size)
        .take(9)
        .read_to_end(&mut magic)
        .map_err(io)?;
    let budget = Budget::of(size);
    let whole = Counted::new(Part::new(&file, 0, size), &budget);
    let content = if magic.starts_with(b"\x7fELF") {
        elf::shared_object(whole).map(Content::SharedObject)
    } else if magic.starts_with(b"PK") {
        archive::package(&file, whole).map(Content::Package)
    } else if tensors::looks_like(&magic) {
        tensors::tensors(whole, size).map(Content::Tensors)
    } else {
        return Err(ExternalError::Unknown {
            path: path.to_owned(),
        });
    };
    let content = content.and_then(|content| budget.check().map(|()| content));
    let content = content.map_err(|error| budget.explain(error).of(path))?;
    Ok(Report {
        path: path.to_owned(),
        size,
        warnings: match &content {
            Content::SharedObject(object) => object.warnings(),
            Content::Package(package) => package.warnings(),
            Content::Tensors(tensors) => tensors.warnings(),
        },
        content,
    })
}

#[cfg(test)]
mod tests;
