//! Calls with inputs that are wrong in every way there is, and right ones at the edge of readable memory.
//!
//! The artifact behind the bad ones throws whenever it runs, so a call that got through would answer `Failed`, which is
//! never the error that is expected. Memory of bad inputs is unreadable for half of the calls: the checks look at
//! metadata alone.

use std::{collections::BTreeMap, time::Instant};

use precast::{
    Model,
    record::{Padding, Program},
    runtime::RuntimeError,
};
use serde_json::json;
use tch::{Kind, Tensor};

use crate::{
    Random,
    fake::{Fake, Memory},
    flat,
    guard::Guarded,
    load,
    report::Tally,
    x,
};

const ROWS: i64 = 8;
const COLS: i64 = 4;
const CPU: tch::Device = tch::Device::Cpu;

/// Module `f` takes `x` float32, `ids.0` and `ids.1` int64, all `[batch, seq]`; `g` takes `x` float32 `[batch, 4]`.
/// Neither may be padded into, so any other size than the bucket's is wrong.
fn throwing() -> Model {
    let mut memory = Memory::with(&[Fake::of("THROWS").inputs(3)]);
    let mut fixed = memory.add("g", &Fake::of("THROWS"));
    fixed.inputs[0].dims[1] = None;
    fixed.outputs[0].dims[1] = None;
    fixed.sizes.remove("seq");
    memory.programs.insert(fixed.id, fixed);
    let refused = Padding::Refused {
        padded: vec![],
        why: "a test".into(),
    };
    let refuses = |program: &mut Program| program.padding = refused.clone();
    memory.each_program(refuses).load()
}

/// One bad call: a module, its inputs, names where it is called by name, and the names that its error may have.
struct Call {
    kind: &'static str,
    module: &'static str,
    inputs: Vec<Tensor>,
    names: Option<Vec<&'static str>>,
    expected: &'static str,
}

/// Returns the name of an error, or of the problem of an input.
fn name(error: &RuntimeError) -> String {
    let RuntimeError::BadInput { problem, .. } = error else {
        return error.name().to_owned();
    };
    let problem = format!("{problem:?}");
    problem.split([' ', '{']).next().unwrap().to_owned()
}

const KINDS: [Kind; 18] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::ComplexHalf,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
    Kind::BFloat16,
    Kind::Float8e5m2,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2fnuz,
    Kind::Float8e4m3fnuz,
    Kind::Float,
];

/// Makes the tensors of calls.
struct Maker {
    random: Random,
    /// Readable to its end, and not readable at all.
    open: Guarded,
    closed: Guarded,
}

impl Maker {
    fn kind(&self, input: usize) -> Kind {
        if input == 0 { Kind::Float } else { Kind::Int64 }
    }

    /// A tensor over guarded memory; half of them over memory that nobody may read.
    fn over(&mut self, sizes: &[i64], strides: &[i64], kind: Kind, short: usize) -> Option<Tensor> {
        let memory = match self.random.below(2) {
            0 => &self.open,
            _ => &self.closed,
        };
        memory.tensor(sizes, strides, kind, short)
    }

    fn good(&mut self) -> Vec<Tensor> {
        let one = |i| Tensor::ones([ROWS, COLS], (self.kind(i), CPU));
        (0..3).map(one).collect()
    }

    /// Returns right inputs for `f` with one of them replaced.
    fn with(&mut self, at: usize, tensor: Tensor) -> Vec<Tensor> {
        let mut inputs = self.good();
        inputs[at] = tensor;
        inputs
    }

    /// Makes the `n`-th call; none where torch itself refuses to make such a tensor.
    fn call(&mut self, n: u64) -> Option<Call> {
        let at = self.random.below(3);
        let kind = self.kind(at);
        let f = |kind, inputs, expected| Call {
            kind,
            module: "f",
            inputs,
            names: None,
            expected,
        };
        let strides = [COLS, 1];
        let ones = |kind| Tensor::ones([ROWS, COLS], (kind, CPU));
        Some(match n % 24 {
            0 => {
                let count = *self.random.of(&[0, 1, 2, 4, 5, 6, 7, 8, 9, 64]);
                let inputs = (0..count).map(|i| ones(self.kind(i % 3)));
                f("count", inputs.collect(), "InputCount")
            }
            1 | 2 => {
                let wrong = *self.random.of(&KINDS);
                if wrong == kind {
                    return None;
                }
                let tensor = self.over(&[ROWS, COLS], &strides, wrong, 0)?;
                f("dtype", self.with(at, tensor), "Dtype")
            }
            3 => {
                let rank = *self.random.of(&[0usize, 1, 3, 4, 5, 6, 7, 8, 9]);
                let sizes = vec![if self.random.below(2) == 0 { 1 } else { 2 }; rank];
                let strides = crate::fake::layout(precast::record::Dtype::Float32, &sizes).stride;
                let tensor = self.over(&sizes, &strides, kind, 0)?;
                f("rank", self.with(at, tensor), "Rank")
            }
            4 => {
                let all = [(9, 4), (7, 4), (8, 5), (8, 3), (1, 1), (9, 5), (16, 8)];
                let (rows, cols) = *self.random.of(&all);
                let inputs = (0..3).map(|i| self.over(&[rows, cols], &[cols, 1], self.kind(i), 0));
                f(
                    "sizes off by some",
                    inputs.collect::<Option<_>>()?,
                    "NoBucket",
                )
            }
            5 => {
                let (rows, cols) = *self.random.of(&[(9, 4), (7, 4), (8, 5), (8, 3)]);
                let tensor = self.over(&[rows, cols], &[cols, 1], kind, 0)?;
                f("sizes that disagree", self.with(at, tensor), "Disagrees")
            }
            6 => {
                let size = 1i64 << (10 + self.random.below(34));
                let sizes = *self.random.of(&[[size, COLS], [ROWS, size]]);
                let inputs = (0..3).map(|i| self.over(&sizes, &[sizes[1], 1], self.kind(i), 0));
                f("absurd sizes", inputs.collect::<Option<_>>()?, "NoBucket")
            }
            7 => {
                let size = 1i64 << (3 + self.random.below(58));
                let tensor = Tensor::ones([1, COLS], (kind, CPU));
                let tensor = tensor.f_expand([size, COLS], false).ok()?;
                let expected = "Strides Disagrees Storage";
                f("absurd sizes on few bytes", self.with(at, tensor), expected)
            }
            8 => {
                let sizes = *self.random.of(&[[0, COLS], [ROWS, 0], [0, 0]]);
                let tensor = Tensor::zeros(sizes, (kind, CPU));
                f("no elements", self.with(at, tensor), "Empty Disagrees")
            }
            9 => {
                let tensor = self.over(&[ROWS, COLS], &[1, ROWS], kind, 0)?;
                f("permuted strides", self.with(at, tensor), "Strides")
            }
            10 => {
                let all = [[0, 1], [1, 1], [2, 1], [4, 0], [0, 0], [3, 1]];
                let strides = *self.random.of(&all);
                let tensor = self.over(&[ROWS, COLS], &strides, kind, 0)?;
                f("overlapping strides", self.with(at, tensor), "Strides")
            }
            11 => {
                let all = [[5, 1], [8, 1], [4, 2], [8, 2], [1 << 20, 1]];
                let strides = *self.random.of(&all);
                let tensor = self.over(&[ROWS, COLS], &strides, kind, 0)?;
                f("gaps", self.with(at, tensor), "Strides")
            }
            12 => {
                let short = 1 + self.random.below(kind.elt_size_in_bytes() - 1);
                let tensor = self.over(&[ROWS, COLS], &strides, kind, short)?;
                f("misaligned", self.with(at, tensor), "Alignment")
            }
            13 => f("undefined", self.with(at, Tensor::new()), "Undefined"),
            14 => {
                let dense = ones(kind);
                let sparse = match self.random.below(4) {
                    0 => dense.f_to_sparse_sparse_dim(2).ok()?,
                    1 => dense.f_to_sparse_csr(None).ok()?,
                    2 => dense.f_to_sparse_csc(None).ok()?,
                    _ => dense.f_to_sparse_bsr([2, 2], None).ok()?,
                };
                f("sparse", self.with(at, sparse), "NotDense")
            }
            15 => {
                let to = *self.random.of(&[Kind::QInt8, Kind::QUInt8, Kind::QInt32]);
                let tensor = ones(Kind::Float).f_quantize_per_tensor(0.5, 0, to);
                f("quantised", self.with(at, tensor.ok()?), "NotDense")
            }
            16 => {
                let tensor = ones(Kind::Float).f_to_mkldnn(None).ok()?;
                f("opaque", self.with(0, tensor), "NotDense")
            }
            17 => {
                let complex = Tensor::zeros([ROWS, COLS], (Kind::ComplexFloat, CPU));
                f("negated view", self.with(0, complex.conj().imag()), "Lazy")
            }
            18 => {
                let tensor = Tensor::f_internal_efficientzerotensor([ROWS, COLS], (kind, CPU));
                f(
                    "no memory behind it",
                    self.with(at, tensor.ok()?),
                    "Storage",
                )
            }
            19 => {
                let cols = *self.random.of(&[1, 2, 3, 5, 6, 1 << 20]);
                let tensor = self.over(&[ROWS, cols], &[cols, 1], Kind::Float, 0)?;
                Call {
                    module: "g",
                    ..f("a fixed size", vec![tensor], "Size")
                }
            }
            20 => {
                let names = self.random.of(&[
                    ["x", "ids.0", "ids.2"],
                    ["x", "x", "ids.0"],
                    ["", "ids.0", "ids.1"],
                    ["X", "ids.0", "ids.1"],
                ]);
                Call {
                    names: Some(names.to_vec()),
                    ..f("names", self.good(), "InputNames")
                }
            }
            21 => {
                let module = *self.random.of(&["", "F", "forward", "f ", "\0", "g.f"]);
                Call {
                    module,
                    ..f("module", self.good(), "NoModule")
                }
            }
            22 => {
                // Everything wrong at once: it is refused, by any of the names.
                let wrong = *self.random.of(&KINDS);
                let mut below = |most: usize| self.random.below(most) as i64;
                let (sizes, strides) = ([below(20) + 9, below(20) + 1], [below(9), below(9)]);
                let short = self.random.below(wrong.elt_size_in_bytes());
                let tensor = self.over(&sizes, &strides, wrong, short)?;
                f("everything", self.with(at, tensor), "any NoBucket")
            }
            _ => {
                let base = Tensor::ones([ROWS * 2, COLS], (kind, CPU));
                let tensor = base.f_slice(0, 0, ROWS * 2, 2).ok()?;
                f("every second row", self.with(at, tensor), "Strides")
            }
        })
    }
}

/// Makes `count` calls, every tenth of them a right one on memory that ends at a guard page. The kinds of refused calls
/// have their number and their median in nanoseconds.
pub fn run(seed: u64, count: u64) -> Tally {
    let (throws, works) = (throwing(), load(&[Fake::sized(ROWS, COLS)]));
    let mut maker = Maker {
        random: Random(seed),
        open: Guarded::new(1 << 26, true),
        closed: Guarded::new(4096, false),
    };
    let mut outcome = Tally::of(["calls", "refused", "answered"]);
    let mut times: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
    let (mut n, mut turn) = (seed, 0u64);
    while outcome.count("calls") < count {
        (n, turn) = (n.wrapping_add(1), turn + 1);
        if turn.is_multiple_of(10) {
            outcome.add("calls", 1);
            match at_the_edge(&works, &mut maker) {
                Ok(()) => outcome.add("answered", 1),
                Err(why) => outcome.fail(format!("seed {seed} call {n}: {why}")),
            }
            continue;
        }
        let Some(call) = maker.call(n) else { continue };
        outcome.add("calls", 1);
        let names = call.names.as_ref();
        let named: Option<Vec<(&str, &Tensor)>> =
            names.map(|names| names.iter().copied().zip(&call.inputs).collect());
        let begin = Instant::now();
        let result = match &named {
            None => throws.run(call.module, &call.inputs),
            Some(named) => throws.run_named(call.module, named),
        };
        let took = begin.elapsed().as_nanos() as u64;
        match result {
            Err(error) if expects(&call, &error) && names_it(&error, &call) => {
                outcome.add("refused", 1);
                times.entry(call.kind).or_default().push(took);
            }
            other => {
                let got = other.map_or_else(|error| error.to_string(), |_| "answered".to_owned());
                outcome.fail(format!("seed {seed} call {n}: {}: {got}", call.kind));
            }
        }
    }
    let mut all: Vec<u64> = times.values().flatten().copied().collect();
    all.sort_unstable();
    let mean = (all.iter().sum::<u64>() as f64 / all.len().max(1) as f64).round();
    outcome.set("mean_ns", mean);
    for (name, share) in [("median_ns", 50), ("p99_ns", 99)] {
        outcome.set(name, all.get(all.len() * share / 100).copied());
    }
    let kinds: BTreeMap<_, _> = (times.into_iter())
        .map(|(kind, mut took)| {
            took.sort_unstable();
            (kind, (took.len(), took[took.len() / 2]))
        })
        .collect();
    outcome.set("kinds", json!(kinds));
    outcome
}

fn expects(call: &Call, error: &RuntimeError) -> bool {
    let (name, any) = (name(error), error.name() == "BadInput");
    let mut expected = call.expected.split(' ');
    expected.any(|one| one == name || any && one == "any")
}

/// Returns whether a message says which input of which module, or which module, it is about.
fn names_it(error: &RuntimeError, call: &Call) -> bool {
    let text = error.to_string();
    let mut inputs = ["`x`", "`ids.0`", "`ids.1`"].iter();
    let input = inputs.any(|name| text.contains(name));
    text.contains(&format!("module `{}`", call.module))
        && (input || !matches!(error, RuntimeError::BadInput { .. }))
}

/// A right call, of the bucket's size or smaller, whose input ends where readable memory ends.
fn at_the_edge(works: &Model, maker: &mut Maker) -> Result<(), String> {
    let rows = 1 + maker.random.below(ROWS as usize) as i64;
    let cols = 1 + maker.random.below(COLS as usize) as i64;
    let input = maker.open.tensor(&[rows, cols], &[cols, 1], Kind::Float, 0);
    let mut input = input.ok_or("no tensor")?;
    input.copy_(&x(rows, cols));
    let out = works
        .run("f", &[input])
        .map_err(|error| error.to_string())?;
    let expected = flat(&(x(rows, cols) * 2));
    match out[0].shape() == [rows, cols] && flat(&out[0]) == expected {
        true => Ok(()),
        false => Err(format!("{rows}x{cols}: a wrong answer")),
    }
}
