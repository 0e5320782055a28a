//! The overhead of a call through the runtime over the artifact's own C function: `make bench-overhead`.
//!
//! The artifact is a fake whose work takes a fraction of a microsecond, so that the difference shows. `raw` is the C
//! call with new input handles and its outputs freed, as every caller must do; `run` is `Model::run`; `eight inputs`
//! shows the cost of validating more inputs, and `refused` the cost of a bad call of each kind.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "a benchmark panics where it fails"
)]

#[path = "../tests/fake/mod.rs"]
mod fake;

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_void},
    path::{Path, PathBuf},
};

use criterion::{Criterion, criterion_group};
use fake::{Fake, Memory};
use precast_runtime::Model;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

type Create = unsafe extern "C" fn(*mut *mut c_void, usize, *const c_char, *const c_char) -> i32;
type Run = unsafe extern "C" fn(
    *mut c_void,
    *mut *mut c_void,
    usize,
    *mut *mut c_void,
    usize,
    *mut c_void,
    *mut c_void,
) -> i32;
type Bind = unsafe extern "C" fn(
    *mut c_void,
    *const (*const c_char, *mut c_void),
    usize,
    bool,
    bool,
) -> i32;

unsafe extern "C" {
    fn aoti_torch_new_tensor_handle(tensor: *mut c_void, out: *mut *mut c_void) -> i32;
    fn aoti_torch_delete_tensor_object(tensor: *mut c_void) -> i32;
}

/// The C functions, called as directly as Rust can.
struct Raw {
    container: *mut c_void,
    run: Run,
    _weights: Tensor,
}

impl Raw {
    fn new(fake: &Fake) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), fake.object()).unwrap();
        let weights = Tensor::from_slice(&[2.0f32]);
        // SAFETY: the fake exports these functions with these types, and is never unloaded.
        unsafe {
            let library = Box::leak(Box::new(libloading::Library::new(file.path()).unwrap()));
            let create: Create = *library
                .get(b"AOTInductorModelContainerCreateWithDevice")
                .unwrap();
            let bind: Bind = *library
                .get(b"AOTInductorModelContainerUpdateUserManagedConstantBufferPairs")
                .unwrap();
            let run: Run = *library
                .get(b"AOTInductorModelContainerRunSingleThreaded")
                .unwrap();
            let mut container = std::ptr::null_mut();
            assert_eq!(
                create(&mut container, 1, c"cpu".as_ptr(), std::ptr::null()),
                0
            );
            let name: &CStr = c"c0";
            let pair = (name.as_ptr(), weights.as_ptr().cast_mut().cast());
            assert_eq!(bind(container, &pair, 1, false, true), 0);
            Self {
                container,
                run,
                _weights: weights,
            }
        }
    }

    fn call(&self, inputs: &[Tensor]) {
        let mut handles = [std::ptr::null_mut(); 8];
        let mut output = std::ptr::null_mut();
        // SAFETY: the inputs fit the fake's layouts; it steals the handles, and the output is freed here.
        unsafe {
            for (handle, input) in handles.iter_mut().zip(inputs) {
                aoti_torch_new_tensor_handle(input.as_ptr().cast_mut().cast(), handle);
            }
            let none = std::ptr::null_mut();
            assert_eq!(
                (self.run)(
                    self.container,
                    handles.as_mut_ptr(),
                    inputs.len(),
                    &mut output,
                    1,
                    none,
                    none
                ),
                0
            );
            aoti_torch_delete_tensor_object(output);
        }
    }
}

fn overhead(criterion: &mut Criterion) {
    for (name, inputs) in [("one input", 1), ("eight inputs", 8)] {
        let fake = Fake::sized(2, 2).inputs(inputs);
        let model = load(Memory::with(std::slice::from_ref(&fake)));
        let raw = Raw::new(&fake);
        let tensors = good(inputs, &[2, 2]);
        let mut group = criterion.benchmark_group(name);
        group.bench_function("raw", |bench| bench.iter(|| raw.call(&tensors)));
        group.bench_function("run", |bench| {
            bench.iter(|| model.run("f", &tensors).unwrap())
        });
        let small = good(inputs, &[1, 2]);
        group.bench_function("run padded", |bench| {
            bench.iter(|| model.run("f", &small).unwrap())
        });
        group.finish();
    }
}

/// A step of a session with one small state, beside a call of a program without any.
fn session(criterion: &mut Criterion) {
    let plain = load(Memory::with(&[Fake::sized(1, 2).constants(0)]));
    let stateful = load(Memory::with(&[Fake::sized(1, 2).constants(0).stateful()]));
    let mut session = stateful.session().unwrap();
    let tensors = good(1, &[1, 2]);
    let mut group = criterion.benchmark_group("session");
    group.bench_function("call", |bench| {
        bench.iter(|| plain.run("f", &tensors).unwrap())
    });
    group.bench_function("step", |bench| {
        bench.iter(|| session.run("f", &tensors).unwrap())
    });
    group.finish();
}

/// The cost of checking 1,000 values of an input: a call of a program with bounds, and of one without.
fn values(criterion: &mut Criterion) {
    let fake = Fake::sized(10, 100).inputs(2);
    let mut group = criterion.benchmark_group("values");
    for (name, bounds) in [("unchecked", None), ("1,000 int64", Some([0, 30_522]))] {
        let mut memory = Memory::with(std::slice::from_ref(&fake));
        for program in memory.programs.values_mut() {
            program.inputs[1].bounds = bounds;
        }
        let model = load(memory);
        let tensors = good(2, &[10, 100]);
        group.bench_function(name, |bench| {
            bench.iter(|| model.run("f", &tensors).unwrap())
        });
    }
    group.finish();
}

/// The cost of a refused call, by its mistake. `the last of eight` is the time of the checks of eight inputs, seven of
/// them right.
fn refused(criterion: &mut Criterion) {
    let model = load(Memory::with(&[Fake::sized(8, 4).inputs(8)]));
    let at = |index: usize, tensor: Tensor| {
        let mut inputs = good(8, &[8, 4]);
        inputs[index] = tensor;
        inputs
    };
    let x = || Tensor::ones([8, 4], (Kind::Float, CPU));
    let complex = Tensor::zeros([8, 4], (Kind::ComplexFloat, CPU));
    let nothing = Tensor::f_internal_efficientzerotensor([8, 4], (Kind::Float, CPU)).unwrap();
    let bytes = Tensor::zeros([129], (Kind::Uint8, CPU));
    // Of four bytes at an odd address.
    let odd = bytes.slice(0, 1, 129, 1).data_ptr().cast::<u8>();
    // SAFETY: the 128 bytes behind `odd` live as long as `bytes`, to the end of this function.
    let odd = unsafe { Tensor::from_blob(odd, &[8, 4], &[4, 1], Kind::Float, CPU) };
    let calls = [
        ("the last of eight", at(7, x())),
        ("count", good(7, &[8, 4])),
        ("dtype", at(0, x().to_kind(Kind::Double))),
        ("dtype no artifact takes", at(0, complex.shallow_clone())),
        ("rank", at(0, x().view([8, 2, 2]))),
        ("no bucket", good(8, &[9, 4])),
        (
            "absurd sizes on few bytes",
            at(
                0,
                Tensor::ones([1, 4], (Kind::Float, CPU)).expand([1 << 60, 4], false),
            ),
        ),
        (
            "sizes that disagree",
            at(7, Tensor::zeros([8, 3], (Kind::Int64, CPU))),
        ),
        (
            "no elements",
            at(0, Tensor::zeros([0, 4], (Kind::Float, CPU))),
        ),
        (
            "strides",
            at(0, Tensor::ones([4, 8], (Kind::Float, CPU)).transpose(0, 1)),
        ),
        (
            "overlapping",
            at(
                0,
                Tensor::ones([1, 4], (Kind::Float, CPU)).expand([8, 4], false),
            ),
        ),
        ("misaligned", at(0, odd)),
        ("undefined", at(0, Tensor::new())),
        ("sparse", at(0, x().to_sparse_sparse_dim(2))),
        (
            "quantised",
            at(0, x().quantize_per_tensor(0.5, 0, Kind::QInt8)),
        ),
        ("negated view", at(0, complex.conj().imag())),
        ("no memory behind it", at(0, nothing)),
    ];
    let mut group = criterion.benchmark_group("refused");
    for (name, inputs) in &calls {
        group.bench_function(*name, |bench| {
            bench.iter(|| model.run("f", inputs).unwrap_err())
        });
    }
    let inputs = good(8, &[8, 4]);
    group.bench_function("module", |bench| {
        bench.iter(|| model.run("g", &inputs).unwrap_err())
    });
    let names = [
        "x", "ids.0", "ids.1", "ids.2", "ids.3", "ids.4", "ids.5", "mask",
    ];
    let named: Vec<(&str, &Tensor)> = names.into_iter().zip(&inputs).collect();
    group.bench_function("names", |bench| {
        bench.iter(|| model.run_named("f", &named).unwrap_err())
    });
    group.finish();
}

const CPU: tch::Device = tch::Device::Cpu;

fn load(memory: Memory) -> Model {
    let runtime = memory.runtime();
    runtime.load("fake").unwrap()
}

/// Returns right inputs of a fake.
fn good(count: usize, sizes: &[i64]) -> Vec<Tensor> {
    let kinds = std::iter::once(Kind::Float).chain(std::iter::repeat(Kind::Int64));
    kinds
        .take(count)
        .map(|kind| Tensor::ones(sizes, (kind, CPU)))
        .collect()
}

criterion_group!(benches, overhead, session, values, refused);

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
    if let Some(path) = std::env::var_os("PRECAST_FIGURES") {
        save(path.as_ref());
    }
}

/// Keeps criterion's measurements, in nanoseconds, with the machine.
fn save(path: &Path) {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let home = std::env::var_os("CRITERION_HOME")
        .map_or_else(|| root.join("target/criterion"), PathBuf::from);
    let read = |path: PathBuf| -> Option<Value> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    };
    let mut figures = BTreeMap::<String, BTreeMap<String, Value>>::new();
    for group in ["one input", "eight inputs", "session", "values", "refused"] {
        for entry in std::fs::read_dir(home.join(group)).unwrap().flatten() {
            let folder = entry.path().join("new");
            let (Some(name), Some(estimates)) = (
                read(folder.join("benchmark.json")),
                read(folder.join("estimates.json")),
            ) else {
                continue;
            };
            let name = name["function_id"].as_str().unwrap().to_owned();
            let nanos = |value: &Value| (value.as_f64().unwrap() * 10.0).round() / 10.0;
            let (median, around) = (
                &estimates["median"],
                &estimates["median"]["confidence_interval"],
            );
            figures.entry(group.to_owned()).or_default().insert(
                name,
                json!({
                    "median": nanos(&median["point_estimate"]),
                    "low": nanos(&around["lower_bound"]),
                    "high": nanos(&around["upper_bound"]),
                }),
            );
        }
    }
    let median = |group: &str, name: &str| figures[group][name]["median"].as_f64().unwrap();
    let added = |group: &str| (median(group, "run") - median(group, "raw")).round();
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name"));
    let target = fake::target();
    let document = json!({
        "schema": 1,
        "command": "make bench-overhead",
        "date": printed("date", &["-u", "+%F"]),
        "commit": printed("git", &["rev-parse", "--short", "HEAD"]),
        "machine": {
            "cpu": cpu.map(|text| text.trim_start_matches([':', ' ', '\t'])),
            "cores": std::thread::available_parallelism().map_or(1, usize::from),
            "kernel": printed("uname", &["-sr"]),
            "load_average": std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim(),
        },
        "versions": {
            "precast": env!("CARGO_PKG_VERSION"),
            "torch": target.torch,
            "rustc": printed("rustc", &["--version"]),
            "g++": printed("g++", &["-dumpfullversion"]),
        },
        "unit": "nanoseconds a call: the median, and the 95 % interval of the median",
        "added": { "one input": added("one input"), "eight inputs": added("eight inputs") },
        "step_over_call": (median("session", "step") - median("session", "call")).round(),
        "figures": figures,
    });
    let text = serde_json::to_string_pretty(&document).unwrap();
    std::fs::write(path, format!("{text}\n")).unwrap();
}

fn printed(program: &str, args: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program)
        .args(args)
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
