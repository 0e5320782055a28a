//! `kind = "autograd"`: one entry of the spec that becomes the programs which Python trains with.
//!
//! | module | computes |
//! |---|---|
//! | `NAME.forward` | the module's results, the new values of buffers that it writes, and saved values |
//! | `NAME.backward` | gradients, from those of the results and the saved values |
//!
//! An entry with several buckets has a pair for each, in their order: `NAME.forward_0`, `NAME.backward_0`, and so on. The
//! values that are saved, and so the inputs of the backward program, may differ between sizes.

use std::collections::BTreeMap;

use precast_store::record::Sizes;
use serde::Serialize;

use super::{
    Dim, Dynamic, InputSpec, Module,
    reader::{KeyValue, Reader, Section},
    train::inputs_of_kind,
};

/// One program of a pair, as keys and the worker have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// The program.
    pub part: PairPart,
    /// The dtype of autocast; none without it.
    pub autocast: Option<&'static str>,
    /// The inputs that get gradients.
    pub gradients: Vec<String>,
}

/// The programs of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PairPart {
    /// Results, and saved values.
    Forward,
    /// Gradients.
    Backward,
}

impl PairPart {
    fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

/// Returns the modules of an entry with `kind = "autograd"`; `module` has its other keys.
pub(super) fn parts<'t>(
    reader: &mut Reader<'t>,
    section: &Section<'t>,
    module: Module,
) -> Option<Vec<Module>> {
    let refuse = [
        ("path", "`entry` returns the module that trains"),
        ("method", "Python calls `forward`"),
        (
            "state",
            "buffers that a call writes are outputs of the forward program",
        ),
        ("padding", "padding would change the loss"),
        ("dynamic", "each size of a batch is a bucket"),
    ];
    let help = "write under [module.inputs] what `forward` takes";
    let inputs = inputs_of_kind(reader, section, &module, "autograd", &refuse, help)?;
    let (autocast, gradients) = match section.field("train") {
        Some(field) => train(reader, &field, inputs)?,
        None => (None, vec![]),
    };
    let several = module.buckets.len() > 1;
    let made = |number: usize, sizes: &Sizes, part: PairPart| {
        let mut one = module.clone();
        let suffix = if several {
            format!("_{number}")
        } else {
            String::new()
        };
        one.name = format!("{}.{}{suffix}", module.name, part.name());
        one.inputs = Some(inputs.iter().map(|input| fixed(input, sizes)).collect());
        one.buckets = vec![Sizes::new()];
        one.compile.dynamic = Some(Dynamic::All(false));
        // The parameters are those of the process that trains.
        let options = one.compile.options.get_or_insert_with(BTreeMap::new);
        options.insert("freezing".to_owned(), false.into());
        one.pair = Some(Pair {
            part,
            autocast,
            gradients: gradients.clone(),
        });
        one
    };
    let pairs = module.buckets.iter().enumerate();
    let both = [PairPart::Forward, PairPart::Backward];
    Some(
        pairs
            .flat_map(|(number, sizes)| both.map(|part| made(number, sizes, part)))
            .collect(),
    )
}

/// Returns an input at the sizes of a bucket.
fn fixed(input: &InputSpec, sizes: &Sizes) -> InputSpec {
    let within = input.within.as_ref().and_then(|dim| sizes.get(dim));
    let shape = input.shape.iter();
    InputSpec {
        shape: shape.map(|dim| Dim::Fixed(dim.size(sizes))).collect(),
        range: (input.range).map(|[first, past]| [first, within.copied().unwrap_or(past)]),
        within: None,
        ..input.clone()
    }
}

/// Reads `[module.train]`: the dtype of autocast, and the inputs that get gradients.
fn train<'t>(
    reader: &mut Reader<'t>,
    field: &KeyValue<'t>,
    inputs: &[InputSpec],
) -> Option<(Option<&'static str>, Vec<String>)> {
    let section = reader.table(field, "[module.train]")?;
    let homes = [
        (
            "optimizer",
            "Python: any optimizer of torch updates the parameters",
        ),
        ("loss", "Python: it computes the loss of the results"),
    ];
    reader.check_keys(&section, &["autocast", "gradients"], &homes);
    let casts = [("bfloat16", "bfloat16"), ("float16", "float16")];
    let autocast = match section.field("autocast") {
        None => None,
        Some(field) => Some(reader.choice(&field, "dtype", &casts)?),
    };
    let mut gradients = vec![];
    if let Some(field) = section.field("gradients") {
        for item in reader.array(&field, "names of inputs")? {
            let name = reader.string(&item)?;
            let input = inputs.iter().find(|input| input.name == name);
            if !input.is_some_and(|input| input.dtype.is_float()) {
                let message = match input {
                    Some(input) => {
                        format!("input `{name}` is {}: it has no gradient", input.dtype)
                    }
                    None => format!("no input is named `{name}`"),
                };
                let help =
                    "`gradients` names inputs of floating point, whose gradients the caller needs";
                reader.wrong_help(&item.place, message, help);
            }
            gradients.push(name.to_owned());
        }
    }
    Some((autocast, gradients))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::spec::{Spec, SpecError};

    const BASE: &str = "schema = 1\n[model]\nname = \"m\"\nentry = \"model:load\"\n[[module]]\nname = \"train\"\nkind = \"autograd\"\n";
    const INPUTS: &str = "[module.inputs]\nids = { dtype = \"int64\", shape = [\"batch\", 4], range = [0, 9] }\nx = { dtype = \"float32\", shape = [\"batch\"] }\n";

    fn read(text: &str) -> Result<Spec, SpecError> {
        Spec::parse(&format!("{BASE}{text}"), Path::new("precast.toml"))
    }

    fn modules(text: &str) -> String {
        let spec = read(text).map_err(|error| error.render()).unwrap();
        let show = |module: &crate::spec::Module| {
            let inputs = module.sized_inputs(&module.buckets[0]).unwrap();
            let inputs = inputs
                .iter()
                .map(|input| format!("{}{:?}", input.name, input.layout.shape));
            let inputs: Vec<String> = inputs.collect();
            let pair = serde_json::to_string(&module.pair).unwrap();
            let options = serde_json::to_string(&module.compile.options).unwrap();
            format!("{}({}) {pair} {options}", module.name, inputs.join(", "))
        };
        let modules: Vec<String> = spec.modules.iter().map(show).collect();
        modules.join("\n")
    }

    fn wrong(text: &str) -> String {
        read(text).unwrap_err().in_lines()
    }

    #[test]
    fn an_entry_becomes_a_pair_for_each_bucket() {
        let one = format!(
            "options = {{ epilogue_fusion = true }}\n{INPUTS}[module.buckets]\nbatch = [2]\n"
        );
        insta::assert_snapshot!(modules(&one), @r#"
train.forward(ids[2, 4], x[2]) {"part":"forward","autocast":null,"gradients":[]} {"epilogue_fusion":true,"freezing":false}
train.backward(ids[2, 4], x[2]) {"part":"backward","autocast":null,"gradients":[]} {"epilogue_fusion":true,"freezing":false}
"#);
        let two = format!(
            "{INPUTS}[module.buckets]\nbatch = [2, 8]\n[module.train]\nautocast = \"bfloat16\"\ngradients = [\"x\"]\n"
        );
        insta::assert_snapshot!(modules(&two), @r#"
train.forward_0(ids[2, 4], x[2]) {"part":"forward","autocast":"bfloat16","gradients":["x"]} {"freezing":false}
train.backward_0(ids[2, 4], x[2]) {"part":"backward","autocast":"bfloat16","gradients":["x"]} {"freezing":false}
train.forward_1(ids[8, 4], x[8]) {"part":"forward","autocast":"bfloat16","gradients":["x"]} {"freezing":false}
train.backward_1(ids[8, 4], x[8]) {"part":"backward","autocast":"bfloat16","gradients":["x"]} {"freezing":false}
"#);
    }

    #[test]
    fn convolutions_of_a_training_keep_their_order_on_a_cpu() {
        let options = |text: &str| {
            let text = format!("{text}{INPUTS}[module.buckets]\nbatch = [2]\n");
            let spec = read(&text).map_err(|error| error.render()).unwrap();
            let none = crate::spec::Overrides::default();
            let settings = spec.settings(&spec.modules[0], &none, &none);
            serde_json::to_string(&settings.compile.options).unwrap()
        };
        let own = "options = { layout_optimization = true }\n";
        let device = "[target]\ndevice = \"cuda\"\n";
        insta::assert_snapshot!(options(""), @r#"{"freezing":false,"layout_optimization":false}"#);
        insta::assert_snapshot!(options(own), @r#"{"freezing":false,"layout_optimization":true}"#);
        let cuda = read(&format!("{INPUTS}[module.buckets]\nbatch = [2]\n{device}")).unwrap();
        let none = crate::spec::Overrides::default();
        let settings = cuda.settings(&cuda.modules[0], &none, &none);
        assert_eq!(
            settings.compile.options.len(),
            1,
            "cuDNN is faster in channels-last order"
        );
    }

    #[test]
    fn mistakes_are_named() {
        let buckets = format!("{INPUTS}[module.buckets]\nbatch = [2]\n");
        insta::assert_snapshot!(wrong(""), @"a module of kind `autograd` needs `inputs` | write under [module.inputs] what `forward` takes");
        insta::assert_snapshot!(wrong(&format!("path = \"a\"\nmethod = \"f\"\ndynamic = true\npadding = \"trusted\"\n{buckets}")), @r"
a module of kind `autograd` has no `path` | `entry` returns the module that trains
a module of kind `autograd` has no `method` | Python calls `forward`
a module of kind `autograd` has no `dynamic` | each size of a batch is a bucket
a module of kind `autograd` has no `padding` | padding would change the loss
");
        insta::assert_snapshot!(wrong(&format!("{buckets}[module.train]\noptimizer = \"sgd\"\nautocast = \"int8\"")), @r"
unknown key `optimizer` in [module.train] | `optimizer` belongs in Python: any optimizer of torch updates the parameters
unknown dtype `int8` | known: `bfloat16`, `float16`
");
        insta::assert_snapshot!(wrong(&format!("{buckets}[module.train]\ngradients = [\"ids\", \"y\"]")), @r"
input `ids` is int64: it has no gradient | `gradients` names inputs of floating point, whose gradients the caller needs
no input is named `y` | `gradients` names inputs of floating point, whose gradients the caller needs
");
    }
}
