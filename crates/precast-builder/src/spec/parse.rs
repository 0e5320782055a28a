//! The parser of a spec: one function per table. The settings of `[compile]` are parsed in `control`.

mod control;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use precast_store::target::{DeviceKind, ISA_LEVELS};
use toml::de::DeTable;

use super::{
    Dim, Dynamic, Gate, Model, Module, Overrides, PaddingRule, SCHEMA, Spec, SpecError, TargetSpec,
    WeightsFrom, buckets,
    callable::callable,
    check, compile,
    error::Problem,
    inputs, pair,
    reader::{KeyValue, Reader, Section, Span},
    states, train,
};
use control::{globs, overrides};
pub(super) use control::{option, reaches, setting};

const TOP: &[&str] = &["schema", "model", "target", "compile", "module", "check"];
pub(crate) const MODEL: &[&str] = &[
    "name",
    "entry",
    "weights",
    "unused_weights",
    "samples",
    "context",
    "assets",
];
pub(crate) const TARGET: &[&str] = &["device", "isa"];
pub(crate) const MODULE: &[&str] = &[
    "name", "kind", "path", "method", "regions", "inputs", "state", "buckets", "gate", "padding",
    "train",
];

/// The table of each key, for keys that are in another table.
const HOMES: &[(&str, &str)] = &[
    ("entry", "[model]"),
    ("weights", "[model]"),
    ("unused_weights", "[model]"),
    ("samples", "[model]"),
    ("context", "[model]"),
    ("assets", "[model]"),
    ("device", "[target]"),
    ("isa", "[target]"),
    ("inputs", "[[module]]"),
    ("state", "[[module]]"),
    ("buckets", "[[module]]"),
    ("regions", "[[module]]"),
    ("gate", "[[module]]"),
    ("padding", "[[module]]"),
    ("kind", "[[module]]"),
    ("train", "[[module]]"),
    ("optimizer", "[module.train]"),
    ("loss", "[module.train]"),
    ("rtol", "[module.gate]"),
    ("atol", "[module.gate]"),
];

/// Reads a whole spec.
pub(super) fn spec(text: &str, path: &Path) -> Result<Spec, SpecError> {
    let (document, syntax) = DeTable::parse_recoverable(text);
    if !syntax.is_empty() {
        let problem = |error: &toml::de::Error| {
            let place = error.span().unwrap_or(0..0);
            let message = format!("invalid TOML: {}", error.message());
            let help = "this is no TOML: strings are in quotes, tables are under `[name]`";
            Problem::new(path.to_owned(), text, place, message, help.to_owned())
        };
        return Err(SpecError::Invalid(syntax.iter().map(problem).collect()));
    }
    let mut reader = Reader::new(text, path);
    let found = top(
        &mut reader,
        path,
        &Section::new("the spec", document.get_ref(), 0..0),
    );
    let problems = reader.into_problems();
    match found {
        Some(spec) if problems.is_empty() => Ok(spec),
        _ => Err(SpecError::Invalid(problems)),
    }
}

fn top<'t>(reader: &mut Reader<'t>, path: &Path, top: &Section<'t>) -> Option<Spec> {
    let root = match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    let schema = reader.required(top, "schema", "schema = 1");
    if let Some(field) = schema
        && let Some(version) = reader.integer(&field)
        && version != SCHEMA
    {
        let help = format!("this `precast` reads schema {SCHEMA}");
        reader.wrong_help(&field.place, format!("unknown schema {version}"), help);
        // Another schema may have other keys: report only that.
        return None;
    }
    reader.check_keys(
        top,
        TOP,
        &[HOMES, &[("modules", "`[[module]]` tables")]].concat(),
    );
    let model = reader
        .required(top, "model", "[model]")
        .and_then(|field| model(reader, &field, &root));
    let target = match top.field("target") {
        Some(field) => target(reader, &field),
        None => Some(TargetSpec {
            device: DeviceKind::Cpu,
            isa: "native".to_owned(),
        }),
    };
    let compile = match top.field("compile") {
        Some(field) => reader.table(&field, "[compile]").map(|section| {
            reader.check_keys(&section, compile::KEYS, HOMES);
            overrides(reader, &section)
        }),
        None => Some(Overrides::default()),
    };
    let modules = modules(reader, top);
    let allowed = match top.field("check") {
        Some(field) => check::check(reader, &field),
        None => Some(Vec::new()),
    };
    if reader.is_sound() {
        let tables = ["compile", "module"].map(|key| top.field(key));
        let paths: Vec<&str> = modules.iter().flatten().map(|one| &*one.path).collect();
        for field in tables.into_iter().flatten() {
            let items = match field.value {
                toml::de::DeValue::Array(_) => reader.array(&field, "tables"),
                _ => Some(vec![field]),
            };
            for item in items.into_iter().flatten() {
                let section = reader.table(&item, "settings");
                for (key, _, field) in section.iter().flat_map(Section::fields) {
                    reaches(reader, key, &field, &paths);
                }
            }
        }
    }
    Some(Spec {
        file: path.to_owned(),
        root,
        model: model?,
        target: target?,
        compile: compile?,
        modules: modules?,
        allowed: allowed?,
    })
}

fn model<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>, root: &Path) -> Option<Model> {
    let section = reader.table(field, "[model]")?;
    reader.check_keys(&section, MODEL, HOMES);
    let name = (reader.required(&section, "name", "name = \"my-model\""))
        .and_then(|field| name(reader, &field));
    let entry = (reader.required(&section, "entry", "entry = \"model:load\""))
        .and_then(|field| callable(reader, &field));
    let samples = optional(&section, "samples", |field| callable(reader, field));
    let weights = optional(&section, "weights", |field| weights(reader, field, root));
    let unused = optional(&section, "unused_weights", |field| globs(reader, field));
    let context = optional(&section, "context", |field| inputs::positive(reader, field));
    let assets = optional(&section, "assets", |field| assets(reader, field, root));
    Some(Model {
        name: name?,
        entry: entry?,
        weights: weights?.unwrap_or(WeightsFrom::Auto),
        unused_weights: unused?.unwrap_or_default(),
        samples: samples?,
        context: context?,
        assets: assets?.unwrap_or_default(),
    })
}

fn assets<'t>(
    reader: &mut Reader<'t>,
    field: &KeyValue<'t>,
    root: &Path,
) -> Option<BTreeMap<String, PathBuf>> {
    let section = reader.table(field, "assets")?;
    let one = |(name, _, field): (&'t str, _, _)| {
        Some((name.to_owned(), root.join(reader.string(&field)?)))
    };
    section.fields().into_iter().map(one).collect()
}

fn weights<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>, root: &Path) -> Option<WeightsFrom> {
    let text = reader.string(field)?;
    if text == "auto" {
        return Some(WeightsFrom::Auto);
    }
    if is_one_of_several(text) {
        let message = format!("`{text}` is one file of a checkpoint in several");
        let help = "name the folder, or the index: `model.safetensors.index.json`";
        reader.wrong_help(&field.place, message, help);
        return None;
    }
    if OTHER_FORMATS.iter().any(|suffix| text.ends_with(suffix)) || text.contains('\0') {
        let message = format!("`{text}` is not a weight set");
        let help = "write `auto`, or the path of a `.safetensors` file, of a `.safetensors.index.json`, or of their folder";
        reader.wrong_help(&field.place, message, help);
        return None;
    }
    Some(WeightsFrom::File(root.join(text)))
}

/// Suffixes of weights that are no safetensors.
const OTHER_FORMATS: [&str; 9] = [
    ".bin",
    ".bin.index.json",
    ".ckpt",
    ".gguf",
    ".h5",
    ".npz",
    ".onnx",
    ".pt",
    ".pth",
];

/// Returns whether a path names one file of a checkpoint in several.
fn is_one_of_several(text: &str) -> bool {
    let number = |text: &str| text.parse::<u32>().ok();
    let parts = text.strip_suffix(".safetensors");
    let parts = parts.and_then(|text| text.rsplit_once("-of-"));
    parts.is_some_and(|(before, count)| {
        let first = before.rsplit('-').next().and_then(number);
        (first.zip(number(count))).is_some_and(|numbers| numbers != (1, 1))
    })
}

fn target<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<TargetSpec> {
    let section = reader.table(field, "[target]")?;
    reader.check_keys(&section, TARGET, HOMES);
    let devices = [("cpu", DeviceKind::Cpu), ("cuda", DeviceKind::Cuda)];
    let device = optional(&section, "device", |field| {
        reader.choice(field, "device", &devices)
    });
    let isas: Vec<(&str, &str)> = (std::iter::once("native")
        .chain(ISA_LEVELS.iter().map(|(name, _)| *name)))
    .map(|name| (name, name))
    .collect();
    let isa = optional(&section, "isa", |field| {
        let known: Vec<(&str, usize)> = isas
            .iter()
            .enumerate()
            .map(|(i, (name, _))| (*name, i))
            .collect();
        reader.choice(field, "isa", &known)
    });
    Some(TargetSpec {
        device: device?.unwrap_or(DeviceKind::Cpu),
        isa: isas[isa?.unwrap_or(0)].0.to_owned(),
    })
}

fn modules<'t>(reader: &mut Reader<'t>, top: &Section<'t>) -> Option<Vec<Module>> {
    let field = reader.required(top, "module", "[[module]]")?;
    if let toml::de::DeValue::Table(_) = field.value {
        reader.wrong_help(
            &field.place,
            "`module` is one table, not a list",
            "write `[[module]]`",
        );
        return None;
    }
    let items = reader.array(&field, "tables")?;
    if items.is_empty() {
        reader.wrong_help(&field.place, "the spec has no module", "add `[[module]]`");
    }
    let read: Vec<_> = (items.iter())
        .map(|item| Some((module(reader, item)?, item.place.clone())))
        .collect();
    let read: Vec<(Vec<Module>, Span)> = read.into_iter().collect::<Option<_>>()?;
    let each = |(modules, place): (Vec<Module>, Span)| {
        let modules = modules.into_iter();
        modules.map(move |module| (module, place.clone()))
    };
    let read: Vec<(Module, Span)> = read.into_iter().flat_map(each).collect();
    for (later, (module, place)) in read.iter().enumerate() {
        if let Some((_, other)) = read[..later]
            .iter()
            .find(|(earlier, _)| clash(earlier, module))
        {
            let line = reader.line(other);
            let message = format!(
                "a second module is named `{}` and can't be told from the one in line {line}",
                module.name
            );
            reader.wrong_help(
                place,
                message,
                "rename it, or give both `inputs`, of other names: dispatch picks by them",
            );
        }
    }
    let modules: Vec<Module> = read.into_iter().map(|(module, _)| module).collect();
    for (item, module) in items.iter().zip(&modules) {
        states::check_fillers(reader, item, module, &modules);
    }
    Some(modules)
}

/// Returns whether a request could mean either module.
fn clash(a: &Module, b: &Module) -> bool {
    a.name == b.name
        && match (a.input_names(), b.input_names()) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        }
}

/// The kind of an entry that is not a single module.
#[derive(Clone, Copy)]
enum Kind {
    Step,
    Autograd,
}

/// Reads one entry: one module, or those of a training step or of pairs.
fn module<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Vec<Module>> {
    let section = reader.table(field, "[[module]]")?;
    let homes = [
        HOMES,
        &[("compile", "[[module]], key by key: write `mode = …` here")],
    ]
    .concat();
    reader.check_keys(&section, &[MODULE, compile::KEYS].concat(), &homes);
    let name = (reader.required(&section, "name", "name = \"forward\""))
        .and_then(|field| name(reader, &field));
    let path = optional(&section, "path", |field| path(reader, field));
    let method = optional(&section, "method", |field| method(reader, field));
    let regions = optional(&section, "regions", |field| globs(reader, field));
    let inputs = optional(&section, "inputs", |field| inputs::inputs(reader, field));
    let known = inputs.as_ref().and_then(Option::as_ref);
    let state = optional(&section, "state", |field| {
        states::states(reader, field, known)
    });
    let buckets = optional(&section, "buckets", |field| buckets::buckets(reader, field));
    let gate = optional(&section, "gate", |field| gate(reader, field));
    let rules = [
        ("checked", PaddingRule::Checked),
        ("trusted", PaddingRule::Trusted),
    ];
    let padding = optional(&section, "padding", |field| {
        reader.choice(field, "padding", &rules)
    });
    let compile = overrides(reader, &section);
    let (inputs, buckets) = (inputs?, buckets?);
    let state = state?.unwrap_or_default();
    if let Some(inputs) = &inputs {
        buckets::check(reader, &section, (inputs, &state), buckets.as_ref());
    }
    if let (Some(Dynamic::Dims(dims)), Some(inputs)) = (&compile.dynamic, &inputs) {
        for dim in dims.keys() {
            let used = inputs
                .iter()
                .any(|(input, _)| input.shape.contains(&Dim::Named(dim.clone())));
            let place = section
                .field("dynamic")
                .map_or(section.place.clone(), |field| field.place);
            if !used {
                reader.wrong_help(
                    &place,
                    format!("no input has the dynamic dimension `{dim}`"),
                    "a `shape` in [module.inputs] uses it, as `shape = [\"batch\", 3]`",
                );
            }
        }
    }
    let module = Module {
        name: name?,
        path: path?.unwrap_or_default(),
        method: method?.unwrap_or_else(|| "forward".to_owned()),
        inputs: inputs.map(|inputs| inputs.into_iter().map(|(input, _)| input).collect()),
        state: state.into_iter().map(|(state, _)| state).collect(),
        buckets: buckets.map_or_else(|| vec![BTreeMap::new()], |buckets| buckets.points),
        regions: regions?.unwrap_or_default(),
        compile,
        gate: gate?.unwrap_or_default(),
        padding: padding?.unwrap_or_default(),
        train: None,
        pair: None,
    };
    let kind = optional(&section, "kind", |field| {
        reader.choice(
            field,
            "kind",
            &[("step", Kind::Step), ("autograd", Kind::Autograd)],
        )
    });
    match kind? {
        Some(Kind::Step) => return train::parts(reader, &section, module),
        Some(Kind::Autograd) => return pair::parts(reader, &section, module),
        None => {}
    }
    if let Some(field) = section.field("train") {
        let help = "add `kind = \"step\"` to this [[module]]";
        reader.wrong_help(
            &field.place,
            "[module.train] is for modules of kind `step` and `autograd`",
            help,
        );
    }
    Some(vec![module])
}

fn gate<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Gate> {
    let section = reader.table(field, "[module.gate]")?;
    reader.check_keys(&section, &["rtol", "atol"], &[]);
    let mut tolerance = |key| {
        optional(&section, key, |field| {
            let value = reader.number(field)?;
            if value < 0.0 {
                let message = format!("{} must not be negative", field.name);
                reader.wrong_help(&field.place, message, "0 asks for equal numbers");
            }
            Some(value)
        })
    };
    Some(Gate {
        rtol: tolerance("rtol")?,
        atol: tolerance("atol")?,
    })
}

/// Reads the name of a model or module.
fn name<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<String> {
    let text = reader.string(field)?;
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if text.is_empty()
        || text.len() > 100
        || !text.chars().all(good)
        || text.starts_with(['-', '.'])
    {
        let message = format!("{} is not a name", field.name);
        let help = "a name has 1 to 100 letters, digits, `_`, `-` or `.`, and starts with none of the last two";
        reader.wrong_help(&field.place, message, help);
    }
    Some(text.to_owned())
}

/// Reads the FQN of a submodule.
fn path<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<String> {
    let text = reader.string(field)?;
    let empty = text.split('.').any(str::is_empty);
    if !text.is_empty() && (empty || text.contains(['*', ' ', '/'])) {
        let message = format!("`{text}` is not the name of a submodule");
        reader.wrong_help(
            &field.place,
            message,
            "write it as `named_modules()` does: `encoder.layer.0`",
        );
    }
    Some(text.to_owned())
}

fn method<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<String> {
    let text = reader.string(field)?;
    if !inputs::is_identifier(text) {
        reader.wrong_help(
            &field.place,
            format!("`{text}` is not the name of a method"),
            "write the name alone, as `encode_text`",
        );
    }
    Some(text.to_owned())
}

/// Reads a value that may be absent. `None` if it exists and is wrong.
fn optional<'t, T>(
    section: &Section<'t>,
    key: &str,
    read: impl FnOnce(&KeyValue<'t>) -> Option<T>,
) -> Option<Option<T>> {
    match section.field(key) {
        Some(field) => read(&field).map(Some),
        None => Some(None),
    }
}
