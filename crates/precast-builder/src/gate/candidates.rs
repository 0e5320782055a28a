//! The candidates of a program: option sets for all of its segments, and the keys of their artifacts.
//!
//! | candidate | tried |
//! |---|---|
//! | the module's own settings | always |
//! | `mode=default` | where the module's mode autotunes |
//! | `coordinate_descent_tuning=true`, `epilogue_fusion=false`, `max_autotune=true` | by `--tune`, unless the settings set it |
//! | `layout_optimization=false` | by `--tune`, where the graph has convolutions |
//! | `attention=efficient`, `attention=flash` | by `--tune`, on CUDA, where the graph has attention, unless the settings set it |
//! | `attention=efficient coordinate_descent_tuning=true` | under the conditions of both: the combination is often best for small sizes |
//! | `freezing=false` | by `--tune`, on a CPU where weights are prepacked at load: compares with plain weights |
//! | offers of installed packages, such as `precast_kernels:split_k triton.enable_pdl=true` | by `--tune`, where the package offers it for the program's segments ([`SegmentPasses::offered`]), unless the settings set all of it |
//!
//! The fastest attention kernel depends on sizes: on an H200 torch chooses cuDNN's, which is best for large sizes only.
//! `attention=cudnn` is not tried, because torch chooses it by default on the devices that it is for (compute
//! capability 9.0 and 10.0). `triton.enable_pdl=true` is tried with the passes that offer it only: without them it took
//! 0.98 to 1.07 times as long on an H200 (`benches/results/kernels-h200.json`).
//!
//! **Keys.** The choice depends on a measurement, so it can't be part of a key that is computed before. The request key
//! of a tuned program has only the fact that it is tuned; its artifact keys have the chosen options. A build without
//! `--tune` uses the tuned program unless the newest release has the untuned one, so that it does not undo the tuning.
//! `--tune` finds the tuned program too, and does not tune again. When only names or sources changed and every
//! candidate has the same artifacts as before, any build reuses the earlier choice and its table.

use precast_store::{Digest, target::DeviceKind};
use serde_json::Value;

use crate::{
    plan::{ArtifactKey, Item, Known, Pass},
    protocol::{Offer, Segment, SegmentPasses},
    spec::{
        Compile, Mode,
        compile::{ATTENTION, InductorOptions},
    },
};

/// An option set that a program can be compiled with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OptionSet {
    pub mode: Mode,
    pub options: InductorOptions,
    /// Graph passes that run on segments, in order.
    pub passes: Vec<Pass>,
    /// Its name in the table: the difference to the module's own settings.
    pub name: String,
}

/// An option set for one program, with the keys of its artifacts. `refused` is the reason why it can't be chosen.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub set: OptionSet,
    /// Key of each segment's artifact.
    pub keys: Vec<Digest>,
    pub refused: Option<String>,
}

impl Candidate {
    /// Returns the name of a task of this candidate: the name of the program, with the option set if there are several
    /// candidates.
    pub fn of(&self, program: &str, candidates: usize) -> String {
        match candidates {
            1 => program.to_owned(),
            _ => format!("{program} [{}]", self.set.name),
        }
    }
}

/// The properties of a program that some options need.
#[derive(Clone, Copy, Default)]
pub(crate) struct Has {
    convolution: bool,
    /// An attention that torch has several kernels for.
    attention: bool,
    device: bool,
}

impl Has {
    fn of(segments: &[Segment], device: DeviceKind) -> Self {
        let any = |operator: &str| segments.iter().any(|s| s.graph.contains(operator));
        let device = device == DeviceKind::Cuda;
        Self {
            convolution: any("convolution"),
            attention: device && any("scaled_dot_product_attention"),
            device,
        }
    }
}

/// Returns the option sets to compile a program with; the first is kept unless another is faster.
///
/// `all`: whether `--tune` is set.
pub(crate) fn option_sets(
    settings: &Compile,
    all: bool,
    has: Has,
    passes: &SegmentPasses,
) -> Vec<OptionSet> {
    let mode = settings.mode;
    let own = OptionSet {
        mode,
        options: settings.options.clone(),
        passes: passes.own.clone(),
        name: std::iter::once(format!("mode={}", mode.name()))
            .chain(settings.options.iter().filter(is_named).map(option))
            .collect::<Vec<_>>()
            .join(" "),
    };
    let mut sets = Vec::new();
    // Without a gate there is nothing to choose by.
    if !settings.healthcheck {
        return vec![own];
    }
    if mode.autotunes() {
        sets.push(OptionSet {
            mode: Mode::Default,
            name: "mode=default".to_owned(),
            ..own.clone()
        });
    }
    sets.push(own.clone());
    if all {
        sets.extend(tuned(settings, has, &own));
        sets.extend(offered(settings, passes, &own));
    }
    sets
}

/// Returns the options that `--tune` tries, each in addition to the module's own.
fn tuned(settings: &Compile, has: Has, own: &OptionSet) -> Vec<OptionSet> {
    let implied: &[&str] = if settings.mode.autotunes() {
        &["coordinate_descent_tuning", "max_autotune"]
    } else {
        &[]
    };
    let descent = ("coordinate_descent_tuning", Value::from(true));
    let kernel = |name: &str| (ATTENTION, Value::from(name));
    let plain_weights = frozen(settings) && !has.device;
    let tried = [
        (vec![descent.clone()], true),
        (vec![("epilogue_fusion", false.into())], true),
        (vec![("max_autotune", true.into())], true),
        (vec![("layout_optimization", false.into())], has.convolution),
        (vec![kernel("efficient")], has.attention),
        (vec![kernel("flash")], has.attention),
        (vec![kernel("efficient"), descent], has.attention),
        (vec![("freezing", false.into())], plain_weights),
    ];
    let set_already = |key: &str| {
        key != "freezing" && (settings.options.contains_key(key) || implied.contains(&key))
    };
    let tried = tried
        .into_iter()
        .filter(|(added, applies)| *applies && !added.iter().any(|(key, _)| set_already(key)));
    let set = |(added, _): (Vec<(&str, Value)>, bool)| {
        let added = added
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value));
        let added: Vec<(String, Value)> = added.collect();
        let name: Vec<String> = added
            .iter()
            .map(|(key, value)| option((key, value)))
            .collect();
        let mut options = settings.options.clone();
        options.extend(added);
        OptionSet {
            options,
            name: name.join(" "),
            ..own.clone()
        }
    };
    tried.map(set).collect()
}

/// Returns the offers of installed packages that the settings do not decide already.
fn offered(settings: &Compile, passes: &SegmentPasses, own: &OptionSet) -> Vec<OptionSet> {
    let set = |offer: &Offer| {
        let new: Vec<&Pass> = (offer.passes.iter())
            .filter(|pass| !passes.own.contains(pass))
            .collect();
        let already_set = |(key, value)| settings.options.get(key) == Some(value);
        let contradicted = |(key, value)| settings.options.get(key).is_some_and(|own| own != value);
        if offer.options.iter().any(contradicted)
            || (new.is_empty() && offer.options.iter().all(already_set))
        {
            return None;
        }
        let name = (offer.passes.iter().map(|pass| pass.callable.clone()))
            .chain(offer.options.iter().map(option))
            .collect::<Vec<_>>()
            .join(" ");
        let mut options = settings.options.clone();
        options.extend(offer.options.clone());
        Some(OptionSet {
            options,
            passes: passes.own.iter().chain(new).cloned().collect(),
            name,
            ..own.clone()
        })
    };
    passes.offered.iter().filter_map(set).collect()
}

fn frozen(settings: &Compile) -> bool {
    settings.options.get("freezing") == Some(&true.into())
}

/// Returns whether the name of an option set has this option: every name but `freezing=true` counts.
fn is_named(option: &(&String, &Value)) -> bool {
    *option != (&"freezing".to_owned(), &true.into())
}

/// Returns an option in the syntax of `--set`: text without quotes.
fn option((key, value): (&String, &Value)) -> String {
    match value {
        Value::String(word) => format!("{key}={word}"),
        _ => format!("{key}={value}"),
    }
}

impl OptionSet {
    /// Returns the key of a segment that is compiled with it, and its explanation.
    pub fn key(&self, item: &Item, segment: &Segment, known: &Known) -> (Digest, Value) {
        let key = ArtifactKey {
            graph: &Digest::of(segment.graph.as_bytes()),
            inputs: &segment.inputs,
            outputs: &segment.outputs,
            constants: &segment.constants,
            backend: item.settings.compile.backend,
            mode: self.mode,
            options: &self.options,
            passes: &self.passes,
            target: &known.target,
        };
        key.explained()
    }
}

/// Returns the candidates of a program; `all`: as with `--tune`.
pub(crate) fn candidates(
    item: &Item,
    segments: &[Segment],
    passes: &SegmentPasses,
    known: &Known,
    all: bool,
) -> Vec<Candidate> {
    let has = Has::of(segments, known.target.device);
    let mut sets = option_sets(&item.settings.compile, all, has, passes);
    if segments.is_empty() {
        sets.truncate(1);
    }
    let candidate = |set: OptionSet| Candidate {
        keys: (segments.iter())
            .map(|segment| set.key(item, segment, known).0)
            .collect(),
        refused: None,
        set,
    };
    sets.into_iter().map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Has = Has {
        convolution: false,
        attention: false,
        device: false,
    };

    const CONVOLVES: Has = Has {
        convolution: true,
        ..PLAIN
    };

    fn names(settings: &Compile, all: bool, has: Has) -> Vec<String> {
        let none = SegmentPasses::default();
        let sets = option_sets(settings, all, has, &none).into_iter();
        sets.map(|set| set.name).collect()
    }

    #[test]
    fn a_plain_program_has_one_candidate_and_a_mode_that_autotunes_has_two() {
        let plain = Compile::default();
        assert_eq!(names(&plain, false, CONVOLVES), ["mode=default"]);
        let auto = Compile {
            mode: Mode::MaxAutotune,
            ..plain.clone()
        };
        // The first candidate is kept unless another is faster.
        let both = ["mode=default", "mode=max-autotune"];
        assert_eq!(names(&auto, false, CONVOLVES), both);
        let unchecked = Compile {
            healthcheck: false,
            ..auto
        };
        assert_eq!(names(&unchecked, false, CONVOLVES), ["mode=max-autotune"]);
    }

    #[test]
    fn tuning_tries_what_the_settings_do_not_say_already() {
        insta::assert_snapshot!(names(&Compile::default(), true, PLAIN).join(", "), @"mode=default, coordinate_descent_tuning=true, epilogue_fusion=false, max_autotune=true");
        let mut says = Compile {
            mode: Mode::MaxAutotuneNoCudagraphs,
            ..Compile::default()
        };
        says.options.insert("epilogue_fusion".into(), false.into());
        insta::assert_snapshot!(names(&says, true, CONVOLVES).join(", "), @"mode=default, mode=max-autotune-no-cudagraphs epilogue_fusion=false, layout_optimization=false");
        // A plan for a CPU implies it.
        let mut cpu = Compile::default();
        cpu.options.insert("freezing".into(), true.into());
        insta::assert_snapshot!(names(&cpu, true, PLAIN).join(", "), @"mode=default, coordinate_descent_tuning=true, epilogue_fusion=false, max_autotune=true, freezing=false");
        let sets = option_sets(&says, true, CONVOLVES, &SegmentPasses::default());
        // What the spec says stays.
        assert_eq!(sets[2].options.len(), 2, "{sets:?}");
    }

    #[test]
    fn tuning_tries_other_kernels_for_attention() {
        let attends = Has {
            attention: true,
            ..PLAIN
        };
        let mut settings = Compile::default();
        insta::assert_snapshot!(names(&settings, true, attends).join(", "), @"mode=default, coordinate_descent_tuning=true, epilogue_fusion=false, max_autotune=true, attention=efficient, attention=flash, attention=efficient coordinate_descent_tuning=true");
        assert_eq!(names(&settings, false, attends), ["mode=default"]);
        let tried = option_sets(&settings, true, attends, &SegmentPasses::default());
        assert_eq!(tried[4].options["attention"], "efficient");
        assert_eq!(tried[6].options.len(), 2);
        settings.options.insert(ATTENTION.into(), "math".into());
        insta::assert_snapshot!(names(&settings, true, attends).join(", "), @"mode=default attention=math, coordinate_descent_tuning=true, epilogue_fusion=false, max_autotune=true");
    }

    #[test]
    fn only_a_device_has_several_kernels_for_attention() {
        let segments = [
            "aten.add.Tensor",
            "aten.scaled_dot_product_attention.default",
        ];
        let segments = segments.map(|graph| Segment {
            graph: graph.to_owned(),
            file: "".into(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            constants: Vec::new(),
            libraries: Vec::new(),
        });
        let has = Has::of(&segments, DeviceKind::Cuda);
        assert!(has.attention && has.device);
        let has = Has::of(&segments, DeviceKind::Cpu);
        assert!(!has.attention && !has.device);
        assert!(!Has::of(&segments[..1], DeviceKind::Cuda).attention);
        let device = Has {
            device: true,
            ..PLAIN
        };
        insta::assert_snapshot!(names(&Compile::default(), true, device).join(", "), @"mode=default, coordinate_descent_tuning=true, epilogue_fusion=false, max_autotune=true");
    }

    #[test]
    fn tuning_tries_offers_of_packages_unless_the_settings_decide_already() {
        let pass = |name: &str| Pass {
            callable: name.to_owned(),
            source: Digest::of(name.as_bytes()),
        };
        let early = || InductorOptions::from([("triton.enable_pdl".to_owned(), true.into())]);
        let offer = |passes: &[&str], options: InductorOptions| Offer {
            passes: passes.iter().map(|name| pass(name)).collect(),
            options,
        };
        let passes = |own: &[&str]| SegmentPasses {
            own: own.iter().map(|name| pass(name)).collect(),
            offered: vec![
                offer(&["kernels:fuse"], InductorOptions::new()),
                offer(&["kernels:fuse", "kernels:split"], early()),
            ],
        };
        let tried = |settings: &Compile, all: bool, own: &[&str]| {
            let sets = option_sets(settings, all, PLAIN, &passes(own)).into_iter();
            let line = |set: OptionSet| {
                let passes = set.passes.iter().map(|pass| pass.callable.as_str());
                format!("{}: {}", set.name, passes.collect::<Vec<_>>().join(", "))
            };
            let kept = sets.filter(|set| set.name.contains(':') || set.name.contains("mode"));
            kept.map(line).collect::<Vec<_>>().join("\n")
        };
        let mut settings = Compile::default();
        insta::assert_snapshot!(tried(&settings, true, &["own:pass"]), @"
        mode=default: own:pass
        kernels:fuse: own:pass, kernels:fuse
        kernels:fuse kernels:split triton.enable_pdl=true: own:pass, kernels:fuse, kernels:split
        ");
        assert_eq!(tried(&settings, false, &[]), "mode=default: ");
        insta::assert_snapshot!(tried(&settings, true, &["kernels:fuse"]), @"
        mode=default: kernels:fuse
        kernels:fuse kernels:split triton.enable_pdl=true: kernels:fuse, kernels:split
        ");
        let pdl = settings.options.entry("triton.enable_pdl".to_owned());
        pdl.or_insert(false.into());
        insta::assert_snapshot!(tried(&settings, true, &[]), @"
        mode=default triton.enable_pdl=false: 
        kernels:fuse: kernels:fuse
        ");
    }
}
