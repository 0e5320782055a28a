//! A shared object: its libraries, entry points, weights and device code.

use std::collections::{BTreeMap, BTreeSet};

use memchr::memmem;
use precast_store::elf::{Elf, Hazard, ReadCache, Section};
use serde::Serialize;

use super::{Parsed, window::Window};

/// The functions of an artifact that precast's runtime calls, by their names in torch 2.11's
/// `torch/csrc/inductor/aoti_runtime/interface.h`.
pub const ENTRY_POINTS: [&str; 12] = [
    "AOTInductorModelContainerCreateWithDevice",
    "AOTInductorModelContainerDelete",
    "AOTInductorModelContainerGetConstantDataSize",
    "AOTInductorModelContainerGetConstantDtype",
    "AOTInductorModelContainerGetConstantFromFolded",
    "AOTInductorModelContainerGetConstantName",
    "AOTInductorModelContainerGetConstantOriginalFQN",
    "AOTInductorModelContainerGetNumConstants",
    "AOTInductorModelContainerGetNumInputs",
    "AOTInductorModelContainerGetNumOutputs",
    "AOTInductorModelContainerRunSingleThreaded",
    "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs",
];

/// Sections of constants smaller than this hold only AOTInductor's own marks.
const SOME_WEIGHTS: u64 = 4096;
/// Paths of kernels that are listed.
const PATHS: usize = 4096;

const CUBIN: &[u8] = b"\x7fELF";
const FATBIN: &[u8] = &0xba55_ed50_u32.to_le_bytes();
const CUBIN_PATH: &[u8] = b".cubin\0";
/// Bytes that are searched at a time, and bytes before them that may hold the begin of a path.
const CHUNK: u64 = 8 << 20;
const LEAD: u64 = 4096;

/// A shared object.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SharedObject {
    /// `x86_64` or `aarch64`; else ELF's number of the machine.
    pub machine: String,
    /// Libraries that the loader must find first.
    pub needed: Vec<String>,
    /// Folders in which the loader looks for them, besides the usual places.
    pub runpath: Vec<String>,
    /// None without any function of AOTInductor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aotinductor: Option<EntryPoints>,
    /// Bytes of weights inside.
    pub weights: u64,
    /// Device code inside.
    pub kernels: Vec<Kernels>,
    /// Files with device code that it reads on the host at run time.
    pub kernel_files: Vec<String>,
    /// Requests to the loader that no artifact needs.
    #[serde(skip)]
    hazards: Vec<Hazard>,
}

/// The functions of AOTInductor's C ABI in a shared object.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EntryPoints {
    /// Number of exported functions whose names begin with `AOTInductor`.
    pub exported: usize,
    /// The functions that the runtime calls and that are not exported.
    pub missing: Vec<String>,
}

/// Format of device code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Machine code for one compute capability.
    Cubin,
    /// NVIDIA's intermediate code, which the driver compiles for its GPU.
    Ptx,
}

/// Device code of one format for one compute capability.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Kernels {
    /// Machine code or PTX.
    pub format: Format,
    /// As `90`, or `90a` for code that runs on no other.
    pub sm: String,
    /// Number of pieces.
    pub count: u64,
    /// Their bytes in the file.
    pub bytes: u64,
}

/// Parses the ELF file in `window`.
pub(super) fn shared_object(window: Window<'_>) -> Parsed<SharedObject> {
    let cache = ReadCache::new(window);
    let elf = Elf::parse(&cache)?;
    let dynamic = elf.dynamic()?;
    let mut found = SharedObject {
        machine: match elf.machine() {
            62 => "x86_64".to_owned(),
            183 => "aarch64".to_owned(),
            other => format!("machine {other}"),
        },
        needed: dynamic.needed,
        runpath: dynamic.runpath.or(dynamic.rpath).unwrap_or_default(),
        aotinductor: None,
        weights: 0,
        kernels: vec![],
        kernel_files: vec![],
        hazards: elf.hazards()?,
    };
    let mut exported = BTreeSet::new();
    for symbol in elf.symbols()? {
        let symbol = symbol?;
        if symbol.defined && symbol.name.starts_with(b"AOTInductor") {
            exported.insert(symbol.name);
        }
    }
    if !exported.is_empty() {
        let missing = ENTRY_POINTS
            .iter()
            .filter(|name| !exported.contains(name.as_bytes()));
        found.aotinductor = Some(EntryPoints {
            exported: exported.len(),
            missing: missing.map(|name| (*name).to_owned()).collect(),
        });
    }
    let mut code = DeviceCode::default();
    for section in elf.sections()?.iter().filter(|section| section.data) {
        if matches!(section.name, b".lrodata" | b".ldata") && section.size >= SOME_WEIGHTS {
            found.weights = found.weights.saturating_add(section.size);
        }
        code.search(window, section)?;
    }
    let kernels = code.kernels.into_iter();
    found.kernels = kernels
        .map(|((_, sm, format), (count, bytes))| Kernels {
            format,
            sm,
            count,
            bytes,
        })
        .collect();
    found.kernel_files = code.paths.into_iter().collect();
    Ok(found)
}

impl SharedObject {
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        match &self.aotinductor {
            None => warnings
                .push("it has none of AOTInductor's entry points: it is no artifact".to_owned()),
            Some(points) => {
                if !points.missing.is_empty() {
                    warnings.push(format!(
                        "it lacks {} of {} entry points that precast needs: {}",
                        points.missing.len(),
                        ENTRY_POINTS.len(),
                        points.missing.join(", ")
                    ));
                }
                if self.weights > 0 {
                    warnings.push(format!(
                        "{} bytes of weights are inside: each copy of the artifact carries its own",
                        self.weights
                    ));
                }
                warnings.extend(self.hazards.iter().map(ToString::to_string));
            }
        }
        if let Some(first) = self.kernel_files.first() {
            warnings.push(format!(
                "{} kernels are not inside: it wants to read them from the machine that built it, as `{}`",
                self.kernel_files.len(),
                first.escape_debug()
            ));
        }
        warnings
    }
}

/// Device code found so far.
///
/// AOTInductor puts Triton's cubins into a data section, and nvcc puts several architectures into a fat binary. Both
/// are found by their magic numbers.
#[derive(Default)]
struct DeviceCode {
    /// (number of the SM, SM, format) -> count and bytes.
    kernels: BTreeMap<(u64, String, Format), (u64, u64)>,
    paths: BTreeSet<String>,
}

impl DeviceCode {
    /// Searches the bytes of a section.
    fn search(&mut self, window: Window<'_>, section: &Section<'_>) -> Parsed<()> {
        let size = section.size.min(window.size.saturating_sub(section.offset));
        let mut taken = 0;
        for base in (0..size).step_by(CHUNK as usize) {
            let begin = base.saturating_sub(LEAD);
            let end = size.min(base + CHUNK);
            let chunk = window.bytes(section.offset + begin, end - begin)?;
            // What ends in the lead was found in the chunk before.
            let lead = (base - begin) as usize;
            let found = |magic: &'static [u8]| {
                memmem::find_iter(&chunk, magic).filter(move |at| at + magic.len() > lead)
            };
            for at in found(CUBIN_PATH) {
                self.add_path(&chunk[..at + CUBIN_PATH.len() - 1]);
            }
            let mut hits: Vec<(usize, bool)> = found(CUBIN).map(|at| (at, false)).collect();
            hits.extend(found(FATBIN).map(|at| (at, true)));
            hits.sort_unstable();
            for (at, fat) in hits {
                let offset = begin + at as u64;
                if offset < taken {
                    continue;
                }
                let (at, left) = (section.offset + offset, size - offset);
                // Magic numbers that turn up by chance are skipped.
                let mut bytes = 1;
                if fat {
                    bytes = self.add_fatbin(window, at, left)?.unwrap_or(1);
                } else if let Some((sm, size)) = cubin(window, at, left)? {
                    bytes = size;
                    self.add(Format::Cubin, sm, size);
                }
                taken = offset + bytes;
            }
        }
        Ok(())
    }

    fn add(&mut self, format: Format, sm: String, bytes: u64) {
        let number = sm.trim_end_matches('a').parse().unwrap_or(0);
        let entry = self.kernels.entry((number, sm, format)).or_default();
        *entry = (entry.0 + 1, entry.1.saturating_add(bytes));
    }

    /// Adds the printable text at the end of `before` if it is an absolute path.
    fn add_path(&mut self, before: &[u8]) {
        let begin = before.iter().rposition(|byte| !(0x20..0x7f).contains(byte));
        let text = &before[begin.map_or(0, |at| at + 1)..];
        if text.starts_with(b"/") && self.paths.len() < PATHS {
            self.paths
                .insert(String::from_utf8_lossy(text).into_owned());
        }
    }

    /// Adds the content of the fat binary at `at` of the file, and returns its size if it is one.
    ///
    /// A header (magic, version, header size, bytes that follow), then entries, each with a header of its own: kind (1
    /// PTX, 2 cubin), header size, bytes, and at 28 the SM.
    fn add_fatbin(&mut self, window: Window<'_>, at: u64, left: u64) -> Parsed<Option<u64>> {
        let header = window.bytes(at, 16)?;
        if header.len() < 16 {
            return Ok(None);
        }
        let (version, own, body) = (
            number(&header[4..6]),
            number(&header[6..8]),
            number(&header[8..]),
        );
        let size = body.saturating_add(own);
        if version != 1 || own < 16 || size > left {
            return Ok(None);
        }
        let mut offset = own;
        while offset + 64 <= size {
            let entry = window.bytes(at + offset, 64)?;
            if entry.len() < 64 {
                break;
            }
            let (kind, own, body) = (
                number(&entry[..2]),
                number(&entry[4..8]),
                number(&entry[8..16]),
            );
            let end = offset.saturating_add(own).saturating_add(body);
            let format = match kind {
                1 => Format::Ptx,
                2 => Format::Cubin,
                _ => break,
            };
            if own < 64 || end > size {
                break;
            }
            let cubin = match format {
                Format::Cubin => cubin(window, at + offset + own, body)?,
                Format::Ptx => None,
            };
            // A compressed cubin has only the SM of the entry.
            let sm = cubin.map_or_else(|| number(&entry[28..32]).to_string(), |(sm, _)| sm);
            self.add(format, sm, body);
            offset = end;
        }
        Ok(Some(size))
    }
}

/// Returns the SM and the size of the cubin at `at` of the file; none for other bytes.
fn cubin(window: Window<'_>, at: u64, left: u64) -> Parsed<Option<(String, u64)>> {
    let header = window.bytes(at, 64)?;
    let parse = || {
        let elf = Elf::parse(&*header).ok()?;
        Some((elf.sm()?, elf.extent()?))
    };
    Ok(parse().filter(|(_, size)| (64..=left).contains(size)))
}

fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| (number << 8) | u64::from(*byte))
}
