//! Small files that would need gigabytes or minutes to inspect. Each is answered or refused with little memory and time.
//!
//! `ulimit` kills a process over its limit; the test then reports a missing error message.

use std::{fs, process::Command};

use crate::sandbox::{Ran, Sandbox};

/// Writes the files. Without limits they take 6 GB, 78 s, 840 MB, and 4 GB.
const FILES: &str = r##"
import struct, zipfile

def elf(name, body, sections):
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 56, 0, 64, len(sections), 1)
    with open(name, "wb") as file:
        file.write(head + body)
        for kind, flags, offset, size, link in sections:
            file.write(struct.pack("<IIQQQQIIQQ", 0, kind, flags, 0, offset, size, link, 0, 0, 24))

SIZE = 7_600_000
elf("sections.so", bytes(SIZE), [(0, 0, 0, 0, 0), (3, 0, 64, 1, 0)] + [(1, 2, 64, SIZE, 0)] * 3000)

SYMBOLS = 1 << 19
names = bytearray(b"a" * SYMBOLS)
names[::4000] = bytes(len(names[::4000]))
table = b"".join(struct.pack("<IBBHQQ", index, 0x10, 0, 1, 0, 0) for index in range(SYMBOLS))
elf("symbols.so", bytes(names) + table, [
    (0, 0, 0, 0, 0), (3, 0, 64, len(names), 0), (11, 2, 64 + len(names), len(table), 1),
])

with zipfile.ZipFile("bomb.pt2", "w", zipfile.ZIP_DEFLATED) as file:
    for index in range(24):
        file.writestr(f"m/{index}_metadata.json", '{"a":[' + "0," * (5 << 20) + "0]}")

with open("huge.toml", "w") as file:
    for _ in range(300):
        file.write("# " + "x" * 999_997 + "\n")
"##;

/// Runs `precast` with 3 GiB of address space, of which libraries and threads have most, and a minute of one core.
fn limited(sandbox: &Sandbox, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command.args(args);
    sandbox.run_after("ulimit -v 3145728; ulimit -t 60", command)
}

#[test]
fn hostile_files_take_little_memory_and_time() {
    let sandbox = Sandbox::new();
    sandbox.write("files.py", FILES);
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/.venv/bin/python");
    let mut made = Command::new(python);
    made.args(["-S", "files.py"]).current_dir(sandbox.path(""));
    assert!(made.status().unwrap().success());
    for (name, largest, answer) in [
        (
            "sections.so",
            8 << 20,
            "`sections.so` is refused: its parts overlap",
        ),
        ("symbols.so", 14 << 20, "its names overlap"),
        // Its metadata is read up to a limit, and then ignored.
        ("bomb.pt2", 512 << 10, "24 members"),
    ] {
        let size = fs::metadata(sandbox.path(name)).unwrap().len();
        assert!(size < largest, "{name}: {size}");
        let ran = limited(&sandbox, &["inspect", name]);
        assert_eq!(ran.code == 0, name == "bomb.pt2", "{}", ran.text());
        ran.shows(answer);
    }
    limited(&sandbox, &["plan", "huge.toml"])
        .exits(2)
        .says("huge.toml");
}
