//! The overhead of a call through the runtime over the artifact's own C function: `make bench-overhead`.
//!
//! The artifact is a fake whose work takes a fraction of a microsecond, so that the difference shows. `raw` is the C
//! call with new input handles and its outputs freed, as every caller must do; `run` is `Model::run`; `eight inputs`
//! shows the cost of validating more inputs, and `refused` the cost of a bad call of each kind.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    unsafe_code,
    reason = "a benchmark panics where it fails"
)]

#[path = "../tests/fake/mod.rs"]
mod fake;
#[path = "../tests/torture/report.rs"]
mod report;

use std::{
    ffi::{c_char, c_void},
    fs,
    hint::black_box,
    time::{Duration, Instant},
};

use fake::{Fake, Memory};
use precast_runtime::Model;
use report::{machine, printed};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(*mut Handle, usize, *const c_char, *const c_char) -> i32;
type Pair = (*const c_char, Handle);
type Bind = unsafe extern "C" fn(Handle, *const Pair, usize, bool, bool) -> i32;
type Run =
    unsafe extern "C" fn(Handle, *mut Handle, usize, *mut Handle, usize, Handle, Handle) -> i32;

unsafe extern "C" {
    fn aoti_torch_new_tensor_handle(tensor: Handle, out: *mut Handle) -> i32;
    fn aoti_torch_delete_tensor_object(tensor: Handle) -> i32;
}

/// Returns a fake's C function and what it is called with; both stay to the end of the process.
fn raw(fake: &Fake) -> (Run, Handle) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), fake.object()).unwrap();
    let weights = Box::leak(Box::new(Tensor::from_slice(&[2.0f32])));
    let of = |name: &str| format!("AOTInductorModelContainer{name}");
    let bind = of("UpdateUserManagedConstantBufferPairs");
    let (mut container, name) = (std::ptr::null_mut(), c"c0");
    let pair = (name.as_ptr(), weights.as_ptr().cast_mut().cast());
    // SAFETY: the fake exports these functions with these types, and is never unloaded.
    unsafe {
        let library = Box::leak(Box::new(libloading::Library::new(file.path()).unwrap()));
        let create: Create = *library.get(of("CreateWithDevice")).unwrap();
        let bind: Bind = *library.get(bind).unwrap();
        let code = create(&mut container, 1, c"cpu".as_ptr(), std::ptr::null());
        assert_eq!((code, bind(container, &pair, 1, false, true)), (0, 0));
        (*library.get(of("RunSingleThreaded")).unwrap(), container)
    }
}

/// Calls it as directly as Rust can.
fn run_raw((run, container): (Run, Handle), inputs: &[Tensor]) {
    let (mut handles, mut output, none) = (
        [std::ptr::null_mut(); 8],
        std::ptr::null_mut(),
        std::ptr::null_mut(),
    );
    // SAFETY: the inputs fit the fake's layouts; it steals the handles, and the output is freed here.
    unsafe {
        for (handle, input) in handles.iter_mut().zip(inputs) {
            aoti_torch_new_tensor_handle(input.as_ptr().cast_mut().cast(), handle);
        }
        let given = handles.as_mut_ptr();
        let code = run(container, given, inputs.len(), &mut output, 1, none, none);
        assert_eq!(code, 0);
        aoti_torch_delete_tensor_object(output);
    }
}

/// The figures of one group of calls, by name.
type Group = Map<String, Value>;

/// Measures a call: the nanoseconds of the median of 100 samples, and the 95 % interval of the median.
fn call<T>(group: &mut Group, name: &str, mut what: impl FnMut() -> T) {
    let mut sample = |count: u32| {
        let start = Instant::now();
        for _ in 0..count {
            drop(black_box(what()));
        }
        start.elapsed()
    };
    let mut count = 1;
    while sample(count) < Duration::from_millis(20) {
        count *= 2;
    }
    let nanos = (0..100).map(|_| sample(count).as_nanos() as f64 / f64::from(count));
    let mut nanos: Vec<f64> = nanos.collect();
    nanos.sort_by(f64::total_cmp);
    let at = |place: usize| (nanos[place] * 10.0).round() / 10.0;
    let figures = json!({ "median": at(50), "low": at(40), "high": at(60) });
    println!("{name}: {figures}");
    group.insert(name.to_owned(), figures);
}

/// Calls with so many inputs.
fn overhead(group: &mut Group, inputs: usize) {
    let fake = Fake::sized(2, 2).inputs(inputs);
    let model = load(Memory::with(std::slice::from_ref(&fake)));
    let raw = raw(&fake);
    let (tensors, small) = (good(inputs, &[2, 2]), good(inputs, &[1, 2]));
    call(group, "raw", || run_raw(raw, &tensors));
    call(group, "run", || model.run("f", &tensors).unwrap());
    call(group, "run padded", || model.run("f", &small).unwrap());
}

/// A step of a session with one small state, beside a call of a program without any.
fn session(group: &mut Group) {
    let plain = load(Memory::with(&[Fake::sized(1, 2).constants(0)]));
    let stateful = load(Memory::with(&[Fake::sized(1, 2).constants(0).stateful()]));
    let mut session = stateful.session().unwrap();
    let tensors = good(1, &[1, 2]);
    call(group, "call", || plain.run("f", &tensors).unwrap());
    call(group, "step", || session.run("f", &tensors).unwrap());
}

/// The cost of checking 1,000 values of an input: a call of a program with bounds, and of one without.
fn values(group: &mut Group) {
    let fake = Fake::sized(10, 100).inputs(2);
    let tensors = good(2, &[10, 100]);
    for (name, bounds) in [("unchecked", None), ("1,000 int64", Some([0, 30_522]))] {
        let mut memory = Memory::with(std::slice::from_ref(&fake));
        for program in memory.programs.values_mut() {
            program.inputs[1].bounds = bounds;
        }
        let model = load(memory);
        call(group, name, || model.run("f", &tensors).unwrap());
    }
}

/// The cost of a refused call, by its mistake. `the last of eight` is the time of the checks of eight inputs, seven of
/// them right.
fn refused(group: &mut Group) {
    let model = load(Memory::with(&[Fake::sized(8, 4).inputs(8)]));
    let x = || Tensor::ones([8, 4], (Kind::Float, CPU));
    let complex = Tensor::zeros([8, 4], (Kind::ComplexFloat, CPU));
    let row = Tensor::ones([1, 4], (Kind::Float, CPU));
    let nothing = Tensor::f_internal_efficientzerotensor([8, 4], (Kind::Float, CPU)).unwrap();
    let bytes = Tensor::zeros([129], (Kind::Uint8, CPU));
    // Of four bytes at an odd address.
    let odd = bytes.slice(0, 1, 129, 1).data_ptr().cast::<u8>();
    // SAFETY: the 128 bytes behind `odd` live as long as `bytes`, to the end of this function.
    let odd = unsafe { Tensor::from_blob(odd, &[8, 4], &[4, 1], Kind::Float, CPU) };
    let first = [
        ("dtype", x().to_kind(Kind::Double)),
        ("dtype no artifact takes", complex.shallow_clone()),
        ("rank", x().view([8, 2, 2])),
        ("absurd sizes on few bytes", row.expand([1 << 60, 4], false)),
        ("no elements", Tensor::zeros([0, 4], (Kind::Float, CPU))),
        ("strides", x().view([4, 8]).transpose(0, 1)),
        ("overlapping", row.expand([8, 4], false)),
        ("misaligned", odd),
        ("undefined", Tensor::new()),
        ("sparse", x().to_sparse_sparse_dim(2)),
        ("quantised", x().quantize_per_tensor(0.5, 0, Kind::QInt8)),
        ("negated view", complex.conj().imag()),
        ("no memory behind it", nothing),
    ];
    let fewer = Tensor::zeros([8, 3], (Kind::Int64, CPU));
    let last = [("the last of eight", x()), ("sizes that disagree", fewer)];
    let right = good(8, &[8, 4]);
    for (at, calls) in [(0, &first[..]), (7, &last[..])] {
        for (name, wrong) in calls {
            let mut inputs = good(8, &[8, 4]);
            inputs[at] = wrong.shallow_clone();
            call(group, name, || model.run("f", &inputs).unwrap_err());
        }
    }
    let (seven, large) = (good(7, &[8, 4]), good(8, &[9, 4]));
    call(group, "count", || model.run("f", &seven).unwrap_err());
    call(group, "no bucket", || model.run("f", &large).unwrap_err());
    call(group, "module", || model.run("g", &right).unwrap_err());
    let names = [
        "x", "ids.0", "ids.1", "ids.2", "ids.3", "ids.4", "ids.5", "mask",
    ];
    let named: Vec<(&str, &Tensor)> = names.into_iter().zip(&right).collect();
    call(group, "names", || model.run_named("f", &named).unwrap_err());
}

const CPU: tch::Device = tch::Device::Cpu;

fn load(memory: Memory) -> Model {
    memory.runtime().load("fake").unwrap()
}

/// Returns right inputs of a fake.
fn good(count: usize, sizes: &[i64]) -> Vec<Tensor> {
    let kinds = std::iter::once(Kind::Float).chain(std::iter::repeat(Kind::Int64));
    kinds
        .take(count)
        .map(|kind| Tensor::ones(sizes, (kind, CPU)))
        .collect()
}

/// Writes the figures to the file of the first argument.
fn main() {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.find(|argument| argument != "--bench").unwrap();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut figures = json!({});
    let mut measure = |name: &str, fill: fn(&mut Group)| {
        let mut group = Group::new();
        fill(&mut group);
        figures[name] = group.into();
    };
    measure("one input", |group| overhead(group, 1));
    measure("eight inputs", |group| overhead(group, 8));
    measure("session", session);
    measure("values", values);
    measure("refused", refused);
    let over = |group: &str, name: &str, other: &str| {
        let median = |name: &str| figures[group][name]["median"].as_f64().unwrap();
        (median(name) - median(other)).round()
    };
    let added = |group: &str| over(group, "run", "raw");
    let document = json!({
        "schema": 1,
        "command": "make bench-overhead",
        "date": printed("date", &["-u", "+%F"]),
        "commit": printed("git", &["rev-parse", "--short", "HEAD"]),
        "machine": machine(),
        "load_average": load.trim(),
        "versions": {
            "precast": env!("CARGO_PKG_VERSION"),
            "torch": fake::target().torch,
            "rustc": printed("rustc", &["--version"]),
            "g++": printed("g++", &["-dumpfullversion"]),
        },
        "unit": "nanoseconds a call: the median, and the 95 % interval of the median",
        "added": { "one input": added("one input"), "eight inputs": added("eight inputs") },
        "step_over_call": over("session", "step", "call"),
        "figures": figures,
    });
    report::write(&file, &document);
}
