//! A folder of its own for each test: a fake model with its spec, a store, and a worker that needs no torch.
//!
//! ```text
//! <temp>/
//!   model.py  precast.toml   edited by the test
//!   worker                   starts tests/fake/worker.py
//!   artifacts/               the store
//!   tmp/                     TMPDIR, to find files left there
//! ```

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use tempfile::TempDir;

/// The torch of the checkout.
pub const LIBTORCH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/.venv/libtorch");

const MODEL: &str = r#"SCALE = 2.0
OFFSET = 1.0


def load():
    return {"": "Model", "encoder": "Encoder", "encoder.layer.0": "Layer", "encoder.layer.1": "Layer"}
"#;

const SPEC: &str = r#"schema = 1

[model]
name = "fake"
entry = "model:load"

[target]
device = "cpu"

[[module]]
name = "affine"
[module.inputs]
x = { dtype = "float32", shape = ["batch", 3], pad = 0 }
[module.buckets]
batch = [1, 4]
"#;

pub struct Sandbox {
    root: TempDir,
}

impl Sandbox {
    pub fn new() -> Self {
        let root = TempDir::new().unwrap();
        let sandbox = Self { root };
        sandbox.write("model.py", MODEL);
        sandbox.write("precast.toml", SPEC);
        fs::create_dir(sandbox.path("tmp")).unwrap();
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR"));
        let python = checkout.join(".venv/bin/python");
        let worker = checkout.join("tests/fake/worker.py");
        sandbox.script(
            "worker",
            &format!("exec {} -S {}", python.display(), worker.display()),
        );
        sandbox
    }

    /// Returns a sandbox whose model is built.
    pub fn built() -> Self {
        let sandbox = Self::new();
        let ran = sandbox.run(&["build", "-q"]);
        assert_eq!(ran.code, 0, "{}", ran.text());
        sandbox
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Writes an executable shell script.
    ///
    /// A process of its own writes it: a child of another test could inherit this process's open handle, and a script
    /// that is open for writing can't be run.
    pub fn script(&self, name: &str, body: &str) {
        let mut writer = Command::new("sh")
            .args(["-c", "rm -f \"$0\" && cat > \"$0\" && chmod 755 \"$0\""])
            .arg(self.path(name))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let text = format!("#!/bin/sh\n{body}\n");
        // Dropped here, which is the end of the text.
        let written = writer.stdin.take().unwrap().write_all(text.as_bytes());
        assert!(writer.wait().unwrap().success());
        written.unwrap();
    }

    /// Replaces `from`, which must be there, by `to`.
    pub fn edit(&self, name: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(name)).unwrap();
        assert!(text.contains(from), "`{from}` is not in {name}");
        self.write(name, text.replacen(from, to, 1));
    }

    /// Adds a line to the end of a file.
    pub fn append(&self, name: &str, line: &str) {
        let text = fs::read_to_string(self.path(name)).unwrap();
        self.write(name, format!("{text}{line}\n"));
    }

    /// Returns `precast` in this folder, with nothing of the caller's environment but `PATH`.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
        command
            .args(args)
            .current_dir(self.root.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("TMPDIR", self.path("tmp"))
            .env("PRECAST_WORKER", self.path("worker"))
            .env("LIBTORCH", LIBTORCH)
            .env("FAKE_SHIM", &precast_shim::testing::compiled().answer);
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.output(&mut self.command(args))
    }

    pub fn output(&self, command: &mut Command) -> Ran {
        Ran::new(command.output().unwrap(), self.root.path())
    }

    /// Returns the JSON document that a command prints.
    pub fn json(&self, args: &[&str]) -> Value {
        let ran = self.run(&[args, &["--format", "json"]].concat());
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}:\n{}", ran.text()))
    }

    /// Writes named float32 tensors as a safetensors file.
    pub fn tensors(&self, name: &str, tensors: &[(&str, &[usize], &[f32])]) {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes()).collect())
            .collect();
        let views: BTreeMap<&str, TensorView<'_>> = tensors
            .iter()
            .zip(&bytes)
            .map(|((name, shape, _), bytes)| {
                (
                    *name,
                    TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap(),
                )
            })
            .collect();
        self.write(name, safetensors::serialize(views, None).unwrap());
    }

    /// Reads the only tensor of a safetensors file, which is float32.
    pub fn tensor(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let bytes = fs::read(self.path(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let [name] = file.names()[..] else {
            panic!("{:?}", file.names())
        };
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::F32);
        let values = tensor
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        (tensor.shape().to_vec(), values)
    }

    /// Returns every file under a folder of the sandbox, with `/` and sorted.
    pub fn files(&self, folder: &str) -> Vec<PathBuf> {
        let mut found: Vec<_> = walkdir::WalkDir::new(self.path(folder))
            .into_iter()
            .map(Result::unwrap)
            .filter(|entry| entry.file_type().is_file())
            .map(walkdir::DirEntry::into_path)
            .collect();
        found.sort();
        found
    }
}

/// Waits until something is so: for minutes, because a machine may have much else to do.
#[allow(dead_code, reason = "each test target uses a part of it")]
pub fn wait_until(what: &str, is: impl Fn() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < Duration::from_secs(600), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns whether a process runs; a zombie does not.
#[allow(dead_code, reason = "each test target uses a part of it")]
pub fn alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Exit code and output of a command.
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    fn new(output: Output, root: &Path) -> Self {
        let root = root.canonicalize().unwrap();
        let text =
            |bytes: &[u8]| String::from_utf8_lossy(bytes).replace(root.to_str().unwrap(), "[ROOT]");
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }

    /// Returns everything about it in one text, as the snapshots show it.
    pub fn text(&self) -> String {
        let mut text = format!("exit code {}\n", self.code);
        let stderr = self.weights_after_model();
        for (name, content) in [("stdout", &self.stdout), ("stderr", &stderr)] {
            if !content.is_empty() {
                text += &format!("----- {name}\n{}\n", content.trim_end());
            }
        }
        text
    }

    /// Returns stderr with the line of the weights after that of the model: the weights are stored beside the first
    /// capture, and either may end first.
    fn weights_after_model(&self) -> String {
        let (weights, mut lines): (Vec<&str>, Vec<&str>) =
            (self.stderr.lines()).partition(|line| line.starts_with("weights: "));
        if let Some(model) = lines.iter().position(|line| line.starts_with("model: ")) {
            lines.splice(model + 1..model + 1, weights);
            return lines.join("\n");
        }
        self.stderr.clone()
    }
}

/// Patterns of the values that differ between two runs of a command, with their placeholders.
pub const FILTERS: &[(&str, &str)] = &[
    // Values of other widths move the columns of a table.
    (r"(\S) {2,}", "$1  "),
    (r"(?m) +$", ""),
    (r"\b[0-9a-f]{64}\b", "[DIGEST]"),
    (r"\b[0-9a-f]{12}\b", "[ID]"),
    (
        r"\b(\d+ min )?\d+(\.\d+)? ?(ns|µs|us|ms|s|min|m|h)\b",
        "[TIME]",
    ),
    (r"\b\d+(\.\d+)? ?(B|KiB|MiB|GiB)\b", "[SIZE]"),
    (r"torch211-cxx11-cpu-[\w.-]+", "[TARGET]"),
    (r"features \[.*\]", "features [FEATURES]"),
    (r"CPU features `[^`]*`", "CPU features [FEATURES]"),
    (r"torch_git \w+", "torch_git [GIT]"),
    (r"created \d+", "created [TIME]"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "[TIME]"),
    (r"(cosine|seconds_per_run|capture) [\d.e-]+", "$1 [NUMBER]"),
    (r"\d+\.\d+×", "[RATIO]×"),
    (r"\b2\.11\.0\+\w+", "[TORCH]"),
    (r"Python 3\.\d+\.\d+", "Python [PYTHON]"),
];

/// Compares exit code, stdout and stderr with an inline snapshot.
macro_rules! assert_ran {
    ($ran:expr, @$snapshot:literal) => {
        insta::with_settings!({ filters => $crate::sandbox::FILTERS.to_vec() }, {
            insta::assert_snapshot!($ran.text(), @$snapshot);
        })
    };
}
pub(crate) use assert_ran;

/// Runs a command in a sandbox and compares exit code, stdout and stderr with an inline snapshot.
macro_rules! assert_run {
    ($sandbox:expr, $args:expr, @$snapshot:literal) => {{
        let ran = $sandbox.run(&$args);
        $crate::sandbox::assert_ran!(ran, @$snapshot);
        ran
    }};
}
pub(crate) use assert_run;
