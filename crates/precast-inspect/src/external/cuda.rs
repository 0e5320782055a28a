//! Device code inside a shared object: cubins, fat binaries and PTX.
//!
//! AOTInductor places Triton's cubins one after the other in a data section; nvcc wraps several architectures in a fat
//! binary. Both are found by their magic numbers, then parsed. The flags of a cubin's ELF header have its SM: in bits 0 to 7
//! up to ABI version 7, in bits 8 to 15 from version 8 on (LLVM's
//! `BinaryFormat/ELF.h`, `EF_CUDA_SM` and `EF_CUDA_SM_MASK`).

use std::io::{Read, Seek, SeekFrom};

use memchr::memmem;
use serde::Serialize;

use super::{
    ParseError,
    budget::{Budget, Counted},
};

const ELF: &[u8] = b"\x7fELF";
const FATBIN: &[u8] = &0xba55_ed50_u32.to_le_bytes();
const CUBIN_PATH: &[u8] = b".cubin\0";
const EM_CUDA: u16 = 190;

/// How many kernels are listed, and how many names of one.
const LIMIT: usize = 4096;
const NAMES: usize = 64;
/// Bytes that are looked at together. A header, a table of sections or a path that crosses an end is seen in the next
/// window, which begins `OVERLAP` bytes before.
const WINDOW: usize = 8 << 20;
const OVERLAP: usize = 64 << 10;
/// A cubin is read whole up to this size; names of larger ones are not listed.
const CUBIN_LIMIT: usize = 64 << 20;

/// How device code is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Machine code for one compute capability.
    Cubin,
    /// NVIDIA's intermediate code, which the driver compiles for its GPU.
    Ptx,
}

/// A piece of device code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Kernel {
    /// Machine code or PTX.
    pub format: Format,
    /// As `90`, or `90a` where it can run on nothing else.
    pub sm: String,
    /// Section of the shared object that holds it.
    pub section: String,
    /// From the begin of the section.
    pub offset: u64,
    /// Bytes it takes in the file.
    pub bytes: u64,
    /// Names of the functions inside; empty where they are compressed.
    pub functions: Vec<String>,
}

/// What a section holds.
#[derive(Default)]
pub(super) struct Inside {
    pub kernels: Vec<Kernel>,
    /// Paths of kernels that are read at run time.
    pub files: Vec<String>,
}

/// Adds kernels, up to what is listed.
pub(super) fn extend(to: &mut Vec<Kernel>, more: Vec<Kernel>) {
    let room = LIMIT.saturating_sub(to.len());
    to.extend(more.into_iter().take(room));
}

/// Looks for device code in `start..start + size` of `file`.
pub(super) fn scan(
    file: &mut Counted<'_, impl Read + Seek>,
    section: &str,
    start: u64,
    size: u64,
) -> Result<Inside, ParseError> {
    let mut found = Inside::default();
    let mut window = Vec::new();
    let mut base = 0;
    let mut next = 0;
    while base < size {
        let want = (size - base).min((WINDOW + OVERLAP) as u64);
        let Some(from) = start.checked_add(base) else {
            break;
        };
        file.seek(SeekFrom::Start(from))?;
        window.clear();
        file.by_ref().take(want).read_to_end(&mut window)?;
        if window.is_empty() {
            break;
        }
        let last = window.len() <= WINDOW || base + want >= size;
        let end = if last { window.len() } else { WINDOW };
        for at in memmem::find_iter(&window, CUBIN_PATH).take_while(|at| *at < end) {
            path(&window[..at + CUBIN_PATH.len() - 1], &mut found.files);
        }
        let cubins = memmem::find_iter(&window, ELF).map(|at| (at, false));
        let fat = memmem::find_iter(&window, FATBIN).map(|at| (at, true));
        let mut hits: Vec<(usize, bool)> = cubins.chain(fat).filter(|hit| hit.0 < end).collect();
        hits.sort_unstable();
        for (at, fat) in hits {
            let offset = base + at as u64;
            if offset < next || found.kernels.len() >= LIMIT {
                continue;
            }
            let place = Place {
                section,
                offset,
                left: size - offset,
            };
            // Magic that turns up by chance is not device code; what comes after it is looked at again.
            let taken = match fat {
                true => fatbin(file, from + at as u64, &place, &mut found.kernels)?,
                false => cubin(file, from + at as u64, &place, &mut found.kernels)?,
            };
            next = offset + taken.unwrap_or(1);
        }
        if last {
            break;
        }
        base += WINDOW as u64;
    }
    found.files.sort_unstable();
    found.files.dedup();
    Ok(found)
}

struct Place<'a> {
    section: &'a str,
    offset: u64,
    /// Bytes to the end of the section.
    left: u64,
}

impl Place<'_> {
    fn kernel(&self, at: u64, format: Format, sm: String, bytes: u64) -> Kernel {
        Kernel {
            format,
            sm,
            section: self.section.to_owned(),
            offset: self.offset.saturating_add(at),
            bytes,
            functions: vec![],
        }
    }
}

/// Takes the printable text that `before` ends with, if it is an absolute path.
fn path(before: &[u8], files: &mut Vec<String>) {
    let begin = before
        .iter()
        .rposition(|b| !(0x20..0x7f).contains(b))
        .map_or(0, |at| at + 1);
    let text = String::from_utf8_lossy(&before[begin..]);
    if text.starts_with('/') && text.len() < 4096 && files.len() < LIMIT {
        files.push(text.into_owned());
    }
}

fn read(
    file: &mut Counted<'_, impl Read + Seek>,
    at: u64,
    size: usize,
) -> Result<Option<Vec<u8>>, ParseError> {
    file.seek(SeekFrom::Start(at))?;
    let mut bytes = Vec::new();
    file.by_ref().take(size as u64).read_to_end(&mut bytes)?;
    Ok((bytes.len() == size).then_some(bytes))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Adds the cubin that begins at `at` of the file, and returns its size if it is one.
fn cubin(
    file: &mut Counted<'_, impl Read + Seek>,
    at: u64,
    place: &Place<'_>,
    into: &mut Vec<Kernel>,
) -> Result<Option<u64>, ParseError> {
    let Some(header) = read(file, at, 64)? else {
        return Ok(None);
    };
    let Some((size, sm)) = extent(&header, place.left) else {
        return Ok(None);
    };
    let mut kernel = place.kernel(0, Format::Cubin, sm, size);
    if let Ok(whole) = usize::try_from(size)
        && whole <= CUBIN_LIMIT
        && let Some(bytes) = read(file, at, whole)?
    {
        kernel.functions = functions(&bytes, file.budget)?;
    }
    into.push(kernel);
    Ok(Some(size))
}

/// Returns how many bytes the cubin with this ELF header takes, and its SM.
fn extent(header: &[u8], left: u64) -> Option<(u64, String)> {
    let known = header.get(..6)? == b"\x7fELF\x02\x01" && u16_at(header, 18)? == EM_CUDA;
    if !known {
        return None;
    }
    let table = |offset: usize, size: usize, count: usize| -> Option<u64> {
        let bytes = u64::from(u16_at(header, size)?) * u64::from(u16_at(header, count)?);
        u64_at(header, offset)?.checked_add(bytes)
    };
    // The tables of segments and sections come last in what ptxas writes.
    let size = table(32, 54, 56)?.max(table(40, 58, 60)?);
    let flags = u32_at(header, 48)?;
    let (sm, only) = match header[8] {
        0..=7 => (flags & 0xff, flags & 0x800 != 0),
        _ => ((flags >> 8) & 0xff, flags & 0x8 != 0),
    };
    let sm = format!("{sm}{}", if only { "a" } else { "" });
    (size >= 64 && size <= left).then_some((size, sm))
}

/// Returns the names of the functions in a cubin: each has a section `.text.NAME`.
fn functions(cubin: &[u8], budget: &Budget) -> Result<Vec<String>, ParseError> {
    use object::read::elf::{ElfFile64, FileHeader};
    use object::{Object, ObjectSection};
    let Ok(file) = ElfFile64::<object::Endianness>::parse(cubin) else {
        return Ok(vec![]);
    };
    if file.elf_header().e_shoff(file.endian()) == 0 {
        return Ok(vec![]);
    }
    let mut found = Vec::new();
    for section in file.sections() {
        let Ok(name) = section.name() else {
            continue;
        };
        // Each of many sections may have a name as long as the whole cubin.
        budget.work(name.len() as u64)?;
        if let Some(name) = name.strip_prefix(".text.") {
            budget.hold(name.len() as u64)?;
            found.push(name.to_owned());
        }
        if found.len() == NAMES {
            break;
        }
    }
    Ok(found)
}

/// Adds what is in the fat binary that begins at `at` of the file, and returns its size if it is one.
///
/// A header (magic, version, header size, bytes that follow), then entries, each with a header of its own: kind (1 PTX,
/// 2 cubin), header size, bytes, and at 28 the SM.
fn fatbin(
    file: &mut Counted<'_, impl Read + Seek>,
    at: u64,
    place: &Place<'_>,
    into: &mut Vec<Kernel>,
) -> Result<Option<u64>, ParseError> {
    let Some(header) = read(file, at, 16)? else {
        return Ok(None);
    };
    let (Some(version), Some(own), Some(body)) =
        (u16_at(&header, 4), u16_at(&header, 6), u64_at(&header, 8))
    else {
        return Ok(None);
    };
    let Some(size) = body
        .checked_add(own.into())
        .filter(|size| *size <= place.left)
    else {
        return Ok(None);
    };
    if version != 1 || own < 16 {
        return Ok(None);
    }
    let mut offset = u64::from(own);
    while offset + 64 <= size && into.len() < LIMIT {
        let Some(entry) = read(file, at + offset, 64)? else {
            break;
        };
        let (Some(kind), Some(own), Some(body), Some(sm)) = (
            u16_at(&entry, 0),
            u32_at(&entry, 4),
            u64_at(&entry, 8),
            u32_at(&entry, 28),
        ) else {
            break;
        };
        let format = match kind {
            1 => Format::Ptx,
            2 => Format::Cubin,
            _ => break,
        };
        let Some(end) = body
            .checked_add(offset + u64::from(own))
            .filter(|end| *end <= size)
        else {
            break;
        };
        let mut kernel = place.kernel(offset, format, sm.to_string(), body);
        let inner = at + offset + u64::from(own);
        if format == Format::Cubin
            && let Some(header) = read(file, inner, 64)?
            && let Some((bytes, sm)) = extent(&header, body)
        {
            kernel.sm = sm;
            if let Ok(whole) = usize::try_from(bytes)
                && whole <= CUBIN_LIMIT
                && let Some(bytes) = read(file, inner, whole)?
            {
                kernel.functions = functions(&bytes, file.budget)?;
            }
        }
        into.push(kernel);
        offset = end;
    }
    Ok(Some(size))
}
