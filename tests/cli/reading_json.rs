//! The output of `--format json` matches docs/schema in every field.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use crate::{
    sample::{self, Sample, sample},
    schemas::{check, schema},
};

fn printed(sample: &Sample, args: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_precast"))
        .args(args)
        .args(["--format", "json", "--store"])
        .arg(&sample.path)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_commands_json_matches_its_schema() {
    let sample = sample();
    let (program, artifact, failure) = (
        sample.program.short(),
        sample.artifact.short(),
        sample.failure.short(),
    );
    let before = sample.before.short();
    let counts = sample::counts(sample.dir.path()).display().to_string();
    let folder = sample.path.display().to_string();
    check("ls", &printed(&sample, &["ls"]));
    check(
        "ls",
        &printed(&sample, &["ls", "--sort", "size-", "--state", "failed"]),
    );
    check("ls", &printed(&sample, &["ls", "--artifacts"]));
    check("ls", &printed(&sample, &["ls", "--objects"]));
    for by in ["model", "module", "release"] {
        check("du", &printed(&sample, &["du", "--by", by]));
    }
    for id in [&program, &artifact, &failure] {
        check("show", &printed(&sample, &["show", id]));
        check("log", &printed(&sample, &["log", id]));
    }
    let object = printed(&sample, &["show", &artifact])["object"]
        .as_str()
        .unwrap()[..12]
        .to_owned();
    check("show", &printed(&sample, &["show", &object]));
    check("release", &printed(&sample, &["release", "ls"]));
    check(
        "gc",
        &printed(
            &sample,
            &["gc", "--unreleased", "--keep-releases", "1", "--dry-run"],
        ),
    );
    check("why", &printed(&sample, &["why", "encode"]));
    check("why", &printed(&sample, &["why", &artifact]));
    check("diff", &printed(&sample, &["diff", &before, &program]));
    check("diff", &printed(&sample, &["diff", "minilm@1", "minilm@2"]));
    check("diff", &printed(&sample, &["diff", &folder, &folder]));
    check("stats", &printed(&sample, &["stats", &counts]));
    check(
        "report",
        &printed(&sample, &["report", "--counts", &counts]),
    );
    let figures = sample.dir.path().join("train.json");
    let text = r#"{"schema": 1, "model": "minilm", "module": "", "kind": "autograd", "device": "cpu",
        "artifact": {"first_step_seconds": 4.7, "steps_per_second": 1.5, "peak_bytes": 9},
        "eager": {"first_step_seconds": 1.4, "steps_per_second": 1.0, "peak_bytes": null}}"#;
    fs::write(&figures, text).unwrap();
    let figures = figures.display().to_string();
    let report = printed(&sample, &["report", "--training", &figures]);
    check("report", &report);
    assert_eq!(report["training"][0]["artifact"]["steps_per_second"], 1.5);
    let mut other = Command::new(env!("CARGO_BIN_EXE_precast"));
    let other = other.args(["report", "--training", &counts, "--store"]);
    let other = other.arg(&sample.path).output().unwrap();
    let errors = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{errors}");
    assert!(errors.contains("has no figures of training"), "{errors}");
    check(
        "counts",
        &serde_json::from_slice(&fs::read(&counts).unwrap()).unwrap(),
    );
}

#[test]
fn external_files_print_documents_of_the_schema() {
    let sample = sample();
    let file = |name: &str, bytes: &[u8]| {
        let path = sample.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let header =
        br#"{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let mut tensors = (header.len() as u64).to_le_bytes().to_vec();
    tensors.extend(header);
    tensors.extend([0; 8]);
    check(
        "inspect",
        &printed(&sample, &["inspect", &file("w.safetensors", &tensors)]),
    );
    let object = fs::read(compiled(sample.dir.path())).unwrap();
    check(
        "inspect",
        &printed(&sample, &["inspect", &file("a.so", &object)]),
    );
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let plain =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let metadata =
        br#"{"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX2", "AOTI_PLATFORM": "linux"}"#;
    for (name, bytes) in [
        ("m/a_metadata.json", &metadata[..]),
        ("m/a.wrapper.so", &object),
    ] {
        zip.start_file(name, plain).unwrap();
        std::io::Write::write_all(&mut zip, bytes).unwrap();
    }
    let package = zip.finish().unwrap().into_inner();
    check(
        "inspect",
        &printed(&sample, &["inspect", &file("m.pt2", &package)]),
    );
}

/// Returns a shared object with a cubin inside.
fn compiled(dir: &Path) -> std::path::PathBuf {
    let cubin = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/add-sm90a.cubin");
    let source = format!(
        "__asm__(\".section .rodata\\n.incbin \\\"{}\\\"\\n.previous\\n\");\nint AOTInductorModelContainerRun(void) {{ return 0; }}\n",
        cubin.display()
    );
    let (from, to) = (dir.join("k.c"), dir.join("k.so"));
    fs::write(&from, source).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&to)
        .arg(&from)
        .status()
        .unwrap();
    assert!(status.success());
    to
}

#[test]
fn a_field_that_is_not_documented_is_found() {
    let mut document = printed(&sample(), &["du"]);
    assert!(schema("du").is_valid(&document));
    document["total"]["surprise"] = Value::from(1);
    assert!(!schema("du").is_valid(&document));
}
