//! The messages between `precast` and its Python worker: one JSON document per line, in both directions.
//!
//! The worker reads requests on stdin and answers on its original stdout. Output of torch, a model or a compiler goes
//! to the worker's stderr, which is its log. A request has an `id`; the worker answers it with exactly one `result` or
//! `error` of that id, and may send `event`s before. A worker serves one request at a time and stays alive. Paths in
//! answers are absolute and lie in the `out` folder of the request; the store takes its own copy of these files.
//!
//! Environment of a worker: `TORCHINDUCTOR_CACHE_DIR`, `TRITON_CACHE_DIR` and `TMPDIR` are private folders of the
//! build. `PRECAST_HEADER_DIR` may name a folder that outlives builds, for precompiled C++ headers: they take 10 s and
//! are the same for every build on a machine. The worker uses either folder only if this user owns it and no other user
//! can write it.

use std::{collections::BTreeMap, path::PathBuf};

use precast_store::record::{
    self, Constant, Input, Layout, Output, Package, Receipt, Sizes, SourceFile,
    receipt::ModulePadding,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    plan::{OUT_OF_MEMORY, Pass},
    spec::{Bounds, PaddingRule, Pair, SizedState, Train, compile::InductorOptions},
};

mod checked;

pub use self::checked::{
    BucketCost, Checked, Cost, Finding, Fix, Free, KeptOut, Recompiles, Repeated, Severity,
    TorchCall,
};
pub(crate) use crate::plan::PROTOCOL;

/// The hint for a bug.
pub(super) const REPORT: &str =
    "this is a bug of precast: please report it, with what `precast build -vv` prints";

/// A request to a worker.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Requests the versions of the worker: answered with [`Hello`]. It refuses misspelt names before it imports torch.
    Hello {
        /// The spec's folder.
        root: PathBuf,
        /// Every `module:callable` of the spec.
        names: Vec<String>,
    },
    /// Imports the compiler, and compiles the C++ headers that every compile on a machine needs. Answered with
    /// [`WarmedUp`]; without it the first compile takes longer.
    WarmUp {
        device: String,
        isa: String,
        out: PathBuf,
    },
    /// Imports the entry and creates the model: answered with [`Opened`]. Once per worker and model.
    Open {
        /// The spec's folder, first on `sys.path`.
        root: PathBuf,
        /// `module:callable`.
        entry: String,
        /// `cpu` or `cuda`.
        device: String,
        /// Further `module:callable`s that captures will use (passes, samples): their files are sources too.
        also: Vec<String>,
        /// Safetensors files with values for the model, in place of its own. Together they are its weight set.
        weights: Vec<PathBuf>,
        /// The path in the spec, which errors about these files name.
        weights_name: Option<PathBuf>,
        /// Names of tensors of that file that the model may lack.
        unused_weights: Vec<String>,
        /// The size of the cache that a generative model gets.
        context: Option<i64>,
        /// Globs of buffers that the weight set lacks.
        unsaved: Vec<String>,
    },
    /// Writes the weight set as safetensors, unless it came from a file: answered with [`SavedWeights`].
    Weights { out: PathBuf },
    /// Finds the inputs of a module that the spec leaves out, by running the model once: answered with [`Sampled`].
    Inputs {
        path: String,
        method: String,
        /// `module:callable` for sample inputs of the model, with the sizes it has parameters for.
        samples: Option<String>,
        /// Inputs of the model itself, if there is no such callable.
        inputs: Vec<Input>,
        /// Sizes to run at; those of the module's buckets.
        sizes: Sizes,
    },
    /// Captures one module at one bucket: answered with [`Captured`].
    Capture {
        module: ModuleRequest,
        sizes: Sizes,
        out: PathBuf,
    },
    /// Runs a module with more digits on the samples of its capture: answered with [`Truth`].
    Truth {
        module: ModuleRequest,
        sizes: Sizes,
        /// [`Captured::samples`].
        samples: PathBuf,
        /// The dtype in place of fewer digits.
        dtype: record::Dtype,
        /// Runs of eager that its distance comes from.
        runs: u32,
        out: PathBuf,
    },
    /// Checks one module, and compiles nothing: answered with [`Checked`].
    Check {
        /// `dynamic` are the dimensions for which the spec requests a dynamic artifact.
        module: ModuleRequest,
        /// The bucket of the check.
        sizes: Sizes,
        /// All buckets of the module.
        buckets: Vec<Sizes>,
        /// `module:callable` whose sample inputs are used where the spec leaves the module's inputs out.
        samples: Option<String>,
        /// Whether to find the reasons for which torch.compile would compile again.
        recompiles: bool,
        /// Whether to compute the minimum cost of each bucket.
        cost: bool,
    },
    /// Describes the model for a new spec: answered with [`Described`].
    Describe {
        /// `module:callable` that gives sample inputs.
        samples: Option<String>,
        /// The inputs, if there is no such callable.
        inputs: Vec<AskedInput>,
    },
    /// Compiles the shim for the worker's torch: answered with [`CompiledShim`](crate::shims::CompiledShim).
    Shim {
        /// Name -> text of each file.
        sources: BTreeMap<&'static str, &'static str>,
        /// `cpu`, or `cuda` for the shared object for CUDA too.
        device: String,
        out: PathBuf,
    },
    /// Compiles one captured segment: answered with [`Compiled`].
    Compile {
        /// [`Segment::file`] of an earlier answer, of this worker or another.
        file: PathBuf,
        device: String,
        /// `native` or a level of [`precast_store::target::ISA_LEVELS`].
        isa: String,
        mode: String,
        options: serde_json::Map<String, Value>,
        /// Graph passes to run on it, in order. One whose source is another now is refused.
        passes: Vec<Pass>,
        out: PathBuf,
    },
}

/// The module to capture, as the plan has it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ModuleRequest {
    pub name: String,
    /// FQN of the submodule, empty for the model itself.
    pub path: String,
    pub method: String,
    /// In call order, states among them. `layout.shape` holds the sizes of this bucket.
    pub inputs: Vec<Input>,
    /// The states that the spec names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub state: Vec<SizedState>,
    /// Whether its segments will be compiled. Otherwise only the graph for eager is saved.
    pub compiled: bool,
    /// FQN globs of the regions to cut out.
    pub regions: Vec<String>,
    /// Graph passes, `module:callable`: in order those for whole graphs run before the graph is cut.
    pub passes: Vec<String>,
    /// Dimensions to capture as dynamic, each with its bounds: one segment and one graph for every size in them.
    pub dynamic: Option<BTreeMap<String, Bounds>>,
    /// [`Sampled::structure`], for inputs that were found by running the model.
    pub structure: Option<Value>,
    /// `trusted` if padding is not checked.
    pub padding: PaddingRule,
    /// The part of a training step that it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<Train>,
    /// The program of a pair for training in Python that it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pair: Option<Pair>,
}

/// One line from a worker.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Line {
    Result {
        id: u64,
        value: Value,
    },
    Error {
        id: u64,
        error: WorkerError,
    },
    /// Code of the model forked the worker, and the copy has ended.
    Forked,
    /// The current phase of the request, as `lower` or `link`; for progress only.
    Event {
        id: u64,
        phase: String,
    },
}

/// The error of a request.
#[derive(Clone, Debug, Deserialize, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct WorkerError {
    /// A stable code: `entry_import`, `entry_call`, `torch_missing`, `torch_untried`, `no_device`, `no_module`,
    /// `no_method`, `bad_input`, `capture`, `pass`, `compile`, `shim`, `weights`, `truth`, `protocol`, `internal`.
    pub code: String,
    /// One line, lower case, no final period, with the name of the subject.
    pub message: String,
    /// The user's file and line that caused it, as `model.py:12`.
    #[serde(default)]
    pub location: Option<String>,
    /// A hint, if the worker knows more than the code implies.
    #[serde(default)]
    pub hint: Option<String>,
    /// The wrong value in the spec, if that is the cause.
    #[serde(default)]
    pub spec: Option<String>,
    /// The whole Python traceback.
    #[serde(default)]
    pub trace: String,
}

impl WorkerError {
    /// Returns a hint for the user: the worker's, or the one for errors of this kind.
    pub fn hint(&self) -> String {
        if let Some(hint) = &self.hint {
            return hint.clone();
        }
        let text = match self.code.as_str() {
            "entry_import" | "entry_call" => {
                "`entry` names a `module:callable` beside the spec; calling it in that Python shows the same"
            }
            "torch_missing" => {
                "name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`"
            }
            "no_device" => "build on a host that has this device, or change `[target] device`",
            "no_module" => "`path` is one of the names that `named_modules()` gives",
            "no_method" => "`method` is a method of that submodule",
            "bad_input" => "give the inputs of this module in the spec, as the model takes them",
            "capture" => {
                "`torch.export.export` must be able to capture it; eager runs the captured graph too"
            }
            "pass" => "fix the pass, or take it out of `passes`",
            "shim" => {
                "the shim needs a C++ compiler that knows C++20, as g++ 11 does; `precast doctor` says what there is"
            }
            "compile" => {
                "other `options` or another `mode` may do; `enabled = false` leaves the module to eager"
            }
            "weights" => "weights are dense tensors of a dtype that safetensors has",
            OUT_OF_MEMORY => {
                "end other processes that take memory, or ask for smaller buckets; `-j 1` leaves all of it to one worker"
            }
            _ => REPORT,
        };
        text.to_owned()
    }
}

/// The versions of a worker.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    /// Version, as `3.11.7`.
    pub python: String,
    pub site_packages: Vec<String>,
    pub torch: String,
    pub torch_git: String,
    pub cuda: Option<String>,
    pub cxx11_abi: bool,
    /// The feature that is off with this torch.
    pub off: Vec<Off>,
}

/// A feature that a version of torch lacks something for.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Off {
    /// The feature, in words.
    pub what: String,
    /// The reason, and the behaviour instead.
    pub why: String,
}

/// A worker whose compiler is imported.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct WarmedUp {
    /// Seconds by phase.
    pub seconds: BTreeMap<String, f64>,
}

/// The result of importing the entry and making the model.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Opened {
    /// The project's own files that were imported or read, sorted by path.
    pub sources: Vec<SourceFile>,
    /// Installed packages that were imported, sorted by name.
    pub packages: Vec<Package>,
    /// FQN -> class name of every submodule; the model itself is under the empty name.
    pub modules: BTreeMap<String, String>,
    /// FQN -> method -> keys of `[compile]`, from `get_torch_compile_config` and `torch.compiler.disable`.
    #[serde(default)]
    pub declared: BTreeMap<String, BTreeMap<String, Value>>,
    /// Distinguishes weights, by some of the values of each: an entry may draw other values in another worker.
    #[serde(default)]
    pub fingerprint: Option<String>,
    /// Notes for the user about the model, as that it was in training mode.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// The inputs of a module, as the model calls it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Sampled {
    /// Tensors in order, named by the parameter and the path inside it (`cache.0`).
    pub inputs: Vec<Input>,
    /// Their structure: `{"args": […], "kwargs": {…}}` of `{"tensor": n}`, `{"value": v}`, `{"list": […]}`, `{"tuple":
    /// […]}` and `{"dict": {…}}`.
    pub structure: Value,
}

/// The weight set of the opened model.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct SavedWeights {
    /// Absent for a model without parameters and buffers.
    pub file: Option<PathBuf>,
    /// Names of tied tensors -> the name under which the file holds them.
    pub aliases: BTreeMap<String, String>,
}

/// A captured program: segments to compile and the steps that call them.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Captured {
    pub segments: Vec<Segment>,
    pub steps: Vec<CapturedStep>,
    /// The passes that run, or may run, when the segments are compiled.
    #[serde(default)]
    pub passes: SegmentPasses,
    pub inputs: Vec<Input>,
    /// Buffers that the module writes into, and the inputs that the spec names as states.
    #[serde(default)]
    pub states: Vec<record::State>,
    pub outputs: Vec<Output>,
    /// Value numbers of the outputs.
    pub results: Vec<usize>,
    /// The checks of a run; their values are outputs of steps.
    #[serde(default)]
    pub checks: Vec<record::Check>,
    /// Number of values.
    pub values: usize,
    pub call_spec: Value,
    /// Dimensions in which a request can't be smaller than this bucket, each with the reason.
    #[serde(default)]
    pub exact: BTreeMap<String, String>,
    /// Notes for the user about the module, as that an output is no tensor.
    #[serde(default)]
    pub notes: Vec<String>,
    /// For each output, and then for each state's new value, the coarsest dtype below float32 of its computation, if any.
    #[serde(default)]
    pub compute_dtypes: Vec<Option<record::Dtype>>,
    /// The largest value of all gradients: their absolute tolerance is a share of it, because some are zero but for
    /// rounding. None for other outputs.
    #[serde(default)]
    pub largest: Option<f64>,
    /// A safetensors file with inputs `in.0`, `in.1`, …, eager's outputs `out.0`, …, and states before the call
    /// (`state.0`, …) and after it (`after.0`, …).
    pub samples: PathBuf,
    /// A safetensors file with tensors that bindings name and the weight set lacks: tensors without a name in the
    /// model, created by its code. Each is named by its content, so that several captures can be merged.
    #[serde(default)]
    pub extra_weights: Option<PathBuf>,
    /// The bounds that a dynamic capture holds for: a compiled one starts at 2, eager's at the module's smallest size.
    /// Sizes in layouts are then those of the sample inputs.
    #[serde(default)]
    pub dynamic: Option<BTreeMap<String, Bounds>>,
    /// The graph of the whole module at this bucket as a list of operator calls, which eager runs; none if the graph
    /// can't be converted. It holds no weights: its flat inputs are the module's inputs in call order and then
    /// `exported_weights`; its outputs are `outputs`.
    #[serde(default)]
    pub exported: Option<PathBuf>,
    /// Tensor names in the weight set, in the order the graph takes them after the inputs.
    #[serde(default)]
    pub exported_weights: Vec<String>,
    /// Seconds it took.
    pub seconds: f64,
    #[serde(default)]
    pub receipt: Measured,
}

/// The values of a module with more digits, and eager's distances from them.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Truth {
    /// A safetensors file, as in [`GateRequest::truth`](crate::gate::GateRequest::truth).
    pub file: PathBuf,
}

/// Measurements of the module itself, in Python, on the sample inputs.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Measured {
    /// Median microseconds of a call.
    pub eager_us: Option<f64>,
    /// Number of calls of that median.
    pub eager_runs: Option<u64>,
    /// Number of threads that torch used for them.
    pub threads: Option<u64>,
    /// Peak memory, on CUDA.
    pub eager_peak_bytes: Option<u64>,
    /// Its answers to requests that were padded into the bucket; none if padding was not tried.
    pub padding: Option<ModulePadding>,
    /// Floating-point operations of a part of a training step, by the dtype of the operands.
    #[serde(default)]
    pub flops: BTreeMap<record::Dtype, u64>,
}

impl Measured {
    /// Returns the receipt of a program whose capture took so many seconds.
    pub fn receipt(self, seconds: f64) -> Receipt {
        let mut receipt = Receipt {
            eager_us: self.eager_us,
            eager_runs: self.eager_runs,
            threads: self.threads,
            eager_peak_bytes: self.eager_peak_bytes,
            padding: self.padding,
            flops: self.flops,
            ..Receipt::default()
        };
        receipt.took("capture", seconds);
        receipt
    }
}

/// One input of a model, as a user names it: `ids=int64[batch,seq]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AskedInput {
    /// Name of the model's argument.
    pub name: String,
    /// Type of its elements.
    pub dtype: record::Dtype,
    /// Size or dimension of each axis.
    pub shape: Vec<Axis>,
}

/// The size of an axis, or the name of its dimension.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Axis {
    /// The axis has this size in every call.
    Fixed(u64),
    /// The axis has the size of the dimension of this name.
    Named(String),
}

/// The content of a new spec for a model.
#[derive(Clone, Debug, Deserialize)]
pub struct Described {
    /// Name of the model's class.
    pub class: String,
    /// The modules of the spec.
    pub modules: Vec<DescribedModule>,
    /// Whether the model gets a cache: the largest size of `context`.
    pub generative: bool,
    /// Dimension -> every size of it that was seen.
    pub sizes: BTreeMap<String, Vec<u64>>,
    /// The coarsest floating dtype that an output has, or was computed in.
    pub dtype: Option<record::Dtype>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// One module of a new spec.
#[derive(Clone, Debug, Deserialize)]
pub struct DescribedModule {
    /// Name that callers use.
    pub name: String,
    /// The method to capture.
    pub method: String,
    /// In call order; none where they are nested, so that only a callable can give them.
    pub inputs: Option<Vec<DescribedInput>>,
    /// Glob of buffers -> size or dimension of each of their axes.
    pub state: BTreeMap<String, Vec<Axis>>,
    /// Lists of submodules of which several have one graph.
    pub regions: Vec<DescribedRegion>,
}

/// One input of a model.
#[derive(Clone, Debug, Deserialize)]
pub struct DescribedInput {
    /// Name of the model's argument.
    pub name: String,
    /// Type of its elements.
    pub dtype: record::Dtype,
    /// Size or dimension of each axis.
    pub shape: Vec<Axis>,
    /// Value that fills padding, of the input's dtype.
    pub pad: Value,
    /// Minimum, and one past the maximum or the dimension of that size; none if every value is allowed.
    pub range: Option<(i64, Axis)>,
    /// Value of all elements in a session's call that gives none, of the input's dtype.
    #[serde(default)]
    pub default: Option<Value>,
}

/// A list of submodules that could be a region.
#[derive(Clone, Debug, Deserialize)]
pub struct DescribedRegion {
    /// Pattern for `regions`, as `layers.*`.
    pub glob: String,
    /// Number of submodules that it matches.
    pub count: u64,
    /// Number of distinct graphs of these.
    pub artifacts: u64,
}

/// Graph passes for the segments of a program.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct SegmentPasses {
    /// The module's own passes on segments, in order.
    pub own: Vec<Pass>,
    /// Option sets that installed packages offer for these segments, for `--tune` to try.
    pub offered: Vec<Offer>,
}

/// An option set that a package offers, in addition to the module's own settings.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Offer {
    /// Passes after the module's own.
    pub passes: Vec<Pass>,
    pub options: InductorOptions,
}

/// One distinct piece of a captured program.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Segment {
    /// The canonical graph: no names of nodes, modules or files, no paths, no float weight values.
    pub graph: String,
    /// Path of the segment, ready to compile by any worker.
    pub file: PathBuf,
    pub inputs: Vec<Layout>,
    pub outputs: Vec<Layout>,
    pub constants: Vec<Constant>,
    /// Libraries of custom operators to load before the artifact, in this order; their digests are in the text.
    #[serde(default)]
    pub libraries: Vec<PathBuf>,
}

/// One call of a segment.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct CapturedStep {
    pub name: String,
    /// Index into [`Captured::segments`].
    pub segment: usize,
    pub inputs: Vec<usize>,
    pub outputs: Vec<usize>,
    /// Constant name in the segment -> tensor name in the weight set.
    pub binding: BTreeMap<String, String>,
}

/// A compiled segment.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Compiled {
    /// The shared object.
    pub library: PathBuf,
    /// JSON for the proxy executor, if the artifact calls operators through it.
    #[serde(default)]
    pub proxy: Option<PathBuf>,
    /// Its prepacked constants, with the recipes that compute them from the segment's constants.
    #[serde(default)]
    pub prepared: Vec<record::Prepared>,
    /// AOTInductor's own metadata, written next to the library.
    pub metadata: Value,
    /// Seconds by phase (`lower`, `cpp`, `link`, …).
    pub seconds: BTreeMap<String, f64>,
}
