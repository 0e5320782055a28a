//! A `.pt2` package: a zip of shared objects, JSON and weights. Members are read in place or into memory, up to a limit.
//! They are never extracted to disk.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Cursor, Read},
};

use serde::Serialize;
use serde_json::Value;
use zip::{CompressionMethod, ZipArchive, result::ZipError};

use super::{
    ParseError,
    budget::{Budget, Counted},
    elf::{self, SharedObject},
    part::Part,
};

/// A package of a million members is not one that torch made.
const MEMBERS: usize = 100_000;
/// Bytes of memory for a byte of the list of members, and for a byte of JSON that is kept: `0,` is a value.
const LISTED: u64 = 8;
const PARSED: u64 = 32;

/// A `.pt2` package.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Package {
    /// Bytes of all members when unpacked, as the package says.
    pub unpacked: u64,
    /// In the order of the package.
    pub members: Vec<Member>,
    /// The version of torch that exported a graph in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch: Option<String>,
    /// What AOTInductor says about each model in it.
    pub builds: Vec<Build>,
    /// The shared objects in it, in the order of the package.
    pub libraries: Vec<Library>,
    /// Names that would leave the folder they are unpacked in, or that are there twice.
    pub unsafe_names: Vec<String>,
    /// Members that hold a compiler's command line, which libtorch's own loader would run.
    pub commands: Vec<String>,
}

/// A file in a package.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Member {
    /// Path inside the package.
    pub name: String,
    /// Bytes when unpacked, as the package says.
    pub size: u64,
    /// Bytes in the package, compressed or not.
    pub stored: u64,
}

/// The metadata of one compiled model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Build {
    /// Path of the metadata inside the package.
    pub member: String,
    /// `cpu`, `cuda`, …
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Architecture that it was compiled for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// What the builder's CPU had, by torch's names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isa: Option<String>,
    /// Compute capability that it was compiled for, as `90`; absent on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm: Option<String>,
    /// Everything else the metadata says.
    pub other: BTreeMap<String, Value>,
}

/// A shared object in a package.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Library {
    /// Path inside the package.
    pub member: String,
    /// What its headers and sections say.
    #[serde(flatten)]
    pub object: SharedObject,
}

fn damaged(error: ZipError) -> ParseError {
    match error {
        ZipError::Io(error) => error.into(),
        other => ParseError::Malformed(other.to_string().to_lowercase()),
    }
}

pub(super) fn package(file: &File, whole: Counted<'_, Part<'_>>) -> Result<Package, ParseError> {
    let budget = whole.budget;
    let opened = budget.holding(LISTED, || ZipArchive::new(whole));
    let mut archive = opened.map_err(damaged)?;
    if archive.len() > MEMBERS {
        return Err(ParseError::TooLarge(format!(
            "it has {} members, at most {MEMBERS} are read",
            archive.len()
        )));
    }
    let mut found = Package {
        unpacked: 0,
        members: vec![],
        torch: None,
        builds: vec![],
        libraries: vec![],
        unsafe_names: vec![],
        commands: vec![],
    };
    if archive.has_duplicate_names() {
        found
            .unsafe_names
            .push("(a name is there twice)".to_owned());
    }
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(damaged)?;
        let name = String::from_utf8_lossy(entry.entry().name_raw()).into_owned();
        let (size, stored) = (entry.entry().size(), entry.entry().compressed_size());
        let plain = entry.entry().compression() == CompressionMethod::Stored;
        let start = entry.data_start();
        drop(entry);
        found.unpacked = found.unpacked.saturating_add(size);
        if escapes(&name) {
            found.unsafe_names.push(name.clone());
        }
        found.members.push(Member {
            name: name.clone(),
            size,
            stored,
        });
        if name.ends_with("_compile_flags.json") || name.ends_with("compile_cmd") {
            found.commands.push(name);
        } else if name.ends_with("_metadata.json") {
            let text = bytes(&mut archive, budget, index, &name)?;
            // What is made of it is kept.
            let kept = (text.len() as u64).saturating_mul(PARSED);
            budget.hold(kept).map_err(|error| within(&name, error))?;
            found.builds.extend(build(name, &text));
            budget.free(text.len() as u64);
        } else if name.ends_with(".so") {
            let object = match (plain, start) {
                (true, Some(start)) => {
                    elf::shared_object(Counted::new(Part::new(file, start, stored), budget))
                }
                _ => {
                    let unpacked = bytes(&mut archive, budget, index, &name)?;
                    let object = elf::shared_object(Counted::new(Cursor::new(&*unpacked), budget));
                    budget.free(unpacked.len() as u64);
                    object
                }
            };
            let object = object.map_err(|error| within(&name, error))?;
            found.libraries.push(Library {
                member: name,
                object,
            });
        } else if found.torch.is_none() && name.contains("models/") && name.ends_with(".json") {
            let text = bytes(&mut archive, budget, index, &name)?;
            budget.free(text.len() as u64);
            let version: Option<Exported> = serde_json::from_slice(&text).ok();
            found.torch = version.and_then(|exported| exported.torch_version);
        }
    }
    Ok(found)
}

/// The reported part of an exported graph; the rest is skipped and not kept.
#[derive(serde::Deserialize)]
struct Exported {
    torch_version: Option<String>,
}

/// Reads one member into memory, which is taken for it.
fn bytes(
    archive: &mut ZipArchive<Counted<'_, Part<'_>>>,
    budget: &Budget,
    index: usize,
    name: &str,
) -> Result<Vec<u8>, ParseError> {
    const PIECE: u64 = 1 << 20;
    let mut member = archive.by_index(index).map_err(damaged)?;
    let mut text = Vec::new();
    // The size that a package states is a claim: what counts is what comes out.
    loop {
        let got = member.by_ref().take(PIECE).read_to_end(&mut text);
        let got = got.map_err(|e| within(name, e.into()))? as u64;
        let taken = budget.work(got).and_then(|()| budget.hold(got));
        taken.map_err(|error| within(name, error))?;
        if got < PIECE {
            return Ok(text);
        }
    }
}

fn within(name: &str, error: ParseError) -> ParseError {
    let name = name.escape_debug();
    match error {
        ParseError::Malformed(why) => ParseError::Malformed(format!("its member `{name}`: {why}")),
        ParseError::TooLarge(why) => ParseError::TooLarge(format!("its member `{name}`: {why}")),
        ParseError::Io(error) => ParseError::Malformed(format!("its member `{name}`: {error}")),
    }
}

/// Returns whether unpacking `name` into a folder would write outside of it.
fn escapes(name: &str) -> bool {
    name.starts_with('/')
        || name.contains(['\\', '\0'])
        || name.get(1..2) == Some(":")
        || name.split('/').any(|part| part == "..")
}

fn build(member: String, text: &[u8]) -> Option<Build> {
    let mut all: BTreeMap<String, Value> = serde_json::from_slice(text).ok()?;
    let mut take = |key: &str| match all.remove(key) {
        Some(Value::String(text)) if !text.is_empty() => Some(text),
        Some(Value::Number(number)) => Some(number.to_string()),
        _ => None,
    };
    Some(Build {
        device: take("AOTI_DEVICE_KEY"),
        machine: take("AOTI_MACHINE"),
        isa: take("AOTI_CPU_ISA"),
        sm: take("AOTI_COMPUTE_CAPABILITY"),
        other: all,
        member,
    })
}

impl Package {
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for name in self.unsafe_names.iter().take(10) {
            warnings.push(format!(
                "unpacking it is not safe: member `{}`",
                name.escape_debug()
            ));
        }
        for name in self.commands.iter().take(10) {
            warnings.push(format!(
                "member `{}` holds a command line that libtorch's loader would run",
                name.escape_debug()
            ));
        }
        for library in &self.libraries {
            let name = library.member.rsplit('/').next().unwrap_or_default();
            let of = library.object.warnings().into_iter();
            warnings.extend(of.map(|text| format!("`{}`: {text}", name.escape_debug())));
        }
        warnings
    }
}
