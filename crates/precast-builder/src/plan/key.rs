//! The two keys, and the fields that each one hashes.
//!
//! **The request key** names a program. It is computed before any Python starts: from the spec, the target, and the
//! digests of the sources that the last import of the entry read. If the store has it, there is nothing to build. **The
//! artifact key** names a compiled segment. It is computed after a capture, from the canonical graph, and contains no
//! names or paths of the project. So a changed comment changes request keys and costs a capture, but every artifact is
//! found.
//!
//! | | request key | artifact key |
//! |---|---|---|
//! | format version, worker protocol | yes | yes |
//! | target: OS, CPU architecture, ISA and its features, device, SM, torch and its commit, CUDA, C++ ABI | yes | yes |
//! | model name, entry, samples callable, `context`, the states that the weight set lacks; module name, path, method | yes | no: names are not code |
//! | sources by path and digest, packages by name and version | yes | no: their effect is in the graph |
//! | bucket (not for eager of any size), inputs (name, dtype, shape, stride, dimensions, padding value, range of samples and its dimension, default if there is one), regions | yes | layouts only |
//! | `[module.state]`: which inputs are states, shapes of buffers, first values, and the modules that give some | yes | no: writes into them are in the graph |
//! | whether it is compiled (`enabled`, `allowlist`, `blocklist`, by their outcome), bounds of dynamic dimensions | yes | no: in the graph |
//! | `backend`, `mode`, `options`, `passes` | yes, passes by name | yes, but only passes on segments, by name and source digest: the effect of others is in the graph |
//! | whether `weights` is a file: the model's other tensors are then constants of its programs | yes | no |
//! | `padding`: the rule for padded requests | yes | no |
//! | `[module.train]`: the part of a step, the optimizer with its options, `clip`, `autocast` | yes | no: in the graph |
//! | `kind = "autograd"`: the program of a pair, `autocast`, the inputs that get gradients | yes | no: in the graph |
//! | whether `--tune` was given | yes | no: its choice is in `mode` and `options` |
//! | canonical graph; constants in order, with the names a binding uses | no | yes |
//! | `fullgraph`, `healthcheck`, `smoketest_steps`, `fail_policy`, `[module.gate]` | no | no |
//! | weight values; host, user, time, folders, number of workers | no | no |
//!
//! `fullgraph` and `fail_policy` decide how a build handles a failed capture and a missing artifact; they do not change
//! a finished program. Smoke steps and tolerances decide whether a program is published; a program that was published
//! under looser ones stays. A tuned program has a separate key, so that the store can have it in addition to the
//! untuned one; a build without `--tune` uses it if it exists. The padding value and the range of samples change no
//! artifact, but they are in the program's record, so they are in its key.

use std::collections::BTreeMap;

use precast_store::{
    Digest, Target,
    record::{ArtifactKind, Constant, Dynamic, Input, Layout, Package, Sizes, SourceFile},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use precast_store::canon::{self, Shared};

use crate::spec::{Backend, Compile, Mode, PaddingRule, Pair, SizedFirst, SizedState, Train};

/// The version of the worker, a part of every key: a change in its capture or compilation makes every old artifact
/// miss. A change that only makes new artifacts faster does not change the version.
pub(crate) const PROTOCOL: u32 = 2;

/// The fields that all programs of a model have in common, written once by [`Common::shared`].
#[derive(Clone, Copy, Debug)]
pub struct Common<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// The spec's entry, as `module:callable`.
    pub entry: &'a str,
    /// The spec's callable for sample inputs, as `module:callable`; none if it has none.
    pub samples: Option<&'a str>,
    /// The spec's `context`: the size of the cache that a generative model gets.
    pub context: Option<i64>,
    /// Globs of buffers that the weight set lacks: states that begin with other values.
    pub unsaved: &'a [String],
    /// Whether the spec names a file of weights: programs then hold the constants that such a file lacks.
    pub weights_file: bool,
    /// The project's own files that the entry imports or reads.
    pub sources: &'a [SourceFile],
    /// The installed packages that the entry imports.
    pub packages: &'a [Package],
    /// The target of the programs.
    pub target: &'a Target,
}

/// The fields of a request key.
#[derive(Clone, Copy, Debug)]
pub struct RequestKey<'a> {
    /// From [`Common::shared`].
    pub common: &'a Shared,
    /// Name of the module in the spec.
    pub module: &'a str,
    /// FQN of the submodule, empty for the model itself.
    pub path: &'a str,
    /// Name of the method that is captured.
    pub method: &'a str,
    /// At this bucket, in call order; none if they are captured from sample inputs.
    pub inputs: Option<&'a [Input]>,
    /// The states that the spec names, at this bucket.
    pub state: &'a [SizedState],
    /// The bucket; for a dynamic program the sizes to capture at, unless only eager runs it.
    pub sizes: &'a Sizes,
    /// Bounds of the dynamic dimensions, for a program that is not for one bucket.
    pub dynamic: Option<&'a Dynamic>,
    /// False for a program that only eager runs.
    pub compiled: bool,
    /// FQN globs of the regions that are cut out.
    pub regions: &'a [String],
    /// The module's compile settings, merged from all layers.
    pub settings: &'a Compile,
    /// The rule for padding a smaller request into it.
    pub padding: PaddingRule,
    /// The part of a training step that it is.
    pub train: Option<&'a Train>,
    /// The program of a pair for training in Python that it is.
    pub pair: Option<&'a Pair>,
    /// Whether measurements choose it among several option sets.
    pub tuned: bool,
}

/// The fields of an artifact key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArtifactKey<'a> {
    /// Digest of the canonical graph's text.
    pub graph: &'a Digest,
    pub inputs: &'a [Layout],
    pub outputs: &'a [Layout],
    pub constants: &'a [Constant],
    pub backend: Backend,
    pub mode: Mode,
    pub options: &'a BTreeMap<String, Value>,
    pub passes: &'a [Pass],
    pub target: &'a Target,
}

/// The key of a graph or of constants that a program holds: the object itself, on its target.
#[derive(Clone, Copy, Debug)]
pub struct HeldKey<'a> {
    /// Whether it is a graph, a library or constants.
    pub kind: ArtifactKind,
    /// The object that holds it.
    pub object: &'a Digest,
    /// Libraries of the custom operators a graph calls.
    pub libraries: &'a [Digest],
    /// Its target.
    pub target: &'a Target,
}

/// A graph pass that runs on segments, and the digest of its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Pass {
    /// As the spec names it.
    pub callable: String,
    /// Digest of the project's files of the pass; for an installed one, the version and every Python file of its
    /// package.
    pub source: Digest,
}

impl Common<'_> {
    /// Writes it once for any number of [`RequestKey`]s.
    pub fn shared(&self) -> Shared {
        let sources: BTreeMap<_, _> = self.sources.iter().map(|s| (&s.path, s.digest)).collect();
        let packages = self.packages.iter().map(|p| (&p.name, &p.version));
        let mut fields = json!({
            "model": self.model,
            "entry": self.entry,
            "samples": self.samples,
            "sources": sources,
            "packages": packages.collect::<BTreeMap<_, _>>(),
            "target": canon::target(self.target),
            "weights": if self.weights_file { "file" } else { "auto" },
        });
        if let Some(context) = self.context {
            fields["context"] = context.into();
        }
        if !self.unsaved.is_empty() {
            fields["unsaved"] = self.unsaved.into();
        }
        Shared::new(fields)
    }
}

impl RequestKey<'_> {
    /// Returns only the key's digest: a build with nothing to do needs no more.
    pub fn digest(&self) -> Digest {
        canon::digest_with(&self.own(), "common", self.common)
    }

    /// Returns the key and its digest.
    pub fn explained(&self) -> (Digest, Value) {
        let mut fields = self.own();
        // At the place where a reader of `diff` expects it: before the fields of the module.
        fields.shift_insert(3, "common".to_owned(), self.common.value().clone());
        (self.digest(), fields.into())
    }

    /// Returns the fields that other requests of the model do not share.
    fn own(&self) -> Map<String, Value> {
        let inputs = self.inputs.map(|all| all.iter().map(canon::input));
        let mut own = fields([
            ("kind", "request".into()),
            ("format", canon::FORMAT.into()),
            ("protocol", PROTOCOL.into()),
            ("module", self.module.into()),
            ("path", self.path.into()),
            ("method", self.method.into()),
            ("inputs", inputs.map_or(Value::Null, Iterator::collect)),
            ("state", self.state.iter().map(state).collect()),
            ("sizes", json!(self.sizes)),
            ("regions", self.regions.into()),
            ("compiles", self.compiled.into()),
            ("dynamic", self.dynamic.map_or(Value::Null, canon::dynamic)),
            ("backend", self.settings.backend.name().into()),
            ("mode", self.settings.mode.name().into()),
            ("options", json!(self.settings.options)),
            ("passes", json!(self.settings.passes)),
            ("padding", json!(self.padding)),
            ("tuned", self.tuned.into()),
        ]);
        if let Some(train) = self.train {
            own.insert("train".to_owned(), json!(train));
        }
        if let Some(pair) = self.pair {
            own.insert("pair".to_owned(), json!(pair));
        }
        own
    }
}

/// Returns a state in canonical form.
fn state(state: &SizedState) -> Value {
    let first = match &state.first {
        SizedFirst::Zeros => "zeros".into(),
        SizedFirst::Own => "own".into(),
        SizedFirst::Module(filler) => json!({"module": {
            "name": filler.name,
            "path": filler.path,
            "method": filler.method,
            "inputs": filler.inputs.iter().map(canon::input).collect::<Vec<_>>(),
        }}),
    };
    json!({"name": state.name, "first": first, "shape": state.shape, "dims": state.dims})
}

impl ArtifactKey<'_> {
    /// Returns the key and its digest.
    pub fn explained(&self) -> (Digest, Value) {
        let passes = self.passes.iter();
        named([
            ("kind", "artifact".into()),
            ("format", canon::FORMAT.into()),
            ("protocol", PROTOCOL.into()),
            ("graph", json!(self.graph)),
            ("inputs", self.inputs.iter().map(canon::layout).collect()),
            ("outputs", self.outputs.iter().map(canon::layout).collect()),
            (
                "constants",
                self.constants.iter().map(canon::constant).collect(),
            ),
            ("backend", self.backend.name().into()),
            ("mode", self.mode.name().into()),
            ("options", json!(self.options)),
            (
                "passes",
                passes
                    .map(|pass| json!({"callable": pass.callable, "source": pass.source}))
                    .collect(),
            ),
            ("target", canon::target(self.target)),
        ])
    }
}

impl HeldKey<'_> {
    /// Returns the key and its digest.
    pub fn explained(&self) -> (Digest, Value) {
        let kind = match self.kind {
            ArtifactKind::Library => "library",
            ArtifactKind::Constants => "constants",
            ArtifactKind::Graph => "graph",
        };
        named([
            ("kind", kind.into()),
            ("format", canon::FORMAT.into()),
            ("protocol", PROTOCOL.into()),
            ("object", json!(self.object)),
            ("libraries", json!(self.libraries)),
            ("target", canon::target(self.target)),
        ])
    }
}

/// Returns a key of these fields, and its digest.
fn named<const N: usize>(all: [(&str, Value); N]) -> (Digest, Value) {
    let key = fields(all).into();
    (canon::digest(&key), key)
}

fn fields<const N: usize>(all: [(&str, Value); N]) -> Map<String, Value> {
    let owned = all
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value));
    owned.collect()
}

#[cfg(test)]
mod tests;
