//! The output of `--format json` matches docs/schema in every field.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use crate::{
    sample::{self, Sample, sample},
    schemas::{check, schema},
};

fn command(sample: &Sample, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command
        .args(args)
        .args(["--format", "json", "--store"])
        .arg(&sample.path);
    command
}

fn printed(sample: &Sample, args: &[&str]) -> Value {
    let output = command(sample, args).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
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
    let object = printed(&sample, &["show", &artifact])["object"]
        .as_str()
        .unwrap()[..12]
        .to_owned();
    let counts = sample::counts(sample.dir.path()).display().to_string();
    let store = sample.path.display();
    for line in [
        "ls",
        "ls --sort size- --state failed",
        "ls --artifacts",
        "ls --objects",
        "du --by model",
        "du --by module",
        "du --by release",
        &format!("show {program}"),
        &format!("show {artifact}"),
        &format!("show {failure}"),
        &format!("show {object}"),
        &format!("log {program}"),
        &format!("log {artifact}"),
        &format!("log {failure}"),
        "release ls",
        "gc --unreleased --keep-releases 1 --dry-run",
        "why encode",
        &format!("why {artifact}"),
        &format!("diff {} {program}", sample.before.short()),
        "diff minilm@1 minilm@2",
        &format!("diff {store} {store}"),
        &format!("stats {counts}"),
        &format!("report --counts {counts}"),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        check(words[0], &printed(&sample, &words));
    }
    check(
        "counts",
        &serde_json::from_slice(&fs::read(&counts).unwrap()).unwrap(),
    );
}

#[test]
fn a_report_has_figures_of_training() {
    let sample = sample();
    let figures = sample.dir.path().join("train.json");
    let text = r#"{"schema": 1, "model": "minilm", "module": "", "kind": "autograd", "device": "cpu",
        "artifact": {"first_step_seconds": 4.7, "steps_per_second": 1.5, "peak_bytes": 9},
        "eager": {"first_step_seconds": 1.4, "steps_per_second": 1.0, "peak_bytes": null}}"#;
    fs::write(&figures, text).unwrap();
    let report = printed(
        &sample,
        &["report", "--training", figures.to_str().unwrap()],
    );
    check("report", &report);
    assert_eq!(report["training"][0]["artifact"]["steps_per_second"], 1.5);
    let counts = sample::counts(sample.dir.path());
    let other = command(&sample, &["report", "--training", counts.to_str().unwrap()])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{errors}");
    assert!(errors.contains("has no figures of training"), "{errors}");
}

#[test]
fn external_files_print_documents_of_the_schema() {
    let sample = sample();
    let inspected = |name: &str, bytes: &[u8]| {
        let path = sample.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        check(
            "inspect",
            &printed(&sample, &["inspect", path.to_str().unwrap()]),
        );
    };
    let header =
        br#"{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let mut tensors = (header.len() as u64).to_le_bytes().to_vec();
    tensors.extend(header);
    tensors.extend([0; 8]);
    inspected("w.safetensors", &tensors);
    let object = fs::read(compiled(sample.dir.path())).unwrap();
    inspected("a.so", &object);
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
    inspected("m.pt2", &zip.finish().unwrap().into_inner());
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
    let mut cc = Command::new("cc");
    let status = cc
        .args(["-shared", "-fPIC", "-o"])
        .args([&to, &from])
        .status();
    assert!(status.unwrap().success());
    to
}

#[test]
fn a_field_that_is_not_documented_is_found() {
    let mut document = printed(&sample(), &["du"]);
    assert!(schema("du").is_valid(&document));
    document["total"]["surprise"] = Value::from(1);
    assert!(!schema("du").is_valid(&document));
}
