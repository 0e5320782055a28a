//! Stores with many programs. `make bench-store` measures a million.

#[allow(unsafe_code, reason = "it waits by `wait4`")]
#[path = "../sample/ran.rs"]
mod ran;
#[path = "../sample/rows.rs"]
mod rows;

use std::{path::Path, process::Command};

use precast::Store;
use tempfile::TempDir;

const FEW: u64 = 2_000;
const MANY: u64 = 20_000;

/// Makes a store whose index has `count` programs.
fn store(count: u64) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    drop(Store::create(&path).unwrap());
    rows::write(&path, count);
    dir
}

#[test]
#[ignore = "long: `make test-long`"]
fn memory_does_not_grow_with_the_number_of_programs() {
    let (few, many) = (store(FEW), store(MANY));
    for args in [
        &["ls"][..],
        &["ls", "--ids"],
        &["ls", "--format", "json"],
        &["ls", "--sort", "bucket-"],
        &["diff", "store", "store"],
        &["du"],
        &["du", "--by", "module"],
    ] {
        let run = |dir: &TempDir| {
            let path = dir.path().join("store");
            let args: Vec<&str> = (args.iter())
                .map(|arg| match *arg {
                    "store" => path.to_str().unwrap(),
                    arg => arg,
                })
                .collect();
            ran::run(&args, &path)
        };
        let (small, large) = (run(&few), run(&many));
        if args[0] == "ls" {
            assert_eq!(large.lines - small.lines, MANY - FEW, "{args:?}");
        }
        let grown = large.peak.saturating_sub(small.peak);
        // SQLite's caches fill up. A sorted list holds its rows, a comparison the names of both stores.
        let held = args.contains(&"--sort") || args[0] == "diff";
        assert!(
            grown < if held { 20 << 20 } else { 3 << 20 },
            "{args:?} took {} KiB more for {} more programs",
            grown >> 10,
            MANY - FEW
        );
    }
}

#[test]
fn the_first_lines_of_a_long_list_end_it_quietly() {
    let dir = store(MANY);
    let precast = Path::new(env!("CARGO_BIN_EXE_precast")).display();
    let all = "ls; ls --format json; ls --sort size-; ls --ids; gc --unreleased --dry-run";
    for args in all.split("; ") {
        let script = format!(
            "'{precast}' {args} 2>err | head -n 1 >first; echo ${{PIPESTATUS[0]}}; cat err"
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]).current_dir(dir.path());
        let output = command
            .env("PRECAST_STORE", dir.path().join("store"))
            .output()
            .unwrap();
        let first = std::fs::read_to_string(dir.path().join("first")).unwrap();
        assert!(!first.is_empty(), "{args}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{args}");
    }
}
