use std::{
    fs,
    io::{Cursor, Write},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use proptest::prelude::*;
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

use super::*;

fn report_of(bytes: &[u8]) -> Result<Report, ExternalError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    inspect(file.path())
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data")
}

/// Returns a shared object from C source.
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

/// Returns a shared object with two cubins in `.rodata`, the first at an odd offset.
fn with_kernels() -> &'static [u8] {
    static OBJECT: OnceLock<Vec<u8>> = OnceLock::new();
    OBJECT.get_or_init(|| {
        let embed = |name: &str| format!(".incbin \\\"{}\\\"\\n", data().join(name).display());
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

/// Excerpts of a package of torch 2.11.
const GRAPH: &[u8] = br#"{"graph_module": {"graph": {"inputs": []}, "signature": {"input_specs": [
    {"parameter": {"arg": {"name": "p_l_weight"}, "parameter_name": "l.weight"}},
    {"buffer": {"arg": {"name": "b_b"}, "buffer_name": "b", "persistent": true}},
    {"user_input": {"arg": {"as_tensor": {"name": "x"}}}}, {"user_input": {"arg": {"as_int": 3}}}
    ]}}, "torch_version": "2.11.0"}"#;
const SOURCE: &[u8] =
    b"    inputs_info_[0].name = \"arg3_1\";\n    constants_info_[0].name = \"l_weight\";\n\
    constants_info_[0].original_fqn = \"l.weight\";\n";

fn package() -> Vec<u8> {
    use CompressionMethod::{Deflated, Stored};
    let (model, object) = ("m/data/aotinductor/model", with_kernels());
    zipped(&[
        (&format!("{model}/k.wrapper.so"), object, Stored),
        (&format!("{model}/packed.so"), object, Deflated),
        (
            &format!("{model}/k.wrapper_metadata.json"),
            METADATA,
            Stored,
        ),
        ("m/models/model.json", GRAPH, Deflated),
        (&format!("{model}/k.wrapper.cpp"), SOURCE, Stored),
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
fn a_shared_object_has_entry_points_and_device_code() {
    let report = report_of(with_kernels()).unwrap();
    let object = shared(report.content);
    let points = object.aotinductor.unwrap();
    assert_eq!(points.exported, 1);
    assert_eq!(points.missing.len(), ENTRY_POINTS.len() - 1);
    let kernels = object
        .kernels
        .iter()
        .map(|k| (&*k.sm, k.format, k.count, k.bytes));
    let cubin = |sm, name: &str| {
        let bytes = fs::metadata(data().join(name)).unwrap().len();
        (sm, Format::Cubin, 1, bytes)
    };
    let both = [
        cubin("90a", "add-sm90a.cubin"),
        cubin("100", "add-sm100.cubin"),
    ];
    assert_eq!(kernels.collect::<Vec<_>>(), both);
    assert_eq!(report.warnings.len(), 1, "{:?}", report.warnings);
}

fn shared(content: Content) -> SharedObject {
    match content {
        Content::SharedObject(object) => object,
        _ => panic!("not a shared object"),
    }
}

fn packed(content: Content) -> Package {
    match content {
        Content::Package(package) => package,
        _ => panic!("not a package"),
    }
}

/// The code crosses the end of the first chunk of the search.
#[test]
fn device_code_is_found_anywhere_and_chance_matches_are_skipped() {
    let cubin = fs::read(data().join("add-sm90a.cubin")).unwrap();
    let entry = |kind: u16, body: &[u8]| {
        let mut bytes = [kind.to_le_bytes(), [0; 2]].concat();
        bytes.extend(64_u32.to_le_bytes());
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.resize(28, 0);
        bytes.extend(80_u32.to_le_bytes());
        bytes.resize(64, 0);
        [&bytes, body].concat()
    };
    let ptx = entry(1, b".version 8.0");
    let entries = [ptx, entry(2, b"compressed"), entry(2, &cubin)].concat();
    let mut fat = 0xba55_ed50_u32.to_le_bytes().to_vec();
    fat.extend([1, 0, 16, 0]);
    fat.extend((entries.len() as u64).to_le_bytes());
    fat.extend(entries);
    for offset in [0, 1, 2, 3, 40] {
        let mut body = b"\0\x7fELF\x02\x01 by chance \x50\xed\x55\xba".to_vec();
        body.resize((8 << 20) - offset, 0);
        body.extend(&fat);
        body.extend(b"\0/a/b.cubin\0");
        body.extend(&cubin);
        let size = body.len() as u64;
        let sections = [(0, 0, 0, 0, 0), (3, 0, 64, 1, 0), (1, 2, 64, size, 0)];
        let object = shared(report_of(&elf_of(&body, &sections)).unwrap().content);
        let kernels = object.kernels.iter().map(|k| (&*k.sm, k.format, k.count));
        let old = [("80", Format::Cubin, 1), ("80", Format::Ptx, 1)];
        let all = [&old[..], &[("90a", Format::Cubin, 2)]].concat();
        assert_eq!(kernels.collect::<Vec<_>>(), all, "{offset}");
    }
}

#[test]
fn the_entry_points_are_those_the_runtime_asks_for() {
    let source = include_str!("../../../precast-runtime/src/ffi/library.rs");
    let asked = source.split("symbol!(b\"").skip(1);
    let asked = asked.filter_map(|rest| rest.split('"').next());
    let asked: std::collections::BTreeSet<&str> = asked.collect();
    assert_eq!(asked.into_iter().collect::<Vec<_>>(), ENTRY_POINTS);
}

#[test]
fn a_package_has_a_target_inputs_and_constants() {
    let package = packed(report_of(&package()).unwrap().content);
    assert_eq!(package.members.len(), 5);
    assert_eq!(package.torch.as_deref(), Some("2.11.0"));
    let [build] = &package.builds[..] else {
        panic!("{:?}", package.builds);
    };
    let target = [&build.device, &build.machine, &build.isa, &build.sm];
    let target = target.map(|word| word.as_deref().unwrap());
    assert_eq!(target, ["cuda", "x86_64", "AVX2", "90"]);
    let models = package.models.iter();
    let models = models.map(|model| [model.inputs.join(" "), model.constants.join(" ")]);
    let names = [["x (no tensor)", "l.weight b"], ["arg3_1", "l.weight"]];
    assert_eq!(models.collect::<Vec<_>>(), names);
    // torch writes shared objects uncompressed; a compressed one is a member without an entry of its own.
    let [plain] = &package.libraries[..] else {
        panic!("{:?}", package.libraries);
    };
    assert_eq!(plain.object.kernels.len(), 2);
}

#[test]
fn tensors_are_listed_without_their_bytes() {
    let report = report_of(&tensors_file(HEADER, 30)).unwrap();
    let Content::Tensors(tensors) = report.content else {
        panic!("not tensors");
    };
    let all = tensors.tensors.iter();
    let all = all.map(|t| (&*t.name, &*t.dtype, &t.shape[..], t.bytes));
    let both = [("b", "BF16", &[3][..], 6), ("w", "F32", &[2, 3], 24)];
    assert_eq!(all.collect::<Vec<_>>(), both);
    assert_eq!(tensors.metadata["format"], "pt");
    assert_eq!(tensors.elements["F32"], 6);
}

#[test]
fn an_unknown_file_is_an_error() {
    for bytes in [&b""[..], b"hello, world", &[0; 9], b"{\"a\":1}"] {
        let error = report_of(bytes).unwrap_err();
        assert!(matches!(error, ExternalError::Unknown { .. }), "{bytes:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = inspect(dir.path()).unwrap_err();
    assert!(matches!(folder, ExternalError::NotAFile { .. }));
    let none = inspect(&dir.path().join("none")).unwrap_err();
    assert!(matches!(none, ExternalError::Io { .. }));
}

#[test]
fn giant_counts_are_errors() {
    let malformed = |bytes: &[u8]| match report_of(bytes) {
        Err(ExternalError::Malformed { why, .. }) => why,
        other => panic!("{:?}", other.map(|report| report.size)),
    };
    // A header longer than the file.
    malformed(b"\xff\xff\xff\xff\0\0\0\0{");
    // A shape whose product overflows, offsets that overlap, unused bytes, and descending offsets.
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let (four, overlapping) = (tensor("[4]", "[0,4]"), tensor("[4]", "[2,6]"));
    for (tensors, data) in [
        (
            format!(
                r#""a":{}"#,
                tensor("[4294967295,4294967295,4294967295]", "[0,4]")
            ),
            4,
        ),
        (format!(r#""a":{four},"b":{overlapping}"#), 6),
        (format!(r#""a":{four}"#), 5),
        (format!(r#""a":{}"#, tensor("[4]", "[4,0]")), 4),
    ] {
        malformed(&tensors_file(&format!("{{{tensors}}}"), data));
    }
    // Sections: count 0 in the header means that section 0 has it.
    let mut bytes = with_kernels().to_vec();
    bytes[60..62].copy_from_slice(&[0, 0]);
    let table = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes[table + 32..table + 40].copy_from_slice(&0x7fff_ffff_u64.to_le_bytes());
    let why = malformed(&bytes);
    assert!(
        why.starts_with("one of its tables has 137438953408 bytes"),
        "{why}"
    );
    // Members: the end record claims 65535 of them.
    let mut bytes = package();
    let end = bytes.len() - 22;
    bytes[end + 8..end + 12].copy_from_slice(&[0xff; 4]);
    malformed(&bytes);
}

/// Returns why a file is refused for its cost.
fn refused(bytes: &[u8]) -> String {
    match report_of(bytes) {
        Err(ExternalError::TooLarge { why, .. }) => why,
        other => panic!("{:?}", other.map(|report| report.size)),
    }
}

#[test]
fn bombs_are_unpacked_up_to_the_limit() {
    // Graphs of zeros that unpack to more than is read of a file of this size.
    let zeros = vec![0; 17 << 20];
    let deflated = CompressionMethod::Deflated;
    let names: Vec<String> = (0..20).map(|i| format!("m/models/{i}.json")).collect();
    let members: Vec<_> = (names.iter())
        .map(|name| (name.as_str(), &zeros[..], deflated))
        .collect();
    let bytes = zipped(&members);
    assert!(bytes.len() < 1 << 20);
    assert!(refused(&bytes).starts_with("its parts overlap or unpack"));
    // Of JSON only the first bytes are read.
    let text = format!("{{\"a\":[{}0]}}", "0,".repeat(2 << 20));
    let bytes = zipped(&[("m/a_metadata.json", text.as_bytes(), deflated)]);
    assert_eq!(packed(report_of(&bytes).unwrap().content).builds, []);
    let header = format!("{{\"a\":[{}0]}}", "0,".repeat(9 << 20));
    let why = refused(&tensors_file(&header, 0));
    assert!(why.ends_with("at most 16777216 are read"), "{why}");
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
fn parts_that_overlap_are_refused() {
    const SIZE: u64 = 4 << 20;
    let mut sections = vec![(0, 0, 0, 0, 0), (3, 0, 64, 1, 0)];
    sections.resize(400, (1, 2, 64, SIZE, 0));
    let bytes = elf_of(&vec![0; SIZE as usize], &sections);
    assert!(refused(&bytes).starts_with("its parts overlap"));
    // A few are read.
    assert!(report_of(&elf_of(&vec![0; SIZE as usize], &sections[..10])).is_ok());
}

#[test]
fn hostile_names_are_reported_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let names = "../../evil.so.txt /etc/evil a/../../b c:\\evil ok/fine esc\x1b[2Jape";
    let members = names
        .split(' ')
        .map(|name| (name, &b"x"[..], CompressionMethod::Stored));
    let members: Vec<_> = members.collect();
    let path = inner.join("x.pt2");
    fs::write(&path, zipped(&members)).unwrap();
    let report = inspect(&path).unwrap();
    assert!(matches!(report.content, Content::Package(_)));
    assert!(report.warnings.iter().all(|text| !text.contains('\x1b')));
    let entries = walkdir::WalkDir::new(dir.path())
        .into_iter()
        .map(Result::unwrap);
    assert_eq!(
        entries.filter(|entry| entry.file_type().is_file()).count(),
        1
    );
}

#[test]
fn every_truncation_gives_an_error_or_a_report() {
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

    /// Any changed bytes give a report or an error.
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
