//! A shared object: its libraries, exports, sections and kernels.

use std::{
    collections::BTreeSet,
    io::{Read, Seek, SeekFrom},
};

use object::{
    Endianness,
    elf::{self, FileHeader64},
    read::{
        ReadCache, ReadRef,
        elf::{FileHeader, SectionHeader, SectionTable, Sym},
    },
};
use precast_store::segments::{self, Hazard};
use serde::Serialize;

use super::{
    ParseError,
    budget::{Budget, Counted},
    cuda::{self, Kernel},
};

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

/// Bytes of memory for something that is listed, besides its name.
const ENTRY: u64 = 64;
/// How many plain names are listed.
const NAMES: usize = 1000;
/// Sections of constants smaller than this hold only AOTInductor's own marks.
const SOME_WEIGHTS: u64 = 4096;

/// A shared object.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SharedObject {
    /// `x86_64` or `aarch64`; else ELF's number of the machine.
    pub machine: String,
    /// The name that the loader knows it by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soname: Option<String>,
    /// Libraries that the loader must find first.
    pub needed: Vec<String>,
    /// Where the loader looks for them, besides the usual places.
    pub runpath: Vec<String>,
    /// Newest symbol versions asked for, as `GLIBC_2.34` and `GLIBCXX_3.4.30`.
    pub versions: Vec<String>,
    /// What the compilers say they are.
    pub compilers: Vec<String>,
    /// Sections that are loaded, in the order of the file.
    pub sections: Vec<Section>,
    /// How many symbols it exports.
    pub exported: usize,
    /// Exported names that are not C++'s, sorted; the first thousand.
    pub exports: Vec<String>,
    /// None when it has nothing of AOTInductor's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aotinductor: Option<EntryPoints>,
    /// Bytes of weights inside.
    pub weights: u64,
    /// Device code inside.
    pub kernels: Vec<Kernel>,
    /// Files with device code that it wants to find on the host at run time.
    pub kernel_files: Vec<String>,
    /// What it asks of the loader that no artifact needs; the warnings say it.
    #[serde(skip)]
    hazards: Vec<Hazard>,
}

/// A section of a shared object.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Section {
    /// As the section header has it.
    pub name: String,
    /// Bytes in memory.
    pub bytes: u64,
}

/// Which functions of AOTInductor's C ABI are there.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EntryPoints {
    /// How many functions whose names begin with `AOTInductor` are exported.
    pub exported: usize,
    /// The functions that the runtime calls and that are not exported.
    pub missing: Vec<String>,
}

impl From<object::read::Error> for ParseError {
    fn from(error: object::read::Error) -> Self {
        Self::Malformed(error.to_string().to_lowercase())
    }
}

/// Parses the ELF file that `reader` holds.
pub(super) fn shared_object(
    mut reader: Counted<'_, impl Read + Seek + Clone>,
) -> Result<SharedObject, ParseError> {
    let budget = reader.budget;
    let cache = ReadCache::new(reader.clone().held());
    let data = &cache;
    let mut ident = [0; 6];
    reader.seek(SeekFrom::Start(0))?;
    reader.read_exact(&mut ident)?;
    if ident[4..] != [elf::ELFCLASS64.0, elf::ELFDATA2LSB.0] {
        return Err(ParseError::Malformed(
            "it is not a 64-bit little-endian object, as those that torch makes".to_owned(),
        ));
    }
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let count = u64::from(header.shnum(endian, data)?);
    fits(budget, count.saturating_mul(64))?;
    let sections = header.sections(endian, data)?;
    for section in sections.iter() {
        let table = matches!(
            section.sh_type(endian),
            elf::SHT_DYNSYM
                | elf::SHT_DYNAMIC
                | elf::SHT_GNU_VERSYM
                | elf::SHT_GNU_VERNEED
                | elf::SHT_GNU_VERDEF
        );
        if table {
            fits(budget, section.sh_size(endian))?;
        }
    }
    let mut found = SharedObject {
        machine: match header.e_machine(endian) {
            elf::EM_X86_64 => "x86_64".to_owned(),
            elf::EM_AARCH64 => "aarch64".to_owned(),
            other => format!("machine {}", other.0),
        },
        soname: None,
        needed: vec![],
        runpath: vec![],
        versions: versions(&sections, endian, data)?,
        compilers: vec![],
        sections: vec![],
        exported: 0,
        exports: vec![],
        aotinductor: None,
        weights: 0,
        kernels: vec![],
        kernel_files: vec![],
        hazards: segments::hazards(data)?,
    };
    found.read_dynamic(&sections, endian, data, budget)?;
    found.read_exports(&sections, endian, data)?;
    let mut files = BTreeSet::new();
    for section in sections.iter() {
        let name = text(sections.section_name(endian, section).unwrap_or(b"?"));
        let loaded = section.sh_flags(endian).0 & elf::SHF_ALLOC.0 != 0;
        let bytes = section.sh_size(endian);
        budget.hold(name.len() as u64 + ENTRY)?;
        if loaded {
            found.sections.push(Section {
                name: name.clone(),
                bytes,
            });
        }
        if matches!(&*name, ".lrodata" | ".ldata") && bytes >= SOME_WEIGHTS {
            found.weights = found.weights.saturating_add(bytes);
        }
        let Some((start, size)) = section.file_range(endian) else {
            continue;
        };
        if name == ".comment" {
            fits(budget, size)?;
            let comment = section.data(endian, data)?;
            budget.hold(size)?;
            let lines: BTreeSet<String> = comment
                .split(|b| *b == 0)
                .filter(|line| !line.is_empty())
                .map(text)
                .take(NAMES)
                .collect();
            found.compilers = lines.into_iter().collect();
        }
        let code = section.sh_flags(endian).0 & elf::SHF_EXECINSTR.0 != 0;
        if loaded && !code && section.sh_type(endian) == elf::SHT_PROGBITS {
            let inside = cuda::scan(&mut reader, &name, start, size)?;
            cuda::extend(&mut found.kernels, inside.kernels);
            files.extend(inside.files);
        }
    }
    found.kernel_files = files.into_iter().collect();
    Ok(found)
}

impl SharedObject {
    fn read_dynamic<'d, R: ReadRef<'d>>(
        &mut self,
        sections: &SectionTable<'d, FileHeader64<Endianness>, R>,
        endian: Endianness,
        data: R,
        budget: &Budget,
    ) -> Result<(), ParseError> {
        let table = sections.dynamic_table(endian, data)?;
        for entry in table.iter() {
            let Ok(value) = table.string(entry) else {
                continue;
            };
            budget.hold(value.len() as u64 + ENTRY)?;
            match entry.tag {
                elf::DT_NEEDED => self.needed.push(text(value)),
                elf::DT_SONAME => self.soname = Some(text(value)),
                elf::DT_RPATH | elf::DT_RUNPATH => {
                    self.runpath
                        .extend(text(value).split(':').map(str::to_owned));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read_exports<'d, R: ReadRef<'d>>(
        &mut self,
        sections: &SectionTable<'d, FileHeader64<Endianness>, R>,
        endian: Endianness,
        data: R,
    ) -> Result<(), ParseError> {
        let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
        let mut plain = BTreeSet::new();
        let mut aoti = BTreeSet::new();
        for symbol in symbols.iter() {
            let hidden = matches!(symbol.st_visibility(), elf::STV_HIDDEN | elf::STV_INTERNAL);
            let exported = !symbol.is_undefined(endian)
                && !hidden
                && matches!(
                    symbol.st_bind(),
                    elf::STB_GLOBAL | elf::STB_WEAK | elf::STB_GNU_UNIQUE
                );
            if !exported {
                continue;
            }
            self.exported += 1;
            let Ok(name) = symbol.name(endian, symbols.strings()) else {
                continue;
            };
            if name.starts_with(b"AOTInductor") && aoti.len() < NAMES {
                aoti.insert(text(name));
            }
            if !name.starts_with(b"_Z") {
                plain.insert(text(name));
                if plain.len() > NAMES {
                    plain.pop_last();
                }
            }
        }
        if !aoti.is_empty() {
            let missing = ENTRY_POINTS.iter().filter(|name| !aoti.contains(**name));
            self.aotinductor = Some(EntryPoints {
                exported: aoti.len(),
                missing: missing.map(|name| (*name).to_owned()).collect(),
            });
        }
        self.exports = plain.into_iter().collect();
        Ok(())
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        match &self.aotinductor {
            None => warnings
                .push("it has none of AOTInductor's entry points: it is no artifact".to_owned()),
            Some(points) if !points.missing.is_empty() => warnings.push(format!(
                "it lacks {} of {} entry points that precast needs: {}",
                points.missing.len(),
                ENTRY_POINTS.len(),
                points.missing.join(", ")
            )),
            Some(_) => {}
        }
        if self.weights > 0 && self.aotinductor.is_some() {
            warnings.push(format!(
                "{} bytes of weights are inside: each copy of the artifact carries its own",
                self.weights
            ));
        }
        if self.aotinductor.is_some() {
            warnings.extend(self.hazards.iter().map(ToString::to_string));
        }
        if !self.kernel_files.is_empty() {
            warnings.push(format!(
                "{} kernels are not inside: it wants to read them from the machine that built it, as `{}`",
                self.kernel_files.len(),
                self.kernel_files[0].escape_debug()
            ));
        }
        warnings
    }
}

/// Returns the newest version of each family (`GLIBC_…`) that the object asks for.
fn versions<'d, R: ReadRef<'d>>(
    sections: &SectionTable<'d, FileHeader64<Endianness>, R>,
    endian: Endianness,
    data: R,
) -> Result<Vec<String>, ParseError> {
    let Some((mut needs, link)) = sections.gnu_verneed(endian, data)? else {
        return Ok(vec![]);
    };
    let strings = sections.strings(endian, data, link)?;
    let mut newest: std::collections::BTreeMap<String, (Vec<u64>, String)> = Default::default();
    let mut left = NAMES;
    while let Some((_, mut names)) = needs.next()? {
        while let Some(aux) = names.next()? {
            // Entries can point back at themselves.
            left = left.saturating_sub(1);
            if left == 0 {
                return Err(ParseError::Malformed("its versions have no end".to_owned()));
            }
            let version = text(aux.name(endian, strings)?);
            let Some((family, numbers)) = version.rsplit_once('_') else {
                continue;
            };
            let order: Vec<u64> = numbers.split('.').filter_map(|n| n.parse().ok()).collect();
            let best = newest.entry(family.to_owned()).or_default();
            if order >= best.0 {
                *best = (order, version.clone());
            }
        }
    }
    Ok(newest.into_values().map(|(_, version)| version).collect())
}

/// Returns whether there is memory for so many bytes, before they are read.
fn fits(budget: &Budget, bytes: u64) -> Result<(), ParseError> {
    budget.hold(bytes)?;
    budget.free(bytes);
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
