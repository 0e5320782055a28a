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

/// Runs `affine` on `x.safetensors`, into `y.safetensors`.
pub const RUN: [&str; 7] = [
    "run",
    "affine",
    "--inputs",
    "x.safetensors",
    "--outputs",
    "y.safetensors",
    "-q",
];

/// The graph that eager runs for the fake model: `2 * x + 1`.
pub const EAGER: &str = r#"{"format": 1, "inputs": 1, "outputs": [2], "calls": [
  {"op": "aten::mul.Scalar", "args": {"self": {"value": 0}, "other": {"float": "2.0"}}, "results": [1]},
  {"op": "aten::add.Scalar", "args": {"self": {"value": 1}, "other": {"float": "1.0"}, "alpha": 1}, "results": [2]}
]}"#;

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
        sandbox.ok(&["build", "-q"]);
        sandbox
    }

    /// Returns a sandbox whose model's file has these `# fake:` lines for the worker.
    pub fn steered(lines: &[&str]) -> Self {
        let sandbox = Self::new();
        for line in lines {
            sandbox.append("model.py", &format!("# fake: {line}"));
        }
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

    /// Adds a line to the first module of the spec.
    pub fn module(&self, line: &str) {
        let name = "name = \"affine\"\n";
        self.edit("precast.toml", name, &format!("{name}{line}\n"));
    }

    /// Names `w.safetensors` as the model's weights in the spec.
    pub fn weights_file(&self) {
        let entry = "entry = \"model:load\"\n";
        let with = format!("{entry}weights = \"w.safetensors\"\n");
        self.edit("precast.toml", entry, &with);
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

    /// Runs a command after a line of the shell, such as `umask 0`, in the same process.
    pub fn run_after(&self, line: &str, command: Command) -> Ran {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{line}; exec \"$0\" \"$@\"")]);
        shell.arg(command.get_program()).args(command.get_args());
        let set = command.get_envs();
        shell.envs(set.filter_map(|(name, value)| Some((name, value?))));
        self.output(shell.current_dir(self.root.path()))
    }

    /// Runs a command that must succeed.
    pub fn ok(&self, args: &[&str]) -> Ran {
        self.run(args).exits(0)
    }

    /// Returns the number of releases.
    pub fn releases(&self) -> usize {
        count(&self.json(&["release", "ls"])["releases"])
    }

    /// Sets the buckets of the spec.
    pub fn buckets(&self, batch: &str) {
        self.edit(
            "precast.toml",
            "batch = [1, 4]",
            &format!("batch = [{batch}]"),
        );
    }

    /// Writes inputs with this many rows of 0, 1, 2, … to `x.safetensors`.
    pub fn rows(&self, count: usize) {
        let values: Vec<f32> = (0..count * 3).map(|i| i as f32).collect();
        self.tensors("x.safetensors", &[("x", &[count, 3], &values)]);
    }

    /// Returns the answer to `x.safetensors`, with more arguments of `run`.
    pub fn answer(&self, more: &[&str]) -> Vec<f32> {
        self.ok(&[&RUN[..], more].concat());
        self.tensor("y.safetensors").1
    }

    /// Returns the JSON document that a command prints.
    pub fn json(&self, args: &[&str]) -> Value {
        self.run(&[args, &["--format", "json"]].concat()).json()
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

/// Returns the number of items of a JSON list.
pub fn count(list: &Value) -> usize {
    list.as_array().unwrap_or_else(|| panic!("{list}")).len()
}

/// Returns the state of each program, from a build's last document: `affine batch=1: built`.
pub fn states(last: &Value) -> Vec<String> {
    let programs = last["programs"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    programs
        .map(|p| format!("{}: {}", text(&p["program"]), text(&p["state"])))
        .collect()
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
    /// Returns the result of a command, with `root` replaced in its output.
    pub fn new(output: Output, root: &Path) -> Self {
        let root = root.canonicalize().unwrap();
        let text =
            |bytes: &[u8]| String::from_utf8_lossy(bytes).replace(root.to_str().unwrap(), "[ROOT]");
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }

    /// Fails unless the command ended with this exit code.
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}", self.text());
        self
    }

    /// Fails unless stderr has this text.
    pub fn says(&self, text: &str) {
        assert!(
            self.stderr.contains(text),
            "`{text}` is not in\n{}",
            self.text()
        );
    }

    /// Fails unless stdout has this text.
    pub fn prints(&self, text: &str) {
        assert!(
            self.stdout.contains(text),
            "`{text}` is not in\n{}",
            self.text()
        );
    }

    /// Fails unless stdout or stderr has this text.
    pub fn shows(&self, text: &str) {
        assert!(
            self.text().contains(text),
            "`{text}` is not in\n{}",
            self.text()
        );
    }

    /// Returns the JSON document of stdout.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}:\n{}", self.text()))
    }

    /// Returns the JSON documents of stdout, one a line.
    pub fn events(&self) -> Vec<Value> {
        let parse =
            |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}:\n{}", self.text()));
        self.stdout.lines().map(parse).collect()
    }

    /// Returns the last JSON document of stdout.
    pub fn last(&self) -> Value {
        let last = self.events().pop();
        last.unwrap_or_else(|| panic!("{}", self.text()))
    }

    /// Returns the text without the lines of finished tasks, whose order `build` has in full.
    pub fn brief(&self) -> String {
        let tasks = [
            "worker", "model", "weights", "shim", "capture", "compile", "gate", "check", "measure",
        ];
        let finished = |line: &&str| {
            let task = line
                .split_once(": ")
                .is_some_and(|(task, _)| tasks.contains(&task));
            task && line.ends_with(')')
        };
        self.text()
            .lines()
            .filter(|line| !finished(line))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Returns everything about it in one text, as the snapshots show it: exit code and streams. The output of a command
    /// that succeeded has no heading.
    pub fn text(&self) -> String {
        let stderr = self.weights_after_model();
        let streams = [("stdout", &self.stdout), ("stderr", &stderr)];
        let streams = streams.into_iter().filter(|(_, text)| !text.is_empty());
        let parts = streams
            .enumerate()
            .map(|(at, (name, text))| match (at, name) {
                (0, "stdout") if self.code == 0 => format!("{}\n", text.trim_end()),
                (0, _) => format!("exit code {}, {name}\n{}\n", self.code, text.trim_end()),
                _ => format!("----- {name}\n{}\n", text.trim_end()),
            });
        let parts: Vec<String> = parts.collect();
        match &parts[..] {
            [] => format!("exit code {}\n", self.code),
            _ => parts.concat(),
        }
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

/// Compares exit code, stdout and stderr with an inline snapshot; `brief` leaves out the lines of finished tasks.
macro_rules! assert_ran {
    (brief $ran:expr, @$snapshot:literal) => {
        insta::with_settings!({ filters => $crate::sandbox::FILTERS.to_vec() }, {
            insta::assert_snapshot!($ran.brief(), @$snapshot);
        })
    };
    ($ran:expr, @$snapshot:literal) => {
        insta::with_settings!({ filters => $crate::sandbox::FILTERS.to_vec() }, {
            insta::assert_snapshot!($ran.text(), @$snapshot);
        })
    };
}
pub(crate) use assert_ran;

/// Runs a command in a sandbox and compares exit code, stdout and stderr with an inline snapshot.
macro_rules! assert_run {
    (brief $sandbox:expr, $args:expr, @$snapshot:literal) => {{
        let ran = $sandbox.run(&$args);
        $crate::sandbox::assert_ran!(brief ran, @$snapshot);
    }};
    ($sandbox:expr, $args:expr, @$snapshot:literal) => {{
        let ran = $sandbox.run(&$args);
        $crate::sandbox::assert_ran!(ran, @$snapshot);
        ran
    }};
}
pub(crate) use assert_run;
