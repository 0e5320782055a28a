//! A `.pt2` package: a zip of shared objects, JSON and weights. Nothing is extracted to disk.

use std::io::Read;

use serde::Serialize;
use serde_json::Value;
use zip::{CompressionMethod, ZipArchive, result::ZipError};

use super::{
    Parsed,
    object::{self, SharedObject},
    window::Window,
};

const MEMBERS: usize = 100_000;
/// Bytes that are read of the list of members, the metadata of a build, and a graph or source. A JSON value in memory
/// takes up to 32 times its text.
const LIST: u64 = 64 << 20;
const METADATA: u64 = 1 << 20;
const GRAPH: u64 = 16 << 20;

/// A `.pt2` package.
#[derive(Clone, Debug, Default, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Package {
    /// Unpacked bytes of all members, as declared in the package.
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
    /// The shared objects in it that are not compressed, in the order of the package.
    pub libraries: Vec<PackagedObject>,
}

/// A file in a package.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Member {
    /// Path inside the package.
    pub name: String,
    /// Unpacked bytes, as declared in the package.
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
pub(super) fn package(file: Window<'_>) -> Parsed<Package> {
    let opened = file.limit.within(LIST, || ZipArchive::new(file));
    let mut archive = opened.map_err(text)?;
    let count = archive.len();
    if count > MEMBERS {
        let why = format!("it has {count} members, at most {MEMBERS} are read");
        return Err(file.limit.refuse(why));
    }
    let mut found = Package::default();
    for index in 0..count {
        let entry = archive.by_index_raw(index).map_err(text)?;
        let head = entry.entry();
        let member = Member {
            name: String::from_utf8_lossy(head.name_raw()).into_owned(),
            size: head.size(),
            stored: head.compressed_size(),
        };
        let plain = head.compression() == CompressionMethod::Stored;
        let start = entry.data_start().filter(|_| plain);
        drop(entry);
        let place = start.map(|start| file.part(start, member.stored));
        // The size that the package states is not trusted.
        let read = |limit| {
            let mut bytes = Vec::new();
            let member = archive.by_index(index).map_err(text)?;
            let read = member.take(limit).read_to_end(&mut bytes);
            let read = read.and_then(|size| file.limit.take(size));
            read.map_err(|error| error.to_string())?;
            Ok(bytes)
        };
        let added = found.add(&member.name, place, read);
        added.map_err(|why| format!("its member `{}`: {why}", member.name.escape_debug()))?;
        found.unpacked = found.unpacked.saturating_add(member.size);
        found.members.push(member);
    }
    Ok(found)
}

impl Package {
    /// Adds the content of one member, whose place in the file is known unless it is compressed.
    fn add(
        &mut self,
        name: &str,
        place: Option<Window<'_>>,
        read: impl FnOnce(u64) -> Parsed<Vec<u8>>,
    ) -> Parsed<()> {
        let member = name.to_owned();
        if name.ends_with("_metadata.json") {
            let metadata = serde_json::from_slice(&read(METADATA)?).ok();
            self.builds
                .extend(metadata.map(|metadata| build(member, &metadata)));
        } else if name.ends_with(".so") {
            if let Some(object) = place.map(object::shared_object).transpose()? {
                self.libraries.push(PackagedObject { member, object });
            }
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
        let of = |library: &PackagedObject| {
            let name = library.member.rsplit('/').next().unwrap_or_default();
            let name = name.escape_debug().to_string();
            let texts = library.object.warnings().into_iter();
            texts.map(move |text| format!("`{name}`: {text}"))
        };
        self.libraries.iter().flat_map(of).collect()
    }
}

fn text(error: ZipError) -> String {
    error.to_string().to_lowercase()
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
        for kind in ["parameter", "buffer", "tensor_constant"] {
            let name = spec[kind][format!("{kind}_name")].as_str();
            constants.extend(name.map(str::to_owned));
        }
        let input = &spec["user_input"]["arg"];
        if input.is_object() {
            let name = input["as_tensor"]["name"].as_str();
            inputs.push(name.unwrap_or("(no tensor)").to_owned());
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
