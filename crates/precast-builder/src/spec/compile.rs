//! The settings of `[compile]`, and the layers that decide each one.
//!
//! | layer, strongest first | its place |
//! |---|---|
//! | [`Origin::CommandLine`] | `--set` of one run |
//! | [`Origin::Module`] | the `[[module]]` entry |
//! | [`Origin::Submodule`] | `get_torch_compile_config()` of the submodule, or `torch.compiler.disable` |
//! | [`Origin::Spec`] | the `[compile]` table |
//! | [`Origin::BuiltIn`] | [`Compile::default`] |
//!
//! The strongest layer with a key decides its whole value: a list is replaced, not extended. `options` is the
//! exception: its layers are merged option by option, so that a module can change one option without repeating the
//! others.
//!
//! Options are Inductor's, by its own names, except one: [`ATTENTION`] selects the kernel of
//! `scaled_dot_product_attention`. Without it torch chooses.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use precast_store::record::Bounds;

/// The compiler of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// AOTInductor.
    Inductor,
    /// The exported graph, run without Python.
    Eager,
}

/// torch's compile modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Inductor's own defaults.
    Default,
    /// CUDA graphs, for less work of the CPU in each call.
    ReduceOverhead,
    /// Kernels are timed at build and the fastest are chosen.
    MaxAutotune,
    /// The same without CUDA graphs.
    MaxAutotuneNoCudagraphs,
}

/// The answer to a request that no artifact can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FailPolicy {
    /// Eager answers instead.
    FallbackEager,
    /// The call fails, and so does a build that lacks the program.
    Raise,
}

/// Whether a module gets a dynamic-shape artifact in addition to its buckets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Dynamic {
    /// `true`: every bucketed dimension is dynamic.
    All(bool),
    /// These dimensions are, each from a smallest to a largest size.
    Dims(BTreeMap<String, Bounds>),
}

macro_rules! words {
    ($type:ident { $($variant:ident = $word:literal),* $(,)? }) => {
        impl $type {
            /// Every value by its word in the spec.
            pub const WORDS: &'static [(&'static str, Self)] = &[$(($word, Self::$variant)),*];

            /// Returns the value's word in the spec.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $word),* }
            }
        }
    };
}

words!(Backend {
    Inductor = "inductor",
    Eager = "eager",
});
words!(Mode {
    Default = "default",
    ReduceOverhead = "reduce-overhead",
    MaxAutotune = "max-autotune",
    MaxAutotuneNoCudagraphs = "max-autotune-no-cudagraphs",
});
words!(FailPolicy {
    FallbackEager = "fallback_eager",
    Raise = "raise",
});

impl Mode {
    /// Returns whether the compiler times kernels to choose between them.
    pub fn autotunes(self) -> bool {
        matches!(self, Self::MaxAutotune | Self::MaxAutotuneNoCudagraphs)
    }
}

/// Inductor options by their own dotted names, and [`ATTENTION`].
pub type InductorOptions = BTreeMap<String, Value>;

/// The kernel for attention.
pub const ATTENTION: &str = "attention";

/// The choice is left to torch: the default.
pub const AUTO: &str = "auto";

/// The options that are not Inductor's, each with its values, torch's own choice first
/// (`torch.nn.attention.SDPBackend`).
pub const WORDS: &[(&str, &[&str])] =
    &[(ATTENTION, &[AUTO, "flash", "efficient", "cudnn", "math"])];

/// Options, or their values, that graph passes have taken the place of: option, value if it is one, pass to write
/// instead.
pub const REPLACED: &[(&str, Option<&str>, &str)] = &[
    (
        ATTENTION,
        Some("one_tile"),
        "precast_kernels:single_tile_attention",
    ),
    ("matmul", None, "precast_kernels:split_k"),
];

macro_rules! settings {
    ($($(#[doc = $doc:literal])* $key:ident: $type:ty = $default:expr;)*) => {
        /// Every setting, decided.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct Compile {
            $($(#[doc = $doc])* pub $key: $type,)*
            /// Inductor options by their own names.
            pub options: InductorOptions,
        }

        /// The keys of one layer; absent keys are left to weaker layers.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields)]
        pub struct Overrides {
            $(
                $(#[doc = $doc])*
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $key: Option<$type>,
            )*
            /// Inductor options by their own names, added to those of weaker layers.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub options: Option<InductorOptions>,
        }

        impl Default for Compile {
            fn default() -> Self {
                Self { $($key: $default,)* options: InductorOptions::new() }
            }
        }

        impl Overrides {
            /// Takes the keys of `stronger`; options one by one.
            pub fn merge(&mut self, stronger: &Self) {
                $(if let Some(value) = &stronger.$key {
                    self.$key = Some(value.clone());
                })*
                if let Some(options) = &stronger.options {
                    self.options.get_or_insert_default().extend(options.clone());
                }
            }
        }

        impl Effective {
            fn apply(&mut self, origin: Origin, layer: &Overrides) {
                $(if let Some(value) = &layer.$key {
                    self.compile.$key = value.clone();
                    self.origins.insert(stringify!($key).to_owned(), origin);
                })*
                for (name, value) in layer.options.iter().flatten() {
                    self.compile.options.insert(name.clone(), value.clone());
                    self.origins.insert(format!("options.{name}"), origin);
                }
            }
        }

        /// The keys of `[compile]`, in the order in which they are shown.
        pub const KEYS: &[&str] = &[$(stringify!($key),)* "options"];
    };
}

settings! {
    /// False: the module is served by eager.
    enabled: bool = true;
    /// The compiler of its regions.
    backend: Backend = Backend::Inductor;
    /// torch's compile mode.
    mode: Mode = Mode::Default;
    /// Dimensions of a dynamic-shape artifact in addition to the buckets.
    dynamic: Dynamic = Dynamic::All(false);
    /// False: a module that cannot be captured whole is reported and left out, not an error.
    fullgraph: bool = true;
    /// Graph passes as `module:callable`, run in order on the captured graph.
    passes: Vec<String> = Vec::new();
    /// FQN globs of submodules that may be compiled.
    allowlist: Vec<String> = vec!["*".to_owned()];
    /// FQN globs of submodules that may not be compiled; stronger than the allowlist.
    blocklist: Vec<String> = Vec::new();
    /// False: a program is published without comparing it with eager.
    healthcheck: bool = true;
    /// Calls of a program before it is published, at least 2.
    smoketest_steps: u32 = 3;
    /// The answer to a request that no artifact can serve.
    fail_policy: FailPolicy = FailPolicy::FallbackEager;
}

impl Compile {
    /// Returns whether the submodule `fqn` may be compiled.
    pub fn compiles(&self, fqn: &str) -> bool {
        self.enabled
            && self.backend != Backend::Eager
            && super::glob::listed(&self.allowlist, fqn)
            && !super::glob::listed(&self.blocklist, fqn)
    }
}

/// A layer of settings, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// No layer sets it.
    BuiltIn,
    /// The spec's `[compile]` table.
    Spec,
    /// The submodule's own `get_torch_compile_config()`.
    Submodule,
    /// The spec's `[[module]]` entry.
    Module,
    /// A flag of this run.
    CommandLine,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::BuiltIn => "built-in",
            Self::Spec => "[compile]",
            Self::Submodule => "the submodule",
            Self::Module => "[[module]]",
            Self::CommandLine => "the command line",
        })
    }
}

/// Settings, with the origin of each one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Effective {
    /// The value of every setting.
    pub compile: Compile,
    /// Key (`mode`, `options.epilogue_fusion`) -> layer. Keys that no layer has are built in and not listed.
    pub origins: BTreeMap<String, Origin>,
}

impl Effective {
    /// Returns the origin of `key`.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).copied().unwrap_or(Origin::BuiltIn)
    }

    /// Returns every setting as `(key, value, origin)`, in the order of [`KEYS`], one row for each option.
    pub fn rows(&self) -> Vec<(String, Value, Origin)> {
        let Ok(Value::Object(values)) = serde_json::to_value(&self.compile) else {
            return Vec::new();
        };
        let mut rows = Vec::new();
        for key in KEYS.iter().filter(|key| **key != "options") {
            let value = values.get(*key).cloned().unwrap_or_default();
            rows.push(((*key).to_owned(), value, self.origin(key)));
        }
        for (name, value) in &self.compile.options {
            let key = format!("options.{name}");
            let origin = self.origin(&key);
            rows.push((key, value.clone(), origin));
        }
        rows
    }
}

/// Decides every setting from these layers, whose order does not matter.
pub fn effective(layers: &[(Origin, &Overrides)]) -> Effective {
    let mut result = Effective {
        compile: Compile::default(),
        origins: BTreeMap::new(),
    };
    let mut layers = layers.to_vec();
    layers.sort_by_key(|(origin, _)| *origin);
    for (origin, layer) in layers {
        result.apply(origin, layer);
    }
    for (name, _) in WORDS {
        let options = &mut result.compile.options;
        if options.get(*name).is_some_and(|word| word == AUTO) {
            options.remove(*name);
            result.origins.remove(&*format!("options.{name}"));
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overrides(json: &str) -> Overrides {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn the_strongest_layer_decides_and_is_named() {
        let layers = [
            (Origin::CommandLine, r#"{"enabled": false}"#),
            (
                Origin::Module,
                r#"{"backend": "inductor", "options": {"c": 3}, "passes": ["p:q"]}"#,
            ),
            (
                Origin::Submodule,
                r#"{"mode": "reduce-overhead", "backend": "eager", "options": {"b": 2, "c": 2}}"#,
            ),
            (
                Origin::Spec,
                r#"{"mode": "max-autotune", "smoketest_steps": 1, "options": {"a": 1, "b": 1}}"#,
            ),
        ];
        let layers = layers.map(|(origin, json)| (origin, overrides(json)));
        let mut layers = layers
            .each_ref()
            .map(|(origin, overrides)| (*origin, overrides));
        let decided = effective(&layers);
        let rows = decided.rows();
        let rows = rows
            .iter()
            .map(|(key, value, origin)| format!("{key} = {value}  ({origin})"));
        let rows: Vec<String> = rows.collect();
        insta::assert_snapshot!(rows.join("\n"), @r#"
        enabled = false  (the command line)
        backend = "inductor"  ([[module]])
        mode = "reduce-overhead"  (the submodule)
        dynamic = false  (built-in)
        fullgraph = true  (built-in)
        passes = ["p:q"]  ([[module]])
        allowlist = ["*"]  (built-in)
        blocklist = []  (built-in)
        healthcheck = true  (built-in)
        smoketest_steps = 1  ([compile])
        fail_policy = "fallback_eager"  (built-in)
        options.a = 1  ([compile])
        options.b = 2  (the submodule)
        options.c = 3  ([[module]])
        "#);
        layers.reverse();
        assert_eq!(effective(&layers), decided);
    }

    #[test]
    fn attention_that_is_left_to_torch_is_the_default() {
        let math = overrides(r#"{"options": {"attention": "math"}}"#);
        let auto = overrides(r#"{"options": {"attention": "auto"}}"#);
        assert_eq!(effective(&[(Origin::Spec, &auto)]), effective(&[]));
        let layers = [(Origin::Spec, &math), (Origin::Module, &auto)];
        assert_eq!(effective(&layers), effective(&[]));
        let layers = [(Origin::Spec, &auto), (Origin::CommandLine, &math)];
        let decided = effective(&layers);
        assert_eq!(decided.compile.options["attention"], "math");
        assert_eq!(decided.origin("options.attention"), Origin::CommandLine);
    }

    #[test]
    fn lists_and_switches_decide_what_compiles() {
        let with = |json: &str| effective(&[(Origin::Spec, &overrides(json))]).compile;
        assert!(with("{}").compiles("") && with("{}").compiles("a.b"));
        assert!(!with(r#"{"enabled": false}"#).compiles("a"));
        assert!(!with(r#"{"backend": "eager"}"#).compiles("a"));
        let narrow = with(r#"{"allowlist": ["vision.**"], "blocklist": ["**.head"]}"#);
        assert!(narrow.compiles("vision") && narrow.compiles("vision.tower"));
        assert!(!narrow.compiles("") && !narrow.compiles("vision.head"));
    }

    #[test]
    fn what_a_submodule_declares_is_checked() {
        let bad = |json: &str| {
            let read = serde_json::from_str::<Overrides>(json);
            read.unwrap_err().to_string()
        };
        assert!(bad(r#"{"modee": 1}"#).contains("unknown field `modee`"));
        assert!(bad(r#"{"mode": "fast"}"#).contains("unknown variant `fast`"));
    }

    #[test]
    fn words_are_what_is_serialised() {
        for (word, mode) in Mode::WORDS {
            assert_eq!(serde_json::to_value(mode).unwrap(), *word);
            assert_eq!(mode.name(), *word);
        }
        for (word, backend) in Backend::WORDS {
            assert_eq!(serde_json::to_value(backend).unwrap(), *word);
        }
        for (word, policy) in FailPolicy::WORDS {
            assert_eq!(serde_json::to_value(policy).unwrap(), *word);
        }
    }
}
