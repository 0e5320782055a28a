//! The paths inside a store, and the creation of a store in an empty folder.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};
use serde::{Deserialize, Serialize};

use super::{
    error::{At, StoreError},
    permissions::{Distrust, Options, Trust},
    publish::{self, PendingFile, open_plain},
};
use crate::Digest;

/// The version of the folder layout that this code reads and writes.
pub const LAYOUT: i64 = 1;

/// The file that marks a store, for who keeps the files of a store elsewhere.
pub mod marker {
    pub use super::LAYOUT;
    use super::Marker;

    /// Returns the content of the marker.
    pub fn text() -> String {
        let marker = Marker {
            schema: 1,
            layout: LAYOUT,
        };
        let mut text = serde_json::to_string(&marker).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Returns the version of the layout that a marker names; none if it is no marker.
    pub fn layout(text: &[u8]) -> Option<i64> {
        let marker: Marker = serde_json::from_slice(text).ok()?;
        Some(marker.layout)
    }
}

const TAG_TEXT: &str = "Signature: 8a477f597d28d172789f06886806bc55\n\
    # This folder holds compiled artifacts of precast; all of it can be built again.\n\
    # For information about cache directory tags see https://bford.info/cachedir/\n";
const MARKER: &str = "precast-store.json";

/// The content of the marker file.
#[derive(Serialize, Deserialize)]
struct Marker {
    schema: u32,
    layout: i64,
}

/// The kinds of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Artifact,
    Program,
    Failure,
    Release,
}

impl Kind {
    /// Returns the name of the kind, as in `artifact`.
    pub fn name(self) -> &'static str {
        self.folder().trim_end_matches('s')
    }

    /// Returns the name of the kind's folder and of its table in the index.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Artifact => "artifacts",
            Self::Program => "programs",
            Self::Failure => "failures",
            Self::Release => "releases",
        }
    }
}

/// The paths of one store.
#[derive(Clone, Debug)]
pub(crate) struct StoreLayout {
    pub root: PathBuf,
    trust: Option<Trust>,
}

impl StoreLayout {
    pub const TAG: &str = "CACHEDIR.TAG";

    /// Every file that may lie at the top of a store.
    pub const FILES: [&str; 6] = [
        Self::TAG,
        MARKER,
        "index.sqlite",
        "index.sqlite-journal",
        "README.md",
        ".gitignore",
    ];

    /// Every folder of a store, in the order of creation.
    pub const FOLDERS: [&str; 11] = [
        "objects",
        "artifacts",
        "programs",
        "releases",
        "failures",
        "ready",
        "cache",
        "tmp",
        "locks",
        "leases",
        "quarantine",
    ];

    /// Makes `root` a store, or completes an interrupted creation.
    pub fn create(root: &Path, options: Options) -> Result<Self, StoreError> {
        if fs::symlink_metadata(root).is_err() {
            let mut folders = fs::DirBuilder::new();
            folders.recursive(true).mode(0o755);
            folders.create(root).at("make the folder", root)?;
        }
        let layout = Self::trusting(root, options)?;
        if layout.marker().exists() {
            layout.check()?;
        } else {
            layout.refuse_foreign()?;
        }
        layout.complete()?;
        Ok(layout)
    }

    /// Creates the missing files and folders of a store: a copy may lack empty folders.
    pub fn complete(&self) -> Result<(), StoreError> {
        let (layout, root) = (self, &self.root);
        for folder in Self::FOLDERS {
            let path = root.join(folder);
            publish::folder(&path)?;
        }
        let text = marker::text();
        for (name, text) in [(Self::TAG, TAG_TEXT), (MARKER, text.as_str())] {
            let path = root.join(name);
            if !path.exists() {
                publish::bytes(PendingFile::new(&layout.tmp())?, &path, text.as_bytes())?;
            }
        }
        Ok(())
    }

    /// Like [`Self::complete`], only if a folder is missing.
    pub fn complete_folders(&self) -> Result<(), StoreError> {
        let missing = |folder: &&str| fs::symlink_metadata(self.root.join(folder)).is_err();
        if Self::FOLDERS.iter().any(missing) {
            self.complete()
        } else {
            Ok(())
        }
    }

    /// Finds the store at `root`, and checks which users could change it. Changes nothing.
    pub fn find(root: &Path, options: Options) -> Result<Self, StoreError> {
        let layout = match fs::symlink_metadata(root) {
            Ok(meta) if meta.is_dir() || meta.is_symlink() => Self::trusting(root, options)?,
            // The check below reports the missing marker.
            _ => Self {
                root: root.to_owned(),
                trust: None,
            },
        };
        layout.check()?;
        Ok(layout)
    }

    /// Returns the paths of a store that is elsewhere, relative to it.
    pub fn nowhere() -> Self {
        Self {
            root: PathBuf::new(),
            trust: None,
        }
    }

    fn trusting(root: &Path, options: Options) -> Result<Self, StoreError> {
        Ok(Self {
            root: root.to_owned(),
            trust: Some(Trust::of(root, options)?),
        })
    }

    /// Returns the same paths without checks of owners and modes. An audit uses them to report unsafe files.
    pub fn unchecked(&self) -> Self {
        Self {
            root: self.root.clone(),
            trust: None,
        }
    }

    /// Opens a file of the store for reading. Refuses a file that other users could have changed.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        match &self.trust {
            Some(trust) => trust.open(&self.root, path),
            None => open_plain(path),
        }
    }

    /// Checks a folder of the store, or a file that is then opened by name.
    pub fn look(&self, path: &Path) -> Result<(), StoreError> {
        let Some(trust) = &self.trust else {
            return Ok(());
        };
        trust.inner(path)
    }

    /// Checks a file that is open for writing, and the folders of its path.
    pub fn accept(&self, path: &Path, file: &File) -> io::Result<()> {
        let Some(trust) = &self.trust else {
            return Ok(());
        };
        trust.folders(&self.root, path)?;
        trust.accept(path, &file.metadata()?)
    }

    /// Returns the reason why a file of the store is not trusted, or none if it is.
    pub fn check_trust(&self, meta: &fs::Metadata) -> Option<Distrust> {
        self.trust
            .as_ref()
            .and_then(|trust| trust.check_trust(meta).err())
    }

    /// Returns whether this user may write to the store. Writes nothing.
    pub fn is_writable(&self) -> bool {
        [self.root.clone(), self.tmp(), self.index()]
            .iter()
            .all(|path| !path.exists() || access(path, Access::WRITE_OK).is_ok())
    }

    fn check(&self) -> Result<(), StoreError> {
        let not = |why| StoreError::NotAStore {
            path: self.root.clone(),
            why,
        };
        let path = self.marker();
        let text = match self.small(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(not(if self.root.exists() {
                    "it has no `precast-store.json`"
                } else {
                    "there is no such folder"
                }));
            }
            Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Err(not("it is a file")),
            Err(e) => return Err(e).at("read", &path),
        };
        let found = marker::layout(&text);
        let found = found.ok_or_else(|| not("its `precast-store.json` is damaged"))?;
        if found > LAYOUT {
            return Err(StoreError::Newer {
                path: self.root.clone(),
                found,
                known: LAYOUT,
            });
        }
        Ok(())
    }

    /// Refuses a folder with anything that is not part of a store.
    fn refuse_foreign(&self) -> Result<(), StoreError> {
        for entry in fs::read_dir(&self.root).at("list", &self.root)? {
            let entry = entry.at("list", &self.root)?;
            let name = entry.file_name();
            let ours = Self::FOLDERS.iter().any(|f| name == *f)
                || Self::FILES.iter().any(|f| name == *f)
                || name == "lost+found";
            if !ours {
                return Err(StoreError::NotEmpty {
                    path: self.root.clone(),
                    found: entry.file_name().into(),
                });
            }
        }
        Ok(())
    }

    /// Returns whether `CACHEDIR.TAG` exists and has the right content.
    pub fn tag_is_right(&self) -> bool {
        self.small(&self.root.join(Self::TAG))
            .is_ok_and(|text| text.starts_with(&TAG_TEXT.as_bytes()[..43]))
    }

    /// Reads a small file.
    fn small(&self, path: &Path) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        self.open(path)?.take(1 << 16).read_to_end(&mut text)?;
        Ok(text)
    }

    fn marker(&self) -> PathBuf {
        self.root.join(MARKER)
    }

    pub fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    pub fn index(&self) -> PathBuf {
        self.root.join("index.sqlite")
    }

    pub fn object(&self, digest: &Digest) -> PathBuf {
        self.root.join(Self::object_name(digest))
    }

    pub fn ready(&self, digest: &Digest) -> PathBuf {
        self.root.join(sharded("ready", digest, ""))
    }

    /// Returns the path of an object's file, relative to the store.
    pub fn object_name(digest: &Digest) -> PathBuf {
        sharded("objects", digest, ".zst")
    }

    /// Returns the path of a record's file, relative to the store.
    pub fn record_name(kind: Kind, id: &Digest) -> PathBuf {
        sharded(kind.folder(), id, ".json")
    }

    pub fn folder(&self, kind: Kind) -> PathBuf {
        self.root.join(kind.folder())
    }

    pub fn record(&self, kind: Kind, id: &Digest) -> PathBuf {
        self.root.join(Self::record_name(kind, id))
    }

    pub fn releases(&self, model: &str) -> Result<PathBuf, StoreError> {
        Ok(self.folder(Kind::Release).join(file_name(model)?))
    }

    pub fn release(&self, model: &str, seq: u64) -> Result<PathBuf, StoreError> {
        Ok(self.releases(model)?.join(format!("{seq:08}.json")))
    }
}

/// Returns `FOLDER/3f/3f9c…SUFFIX`.
fn sharded(folder: &str, digest: &Digest, suffix: &str) -> PathBuf {
    let hex = digest.hex();
    [folder, &hex[..2], &format!("{hex}{suffix}")]
        .iter()
        .collect()
}

/// Returns `name` as one safe path component. Bytes other than letters, digits, `-`, `_` and inner `.` become `%` and
/// two hex digits.
fn file_name(name: &str) -> Result<String, StoreError> {
    check_name(name)?;
    let mut out = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if plain || (byte == b'.' && at > 0) {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02x}"));
        }
    }
    if out.len() <= 250 {
        Ok(out)
    } else {
        Err(StoreError::BadName(name.to_owned()))
    }
}

/// Returns the name that [`file_name`] made this path component of; none for other components.
pub(crate) fn name_of(component: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(component.len());
    let mut rest = component.as_bytes();
    while let Some((&byte, more)) = rest.split_first() {
        rest = more;
        if byte == b'%' {
            let (hex, more) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
            rest = more;
        } else {
            bytes.push(byte);
        }
    }
    let name = String::from_utf8(bytes).ok()?;
    (file_name(&name).ok()? == component).then_some(name)
}

/// Checks the name of a model or a release: it must be printable and of limited length.
pub(crate) fn check_name(name: &str) -> Result<(), StoreError> {
    let good = (1..=100).contains(&name.chars().count()) && !name.chars().any(char::is_control);
    if good {
        Ok(())
    } else {
        Err(StoreError::BadName(name.escape_debug().to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::refused;

    #[test]
    fn names_never_leave_their_folder() {
        for (name, file) in [
            ("minilm", "minilm"),
            ("..", "%2e."),
            (".", "%2e"),
            ("a/b", "a%2fb"),
            ("v1.2", "v1.2"),
            ("é", "%c3%a9"),
        ] {
            assert_eq!(file_name(name).unwrap(), file);
            assert_eq!(name_of(file).as_deref(), Some(name));
        }
        for component in ["..", "a%2Fb", "a%2", "a/b", "%61", "%ff", ""] {
            assert_eq!(name_of(component), None, "{component}");
        }
        for name in ["", "a\nb", "\0", &"x".repeat(101)] {
            assert!(file_name(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_folder_with_other_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        fs::create_dir(&root).unwrap();
        fs::write(root.join("README.md"), "x").unwrap();
        StoreLayout::create(&root, Options::default()).unwrap();
        StoreLayout::create(&root, Options::default()).unwrap();
        StoreLayout::find(&root, Options::default()).unwrap();
        let other = dir.path().join("o");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("thesis.doc"), "x").unwrap();
        let create = StoreLayout::create(&other, Options::default());
        assert_eq!(refused(create), "NotEmpty");
        let find = StoreLayout::find(&other, Options::default());
        assert_eq!(refused(find), "NotAStore");
    }
}
