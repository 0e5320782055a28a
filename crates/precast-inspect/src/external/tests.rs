use std::{
    fs,
    io::{Cursor, Write},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use proptest::prelude::*;
use tempfile::TempDir;
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

use super::*;

fn write(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn report_of(bytes: &[u8]) -> Result<Report, ExternalError> {
    let dir = tempfile::tempdir().unwrap();
    inspect(&write(&dir, "file", bytes))
}

/// Compiles `source` into a shared object and returns its bytes.
fn compiled(source: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("a.c"), dir.path().join("a.so"));
    fs::write(&from, source).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&to).arg(&from);
    let status = cc.status().expect("a C compiler is on the path");
    assert!(status.success());
    fs::read(to).unwrap()
}

/// A shared object with two cubins in `.rodata`, one right after an odd byte.
fn with_kernels() -> &'static [u8] {
    static MADE: OnceLock<Vec<u8>> = OnceLock::new();
    MADE.get_or_init(|| {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
        let embed = |name: &str| format!(".incbin \\\"{}\\\"\\n", data.join(name).display());
        compiled(&format!(
            "__asm__(\".section .rodata\\n.byte 1\\n{}{}.previous\\n\");\n\
             const char *path = \"/somewhere/else/abc.cubin\";\n\
             int AOTInductorModelContainerDelete(void) {{ return path[0]; }}\n",
            embed("add-sm90a.cubin"),
            embed("add-sm100.cubin")
        ))
    })
}

fn zipped(members: &[(&str, &[u8], CompressionMethod)]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes, method) in members {
        let options = SimpleFileOptions::default().compression_method(*method);
        zip.start_file(*name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

const METADATA: &[u8] =
    br#"{"AOTI_DEVICE_KEY": "cuda", "AOTI_MACHINE": "x86_64", "AOTI_CPU_ISA": "AVX2",
    "AOTI_COMPUTE_CAPABILITY": "90", "AOTI_PLATFORM": "linux"}"#;

fn package() -> Vec<u8> {
    zipped(&[
        (
            "m/data/aotinductor/model/k.wrapper.so",
            with_kernels(),
            CompressionMethod::Stored,
        ),
        (
            "m/data/aotinductor/model/packed.so",
            with_kernels(),
            CompressionMethod::Deflated,
        ),
        (
            "m/data/aotinductor/model/k.wrapper_metadata.json",
            METADATA,
            CompressionMethod::Stored,
        ),
        (
            "m/models/model.json",
            br#"{"graph_module": {}, "torch_version": "2.11.0"}"#,
            CompressionMethod::Deflated,
        ),
    ])
}

fn tensors_file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

const HEADER: &str = r#"{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]}}"#;

#[test]
fn a_shared_object_tells_what_it_needs_gives_and_holds() {
    let report = report_of(with_kernels()).unwrap();
    let Content::SharedObject(object) = report.content else {
        panic!("not a shared object");
    };
    assert_eq!(object.exports, ["AOTInductorModelContainerDelete", "path"]);
    let points = object.aotinductor.unwrap();
    assert_eq!(points.exported, 1);
    assert_eq!(points.missing.len(), ENTRY_POINTS.len() - 1);
    let kernels: Vec<_> = object
        .kernels
        .iter()
        .map(|k| (&*k.sm, &*k.section, &k.functions[..]))
        .collect();
    let name = ["add_one".to_owned()];
    assert_eq!(
        kernels,
        [("90a", ".rodata", &name[..]), ("100", ".rodata", &name[..])]
    );
    assert_eq!(object.kernel_files, ["/somewhere/else/abc.cubin"]);
    assert_eq!(report.warnings.len(), 2, "{:?}", report.warnings);
}

#[test]
fn the_entry_points_are_those_the_runtime_asks_for() {
    let source = include_str!("../../../precast-runtime/src/ffi/library.rs");
    let asked: std::collections::BTreeSet<&str> = source
        .split("symbol!(b\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .collect();
    assert_eq!(asked.into_iter().collect::<Vec<_>>(), ENTRY_POINTS);
}

#[test]
fn a_fat_binary_lists_its_architectures() {
    let cubin = include_bytes!("../../../../tests/data/add-sm90a.cubin");
    let mut body = Vec::new();
    for (kind, sm, bytes) in [(1_u16, 80_u32, &b".version 8.0"[..]), (2, 90, &cubin[..])] {
        let mut header = [0; 64];
        header[0..2].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&64_u32.to_le_bytes());
        header[8..16].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        header[28..32].copy_from_slice(&sm.to_le_bytes());
        body.extend(header);
        body.extend(bytes);
    }
    let mut section = vec![7; 3];
    section.extend(0xba55_ed50_u32.to_le_bytes());
    section.extend([1, 0, 16, 0]);
    section.extend((body.len() as u64).to_le_bytes());
    section.extend(&body);
    let size = section.len() as u64;
    let budget = Budget::of(size);
    let found = cuda::scan(
        &mut Counted::new(Cursor::new(&section), &budget),
        ".nv_fatbin",
        0,
        size,
    )
    .unwrap();
    let kernels: Vec<_> = found
        .kernels
        .iter()
        .map(|k| (k.format, &*k.sm, k.functions.len()))
        .collect();
    assert_eq!(kernels, [(Format::Ptx, "80", 0), (Format::Cubin, "90a", 1)]);
    // A length that goes past the section is no fat binary, whatever its magic says; the cubin inside is still found.
    section[3 + 15] = 0xff;
    let found = cuda::scan(
        &mut Counted::new(Cursor::new(&section), &budget),
        ".nv_fatbin",
        0,
        size,
    )
    .unwrap();
    assert_eq!(found.kernels.len(), 1);
}

#[test]
fn a_package_tells_who_built_it_and_what_is_in_its_objects() {
    let report = report_of(&package()).unwrap();
    let Content::Package(package) = report.content else {
        panic!("not a package");
    };
    assert_eq!(package.torch.as_deref(), Some("2.11.0"));
    assert_eq!(package.members.len(), 4);
    let [build] = &package.builds[..] else {
        panic!("{:?}", package.builds);
    };
    assert_eq!(build.device.as_deref(), Some("cuda"));
    assert_eq!(build.isa.as_deref(), Some("AVX2"));
    assert_eq!(build.sm.as_deref(), Some("90"));
    assert_eq!(build.other.len(), 1);
    // Read in place, and unpacked into memory: the same.
    let [plain, packed] = &package.libraries[..] else {
        panic!("{:?}", package.libraries);
    };
    assert_eq!(plain.object.kernels, packed.object.kernels);
    assert_eq!(plain.object.kernels.len(), 2);
}

#[test]
fn tensors_are_listed_without_their_bytes() {
    let report = report_of(&tensors_file(HEADER, 30)).unwrap();
    let Content::Tensors(tensors) = report.content else {
        panic!("not tensors");
    };
    let all: Vec<_> = tensors
        .tensors
        .iter()
        .map(|t| (&*t.name, &*t.dtype, &t.shape[..], t.bytes))
        .collect();
    assert_eq!(
        all,
        [("b", "BF16", &[3][..], 6), ("w", "F32", &[2, 3][..], 24)]
    );
    assert_eq!(tensors.metadata["format"], "pt");
    assert_eq!(tensors.elements["F32"], 6);
}

#[test]
fn an_unknown_file_is_an_error() {
    for bytes in [
        &b""[..],
        b"hello, world",
        b"\0\0\0\0\0\0\0\0\0",
        b"{\"a\":1}",
    ] {
        assert!(
            matches!(report_of(bytes), Err(ExternalError::Unknown { .. })),
            "{bytes:?}"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        inspect(dir.path()),
        Err(ExternalError::NotAFile { .. })
    ));
    assert!(matches!(
        inspect(&dir.path().join("none")),
        Err(ExternalError::Io { .. })
    ));
}

#[test]
fn giant_counts_are_errors() {
    // A header longer than the format allows, and one longer than the file.
    let mut bytes = 0xffff_ffff_u64.to_le_bytes().to_vec();
    bytes.push(b'{');
    assert!(matches!(
        report_of(&bytes),
        Err(ExternalError::TooLarge { .. })
    ));
    let mut bytes = 99_999_999_u64.to_le_bytes().to_vec();
    bytes.push(b'{');
    assert!(matches!(
        report_of(&bytes),
        Err(ExternalError::Malformed { .. })
    ));
    // A shape whose product overflows, offsets that overlap, bytes that are left over.
    for (header, data) in [
        (
            r#"{"a":{"dtype":"F32","shape":[4294967295,4294967295,4294967295],"data_offsets":[0,4]}}"#,
            4,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
            6,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            5,
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#,
            4,
        ),
    ] {
        let found = report_of(&tensors_file(header, data));
        assert!(
            matches!(found, Err(ExternalError::Malformed { .. })),
            "{header}: {found:?}"
        );
    }
    // Sections: more than there can be (count 0 in the header means that section 0 has it).
    let mut bytes = with_kernels().to_vec();
    bytes[60..62].copy_from_slice(&[0, 0]);
    let table = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes[table + 32..table + 40].copy_from_slice(&0x7fff_ffff_u64.to_le_bytes());
    assert!(matches!(
        report_of(&bytes),
        Err(ExternalError::TooLarge { .. } | ExternalError::Malformed { .. })
    ));
    // Members: the end record claims 65535 of them.
    let mut bytes = package();
    let end = bytes.len() - 22;
    bytes[end + 8..end + 12].copy_from_slice(&[0xff; 4]);
    assert!(report_of(&bytes).is_err());
}

#[test]
fn a_bomb_is_stopped_at_the_limit() {
    let zeros = vec![b' '; (65 << 20) + 1];
    let bytes = zipped(&[("m/a_metadata.json", &zeros, CompressionMethod::Deflated)]);
    assert!(bytes.len() < 1 << 20);
    assert!(matches!(
        report_of(&bytes),
        Err(ExternalError::TooLarge { .. })
    ));
}

/// Returns why a file is refused for what it would cost.
fn refused(bytes: &[u8]) -> String {
    match report_of(bytes) {
        Err(ExternalError::TooLarge { why, .. }) => why,
        other => panic!("{:?}", other.map(|report| report.size)),
    }
}

#[test]
fn members_that_unpack_to_much_together_are_stopped() {
    // Each is small enough; kept values are sixteen times the text.
    let text = format!("{{\"a\":[{}0]}}", "0,".repeat(2 << 20));
    let members: Vec<_> = (0..16).map(|n| format!("m/{n}_metadata.json")).collect();
    let members: Vec<_> = members
        .iter()
        .map(|name| (&**name, text.as_bytes(), CompressionMethod::Deflated))
        .collect();
    let bytes = zipped(&members);
    assert!(bytes.len() < 1 << 20);
    let why = refused(&bytes);
    assert!(why.contains("more than 512 MiB of memory"), "{why}");
    // One shared object of nothing, more than a file of this size may unpack to.
    let mut nothing = b"\x7fELF\x02\x01\x01".to_vec();
    nothing.resize(300 << 20, 0);
    let bytes = zipped(&[("m/a.so", &nothing, CompressionMethod::Deflated)]);
    assert!(bytes.len() < 1 << 20);
    let why = refused(&bytes);
    assert!(
        why.starts_with("its member `m/a.so`: its parts overlap or unpack to more than"),
        "{why}"
    );
}

/// Returns an ELF file with these sections, each of a type, flags, an offset, a size, and the section with its names.
fn elf_of(body: &[u8], sections: &[(u32, u64, u64, u64, u32)]) -> Vec<u8> {
    let table = 64 + body.len() as u64;
    let mut bytes = vec![0; 64];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[16..20].copy_from_slice(&[3, 0, 62, 0]);
    bytes[20] = 1;
    bytes[40..48].copy_from_slice(&table.to_le_bytes());
    bytes[52] = 64;
    bytes[54] = 56;
    bytes[58] = 64;
    bytes[60..62].copy_from_slice(&(sections.len() as u16).to_le_bytes());
    bytes[62..64].copy_from_slice(&1_u16.to_le_bytes());
    bytes.extend(body);
    for (kind, flags, offset, size, link) in sections {
        let mut header = [0; 64];
        header[4..8].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&flags.to_le_bytes());
        header[24..32].copy_from_slice(&offset.to_le_bytes());
        header[32..40].copy_from_slice(&size.to_le_bytes());
        header[40..44].copy_from_slice(&link.to_le_bytes());
        header[56] = 24;
        bytes.extend(header);
    }
    bytes
}

#[test]
fn sections_that_overlap_are_not_read_for_ever() {
    const SIZE: u64 = 4 << 20;
    let mut sections = vec![(0, 0, 0, 0, 0), (3, 0, 64, 1, 0)];
    sections.resize(4000, (1, 2, 64, SIZE, 0));
    let bytes = elf_of(&vec![0; SIZE as usize], &sections);
    let why = refused(&bytes);
    assert!(why.starts_with("its parts overlap"), "{why}");
    // A few do no harm.
    assert!(report_of(&elf_of(&vec![0; SIZE as usize], &sections[..10])).is_ok());
}

#[test]
fn symbols_whose_names_overlap_are_not_all_read() {
    const SYMBOLS: usize = 1 << 18;
    // Every name is the rest of one long text.
    let mut body = vec![b'a'; SYMBOLS + 4000];
    body.iter_mut().step_by(4000).for_each(|byte| *byte = 0);
    let strings = body.len() as u64;
    for index in 0..SYMBOLS as u32 {
        body.extend(index.to_le_bytes());
        body.extend([0x10, 0, 1, 0]);
        body.extend([0; 16]);
    }
    let sections = [
        (0, 0, 0, 0, 0),
        (3, 0, 64, strings, 0),
        (11, 2, 64 + strings, 24 * SYMBOLS as u64, 1),
    ];
    let bytes = elf_of(&body, &sections);
    assert!(bytes.len() < 8 << 20);
    let why = refused(&bytes);
    assert!(why.starts_with("its parts overlap"), "{why}");
}

#[test]
fn a_header_of_tensors_that_takes_much_memory_is_refused() {
    let header = format!("{{\"a\":[{}0]}}", "0,".repeat(9 << 20));
    let why = refused(&tensors_file(&header, 0));
    assert!(why.contains("more than 512 MiB of memory"), "{why}");
}

#[test]
fn hostile_names_are_reported_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let names = [
        "../../evil.so.txt",
        "/etc/evil",
        "a/../../b",
        "c:\\evil",
        "ok/fine",
        "esc\x1b[2Jape",
    ];
    let members: Vec<_> = names
        .iter()
        .map(|name| (*name, &b"x"[..], CompressionMethod::Stored))
        .collect();
    let path = inner.join("x.pt2");
    fs::write(&path, zipped(&members)).unwrap();
    let report = inspect(&path).unwrap();
    let Content::Package(package) = &report.content else {
        panic!("not a package");
    };
    assert_eq!(package.unsafe_names.len(), 4, "{:?}", package.unsafe_names);
    assert!(report.warnings.iter().all(|text| !text.contains('\x1b')));
    let files = walkdir::WalkDir::new(dir.path())
        .into_iter()
        .filter(|e| e.as_ref().unwrap().file_type().is_file());
    assert_eq!(files.count(), 1);
}

#[test]
fn every_truncation_is_an_error_or_a_report() {
    for whole in [with_kernels().to_vec(), package(), tensors_file(HEADER, 30)] {
        let step = (whole.len() / 200).max(1);
        for length in (0..whole.len()).step_by(step) {
            if let Err(error) = report_of(&whole[..length]) {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Whatever bytes change, the answer is a report or an error, soon.
    #[test]
    fn mutations_never_panic(
        which in 0..3_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(vec![0_u8, 1, 0x40, 0x7f, 0x80, 0xff])), 1..24),
        header in any::<bool>(),
    ) {
        let mut bytes = match which {
            0 => with_kernels().to_vec(),
            1 => package(),
            _ => tensors_file(HEADER, 30),
        };
        let length = if header { bytes.len().min(512) } else { bytes.len() };
        for (at, value) in changes {
            let at = at.index(length);
            bytes[at] = value;
        }
        if let Err(error) = report_of(&bytes) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
