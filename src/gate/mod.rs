//! The gate's checker: runs a candidate program and compares it with eager.
//!
//! A build starts it in a separate process: `precast_builder::gate` has the reason and the rules. It is in this crate
//! because it needs the builder's requests and the runtime, which do not depend on each other.
//!
//! | file | holds |
//! |---|---|
//! | this one | the runs: samples, smaller sizes, memory and time |
//! | `compare` | the checks of one output |
//! | `truth` | the judgement of values that rounding decides |
//! | `chain` | `prefill` and `decode` in one session |
//! | `samples` | inputs that are drawn from a record |
//! | `smoke` | the run with new weights, without eager; its checks are its own |

mod chain;
mod compare;
mod samples;
mod smoke;
mod truth;

use std::{
    collections::BTreeMap,
    fs::File,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use precast_builder::gate::{GateRequest, Question, Samples, Verdict};
use precast_runtime::{
    Model, Outputs, Runtime, RuntimeError, Session, Tensor, Trial,
    command::{peak, tensors, trial_memory},
    cuda::synchronize,
};
use precast_store::{
    Device, Options, Store, StoreError,
    record::{
        Dtype, Output, Program, Sizes, Step, bucket_name,
        receipt::{Compared, Gate, GatePadding, Truth},
    },
    target::DeviceKind,
};

use self::{
    compare::{Choice, SAVED_ONE_OF, SAVED_ONE_OF_IN_HALF, Tolerances, compare, equal},
    truth::Exact,
};

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The number of rounds of a measurement.
#[derive(Clone, Copy)]
struct Rounds {
    max: usize,
    min: usize,
    /// The time for each model, after the minimum.
    seconds: u64,
}

const BESIDE_TASKS: Rounds = Rounds {
    max: 20,
    min: 1,
    seconds: 1,
};
const DECIDING: Rounds = Rounds {
    max: 200,
    min: 7,
    seconds: 4,
};
const BUSY: Rounds = Rounds {
    max: 20,
    min: 7,
    seconds: 2,
};

/// The time limit of the minimum.
const ROUNDS_LIMIT: Duration = Duration::from_secs(60);

/// Calls that take as long do not depend on the caches.
const LONG: Duration = Duration::from_millis(50);

/// Opens the store of the build, which its user trusts.
fn open(store: &Path) -> Result<Store, StoreError> {
    let options = Options {
        shared: true,
        trusted: true,
        ..Options::default()
    };
    Store::open_with(store, options)
}

fn first(device: DeviceKind) -> Device {
    match device {
        DeviceKind::Cpu => Device::Cpu,
        DeviceKind::Cuda => Device::Cuda(0),
    }
}

pub(crate) use self::samples::{samples, samples_of_full};

/// Answers the question to a gate's process.
pub fn answer(question: &Question) -> Verdict {
    match question {
        Question::Compare(request) => check(request),
        Question::Smoke(request) => smoke::check(request),
        Question::Chain(request) => chain::check(request),
    }
}

/// Runs a candidate and compares it with eager.
fn check(request: &GateRequest) -> Verdict {
    match Checker::new(request).and_then(|mut checker| checker.report()) {
        Ok(Ok(report)) => Verdict::Passed {
            report: Box::new(report),
        },
        Ok(Err(Refusal {
            why: message,
            far: true,
            ..
        })) => Verdict::Differs { message },
        Ok(Err(Refusal { why: message, .. })) => Verdict::Failed { message },
        Err(error) => Verdict::Failed {
            message: error.to_string(),
        },
    }
}

/// Why a candidate is refused.
struct Refusal {
    why: String,
    /// Whether a float is beyond its tolerance, or further from the truth than eager.
    far: bool,
    /// How many times its limit a value is away from the truth.
    excess: f64,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self {
            why,
            far: false,
            excess: f64::INFINITY,
        }
    }
}

/// Inputs, and eager's outputs for them.
#[derive(Default)]
struct Sample {
    inputs: Vec<Tensor>,
    /// The states before the call; empty for those of a new session.
    states: Vec<Tensor>,
    /// The outputs, and then the states after the call where they are known.
    expected: Vec<Tensor>,
    /// The same with more digits; empty where tolerances decide.
    exact: Vec<Option<Exact>>,
}

/// A program in a session, which is brought to the states of a sample before each call.
struct GateCaller<'m> {
    session: Session<'m>,
    program: &'m Program,
}

impl<'m> GateCaller<'m> {
    fn new(model: &'m Model, program: &'m Program) -> Fallible<Self> {
        let session = model.session()?;
        Ok(Self { session, program })
    }

    /// Sets the states of the session to those of a sample.
    fn prepare(&mut self, sample: &Sample) -> Fallible<()> {
        self.session.reset();
        self.session.without_fillers();
        for (state, value) in self.program.states.iter().zip(&sample.states) {
            self.session.set_state(&state.name, value)?;
        }
        Ok(())
    }

    fn call(&mut self, sample: &Sample) -> Result<Outputs, RuntimeError> {
        self.session.run(&self.program.module, &sample.inputs)
    }

    /// Returns the outputs, and then the states after the call, on the CPU.
    fn answer(&mut self, sample: &Sample) -> Fallible<Vec<Tensor>> {
        self.prepare(sample)?;
        let out = self.call(sample)?;
        out.check()?;
        let out = out.iter().map(|tensor| tensor.to_device(Device::Cpu));
        let mut all: Vec<Tensor> = out.collect::<Result<_, _>>()?;
        for state in &self.program.states {
            all.push(self.session.state(&state.name)?.to_device(Device::Cpu)?);
        }
        Ok(all)
    }
}

/// A candidate with its runtime, device and samples.
struct Checker<'a> {
    request: &'a GateRequest,
    runtime: Runtime,
    device: Device,
    /// At the sizes of the bucket.
    sample: Sample,
    smaller: Vec<Sample>,
    /// Calls of a training step that follow each other, from first values on.
    sequence: Vec<Sample>,
}

impl<'a> Checker<'a> {
    fn new(request: &'a GateRequest) -> Fallible<Self> {
        let store = open(&request.store)?;
        let device = first(request.program.target.device);
        // The runtime comes first: it loads the device's half of libtorch, without which no tensor can be on the
        // device. The gate tests the artifact, so eager may not answer instead. This process is the trial of a first
        // load.
        let trial = Trial::here().remember(trial_memory(store.path()));
        let runtime = Runtime::new(&store, device)?
            .eager_fallback(false)
            .trial(trial);
        let mut checker = Self {
            request,
            runtime,
            device,
            sample: Sample::default(),
            smaller: vec![],
            sequence: vec![],
        };
        match &request.samples {
            Samples::File(file) => checker.read(file)?,
            Samples::Drawn { any_size, smaller } => checker.draw(any_size.as_deref(), smaller)?,
        }
        Ok(checker)
    }

    /// Reads the samples of a file.
    fn read(&mut self, file: &Path) -> Fallible<()> {
        let (program, device) = (&self.request.program, self.device);
        let mut samples = tensors::read(File::open(file)?)?;
        let mut take = |prefix: &str| -> Fallible<Sample> {
            let mut all = |kind: &str, count: usize| -> Fallible<Vec<Tensor>> {
                let named = (0..count).map(|i| format!("{prefix}{kind}.{i}"));
                let lacks = |name: &str| format!("the samples lack `{name}`").into();
                named
                    .map(|name| samples.remove(&name).ok_or_else(|| lacks(&name)))
                    .collect()
            };
            let inputs = all("in", program.inputs.len())?;
            let inputs = inputs.iter().map(|t| t.to_device(device));
            let mut expected = all("out", program.outputs.len())?;
            if prefix.is_empty() {
                expected.extend(all("after", program.states.len())?);
            }
            let states = match prefix.starts_with("sequence") {
                true => vec![],
                false => all("state", program.states.len())?,
            };
            Ok(Sample {
                inputs: inputs.collect::<Result<_, _>>()?,
                states,
                expected,
                exact: vec![],
            })
        };
        self.sample = take("")?;
        let smaller = (0..).map_while(|index| take(&format!("smaller.{index}.")).ok());
        self.smaller = smaller.collect();
        let sequence = (0..).map_while(|index| take(&format!("sequence.{index}.")).ok());
        self.sequence = sequence.collect();
        match &self.request.truth {
            Some(file) => self.read_truth(file),
            None => Ok(()),
        }
    }

    /// Reads the values of the samples with more digits.
    fn read_truth(&mut self, file: &Path) -> Fallible<()> {
        let program = &self.request.program;
        let mut held = tensors::read(File::open(file)?)?;
        let outputs = program.outputs.len();
        let mut exact = truth::take(&mut held, "out", outputs)?;
        exact.extend(truth::take(&mut held, "after", program.states.len())?);
        self.sample.exact = exact;
        for (number, sample) in self.smaller.iter_mut().enumerate() {
            sample.exact = truth::take(&mut held, &format!("smaller.{number}.out"), outputs)?;
        }
        for (number, sample) in self.sequence.iter_mut().enumerate() {
            let kind = format!("sequence.{number}.out");
            sample.exact = truth::take(&mut held, &kind, outputs)?;
        }
        Ok(())
    }

    /// Draws inputs from the record, and has the exported graphs answer them.
    fn draw(&mut self, any_size: Option<&Program>, smaller: &[Sizes]) -> Fallible<()> {
        let program = &self.request.program;
        let draw = |graph: &Program, all: &[Sizes]| -> Fallible<Vec<Sample>> {
            if graph.eager.is_none() {
                return Err("it has no graph that eager could run: build it again".into());
            }
            let eager = self.load(graph, &[])?;
            let one = |sizes: &Sizes| {
                let mut sample = Sample {
                    inputs: samples(program, sizes, self.device)?,
                    ..Sample::default()
                };
                sample.expected = self.run(&eager, &sample)?;
                Ok(sample)
            };
            all.iter().map(one).collect()
        };
        let own = draw(program, std::slice::from_ref(&program.sizes))?.pop();
        let smaller = match any_size {
            Some(any_size) if !smaller.is_empty() => draw(any_size, smaller)?,
            _ => vec![],
        };
        if let Some(own) = own {
            self.sample = own;
        }
        self.smaller = smaller;
        Ok(())
    }

    /// Compares one output, or one state after the call, with eager's. The truth, if the sample has it, decides on floats
    /// beyond their tolerances, and on all that are in half precision.
    fn compare(
        &self,
        calls_before: usize,
        index: usize,
        got: &Tensor,
        sample: &Sample,
    ) -> Result<Compared, Refusal> {
        let program = &self.request.program;
        let (what, output) = match program.outputs.get(index) {
            Some(output) => ("output", output.clone()),
            None => {
                let state = &program.states[index - program.outputs.len()];
                let output = Output {
                    name: state.name.clone(),
                    layout: state.layout.clone(),
                    dims: vec![],
                };
                ("state", output)
            }
        };
        let exact = sample.exact.get(index).and_then(Option::as_ref);
        let tolerances = Tolerances {
            rtol: self.request.rtol,
            atol: self.request.atol,
            compute_dtype: self.request.compute_dtypes.get(index).copied().flatten(),
            calls_before,
            saved: self.saved(&output.name),
        };
        let name = format!("{what} `{}`", output.name);
        let eager = &sample.expected[index];
        let (why, row) = match compare(tolerances, &output, got, eager) {
            Ok(row) if !exact.is_some_and(|exact| self.decides(exact, index)) => return Ok(row),
            Ok(row) => (name, row),
            Err(refused) => {
                let why = format!("{name} {}", refused.why);
                match refused.beyond {
                    Some(row) => (why, *row),
                    None => return Err(why.into()),
                }
            }
        };
        match exact {
            Some(exact) => exact.judge(got, eager, row).map_err(|further| Refusal {
                why: format!("{why}; {}", further.why),
                far: true,
                excess: further.excess,
            }),
            None if self.known(&output.name, got, eager) => Ok(row),
            None => Err(Refusal {
                far: true,
                ..why.into()
            }),
        }
    }

    /// Returns whether the truth decides on an output in any case, and not a tolerance.
    fn decides(&self, exact: &Exact, index: usize) -> bool {
        let GateRequest { rtol, atol, .. } = self.request;
        let plain = rtol.is_none() && atol.is_none() && !exact.of_training();
        plain && self.in_half_precision(index)
    }

    /// Returns whether an output is as near to eager's as its receipt says that two right values are.
    fn known(&self, name: &str, got: &Tensor, eager: &Tensor) -> bool {
        let gate = self.request.program.receipt.gate.as_ref();
        let rows = gate.and_then(|gate| gate.outputs.as_ref());
        let row = rows.and_then(|rows| rows.iter().find(|row| row.name == name));
        row.and_then(|row| row.truth)
            .is_some_and(|truth| truth::known(&truth, got, eager).unwrap_or(false))
    }

    /// Returns of how many elements of an output one may differ, if it is saved for a backward program.
    fn saved(&self, name: &str) -> Option<usize> {
        let outputs = &self.request.program.outputs;
        let half = || (0..outputs.len()).any(|index| self.in_half_precision(index));
        (name.starts_with("saved.") && is_forward(outputs)).then(|| match half() {
            true => SAVED_ONE_OF_IN_HALF,
            false => SAVED_ONE_OF,
        })
    }

    /// Returns whether an output, or a value that it was computed from, is in half precision.
    fn in_half_precision(&self, index: usize) -> bool {
        let own = self
            .request
            .program
            .outputs
            .get(index)
            .map(|output| output.layout.dtype);
        let inner = self.request.compute_dtypes.get(index).copied().flatten();
        [own, inner].into_iter().flatten().any(Dtype::is_half)
    }

    /// Compares all outputs, and states after the call, with eager's. Of several floats beyond their tolerances names
    /// the one that is furthest from the truth, or else the first.
    fn compare_all(&self, got: &[Tensor], sample: &Sample) -> Result<Vec<Compared>, Refusal> {
        let expected = &sample.expected;
        let floats = |&index: &usize| expected[index].dtype().is_some_and(Dtype::is_float);
        let mut rows: Vec<Option<Compared>> = vec![None; expected.len()];
        let mut furthest: Option<Refusal> = None;
        for index in (0..expected.len()).filter(floats) {
            match self.compare(0, index, &got[index], sample) {
                Ok(row) => rows[index] = Some(row),
                Err(refusal) if (furthest.as_ref()).is_none_or(|f| f.excess < refusal.excess) => {
                    furthest = Some(refusal);
                }
                Err(_) => {}
            }
        }
        if let Some(refusal) = furthest {
            return Err(refusal);
        }
        // The first floats may be the scores of a choice. Those from half precision differ between equal programs.
        let first = rows
            .iter()
            .position(Option::is_some)
            .filter(|&at| self.in_half_precision(at));
        let scores = first.and_then(|at| Some((&expected[at], rows[at].as_ref()?.max_abs?)));
        for index in (0..expected.len()).filter(|index| !floats(index)) {
            let row = self.compare(0, index, &got[index], sample);
            let near = || {
                let (scores, error) = scores?;
                let choices = Choice::all(scores, &got[index], &expected[index], error)?;
                Some(choices.iter().all(Choice::near))
            };
            rows[index] = Some(row.or_else(|why| match near() {
                Some(true) => Ok(Choice::row(&self.request.program.outputs[index].name)),
                _ => Err(why),
            })?);
        }
        Ok(rows.into_iter().flatten().collect())
    }

    /// Loads a program with these steps.
    fn load(&self, program: &Program, steps: &[Step]) -> Fallible<Model> {
        let program = Program {
            steps: steps.to_vec(),
            ..program.clone()
        };
        let name = program.model.clone();
        let GateRequest {
            shim,
            weights,
            aliases,
            ..
        } = self.request;
        Ok(self.runtime.load_programs(
            &name,
            vec![program],
            std::slice::from_ref(shim),
            *weights,
            aliases.clone(),
        )?)
    }

    /// Runs the module once. Returns its outputs, and the states after the call, on the CPU.
    fn run(&self, model: &Model, sample: &Sample) -> Fallible<Vec<Tensor>> {
        GateCaller::new(model, &self.request.program)?.answer(sample)
    }

    /// Gives back the pages of the weights before another model runs. Eager reads the weights, and artifacts read
    /// prepacked ones beside the rest: together they would be twice the memory. A model that runs again maps its pages
    /// from the system's cache of files, in some milliseconds for each GiB.
    fn release(&self) -> Fallible<()> {
        self.runtime.weights(self.request.weights)?.release();
        Ok(())
    }

    /// Returns the peak memory of a call, if it can be measured.
    fn peak(&self, model: &Model) -> Fallible<Option<u64>> {
        let mut caller = GateCaller::new(model, &self.request.program)?;
        caller.prepare(&self.sample)?;
        let (out, bytes) = peak(self.device, || caller.call(&self.sample));
        out?;
        Ok(bytes)
    }

    fn report(&mut self) -> Fallible<Result<Gate, Refusal>> {
        let GateRequest {
            program,
            others,
            steps,
            ..
        } = self.request;
        if program.steps.is_empty() && matches!(self.request.samples, Samples::Drawn { .. }) {
            // Eager's own program: it ran, and there is nothing to compare it with.
            return Ok(Ok(Gate::default()));
        }
        let model = self.load(program, &program.steps)?;
        // Twice at least, to see whether it is deterministic.
        let steps = *steps.max(&2);
        let mut took = Duration::ZERO;
        let mut run = || {
            let started = Instant::now();
            let answer = self.run(&model, &self.sample);
            took += started.elapsed();
            answer
        };
        let first = run()?;
        // The answers of a training step are as large as its parameters and moments: two are held at most.
        let mut deterministic = true;
        for _ in 1..steps {
            for (later, first) in run()?.iter().zip(&first) {
                deterministic = deterministic && equal(later, first)?;
            }
        }
        let seconds = took.as_secs_f64() / f64::from(steps);
        let mut rows = match self.compare_all(&first, &self.sample) {
            Ok(rows) => rows,
            Err(refusal) => return Ok(Err(refusal)),
        };
        drop(first);
        match self.follows(&model)? {
            Ok(found) => {
                for (index, truth) in found {
                    rows[index].truth.get_or_insert(truth);
                }
            }
            Err(refusal) => return Ok(Err(refusal)),
        }
        let artifact_peak = self.peak(&model)?;
        let padding = match self.at_smaller_sizes(&model) {
            Ok(padding) => padding,
            // It is wrong, where it should answer without padding.
            Err(error) => return Ok(Err(error.into())),
        };
        self.release()?;
        let exported = self.exported();
        self.sample.exact = vec![];
        let eager_peak = match &exported {
            Some(eager) => self.peak(eager)?,
            None => None,
        };
        let mut report = Gate {
            outputs: rows.into(),
            deterministic: deterministic.into(),
            steps: u64::from(steps).into(),
            seconds_per_run: seconds.into(),
            artifact_peak_bytes: artifact_peak,
            padding: padding.into(),
            eager_peak_bytes: eager_peak,
            ..Gate::default()
        };
        let others = others.iter().map(|steps| self.load(program, steps));
        let others = others.collect::<Fallible<Vec<_>>>()?;
        let models = [&model].into_iter().chain(&exported).chain(&others);
        let taken = match self.request.exclusive {
            true => self.latencies(&models.collect::<Vec<_>>(), DECIDING)?,
            false => self.latencies(&models.collect::<Vec<_>>(), BESIDE_TASKS)?,
        };
        let (own, others) = taken.split_at(1 + usize::from(exported.is_some()));
        let runs = |taken: &Vec<f64>| taken.len() as u64;
        report.artifact_us = median(&own[0]).into();
        report.artifact_runs = runs(&own[0]).into();
        // Number of rounds in which one was faster than the other.
        let wins = |a: &[f64], b: &[f64]| a.iter().zip(b).filter(|(a, b)| a < b).count() as u64;
        let each = |wins: &dyn Fn(&[f64]) -> u64| -> Vec<u64> {
            others.iter().map(|other| wins(other)).collect()
        };
        if let [artifact, eager] = own {
            report.eager_us = median(eager).into();
            report.eager_runs = runs(eager).into();
            report.eager_wins = wins(eager, artifact).into();
            report.others_eager_wins = each(&|other| wins(eager, other)).into();
        }
        if !others.is_empty() {
            let medians: Vec<f64> = others.iter().map(|taken| median(taken)).collect();
            report.others_us = medians.into();
            report.others_wins = each(&|other| wins(other, &own[0])).into();
        }
        if let Some(eager) = &exported
            && self.request.exclusive
            && self.device == Device::Cpu
            && report.artifact_us > report.eager_us
        {
            let taken = beside_busy_threads(|| self.latencies(&[&model, eager], BUSY))?;
            report.busy_us = Some([median(&taken[0]), median(&taken[1])]);
        }
        Ok(Ok(report))
    }

    /// Makes the calls of the sequence in one session, and compares each with eager. Returns the outputs that the
    /// truth decided on, or the first difference.
    fn follows(&self, model: &Model) -> Fallible<Result<Vec<(usize, Truth)>, Refusal>> {
        let mut found = vec![];
        let mut caller = GateCaller::new(model, &self.request.program)?;
        caller.session.reset();
        for (number, sample) in self.sequence.iter().enumerate() {
            let out = caller.call(sample)?;
            out.check()?;
            for (index, got) in out.iter().enumerate() {
                let got = got.to_device(Device::Cpu)?;
                match self.compare(number, index, &got, sample) {
                    Ok(row) => found.extend(row.truth.map(|truth| (index, truth))),
                    Err(refusal) => {
                        let why = format!("call {} of a session: {}", number + 1, refusal.why);
                        return Ok(Err(Refusal { why, ..refusal }));
                    }
                }
            }
        }
        Ok(Ok(found))
    }

    /// Compares the runtime's answers to smaller requests with eager at their own sizes. If a bucket gives wrong
    /// answers only to these, its smaller dimensions are exact; the report has the reason. Samples of one dimension
    /// come first.
    fn at_smaller_sizes(&self, model: &Model) -> Result<GatePadding, String> {
        let program = &self.request.program;
        let (mut points, mut max_abs) = (Vec::new(), 0.0_f64);
        let mut exact = BTreeMap::new();
        for sample in &self.smaller {
            let sizes = sizes_of(program, &sample.inputs);
            let bounded = |(dim, size): (&String, &i64)| {
                let bounds = program.dynamic.as_ref().and_then(|dims| dims.get(dim));
                bounds.is_none_or(|bounds| (bounds.min..=bounds.max).contains(size))
            };
            // A dynamic program takes them as they are.
            let padded = program.dynamic.is_none();
            let smaller = sizes
                .iter()
                .filter(|(dim, size)| program.sizes[*dim] != **size);
            let smaller: Vec<String> = smaller.map(|(dim, _)| dim.clone()).collect();
            // One of several dimensions may be exact by now.
            let taken = |dim: &String| program.padding.allows(dim) && !exact.contains_key(dim);
            if (padded && !smaller.iter().all(taken)) || !sizes.iter().all(bounded) {
                continue;
            }
            let place = bucket_name(&sizes);
            let compared = self.run(model, sample).map_err(|error| error.to_string());
            let compared = compared.and_then(|got| {
                let rows = self.compare_all(&got, sample);
                rows.map_err(|refusal| refusal.why)
            });
            points.push(sizes);
            for row in compared.iter().flatten() {
                max_abs = max_abs.max(row.max_abs.unwrap_or(0.0));
            }
            if let Err(why) = compared {
                if program.dynamic.is_some() {
                    return Err(format!("at {place} {why}"));
                }
                let why = format!("padded from {place}, {why}");
                exact.extend(smaller.into_iter().map(|dim| (dim, why.clone())));
            }
        }
        Ok(GatePadding {
            points,
            max_abs,
            refused: exact.values().next().cloned(),
            exact,
        })
    }

    /// Returns the exported graph of a compiled program, where it runs and is right: at run time it may answer in the
    /// artifacts' place.
    fn exported(&self) -> Option<Model> {
        let program = &self.request.program;
        if program.eager.is_none() || program.steps.is_empty() {
            return None;
        }
        let model = self.load(program, &[]).ok()?;
        let got = self.run(&model, &self.sample).ok()?;
        self.compare_all(&got, &self.sample).ok()?;
        Some(model)
    }

    /// Returns the microseconds of calls of each model.
    fn latencies(
        &self,
        models: &[&Model],
        Rounds { max, seconds, min }: Rounds,
    ) -> Fallible<Vec<Vec<f64>>> {
        let each = Duration::from_secs(seconds);
        let limit = each * u32::try_from(models.len())?;
        let begun = Instant::now();
        let more = |round: usize| {
            let limit = if round < min { ROUNDS_LIMIT } else { limit };
            round < max && (round == 0 || begun.elapsed() <= limit)
        };
        let callers = models.iter();
        let callers = callers.map(|model| GateCaller::new(model, &self.request.program));
        let mut callers = callers.collect::<Fallible<Vec<_>>>()?;
        let mut last = models.len();
        in_rounds(models.len(), more, |index| {
            if std::mem::replace(&mut last, index) != index {
                self.release()?;
            }
            callers[index].prepare(&self.sample)?;
            synchronize(self.device)?;
            let started = Instant::now();
            let out = callers[index].call(&self.sample)?;
            synchronize(self.device)?;
            let taken = started.elapsed();
            drop(out);
            Ok(taken)
        })
    }
}

/// Returns whether these are the outputs of the forward program of a pair: `worker/torch_private/partition.py` names them.
fn is_forward(outputs: &[Output]) -> bool {
    let kinds = ["output.", "saved.", "buffer."];
    let named = |output: &Output| kinds.iter().any(|kind| output.name.starts_with(kind));
    outputs.iter().all(named)
}

/// Returns the microseconds of the calls of `count` models, in rounds of one call each. Each round begins with another
/// model, so that other work on the machine affects all of them equally. The caches hold data of the previous model,
/// which is not so in production: each call is made twice, and the second one counts, unless calls are long.
fn in_rounds(
    count: usize,
    more: impl Fn(usize) -> bool,
    mut call: impl FnMut(usize) -> Fallible<Duration>,
) -> Fallible<Vec<Vec<f64>>> {
    let mut taken: Vec<Vec<f64>> = vec![Vec::new(); count];
    let mut round = 0;
    while more(round) {
        for place in 0..count {
            let index = (place + round) % count;
            let mut time = call(index)?;
            if time < LONG {
                time = call(index)?;
            }
            taken[index].push(time.as_secs_f64() * 1e6);
        }
        round += 1;
    }
    Ok(taken)
}

/// Calls a function while as many threads as there are cores compute.
fn beside_busy_threads<R>(call: impl FnOnce() -> R) -> R {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let _end = Ends(&done);
        call()
    })
}

/// Ends the busy threads, also after a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn median(taken: &[f64]) -> f64 {
    let mut taken = taken.to_vec();
    taken.sort_by(f64::total_cmp);
    let middle = (taken[(taken.len() - 1) / 2] + taken[taken.len() / 2]) / 2.0;
    (middle * 10.0).round() / 10.0
}

/// Returns the sizes of the bucketed dimensions that inputs have.
fn sizes_of(program: &Program, inputs: &[Tensor]) -> Sizes {
    let axes = program
        .inputs
        .iter()
        .zip(inputs)
        .flat_map(|(input, given)| {
            let sizes = given.shape();
            let named = input.dims.iter().zip(sizes);
            named.filter_map(|(dim, size)| Some((dim.clone()?, size)))
        });
    axes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_of_two_calls_counts() {
        let mut order = Vec::new();
        let call = |index: usize| {
            let first = order.last() != Some(&index);
            order.push(index);
            let millis = [[20, 10], [5, 1], [80, 70]][index][usize::from(!first)];
            Ok(Duration::from_millis(millis))
        };
        let taken = in_rounds(3, |round| round < 2, call).unwrap();
        assert_eq!(taken, [vec![10e3; 2], vec![1e3; 2], vec![80e3; 2]]);
        // A long call is made once a round. The second round begins with another model.
        assert_eq!(order, [0, 0, 1, 1, 2, 1, 1, 2, 0, 0]);
    }
}
