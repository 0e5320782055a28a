//! A `.pt2` package: a zip of shared objects, JSON and weights. Nothing is extracted to disk.

use std::{fs::File, io::Read};

use serde::Serialize;
use serde_json::Value;
use zip::{CompressionMethod, ZipArchive, result::ZipError};

use super::{
    Parsed,
    object::{self, SharedObject},
    window::{Limit, Window},
};

const MEMBERS: usize = 100_000;
/// Bytes that are read of the list of members, the metadata of a build, a graph or source, and a compressed shared
/// object. A JSON value in memory takes up to 32 times its text.
const LIST: u64 = 64 << 20;
const METADATA: u64 = 1 << 20;
const GRAPH: u64 = 16 << 20;
const LIBRARY: u64 = 256 << 20;
/// Names of unsafe members that the warnings list.
const NAMED: usize = 10;

/// A `.pt2` package.
#[derive(Clone, Debug, Default, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Package {
    /// Bytes of all members when unpacked, as the package says.
    pub unpacked: u64,
    /// In the order of the package.
    pub members: Vec<Member>,
    /// The version of torch that exported a graph in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch: Option<String>,
    /// Target of each compiled model.
    pub builds: Vec<Build>,
    /// Inputs and constants of each exported graph, and of each compiled model with its source.
    pub models: Vec<Model>,
    /// The shared objects in it, in the order of the package.
    pub libraries: Vec<PackagedObject>,
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

/// The target of one compiled model.
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
    /// Vector extensions of the builder's CPU, by torch's names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isa: Option<String>,
    /// Compute capability that it was compiled for, as `90`; absent on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm: Option<String>,
}

/// Inputs and constants of one model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Model {
    /// Path of the graph or source inside the package.
    pub member: String,
    /// Names of the inputs, in order.
    pub inputs: Vec<String>,
    /// Names of parameters, buffers and other constants, in order.
    pub constants: Vec<String>,
}

/// A shared object in a package.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PackagedObject {
    /// Path inside the package.
    pub member: String,
    /// Its content.
    #[serde(flatten)]
    pub object: SharedObject,
}

/// Parses the package in `file`.
pub(super) fn package(file: &File, size: u64, limit: &Limit) -> Parsed<Package> {
    let whole = Window::of_file(file, 0, size, limit);
    let opened = limit.within(LIST, || ZipArchive::new(whole));
    let mut archive = opened.map_err(text)?;
    let count = archive.len();
    if count > MEMBERS {
        return Err(limit.refuse(format!(
            "it has {count} members, at most {MEMBERS} are read"
        )));
    }
    let mut found = Package::default();
    if archive.has_duplicate_names() {
        found
            .unsafe_names
            .push("(a name is there twice)".to_owned());
    }
    for index in 0..count {
        let entry = archive.by_index_raw(index).map_err(text)?;
        let head = entry.entry();
        let member = Member {
            name: String::from_utf8_lossy(head.name_raw()).into_owned(),
            size: head.size(),
            stored: head.compressed_size(),
        };
        let start = entry
            .data_start()
            .filter(|_| head.compression() == CompressionMethod::Stored);
        drop(entry);
        let in_place = start.map(|start| Window::of_file(file, start, member.stored, limit));
        let read = |most| unpacked(&mut archive, limit, index, most);
        let added = found.add(&member.name, limit, in_place, read);
        added.map_err(|why| format!("its member `{}`: {why}", member.name.escape_debug()))?;
        found.unpacked = found.unpacked.saturating_add(member.size);
        if escapes(&member.name) {
            found.unsafe_names.push(member.name.clone());
        }
        found.members.push(member);
    }
    Ok(found)
}

impl Package {
    /// Adds the content of one member, which is `in_place` unless it is compressed.
    fn add(
        &mut self,
        name: &str,
        limit: &Limit,
        in_place: Option<Window<'_>>,
        read: impl FnOnce(u64) -> Parsed<Vec<u8>>,
    ) -> Parsed<()> {
        let member = name.to_owned();
        if name.ends_with("_compile_flags.json") || name.ends_with("compile_cmd") {
            self.commands.push(member);
        } else if name.ends_with("_metadata.json") {
            let metadata = serde_json::from_slice(&read(METADATA)?).ok();
            self.builds
                .extend(metadata.map(|metadata| build(member, &metadata)));
        } else if name.ends_with(".so") {
            let object = match in_place {
                Some(window) => object::shared_object(window)?,
                None => object::shared_object(Window::of_bytes(&read(LIBRARY)?, limit))?,
            };
            self.libraries.push(PackagedObject { member, object });
        } else if name.ends_with(".wrapper.cpp") {
            let source = String::from_utf8_lossy(&read(GRAPH)?).into_owned();
            self.models.push(model_of_source(member, &source));
        } else if name.contains("models/") && name.ends_with(".json") {
            let graph: Value = serde_json::from_slice(&read(GRAPH)?).unwrap_or_default();
            let torch = graph["torch_version"].as_str().map(str::to_owned);
            self.torch = self.torch.take().or(torch);
            self.models.push(model_of_graph(member, &graph));
        }
        Ok(())
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let unsafe_names = self.unsafe_names.iter().take(NAMED);
        let mut warnings: Vec<String> = unsafe_names
            .map(|name| format!("unpacking it is not safe: member `{}`", name.escape_debug()))
            .collect();
        warnings.extend(self.commands.iter().take(NAMED).map(|name| {
            format!(
                "member `{}` holds a command line that libtorch's loader would run",
                name.escape_debug()
            )
        }));
        for library in &self.libraries {
            let name = library.member.rsplit('/').next().unwrap_or_default();
            let of = library.object.warnings().into_iter();
            warnings.extend(of.map(|text| format!("`{}`: {text}", name.escape_debug())));
        }
        warnings
    }
}

/// Returns the first `most` bytes of a member. The size that the package states is not trusted.
fn unpacked(
    archive: &mut ZipArchive<Window<'_>>,
    limit: &Limit,
    index: usize,
    most: u64,
) -> Parsed<Vec<u8>> {
    let mut bytes = Vec::new();
    let member = archive.by_index(index).map_err(text)?;
    let read = member.take(most).read_to_end(&mut bytes);
    let read = read.and_then(|size| limit.take(size as u64));
    read.map_err(|error| error.to_string())?;
    Ok(bytes)
}

fn text(error: ZipError) -> String {
    error.to_string().to_lowercase()
}

/// Returns whether unpacking `name` into a folder would write outside of it.
fn escapes(name: &str) -> bool {
    name.starts_with('/')
        || name.contains(['\\', '\0'])
        || name.get(1..2) == Some(":")
        || name.split('/').any(|part| part == "..")
}

/// Returns the target in the metadata of AOTInductor. torch writes numbers or strings.
fn build(member: String, metadata: &Value) -> Build {
    let text = |key: &str| match &metadata[key] {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    Build {
        member,
        device: text("AOTI_DEVICE_KEY"),
        machine: text("AOTI_MACHINE"),
        isa: text("AOTI_CPU_ISA"),
        sm: text("AOTI_COMPUTE_CAPABILITY"),
    }
}

/// Returns the model of an exported graph, by the names of torch's `_export/serde/schema.py`.
fn model_of_graph(member: String, graph: &Value) -> Model {
    let (mut inputs, mut constants) = (Vec::new(), Vec::new());
    let specs = graph["graph_module"]["signature"]["input_specs"].as_array();
    for spec in specs.into_iter().flatten() {
        let names = ["parameter", "buffer", "tensor_constant"];
        let constant = names
            .iter()
            .find_map(|kind| spec[kind][format!("{kind}_name")].as_str());
        constants.extend(constant.map(str::to_owned));
        if let Some(input) = spec["user_input"]["arg"].as_object() {
            let tensor = input
                .get("as_tensor")
                .and_then(|tensor| tensor["name"].as_str());
            inputs.push(tensor.unwrap_or("(no tensor)").to_owned());
        }
    }
    Model {
        member,
        inputs,
        constants,
    }
}

/// Returns the model of a source by AOTInductor, with lines such as `constants_info_[0].original_fqn = "body.weight";`.
fn model_of_source(member: String, source: &str) -> Model {
    let names = |prefix: &str, field: &str| -> Vec<String> {
        let values = source.lines().filter_map(|line| {
            let (_, value) = line.trim().strip_prefix(prefix)?.split_once(field)?;
            value.strip_suffix("\";")
        });
        values.map(str::to_owned).collect()
    };
    Model {
        member,
        inputs: names("inputs_info_[", "].name = \""),
        constants: names("constants_info_[", "].original_fqn = \""),
    }
}
