//! `kind = "step"` and `[module.train]`: one entry of the spec that becomes the modules of a training step.
//!
//! | module | computes | built |
//! |---|---|---|
//! | the entry's name | loss, gradients and update in one program | unless `accumulate` |
//! | `NAME.gradients` | adds the gradients of a batch to their sums | with `accumulate` |
//! | `NAME.update` | updates the parameters with the mean gradients | with `accumulate` |
//! | `NAME.eval` | the loss of a batch | always |

use std::collections::BTreeMap;

use precast_store::record::{Dtype, Pad, Sizes, TrainPart};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Dynamic, InputSpec, Module,
    callable::{callable_help, is_callable},
    inputs::is_identifier,
    reader::{KeyValue, Reader, Section},
};

const KEYS: &[&str] = &["loss", "optimizer", "clip", "accumulate", "autocast"];

/// The keys of an optimizer, with torch's defaults.
const ADAM: &[(&str, f64)] = &[("eps", 1e-8), ("weight_decay", 0.0)];
const SGD: &[(&str, f64)] = &[("momentum", 0.0), ("weight_decay", 0.0)];

/// The rate at which an update moves parameters: an input of `step` and `update`.
pub const RATE: &str = "lr";

/// One part of a training step, as keys and the worker have it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Train {
    /// The part.
    pub part: TrainPart,
    /// `adamw`, `adam`, `sgd`, or `module:callable`.
    pub optimizer: String,
    /// The optimizer's own options.
    pub options: BTreeMap<String, Value>,
    /// The limit of the gradients' global norm; none for no limit.
    pub clip: Option<f64>,
    /// The dtype of the loss' matrix products; none for that of the parameters.
    pub autocast: Option<&'static str>,
}

impl Train {
    /// Returns the optimizer of the project, as `module:callable`; none for torch's.
    pub fn callable(&self) -> Option<&str> {
        is_callable(&self.optimizer).then_some(&self.optimizer)
    }
}

/// Returns the inputs of an entry of a kind. Refuses keys that the kind does not have, each with what it has instead.
pub(super) fn inputs_of_kind<'m, 't>(
    reader: &mut Reader<'t>,
    section: &Section<'t>,
    module: &'m Module,
    kind: &str,
    refused: &[(&str, &str)],
    help: &str,
) -> Option<&'m Vec<InputSpec>> {
    for (key, help) in refused {
        if let Some(field) = section.field(key) {
            let message = format!("a module of kind `{kind}` has no `{key}`");
            reader.wrong_help(&field.place, message, *help);
        }
    }
    if module.inputs.is_none() {
        let message = format!("a module of kind `{kind}` needs `inputs`");
        reader.wrong_help(&section.place, message, help);
    }
    module.inputs.as_ref()
}

/// Returns the modules of an entry with `kind = "step"`; `module` has its other keys.
pub(super) fn parts<'t>(
    reader: &mut Reader<'t>,
    section: &Section<'t>,
    module: Module,
) -> Option<Vec<Module>> {
    let refuse = [
        ("method", "`loss` in [module.train] is the method"),
        ("regions", "a step is one artifact"),
        (
            "state",
            "parameters, buffers and the optimizer's tensors are its states",
        ),
        ("padding", "a loss counts padding, so no batch is padded"),
        ("dynamic", "each size of a batch is a bucket"),
    ];
    let help = "write the batch under [module.inputs]: what the loss takes";
    let inputs = inputs_of_kind(reader, section, &module, "step", &refuse, help)?;
    if inputs.iter().any(|input| input.name == RATE) {
        let message =
            format!("`{RATE}` is the learning rate, an input that the step has by itself");
        reader.wrong_help(&section.place, message, "rename the input of the loss");
    }
    let help = "[module.train]\noptimizer = \"adamw\"";
    let table = reader.required(section, "train", help)?;
    let (train, method, accumulate) = train(reader, &table)?;
    let made = |part: TrainPart| {
        let mut one = Module {
            method: method.clone(),
            train: Some(Train {
                part,
                ..train.clone()
            }),
            ..module.clone()
        };
        one.compile.dynamic = Some(Dynamic::All(false));
        if part != TrainPart::Step {
            one.name = format!("{}.{}", module.name, part.name());
        }
        if part == TrainPart::Update {
            one.inputs = Some(vec![]);
            one.buckets = vec![Sizes::new()];
        }
        if matches!(part, TrainPart::Step | TrainPart::Update) {
            one.inputs.iter_mut().for_each(|inputs| inputs.push(rate()));
        }
        one
    };
    let parts: &[TrainPart] = match accumulate {
        true => &[TrainPart::Gradients, TrainPart::Update, TrainPart::Eval],
        false => &[TrainPart::Step, TrainPart::Eval],
    };
    Some(parts.iter().copied().map(made).collect())
}

fn rate() -> InputSpec {
    InputSpec {
        name: RATE.to_owned(),
        dtype: Dtype::Float32,
        shape: vec![],
        pad: Pad::Float(0.0),
        range: None,
        within: None,
        default: None,
    }
}

/// Reads `[module.train]`: the part is filled in later. Returns the method of the loss, and whether to accumulate.
fn train<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<(Train, String, bool)> {
    let section = reader.table(field, "[module.train]")?;
    let found = reader.required(&section, "optimizer", "optimizer = \"adamw\"");
    let found = found.and_then(|field| optimizer(reader, &field));
    let own: &[&str] = match found {
        Some("adamw" | "adam") => &["betas", "eps", "weight_decay"],
        Some("sgd") => &["momentum", "weight_decay"],
        _ => &[],
    };
    reader.check_keys(&section, &[KEYS, own].concat(), &[]);
    let optimizer = found?;
    let options = options(reader, &section, optimizer);
    let loss = match section.field("loss") {
        None => Some("forward"),
        Some(field) => reader.string(&field).filter(|text| {
            let good = is_identifier(text);
            if !good {
                let message = format!("`{text}` is not the name of a method");
                reader.wrong_help(&field.place, message, "write the name alone, as `loss`");
            }
            good
        }),
    };
    let clip = match section.field("clip") {
        None => Some(None),
        Some(field) => positive(reader, &field).map(Some),
    };
    let accumulate = match section.field("accumulate") {
        None => Some(false),
        Some(field) => reader.boolean(&field),
    };
    let casts = [("bfloat16", "bfloat16")];
    let autocast = match section.field("autocast") {
        None => Some(None),
        Some(field) => reader.choice(&field, "dtype", &casts).map(Some),
    };
    let train = Train {
        part: TrainPart::Step,
        optimizer: optimizer.to_owned(),
        options: options?,
        clip: clip?,
        autocast: autocast?,
    };
    Some((train, loss?.to_owned(), accumulate?))
}

fn optimizer<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<&'t str> {
    let text = reader.string(field)?;
    if matches!(text, "adamw" | "adam" | "sgd") || is_callable(text) {
        return Some(text);
    }
    let message = format!("unknown optimizer `{text}`");
    let help = match text.contains(':') {
        true => callable_help(text),
        false => "known: `adamw`, `adam`, `sgd`, and `module:callable` for one of yours".to_owned(),
    };
    reader.wrong_help(&field.place, message, help);
    None
}

fn options<'t>(
    reader: &mut Reader<'t>,
    section: &Section<'t>,
    optimizer: &str,
) -> Option<BTreeMap<String, Value>> {
    let mut found = BTreeMap::new();
    let numbers = match optimizer {
        "adamw" | "adam" => ADAM,
        "sgd" => SGD,
        _ => return Some(found),
    };
    for &(key, default) in numbers {
        let default = match (optimizer, key) {
            ("adamw", "weight_decay") => 0.01,
            _ => default,
        };
        let value = match section.field(key) {
            None => default,
            Some(field) => not_negative(reader, &field)?,
        };
        found.insert(key.to_owned(), json!(value));
    }
    if numbers == ADAM {
        let betas = match section.field("betas") {
            None => [0.9, 0.999],
            Some(field) => betas(reader, &field)?,
        };
        found.insert("betas".to_owned(), json!(betas));
    }
    Some(found)
}

fn betas<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<[f64; 2]> {
    let items = reader.array(field, "two numbers")?;
    let numbers: Option<Vec<f64>> = items.iter().map(|item| reader.number(item)).collect();
    let numbers = <[f64; 2]>::try_from(numbers?).ok();
    let good = numbers.filter(|both| both.iter().all(|one| (0.0..1.0).contains(one)));
    if good.is_none() {
        let message = format!("{} must be two numbers from 0 to below 1", field.name);
        reader.wrong_help(&field.place, message, "as in `betas = [0.9, 0.999]`");
    }
    good
}

fn not_negative<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<f64> {
    let value = reader.number(field)?;
    if value < 0.0 {
        let message = format!("{} must not be negative", field.name);
        reader.wrong_help(&field.place, message, "0 leaves it out");
        return None;
    }
    Some(value)
}

fn positive<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<f64> {
    let value = reader.number(field)?;
    if value <= 0.0 {
        let message = format!("{} must be above 0", field.name);
        reader.wrong_help(&field.place, message, "leave it out for no limit");
        return None;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::spec::{Spec, SpecError};

    const BASE: &str =
        "schema = 1\n[model]\nname = \"m\"\nentry = \"model:load\"\n[[module]]\nname = \"train\"\n";
    const BATCH: &str = "[module.inputs]\nx = { dtype = \"float32\", shape = [\"batch\", 4] }\n[module.buckets]\nbatch = [2, 8]\n";

    fn read(text: &str) -> Result<Spec, SpecError> {
        Spec::parse(&format!("{BASE}{text}"), Path::new("precast.toml"))
    }

    fn wrong(text: &str) -> String {
        read(text).unwrap_err().in_lines()
    }

    fn modules(train: &str) -> String {
        let text = format!("kind = \"step\"\n{BATCH}[module.train]\n{train}\n");
        let spec = read(&text).map_err(|error| error.render()).unwrap();
        let show = |module: &crate::spec::Module| {
            let inputs = module.inputs.iter().flatten();
            let inputs: Vec<&str> = inputs.map(|input| &*input.name).collect();
            let train = serde_json::to_string(&module.train).unwrap();
            let (name, method, buckets) = (&module.name, &module.method, module.buckets.len());
            format!("{name}.{method}({}) {buckets} {train}", inputs.join(", "))
        };
        let modules: Vec<String> = spec.modules.iter().map(show).collect();
        modules.join("\n")
    }

    #[test]
    fn an_entry_becomes_the_modules_of_a_step() {
        insta::assert_snapshot!(modules("optimizer = \"adamw\""), @r#"
train.forward(x, lr) 2 {"part":"step","optimizer":"adamw","options":{"betas":[0.9,0.999],"eps":1e-8,"weight_decay":0.01},"clip":null,"autocast":null}
train.eval.forward(x) 2 {"part":"eval","optimizer":"adamw","options":{"betas":[0.9,0.999],"eps":1e-8,"weight_decay":0.01},"clip":null,"autocast":null}
"#);
        insta::assert_snapshot!(modules("loss = \"loss\"\noptimizer = \"sgd\"\nmomentum = 0.9\nclip = 1\naccumulate = true\nautocast = \"bfloat16\""), @r#"
train.gradients.loss(x) 2 {"part":"gradients","optimizer":"sgd","options":{"momentum":0.9,"weight_decay":0.0},"clip":1.0,"autocast":"bfloat16"}
train.update.loss(lr) 1 {"part":"update","optimizer":"sgd","options":{"momentum":0.9,"weight_decay":0.0},"clip":1.0,"autocast":"bfloat16"}
train.eval.loss(x) 2 {"part":"eval","optimizer":"sgd","options":{"momentum":0.9,"weight_decay":0.0},"clip":1.0,"autocast":"bfloat16"}
"#);
        insta::assert_snapshot!(modules("optimizer = \"mine:lion\""), @r#"
train.forward(x, lr) 2 {"part":"step","optimizer":"mine:lion","options":{},"clip":null,"autocast":null}
train.eval.forward(x) 2 {"part":"eval","optimizer":"mine:lion","options":{},"clip":null,"autocast":null}
"#);
    }

    #[test]
    fn mistakes_are_named() {
        let train = |text: &str| wrong(&format!("kind = \"step\"\n{BATCH}[module.train]\n{text}"));
        insta::assert_snapshot!(train(""), @r#"missing key `optimizer` in [module.train] | add `optimizer = "adamw"`"#);
        insta::assert_snapshot!(train("optimizer = \"adamx\""), @"unknown optimizer `adamx` | known: `adamw`, `adam`, `sgd`, and `module:callable` for one of yours");
        insta::assert_snapshot!(train("optimizer = \"sgd\"\nbetas = [0.9, 0.99]"), @"unknown key `betas` in [module.train] | known keys: `loss`, `optimizer`, `clip`, `accumulate`, `autocast`, `momentum`, `weight_decay`");
        insta::assert_snapshot!(train("optimizer = \"adam\"\nbetas = [0.9, 1.0]\neps = -1.0"), @"`eps` in [module.train] must not be negative | 0 leaves it out");
        insta::assert_snapshot!(train("optimizer = \"adam\"\nclip = 0\nloss = \"a.b\"\nautocast = \"int8\"\naccumulate = 3"), @r#"
`clip` in [module.train] must be above 0 | leave it out for no limit
`a.b` is not the name of a method | write the name alone, as `loss`
unknown dtype `int8` | known: `bfloat16`
`accumulate` in [module.train] must be true or false, not an integer | write `true` or `false`, without quotes
"#);
        insta::assert_snapshot!(wrong(&format!("kind = \"step\"\nregions = [\"a\"]\nmethod = \"f\"\n{BATCH}[module.train]\noptimizer = \"sgd\"")), @r#"
a module of kind `step` has no `regions` | a step is one artifact
a module of kind `step` has no `method` | `loss` in [module.train] is the method
"#);
        insta::assert_snapshot!(wrong("kind = \"step\"\n[module.train]\noptimizer = \"sgd\""), @"a module of kind `step` needs `inputs` | write the batch under [module.inputs]: what the loss takes");
        insta::assert_snapshot!(wrong(&format!("kind = \"steps\"\n{BATCH}")), @"unknown kind `steps` | did you mean `step`? known: `step`, `autograd`");
        insta::assert_snapshot!(wrong(&format!("{BATCH}[module.train]\noptimizer = \"sgd\"")), @r#"[module.train] is for modules of kind `step` and `autograd` | add `kind = "step"` to this [[module]]"#);
        insta::assert_snapshot!(wrong("kind = \"step\"\n[module.inputs]\nlr = { dtype = \"float32\", shape = [2] }\n[module.train]\noptimizer = \"sgd\""), @"`lr` is the learning rate, an input that the step has by itself | rename the input of the loss");
    }
}
