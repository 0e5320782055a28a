//! The ELF reader of all crates. It parses shared objects and cubins and never runs them.
//!
//! A file is treated as hostile. Every offset and size is checked against the data. The limits below hold for memory
//! and time:
//!
//! | limit | value |
//! |---|---|
//! | one table (headers, symbols, names) | [`TABLE`] |
//! | entries of a dynamic segment | 4096 |
//! | one string of a dynamic segment | 4096 bytes |
//! | all names of a table | 16 times the table, and 1 MiB more: a linker shares only the ends of names |
//!
//! A [`ReadCache`] reads from a file without loading it whole; a slice works as well.

mod hazards;
mod imports;

use std::ffi::CStr;

use object::{
    LittleEndian as Little,
    elf::{self, FileHeader64, ProgramHeader64, SectionHeader64, Sym64},
    read::{
        ReadRef,
        elf::{Dyn, FileHeader, ProgramHeader, SectionHeader, Sym},
    },
};

pub use hazards::Hazard;
pub use object::ReadCache;

/// Maximum bytes of one table.
pub const TABLE: u64 = 64 << 20;
const ENTRIES: usize = 4096;
const STRING: u64 = 4096;

/// The reason why a file can't be parsed, as a fragment of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ElfError(String);

impl From<object::read::Error> for ElfError {
    fn from(error: object::read::Error) -> Self {
        Self(error.to_string().to_lowercase())
    }
}

impl From<&str> for ElfError {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<ElfError> for String {
    fn from(error: ElfError) -> Self {
        error.0
    }
}

/// A 64-bit little-endian ELF file.
pub struct Elf<'d, R: ReadRef<'d> = &'d [u8]> {
    header: &'d FileHeader64<Little>,
    data: R,
}

/// The entries of the dynamic segments that name other libraries and folders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DynamicSection {
    /// `DT_NEEDED`, in order.
    pub needed: Vec<String>,
    /// Folders of `DT_RPATH`, as written.
    pub rpath: Option<Vec<String>>,
    /// Folders of `DT_RUNPATH`, as written.
    pub runpath: Option<Vec<String>>,
    /// True for `DT_TEXTREL` and for its flag in `DT_FLAGS`.
    pub text_relocations: bool,
}

/// A visible symbol of the dynamic symbol table.
#[derive(Clone, Copy, Debug)]
pub struct Symbol<'d> {
    /// Its name, mangled.
    pub name: &'d [u8],
    /// True for an export, false for an import.
    pub defined: bool,
    /// True for weak and unique symbols.
    pub weak: bool,
}

/// A section with bytes in the file.
#[derive(Clone, Copy, Debug)]
pub struct Section<'d> {
    /// Its name.
    pub name: &'d [u8],
    /// Offset of its bytes in the file.
    pub offset: u64,
    /// Its bytes in the file.
    pub size: u64,
    /// True where it is loaded and not executable.
    pub data: bool,
}

impl<'d, R: ReadRef<'d>> Elf<'d, R> {
    /// Parses the header. The other methods read the rest.
    pub fn parse(data: R) -> Result<Self, ElfError> {
        let header = FileHeader64::<Little>::parse(data)?;
        header.endian()?;
        Ok(Self { header, data })
    }

    /// Returns the machine number of the header.
    pub fn machine(&self) -> u16 {
        self.header.e_machine(Little).0
    }

    /// Returns the compute capability of a cubin, as `90`, or `90a` for code that runs on that capability only. Returns
    /// none for other files.
    ///
    /// The flags have it in bits 0 to 7 up to ABI version 7, and in bits 8 to 15 from version 8 on (LLVM's
    /// `BinaryFormat/ELF.h`, `EF_CUDA_SM` and `EF_CUDA_SM_MASK`).
    pub fn sm(&self) -> Option<String> {
        if self.header.e_machine(Little) != elf::EM_CUDA {
            return None;
        }
        let flags = self.header.e_flags(Little).0;
        let (sm, only) = match self.header.e_ident().abi_version {
            0..=7 => (flags & 0xff, flags & 0x800 != 0),
            _ => ((flags >> 8) & 0xff, flags & 0x8 != 0),
        };
        Some(format!("{sm}{}", if only { "a" } else { "" }))
    }

    /// Returns the end of the header tables, which are last in a cubin.
    pub fn extent(&self) -> Option<u64> {
        let header = self.header;
        let end = |offset: u64, size: u16, count: u16| {
            offset.checked_add(u64::from(size) * u64::from(count))
        };
        let segments = end(
            header.e_phoff(Little),
            header.e_phentsize(Little),
            header.e_phnum(Little),
        )?;
        let sections = end(
            header.e_shoff(Little),
            header.e_shentsize(Little),
            header.e_shnum(Little),
        )?;
        Some(segments.max(sections))
    }

    /// Returns whether `size` bytes contain everything that the loader maps.
    ///
    /// The loader does not check the size of the file. Access to a page past the end of the file raises SIGBUS.
    pub fn is_whole(&self, size: u64) -> Result<bool, ElfError> {
        let mut loaded = self
            .segments()?
            .iter()
            .filter(|segment| segment.p_type(Little) == elf::PT_LOAD);
        Ok(loaded.all(|segment| {
            let end = segment
                .p_offset(Little)
                .checked_add(segment.p_filesz(Little));
            end.is_some_and(|end| end <= size)
        }))
    }

    /// Returns the libraries and folders of the dynamic segments. Sections are not needed for it.
    pub fn dynamic(&self) -> Result<DynamicSection, ElfError> {
        let segments = self.segments()?;
        let mut entries: Vec<&elf::Dyn64<Little>> = Vec::new();
        for segment in segments
            .iter()
            .filter(|segment| segment.p_type(Little) == elf::PT_DYNAMIC)
        {
            limited(segment.p_filesz(Little))?;
            let table = segment.dynamic(Little, self.data)?.unwrap_or_default();
            entries.extend(
                table
                    .iter()
                    .take_while(|entry| entry.tag(Little) != elf::DT_NULL),
            );
        }
        if entries.len() > ENTRIES {
            return Err("its dynamic segment has too many entries".into());
        }
        let value = |tag| {
            entries
                .iter()
                .find(|entry| entry.tag(Little) == tag)
                .map(|entry| entry.val(Little))
        };
        let (table, size) = (
            value(elf::DT_STRTAB).unwrap_or(0),
            value(elf::DT_STRSZ).unwrap_or(0),
        );
        // The address is a memory address. The segment that is loaded there gives the offset in the file.
        let start = segments.iter().find_map(|segment| {
            let inside = table.checked_sub(segment.p_vaddr(Little))?;
            let loaded =
                segment.p_type(Little) == elf::PT_LOAD && inside < segment.p_filesz(Little);
            loaded.then(|| segment.p_offset(Little).checked_add(inside))?
        });
        let string = |offset: u64| {
            let range = start
                .and_then(|start| Some((start.checked_add(offset)?, start.checked_add(size)?)));
            let (from, end) = range
                .filter(|(from, end)| from < end)
                .ok_or("a string lies outside of its table")?;
            let text = self
                .data
                .read_bytes_at_until(from..end.min(from.saturating_add(STRING)), 0);
            let text = text.map_err(|()| ElfError::from("a string is too long or has no end"))?;
            Ok::<_, ElfError>(String::from_utf8_lossy(text).into_owned())
        };
        let folders = |offset| {
            let text = string(offset)?;
            Ok::<_, ElfError>(Some(
                text.split(':')
                    .filter(|part| !part.is_empty())
                    .map(str::to_owned)
                    .collect(),
            ))
        };
        let mut found = DynamicSection::default();
        for entry in &entries {
            let value = entry.val(Little);
            match entry.tag(Little) {
                elf::DT_NEEDED => found.needed.push(string(value)?),
                elf::DT_RPATH => found.rpath = folders(value)?,
                elf::DT_RUNPATH => found.runpath = folders(value)?,
                elf::DT_TEXTREL => found.text_relocations = true,
                elf::DT_FLAGS => found.text_relocations |= value & elf::DF_TEXTREL.0 != 0,
                _ => {}
            }
        }
        Ok(found)
    }

    /// Returns the symbols that other objects see or provide: global, weak and unique ones.
    pub fn symbols(&self) -> Result<impl Iterator<Item = Result<Symbol<'d>, ElfError>>, ElfError> {
        let sections = self.section_headers()?;
        let table = sections
            .iter()
            .find(|section| section.sh_type(Little) == elf::SHT_DYNSYM);
        let (symbols, strings): (&[Sym64<Little>], _) = match table {
            None => (&[], None),
            Some(table) => {
                limited(table.sh_size(Little))?;
                (
                    table.data_as_array(Little, self.data)?,
                    sections.get(table.sh_link(Little) as usize),
                )
            }
        };
        let mut names = self.names(strings)?;
        Ok(symbols.iter().filter_map(move |symbol| {
            let weak = match symbol.st_bind() {
                elf::STB_GLOBAL => false,
                elf::STB_WEAK | elf::STB_GNU_UNIQUE => true,
                _ => return None,
            };
            if matches!(symbol.st_visibility(), elf::STV_HIDDEN | elf::STV_INTERNAL) {
                return None;
            }
            let defined = !symbol.is_undefined(Little);
            let name = names.get(symbol.st_name(Little));
            Some(name.map(|name| Symbol {
                name,
                defined,
                weak,
            }))
        }))
    }

    /// Returns the sections with bytes in the file.
    pub fn sections(&self) -> Result<Vec<Section<'d>>, ElfError> {
        let sections = self.section_headers()?;
        let strings = if sections.is_empty() {
            None
        } else {
            sections.get(self.header.shstrndx(Little, self.data)? as usize)
        };
        let mut names = self.names(strings)?;
        let stored = sections
            .iter()
            .filter_map(|section| Some((section, section.file_range(Little)?)));
        let sections = stored.map(|(section, (offset, size))| {
            let flags = section.sh_flags(Little).0;
            Ok(Section {
                name: names.get(section.sh_name(Little))?,
                offset,
                size,
                data: section.sh_type(Little) == elf::SHT_PROGBITS
                    && flags & elf::SHF_ALLOC.0 != 0
                    && flags & elf::SHF_EXECINSTR.0 == 0,
            })
        });
        sections.collect()
    }

    fn segments(&self) -> Result<&'d [ProgramHeader64<Little>], ElfError> {
        limited(
            u64::from(self.header.phnum(Little, self.data)?)
                * size_of::<ProgramHeader64<Little>>() as u64,
        )?;
        Ok(self.header.program_headers(Little, self.data)?)
    }

    fn section_headers(&self) -> Result<&'d [SectionHeader64<Little>], ElfError> {
        limited(
            u64::from(self.header.shnum(Little, self.data)?)
                * size_of::<SectionHeader64<Little>>() as u64,
        )?;
        Ok(self.header.section_headers(Little, self.data)?)
    }

    fn names(&self, table: Option<&SectionHeader64<Little>>) -> Result<Names<'d>, ElfError> {
        let bytes = match table {
            None => &[],
            Some(table) => {
                limited(table.sh_size(Little))?;
                table.data(Little, self.data)?
            }
        };
        let left = (bytes.len() as u64) * 16 + (1 << 20);
        Ok(Names { bytes, left })
    }
}

fn limited(bytes: u64) -> Result<(), ElfError> {
    if bytes > TABLE {
        return Err(ElfError(format!(
            "one of its tables has {bytes} bytes, at most {TABLE} are read"
        )));
    }
    Ok(())
}

/// A table of names, and the limit of bytes that may still be read from it.
struct Names<'d> {
    bytes: &'d [u8],
    left: u64,
}

impl<'d> Names<'d> {
    fn get(&mut self, offset: u32) -> Result<&'d [u8], ElfError> {
        let rest = self.bytes.get(offset as usize..).unwrap_or_default();
        let name = CStr::from_bytes_until_nul(rest)
            .map_err(|_| "a name lies outside of its table")?
            .to_bytes();
        let left = self.left.checked_sub(name.len() as u64);
        self.left = left.ok_or("its names overlap")?;
        Ok(name)
    }
}
