//! A shared object: its libraries, entry points, weights and device code.

use std::collections::{BTreeMap, BTreeSet};

use memchr::memchr2_iter;
use precast_store::elf::{Elf, ReadCache, Section};
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

const CUBIN: &[u8] = b"\x7fELF";
const FATBIN: &[u8] = &0xba55_ed50_u32.to_le_bytes();
/// Bytes that are searched at a time.
const CHUNK: u64 = 8 << 20;

/// A shared object.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SharedObject {
    /// `x86_64` or `aarch64`; else ELF's number of the machine.
    pub machine: String,
    /// Libraries that the loader must find first.
    pub needed: Vec<String>,
    /// Absent without any function of AOTInductor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aotinductor: Option<EntryPoints>,
    /// Bytes of weights inside.
    pub weights: u64,
    /// Device code inside.
    pub kernels: Vec<Kernels>,
}

/// The functions of AOTInductor's C ABI in a shared object.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EntryPoints {
    /// Number of exported functions whose names begin with `AOTInductor`.
    pub exported: usize,
    /// The functions that the runtime calls and that are not exported.
    pub missing: Vec<&'static str>,
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
    let mut exported = BTreeSet::new();
    for symbol in elf.symbols()? {
        let symbol = symbol?;
        if symbol.defined && symbol.name.starts_with(b"AOTInductor") {
            exported.insert(symbol.name);
        }
    }
    let (mut weights, mut code) = (0_u64, DeviceCode::default());
    for section in elf.sections()?.iter().filter(|section| section.data) {
        if matches!(section.name, b".lrodata" | b".ldata") && section.size >= SOME_WEIGHTS {
            weights = weights.saturating_add(section.size);
        }
        code.search(window, section)?;
    }
    let missing = (ENTRY_POINTS.into_iter()).filter(|name| !exported.contains(name.as_bytes()));
    Ok(SharedObject {
        machine: match elf.machine() {
            62 => "x86_64".to_owned(),
            183 => "aarch64".to_owned(),
            other => format!("machine {other}"),
        },
        needed: elf.dynamic()?.needed,
        aotinductor: (!exported.is_empty()).then(|| EntryPoints {
            exported: exported.len(),
            missing: missing.collect(),
        }),
        weights,
        kernels: code.0.into_values().collect(),
    })
}

impl SharedObject {
    pub(super) fn warnings(&self) -> Vec<String> {
        let Some(points) = &self.aotinductor else {
            return vec!["it has none of AOTInductor's entry points: it is no artifact".to_owned()];
        };
        let mut warnings = Vec::new();
        if !points.missing.is_empty() {
            let (lacks, all) = (points.missing.len(), ENTRY_POINTS.len());
            let names = points.missing.join(", ");
            warnings.push(format!(
                "it lacks {lacks} of {all} entry points that precast needs: {names}"
            ));
        }
        if self.weights > 0 {
            warnings.push(format!(
                "{} bytes of weights are inside: each copy of the artifact carries its own",
                self.weights
            ));
        }
        warnings
    }
}

/// Device code, by number of the SM, SM and format.
///
/// AOTInductor puts Triton's cubins into a data section, and nvcc puts several architectures into a fat binary. Both
/// are found by their magic numbers.
#[derive(Default)]
struct DeviceCode(BTreeMap<(u64, String, Format), Kernels>);

impl DeviceCode {
    /// Searches the bytes of a section.
    fn search(&mut self, window: Window<'_>, section: &Section<'_>) -> Parsed<()> {
        let size = section.size.min(window.size.saturating_sub(section.offset));
        let mut end = 0;
        for base in (0..size).step_by(CHUNK as usize) {
            // A magic number may cross the end of a chunk.
            let chunk = window.bytes(section.offset + base, (CHUNK + 3).min(size - base))?;
            for at in memchr2_iter(CUBIN[0], FATBIN[0], &chunk) {
                let (magic, offset) = (chunk.get(at..at + 4), base + at as u64);
                let (place, left) = (section.offset + offset, size - offset);
                // Random matches of magic numbers are skipped.
                let found = match magic {
                    _ if offset < end => None,
                    Some(CUBIN) => self.add_cubin(window, place, left)?,
                    Some(FATBIN) => self.add_fatbin(window, place, left)?,
                    _ => None,
                };
                end = found.map_or(end, |bytes| offset + bytes);
            }
        }
        Ok(())
    }

    fn add(&mut self, format: Format, sm: String, bytes: u64) {
        let number = sm.trim_end_matches('a').parse().unwrap_or(0);
        let kernels = (self.0)
            .entry((number, sm.clone(), format))
            .or_insert(Kernels {
                format,
                sm,
                count: 0,
                bytes: 0,
            });
        kernels.count += 1;
        kernels.bytes = kernels.bytes.saturating_add(bytes);
    }

    /// Adds the cubin at `at` of the file, and returns its size; none for other bytes.
    fn add_cubin(&mut self, window: Window<'_>, at: u64, left: u64) -> Parsed<Option<u64>> {
        let cubin = cubin(window, at, left)?;
        Ok(cubin.map(|(sm, size)| {
            self.add(Format::Cubin, sm, size);
            size
        }))
    }

    /// Adds the content of the fat binary at `at` of the file, and returns its size; none for other bytes.
    ///
    /// A header (magic, version, header size, bytes that follow), then entries, each with a header: kind (1 PTX, 2
    /// cubin), header size, bytes, and at 28 the SM.
    fn add_fatbin(&mut self, window: Window<'_>, at: u64, left: u64) -> Parsed<Option<u64>> {
        let header = window.bytes(at, 16)?;
        let (own, body) = (number(&header, 6, 2), number(&header, 8, 8));
        let size = body.saturating_add(own);
        if number(&header, 4, 2) != 1 || own < 16 || size > left {
            return Ok(None);
        }
        let mut offset = own;
        while offset + 64 <= size {
            let entry = window.bytes(at + offset, 64)?;
            let (own, body) = (number(&entry, 4, 4), number(&entry, 8, 8));
            let end = offset.saturating_add(own).saturating_add(body);
            if own < 64 || end > size {
                break;
            }
            let (format, cubin) = match number(&entry, 0, 2) {
                1 => (Format::Ptx, None),
                2 => (Format::Cubin, cubin(window, at + offset + own, body)?),
                _ => break,
            };
            // A compressed cubin has only the SM of the entry.
            let sm = cubin.map_or_else(|| number(&entry, 28, 4).to_string(), |(sm, _)| sm);
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

/// Returns the number in `size` bytes from `at`; 0 if there are fewer.
pub(super) fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    let bytes = bytes.get(at..at + size).unwrap_or_default().iter();
    bytes.rfold(0, |number, byte| (number << 8) | u64::from(*byte))
}
