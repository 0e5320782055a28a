//! The two keys, and the fields that each one hashes.
//!
//! **The request key** names a program. It is computed before any Python starts: from the spec, the target, and the digests
//! of the sources that the last import of the entry read. If the store has it, there is nothing to build. **The artifact
//! key** names a compiled segment. It is computed after a capture, from the canonical graph, and contains no names or paths
//! of the project. So a changed comment changes request keys and costs a capture, but every artifact is found.
//!
//! | | request key | artifact key |
//! |---|---|---|
//! | format version, worker protocol | yes | yes |
//! | target: OS, CPU architecture, ISA and its features, device, SM, torch and its commit, CUDA, C++ ABI | yes | yes |
//! | model name, entry, samples callable; module name, path, method | yes | no: names are not code |
//! | sources by path and digest, packages by name and version | yes | no: their effect is in the graph |
//! | bucket, inputs (name, dtype, shape, stride, dimensions, padding value, range of samples), regions | yes | layouts only |
//! | whether it is compiled (`enabled`, `allowlist`, `blocklist`, by their outcome), bounds of dynamic dimensions | yes | no: in the graph |
//! | `backend`, `mode`, `options`, `passes` | yes, passes by name | yes, but only passes on segments, by name and source digest: the effect of others is in the graph |
//! | whether `weights` is a file: the model's other tensors are then constants of its programs | yes | no |
//! | whether `--tune` was given | yes | no: its choice is in `mode` and `options` |
//! | canonical graph; constants in order, with the names a binding uses | no | yes |
//! | `fullgraph`, `healthcheck`, `smoketest_steps`, `fail_policy`, `[module.gate]` | no | no |
//! | weight values; host, user, time, folders, number of workers | no | no |
//!
//! `fullgraph` and `fail_policy` decide how a build handles a failed capture and a missing artifact; they do not change a
//! finished program. Smoke steps and tolerances decide whether a program is published; a program that was published under
//! looser ones stays. A tuned program has a key of its own, so that the store can have it beside the untuned one; a build
//! without `--tune` uses it if it exists. The padding value and the range of samples change no artifact, but they are in the
//! program's record, so they are in its key.

use std::collections::BTreeMap;

use precast_store::{
    Digest, Target,
    record::{ArtifactKind, Constant, Dynamic, Input, Layout, Package, Sizes, SourceFile},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use precast_store::canon::{self, Canon, SharedValue, Sink, record};

use crate::spec::{Backend, Compile, Mode};

/// The version of the worker: part of every key, so that a change in how it captures or compiles makes every old artifact miss. What only makes
/// new artifacts faster leaves it as it is.
pub(crate) const PROTOCOL: u32 = 2;

/// What all programs of a model have in common: walk it once with [`Common::shared`].
#[derive(Clone, Copy, Debug)]
pub struct Common<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// The spec's entry, as `module:callable`.
    pub entry: &'a str,
    /// The spec's callable for sample inputs, as `module:callable`; none where it names none.
    pub samples: Option<&'a str>,
    /// Whether the spec names a file of weights: programs then hold what no such file has.
    pub weights_file: bool,
    /// The project's own files that the entry imports or reads.
    pub sources: &'a [SourceFile],
    /// The installed packages that the entry imports.
    pub packages: &'a [Package],
    /// What the programs are compiled for.
    pub target: &'a Target,
}

/// What decides a program.
#[derive(Clone, Copy, Debug)]
pub struct RequestKey<'a> {
    /// From [`Common::shared`].
    pub common: &'a SharedValue,
    /// Name of the module in the spec.
    pub module: &'a str,
    /// FQN of the submodule, empty for the model itself.
    pub path: &'a str,
    /// Name of the method that is captured.
    pub method: &'a str,
    /// At this bucket, in call order; none when they are captured from sample inputs.
    pub inputs: Option<&'a [Input]>,
    /// The bucket; for a dynamic program the sizes to capture at.
    pub sizes: &'a Sizes,
    /// Bounds of the dynamic dimensions, for a program that is not for one bucket.
    pub dynamic: Option<&'a Dynamic>,
    /// False for a program that only eager runs.
    pub compiled: bool,
    /// FQN globs of the regions that are cut out.
    pub regions: &'a [String],
    /// The module's compile settings, merged from all layers.
    pub settings: &'a Compile,
    /// Whether it is to be chosen among several option sets by measuring.
    pub tuned: bool,
}

/// What decides an artifact.
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

/// What names a graph or constants that a program holds: the object itself, on its target.
#[derive(Clone, Copy, Debug)]
pub struct HeldKey<'a> {
    /// Whether it is a graph, an archive, a library or constants.
    pub kind: ArtifactKind,
    /// The object that holds it.
    pub object: &'a Digest,
    /// Libraries of the custom operators a graph calls.
    pub libraries: &'a [Digest],
    /// What it was made for.
    pub target: &'a Target,
}

/// A graph pass that runs on segments, and the digest of its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Pass {
    /// As the spec names it.
    pub callable: String,
    /// Of the project's files that it is made of; of an installed one the version and every Python file of its package.
    pub source: Digest,
}

impl Common<'_> {
    /// Walks it once for any number of [`RequestKey`]s.
    pub fn shared(&self) -> SharedValue {
        SharedValue::new(self)
    }
}

impl RequestKey<'_> {
    /// Returns the key alone: all that a build with nothing to do needs.
    pub fn digest(&self) -> Digest {
        canon::digest(self)
    }

    /// Returns the key and its explanation.
    pub fn explained(&self) -> (Digest, Value) {
        canon::key(self)
    }
}

impl ArtifactKey<'_> {
    /// Returns the key and its explanation.
    pub fn explained(&self) -> (Digest, Value) {
        canon::key(self)
    }
}

impl Canon for Common<'_> {
    fn walk(&self, sink: &mut dyn Sink) {
        let sources: BTreeMap<&str, &Digest> = self
            .sources
            .iter()
            .map(|s| (s.path.as_str(), &s.digest))
            .collect();
        let packages: BTreeMap<&str, &str> = (self.packages.iter())
            .map(|p| (p.name.as_str(), p.version.as_str()))
            .collect();
        let fields: [(&str, &dyn Canon); 7] = [
            ("model", &self.model),
            ("entry", &self.entry),
            ("samples", &self.samples),
            ("sources", &sources),
            ("packages", &packages),
            ("target", self.target),
            ("weights", &"file"),
        ];
        // A model with its own weights has the key it always had.
        record(sink, &fields[..6 + usize::from(self.weights_file)]);
    }
}

impl Canon for RequestKey<'_> {
    fn walk(&self, sink: &mut dyn Sink) {
        let fields: [(&str, &dyn Canon); 17] = [
            ("kind", &"request"),
            ("format", &canon::FORMAT),
            ("protocol", &PROTOCOL),
            ("common", self.common),
            ("module", &self.module),
            ("path", &self.path),
            ("method", &self.method),
            ("inputs", &self.inputs),
            ("sizes", self.sizes),
            ("regions", &self.regions),
            ("compiles", &self.compiled),
            ("dynamic", &self.dynamic),
            ("backend", &self.settings.backend),
            ("mode", &self.settings.mode),
            ("options", &self.settings.options),
            ("passes", &self.settings.passes),
            ("tuned", &self.tuned),
        ];
        // What is not tuned has the key it always had.
        record(sink, &fields[..16 + usize::from(self.tuned)]);
    }
}

impl Canon for ArtifactKey<'_> {
    fn walk(&self, sink: &mut dyn Sink) {
        record(
            sink,
            &[
                ("kind", &"artifact"),
                ("format", &canon::FORMAT),
                ("protocol", &PROTOCOL),
                ("graph", self.graph),
                ("inputs", &self.inputs),
                ("outputs", &self.outputs),
                ("constants", &self.constants),
                ("backend", &self.backend),
                ("mode", &self.mode),
                ("options", self.options),
                ("passes", &self.passes),
                ("target", self.target),
            ],
        );
    }
}

impl HeldKey<'_> {
    /// Returns the key and its explanation.
    pub fn explained(&self) -> (Digest, Value) {
        canon::key(self)
    }
}

impl Canon for HeldKey<'_> {
    fn walk(&self, sink: &mut dyn Sink) {
        let (ordinal, kind) = match self.kind {
            ArtifactKind::Library => (0, "library"),
            ArtifactKind::Archive => (1, "archive"),
            ArtifactKind::Constants => (2, "constants"),
            ArtifactKind::Graph => (3, "graph"),
        };
        // What has no custom operators has the key it always had.
        let libraries = !self.libraries.is_empty();
        sink.begin_map(5 + usize::from(libraries));
        sink.name("kind");
        sink.word(ordinal, kind);
        for (name, number) in [("format", canon::FORMAT), ("protocol", PROTOCOL)] {
            sink.name(name);
            sink.integer(i64::from(number));
        }
        sink.name("object");
        self.object.walk(sink);
        if libraries {
            sink.name("libraries");
            self.libraries.walk(sink);
        }
        sink.name("target");
        self.target.walk(sink);
        sink.end();
    }
}

impl Canon for Pass {
    fn walk(&self, sink: &mut dyn Sink) {
        record(
            sink,
            &[("callable", &self.callable), ("source", &self.source)],
        );
    }
}

impl Canon for Backend {
    fn walk(&self, sink: &mut dyn Sink) {
        let ordinal = match self {
            Self::Inductor => 0,
            Self::Eager => 1,
        };
        sink.word(ordinal, self.name());
    }
}

impl Canon for Mode {
    fn walk(&self, sink: &mut dyn Sink) {
        let ordinal = match self {
            Self::Default => 0,
            Self::ReduceOverhead => 1,
            Self::MaxAutotune => 2,
            Self::MaxAutotuneNoCudagraphs => 3,
        };
        sink.word(ordinal, self.name());
    }
}

#[cfg(test)]
mod tests;
