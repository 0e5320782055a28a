//! The spec, `precast.toml`: the user's description of a build. This module reads one file and uses no torch and no
//! store.
//!
//! ```text
//! schema = 1
//! [model]      name, entry = "module:callable", weights = "auto" | "x.safetensors", samples = "module:callable", context
//! [target]     device = "cpu" | "cuda", isa = "native" | "x86-64-v3" | …
//! [compile]    defaults of the settings, see `compile`
//! [[module]]   name, kind, path, method, regions, padding, and any setting of [compile]
//!   [module.inputs]    input = { dtype, shape = [8, "seq"], pad, range = [first, past_the_last], default }, in call order
//!   [module.state]     input or buffer = "zeros" | "own" | a module | { shape = [1, "context"], first }: kept from call to call
//!   [module.buckets]   dimension = [sizes] (the grid), or points = [{ batch = 1, seq = 512 }, …]
//!   [module.gate]      rtol, atol
//!   [module.train]     loss, optimizer with its options, clip, accumulate, autocast: for `kind = "step"`;
//!                      autocast, gradients: for `kind = "autograd"`
//! [[check.allow]]      finding, function, reason: intended findings of `precast check`
//! ```
//!
//! `--set` overrides settings for one run: see `setting`.
//!
//! A spec is parsed into a tree with positions and walked by hand, so that one run reports all problems, each with its
//! line and a caret ([`SpecError`]). Two modules may share a name if their inputs have different names: they are
//! variants, and dispatch selects by the names in a request. Problems outside the spec (an entry that does not import,
//! a submodule that does not exist) are found later, by the build.

mod buckets;
mod callable;
pub mod check;
pub mod compile;
mod error;
pub mod glob;
mod inputs;
pub mod pair;
pub(crate) mod parse;
mod reader;
mod setting;
mod states;
pub mod train;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

pub use callable::{callable_help, is_callable};
pub use compile::{
    Backend, Bounds, Compile, Dynamic, Effective, FailPolicy, Mode, Origin, Overrides, effective,
};
pub use error::{Problem, SpecError};
pub use inputs::is_identifier;
pub use pair::Pair;
pub use setting::CommandLine;
pub use states::{Filler, FirstValue, SizedFirst, SizedState, StateSpec};
pub use train::Train;

use precast_store::{
    record::{Dtype, Input, Layout, Pad, Sizes},
    target::DeviceKind,
};

/// The version in `schema` of a spec.
pub const SCHEMA: i64 = 1;

/// Maximum bytes of a spec: some twenty thousand lines.
const MAX_BYTES: u64 = 1 << 20;

/// The content of `precast.toml`.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Path as it was given.
    pub file: PathBuf,
    /// The folder of the file: where the entry is imported from and relative paths start.
    pub root: PathBuf,
    /// The `[model]` table.
    pub model: Model,
    /// The `[target]` table.
    pub target: TargetSpec,
    /// The `[compile]` table.
    pub compile: Overrides,
    /// At least one, in the order of the file.
    pub modules: Vec<Module>,
    /// Findings that `precast check` allows. No build depends on them.
    pub allowed: Vec<check::Allow>,
}

/// The model the modules belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Name that programs and releases have in the store.
    pub name: String,
    /// `module:callable`.
    pub entry: String,
    /// The source of the weights.
    pub weights: WeightsFrom,
    /// FQN globs of tensors of that file that the model may lack.
    pub unused_weights: Vec<String>,
    /// `module:callable` that gives sample inputs, for modules whose inputs are left out.
    pub samples: Option<String>,
    /// Files that belong to its releases, by name. Paths are absolute, or already joined to [`Spec::root`].
    pub assets: BTreeMap<String, PathBuf>,
    /// Tokens that the cache of a generative model of transformers has room for; none for other models.
    pub context: Option<i64>,
}

/// The source of the weight set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightsFrom {
    /// The model's own parameters and buffers.
    Auto,
    /// A safetensors file; its path is absolute, or already joined to [`Spec::root`].
    File(PathBuf),
}

impl WeightsFrom {
    /// Returns the file, if there is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Auto => None,
            Self::File(path) => Some(path),
        }
    }
}

/// The target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSpec {
    /// `cpu` unless the spec has `cuda`.
    pub device: DeviceKind,
    /// `native` or a name of [`precast_store::target::ISA_LEVELS`].
    pub isa: String,
}

/// One callable of the model and how to compile it.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// A callable of the model, with its buckets.
    pub name: String,
    /// FQN of the submodule, empty for the model itself.
    pub path: String,
    /// Name of the method to capture; the default is `forward`.
    pub method: String,
    /// In call order; none if they are captured from sample inputs.
    pub inputs: Option<Vec<InputSpec>>,
    /// The inputs that are states, and the shapes of buffers that are. Buffers that the module writes into need no
    /// entry.
    pub state: Vec<StateSpec>,
    /// Sorted and distinct. A module without bucketed dimensions has one bucket, with empty sizes.
    pub buckets: Vec<Sizes>,
    /// FQN globs relative to the submodule.
    pub regions: Vec<String>,
    /// The settings of this entry.
    pub compile: Overrides,
    /// The `[module.gate]` table.
    pub gate: Gate,
    /// Whether padding is checked.
    pub padding: PaddingRule,
    /// The part of a training step that it is, if it is one.
    pub train: Option<Train>,
    /// The program of a pair for training in Python that it is, if it is one.
    pub pair: Option<Pair>,
}

/// The rule for padding a smaller request into a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PaddingRule {
    /// The build: it compares padded requests with unpadded ones, and reads the captured graph.
    #[default]
    Checked,
    /// Padding is declared harmless: the values that the module receives make it so.
    Trusted,
}

/// One named input.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSpec {
    /// Name of the method's parameter.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Size or dimension of each axis.
    pub shape: Vec<Dim>,
    /// Fits `dtype`: a boolean for bool, an integer in range for integers, a finite float for floats.
    pub pad: Pad,
    /// The values that it may have, `range[0]..range[1]`. Samples are drawn from it.
    pub range: Option<[i64; 2]>,
    /// The dimension whose size is `range[1]`, if there is one.
    pub within: Option<String>,
    /// The value of all elements where a session's call gives no input beside tokens.
    pub default: Option<Pad>,
}

/// The size of one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dim {
    /// The same size in every bucket.
    Fixed(i64),
    /// The size a bucket gives to this dimension.
    Named(String),
}

/// Tolerances for the difference between an artifact and eager. The build has defaults by dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gate {
    /// Relative tolerance; none for that of the dtype.
    pub rtol: Option<f64>,
    /// Absolute tolerance; none for that of the dtype.
    pub atol: Option<f64>,
}

impl Spec {
    /// Reads and checks the file at `path`.
    pub fn load(path: &Path) -> Result<Self, SpecError> {
        let mut bytes = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
        read.map_err(|source| SpecError::Read {
            path: path.to_owned(),
            source,
        })?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(SpecError::TooLarge {
                path: path.to_owned(),
                most: MAX_BYTES,
            });
        }
        let text = String::from_utf8(bytes).map_err(|error| SpecError::NotText {
            path: path.to_owned(),
            offset: error.utf8_error().valid_up_to(),
        })?;
        Self::parse(&text, path)
    }

    /// Checks `text` as the content of the file at `path`, which is not read.
    pub fn parse(text: &str, path: &Path) -> Result<Self, SpecError> {
        parse::spec(text, path)
    }

    /// Returns a problem with `message` at the place of a value in the file, in quotes; none if no key for code has
    /// this value.
    pub fn mark(&self, value: &str, message: String, help: String) -> Option<SpecError> {
        let text = fs::read_to_string(&self.file).ok()?;
        let quoted = ['"', '\''].map(|quote| format!("{quote}{value}{quote}"));
        let mut found = quoted.iter().flat_map(|quoted| text.match_indices(quoted));
        // Names may be equal words.
        let (start, _) = found.find(|(start, _)| {
            // A list may have several lines: the key is in the last line with an assignment.
            let lines = text[..*start].lines().rev();
            let key = (lines.filter(|line| !line.trim_start().starts_with('#')))
                .find_map(|line| Some(line.split_once('=')?.0.trim()));
            ["entry", "samples", "path", "method", "passes", "regions"]
                .iter()
                .any(|known| key == Some(known))
        })?;
        let at = start..start + value.len() + 2;
        let problem = Problem::new(self.file.clone(), &text, at, message, help);
        Some(SpecError::Invalid(vec![problem]))
    }

    /// Returns a module's name, with its inputs where variants share the name: `encode`, or `answer(ids, image)`.
    pub fn title(&self, module: usize) -> String {
        let module = &self.modules[module];
        let variants = self
            .modules
            .iter()
            .filter(|other| other.name == module.name);
        match &module.inputs {
            Some(inputs) if variants.count() > 1 => {
                let names: Vec<&str> = inputs.iter().map(|input| input.name.as_str()).collect();
                format!("{}({})", module.name, names.join(", "))
            }
            _ => module.name.clone(),
        }
    }

    /// Returns the settings of one module. `submodule` has its own declarations, `command_line` those of this run.
    pub fn settings(
        &self,
        module: &Module,
        submodule: &Overrides,
        command_line: &Overrides,
    ) -> Effective {
        let mut settings = effective(&[
            (Origin::Spec, &self.compile),
            (Origin::Submodule, submodule),
            (Origin::Module, &module.compile),
            (Origin::CommandLine, command_line),
        ]);
        // Prepacked weights are worth a copy. On a device only graph passes request some.
        let freezing = settings.compile.options.entry("freezing".to_owned());
        freezing.or_insert(true.into());
        let trains = module.train.is_some() || module.pair.is_some();
        if trains && self.target.device == DeviceKind::Cpu {
            // In channels-last order each gradient of a filter is converted: a step of a small ResNet takes longer.
            let channels_last = settings
                .compile
                .options
                .entry("layout_optimization".to_owned());
            channels_last.or_insert(false.into());
        }
        settings
    }
}

impl Module {
    /// Returns the names of the inputs, which distinguish its variants; none if the spec leaves them out.
    pub fn input_names(&self) -> Option<BTreeSet<String>> {
        let inputs = self.inputs.as_ref()?;
        Some(inputs.iter().map(|input| input.name.clone()).collect())
    }

    /// Returns the inputs at one bucket, contiguous, in call order; none if the spec leaves them out. A dimension that
    /// `sizes` lacks has size 1.
    pub fn sized_inputs(&self, sizes: &Sizes) -> Option<Vec<Input>> {
        let inputs = self.inputs.as_ref()?;
        Some(inputs.iter().map(|input| input.sized(sizes)).collect())
    }
}

impl InputSpec {
    fn sized(&self, sizes: &Sizes) -> Input {
        let shape: Vec<i64> = self.shape.iter().map(|dim| dim.size(sizes)).collect();
        let within = self.within.as_ref().and_then(|dim| sizes.get(dim));
        Input {
            name: self.name.clone(),
            layout: Layout {
                dtype: self.dtype,
                stride: contiguous(&shape),
                shape,
            },
            dims: self.shape.iter().map(Dim::name).collect(),
            pad: self.pad,
            range: (self.range).map(|[first, past]| [first, within.copied().unwrap_or(past)]),
            bounds: None,
            within: self.within.clone(),
            default: self.default,
        }
    }
}

impl Dim {
    fn size(&self, sizes: &Sizes) -> i64 {
        match self {
            Self::Fixed(size) => *size,
            Self::Named(name) => sizes.get(name).copied().unwrap_or(1),
        }
    }

    fn name(&self) -> Option<String> {
        match self {
            Self::Fixed(_) => None,
            Self::Named(name) => Some(name.clone()),
        }
    }
}

/// Returns the strides, in elements, of a row-major tensor.
fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = Vec::with_capacity(shape.len());
    let mut stride = 1_i64;
    for size in shape.iter().rev() {
        strides.push(stride);
        stride = stride.saturating_mul(*size);
    }
    strides.reverse();
    strides
}

#[cfg(test)]
mod tests;
