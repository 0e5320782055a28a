//! One store for the whole test run, built by the real worker from the example and from a small model.
//!
//! `LIBTORCH` and `PRECAST_PYTHON` together name another torch than that of `.venv`: the libtorch to run with, and the
//! Python to build with.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{Mutex, OnceLock, PoisonError},
};

use precast::{Device, Runtime, Store};
use safetensors::SafeTensors;
use serde_json::Value;

pub const MINILM: &str = "examples/minilm/precast.toml";
pub const SMALL: &str = "tests/numerics/small/precast.toml";
pub const VALUES: &str = "tests/numerics/values/precast.toml";
pub const STACK: &str = "examples/blocks/precast.toml";
pub const VLM: &str = "examples/vlm/precast.toml";

pub struct Lab {
    pub store: PathBuf,
    cases: PathBuf,
}

pub fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the Python that builds, and runs eager.
pub fn python() -> PathBuf {
    named("PRECAST_PYTHON", ".venv/bin/python")
}

/// Returns the libtorch of that Python.
pub fn libtorch() -> PathBuf {
    named("LIBTORCH", ".venv/libtorch")
}

fn named(variable: &str, default: &str) -> PathBuf {
    let path = std::env::var_os(variable).unwrap_or_else(|| default.into());
    checkout().join(path)
}

/// Returns a runtime over a store. Before it there is no libtorch, and so no tensor.
pub fn runtime(store: &Store) -> Runtime {
    Runtime::libtorch(Some(&libtorch()), false).unwrap();
    Runtime::new(store, Device::Cpu).unwrap()
}

/// Returns the shared store with the model of this spec; the first caller builds it.
pub fn lab(spec: &'static str) -> &'static Lab {
    built(spec);
    shared()
}

/// Returns the last document of the build of this spec in the shared store.
pub fn built(spec: &'static str) -> Value {
    static BUILT: Mutex<BTreeMap<&str, Value>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let build = || shared().json(&["build", "-f", spec]);
    built.entry(spec).or_insert_with(build).clone()
}

/// Returns the shared store. Its first build compiles a shim, and no other one does.
pub fn shared() -> &'static Lab {
    static LAB: OnceLock<Lab> = OnceLock::new();
    LAB.get_or_init(|| {
        // The store of the pass with the torch of `.venv` is kept beside that of another pass.
        let folder = |path: PathBuf| fs::canonicalize(path).ok();
        let name = match folder(libtorch()) == folder(checkout().join(".venv/libtorch")) {
            true => "numerics",
            false => "numerics-other-torch",
        };
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&root);
        Lab::at(&root)
    })
}

/// Returns `precast` in the checkout, with this Python and this store.
pub fn precast(store: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command
        .args(args)
        .current_dir(checkout())
        .env("PRECAST_STORE", store)
        .env("PRECAST_PYTHON", python())
        .env_remove("PRECAST_WORKER");
    command
}

/// Runs `eager.py` with these arguments, in the one Python of this test run that has imported torch for it.
fn eager(args: &[&str]) {
    static SERVER: OnceLock<Mutex<(Child, BufReader<ChildStdout>)>> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        // It ends with its stdin, which is this process's to the end.
        let mut child = Command::new(python())
            .arg("tests/numerics/eager.py")
            .current_dir(checkout())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Mutex::new((child, stdout))
    });
    let mut server = server.lock().unwrap_or_else(PoisonError::into_inner);
    let stdin = server.0.stdin.as_mut().unwrap();
    writeln!(stdin, "{}", serde_json::json!(args)).unwrap();
    let mut status = String::new();
    server.1.read_line(&mut status).unwrap();
    drop(server);
    assert_eq!(status.trim(), "0", "eager.py {args:?}: see stderr");
}

/// The exit code of a command, and what it printed.
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs a command to its end.
pub fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said {
        code: output.status.code(),
        out: text(&output.stdout),
        err: text(&output.stderr),
    }
}

/// Runs a command that must succeed.
#[track_caller]
pub fn well(command: &mut Command) -> Said {
    let said = said(command);
    let Said { code, out, err } = &said;
    assert_eq!(*code, Some(0), "{command:?}: {out}\n{err}");
    said
}

/// Runs a command that must succeed and returns the last JSON document it prints.
pub fn json(command: &mut Command) -> Value {
    let said = well(command);
    let documents = serde_json::Deserializer::from_str(&said.out).into_iter::<Value>();
    let last = documents.last();
    last.unwrap_or_else(|| panic!("{command:?} printed nothing\n{}", said.err))
        .unwrap()
}

/// Writes a project of one file: its spec, and its model.
pub fn project(folder: &Path, spec: &str, model: &str) -> String {
    fs::write(folder.join("model.py"), model).unwrap();
    let path = folder.join("precast.toml");
    fs::write(&path, spec).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Returns the programs of a build's last document, as `(program, state)`.
pub fn states(built: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let programs = built["programs"].as_array().unwrap().iter();
    let states = programs.map(|p| (text(&p["program"]), text(&p["state"])));
    states.collect()
}

impl Lab {
    /// Returns a lab of its own, whose store is empty.
    pub fn at(root: &Path) -> Self {
        Self {
            store: root.join("store"),
            cases: root.join("cases"),
        }
    }

    pub fn json(&self, args: &[&str]) -> Value {
        let args = [args, &["--format", "json"]].concat();
        json(&mut precast(&self.store, &args))
    }

    /// Asks eager for inputs and answers of `module` at these sizes; returns the file with the inputs.
    pub fn inputs(&self, spec: &str, model: &str, module: &str, case: &str) -> PathBuf {
        let folder = self.cases.join(model).join(module);
        let out = folder.to_str().unwrap();
        eager(&["--spec", spec, "--module", module, "--out", out, case]);
        folder.join(format!("{case}.inputs.safetensors"))
    }

    /// Asks eager for inputs and answers of `module` (`answer(ids,pixels)` for one of its variants) at these sizes,
    /// answers the same inputs with `precast run`, and compares: dtype and shape equal, every element within
    /// `atol + rtol * |eager|`. Returns the bucket and the rung that answered.
    pub fn agrees(
        &self,
        spec: &str,
        model: &str,
        module: &str,
        case: &str,
        rtol: f64,
        atol: f64,
    ) -> (String, String) {
        let folder = self.cases.join(model).join(module);
        let inputs = self.inputs(spec, model, module, case);
        let file = |kind: &str| folder.join(format!("{case}.{kind}.safetensors"));
        let got = file("got");
        let (name, _) = module.split_once('(').unwrap_or((module, ""));
        // The artifact is compared, also where eager happened to be faster.
        let run = ["run", name, "--compiled", "--model", model, "--inputs"];
        let files = [inputs.to_str().unwrap(), "--outputs", got.to_str().unwrap()];
        let ran = self.json(&[&run[..], &files].concat());

        let [got, want] = [got, file("eager")].map(|path| fs::read(path).unwrap());
        let [got, want] = [&got, &want].map(|file| SafeTensors::deserialize(file).unwrap());
        let outputs = ran["outputs"].as_array().unwrap();
        assert_eq!(outputs.len(), want.len());
        for (index, output) in outputs.iter().enumerate() {
            let got = got.tensor(output["name"].as_str().unwrap()).unwrap();
            let want = want.tensor(&format!("out.{index}")).unwrap();
            let what = format!("{model} {module} {case} output {index}");
            assert_eq!(got.dtype(), want.dtype(), "{what}");
            assert_eq!(got.shape(), want.shape(), "{what}");
            assert_eq!(want.dtype(), safetensors::Dtype::F32);
            let mut worst = 0.0_f64;
            for (index, (got, want)) in floats(got.data()).zip(floats(want.data())).enumerate() {
                let error = (got - want).abs();
                let near = error <= atol + rtol * want.abs();
                assert!(near, "{what}: {got} for {want} at element {index}");
                worst = worst.max(error);
            }
            let some = floats(want.data()).any(|value| value != 0.0);
            assert!(some, "eager answers nothing but zeros");
            println!("{what} differs from eager by at most {worst:.2e}");
        }
        // Eager for every size has no bucket.
        let bucket = ran["bucket"].as_object().into_iter().flatten();
        let sizes: Vec<String> = bucket.map(|(dim, size)| format!("{dim}={size}")).collect();
        (sizes.join(" "), ran["rung"].as_str().unwrap().to_owned())
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f64> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into())
}
