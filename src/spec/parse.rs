//! The walk over a spec: one function per table.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use toml::de::DeTable;

use super::{
    Backend, Bounds, Dim, Dynamic, FailPolicy, Gate, Mode, Model, Module, Overrides, SCHEMA, Spec,
    SpecError, TargetSpec, WeightsFrom, buckets, compile,
    error::Problem,
    glob, inputs,
    reader::{Field, Place, Reader, Section},
};
use crate::target::{DeviceKind, ISA_LEVELS};

const TOP: &[&str] = &["schema", "model", "target", "compile", "module"];
pub(crate) const MODEL: &[&str] = &["name", "entry", "weights", "samples"];
pub(crate) const TARGET: &[&str] = &["device", "isa"];
pub(crate) const MODULE: &[&str] = &[
    "name", "path", "method", "regions", "inputs", "buckets", "gate",
];

/// Where a key belongs that was found in another table.
const HOMES: &[(&str, &str)] = &[
    ("entry", "[model]"),
    ("weights", "[model]"),
    ("samples", "[model]"),
    ("device", "[target]"),
    ("isa", "[target]"),
    ("inputs", "[[module]]"),
    ("buckets", "[[module]]"),
    ("regions", "[[module]]"),
    ("gate", "[[module]]"),
    ("rtol", "[module.gate]"),
    ("atol", "[module.gate]"),
];

/// Inductor's own groups of options: tables of these names hold dotted options, other tables are values.
const OPTION_GROUPS: &[&str] = &["aot_inductor", "cpp", "cuda", "cutlass", "triton", "xpu"];

/// Options that decide what an artifact is; a spec may not set them.
const OWN_OPTIONS: &[&str] = &[
    "aot_inductor.embed_kernel_binary",
    "aot_inductor.output_path",
    "aot_inductor.package",
    "aot_inductor.package_constants_in_so",
    "aot_inductor.package_cpp_only",
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
        // Another schema may mean other keys: say only that.
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
    Some(Spec {
        file: path.to_owned(),
        root,
        model: model?,
        target: target?,
        compile: compile?,
        modules: modules?,
    })
}

fn model<'t>(reader: &mut Reader<'t>, field: &Field<'t>, root: &Path) -> Option<Model> {
    let section = reader.table(field, "[model]")?;
    reader.check_keys(&section, MODEL, HOMES);
    let name = (reader.required(&section, "name", "name = \"my-model\""))
        .and_then(|field| name(reader, &field));
    let entry = (reader.required(&section, "entry", "entry = \"model:load\""))
        .and_then(|field| callable(reader, &field));
    let samples = optional(&section, "samples", |field| callable(reader, field));
    let weights = optional(&section, "weights", |field| weights(reader, field, root));
    Some(Model {
        name: name?,
        entry: entry?,
        weights: weights?.unwrap_or(WeightsFrom::Auto),
        samples: samples?,
    })
}

fn weights<'t>(reader: &mut Reader<'t>, field: &Field<'t>, root: &Path) -> Option<WeightsFrom> {
    let text = reader.string(field)?;
    if text == "auto" {
        return Some(WeightsFrom::Auto);
    }
    if !text.ends_with(".safetensors") || text.contains('\0') {
        let message = format!("`{text}` is not a weight set");
        reader.wrong_help(
            &field.place,
            message,
            "write `auto` or the path of a `.safetensors` file",
        );
        return None;
    }
    Some(WeightsFrom::File(root.join(text)))
}

fn target<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<TargetSpec> {
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

/// Reads the settings of `[compile]` or of a module.
fn overrides<'t>(reader: &mut Reader<'t>, section: &Section<'t>) -> Overrides {
    let mut read = Overrides::default();
    for (key, _, field) in section.fields() {
        match key {
            "enabled" => read.enabled = reader.boolean(&field),
            "backend" => read.backend = reader.choice(&field, "backend", Backend::WORDS),
            "mode" => read.mode = reader.choice(&field, "mode", Mode::WORDS),
            "dynamic" => read.dynamic = dynamic(reader, &field),
            "fullgraph" => read.fullgraph = reader.boolean(&field),
            "options" => read.options = options(reader, &field),
            "passes" => read.passes = passes(reader, &field),
            "allowlist" => read.allowlist = globs(reader, &field),
            "blocklist" => read.blocklist = globs(reader, &field),
            "healthcheck" => read.healthcheck = reader.boolean(&field),
            "smoketest_steps" => read.smoketest_steps = steps(reader, &field),
            "fail_policy" => {
                read.fail_policy = reader.choice(&field, "fail_policy", FailPolicy::WORDS)
            }
            _ => {}
        }
    }
    read
}

fn dynamic<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<Dynamic> {
    if let toml::de::DeValue::Boolean(all) = field.value {
        return Some(Dynamic::All(*all));
    }
    let toml::de::DeValue::Table(_) = field.value else {
        let help =
            "write true, false, or dimensions with their sizes: `{ seq = { min = 1, max = 512 } }`";
        reader.wrong_help(
            &field.place,
            format!("{} must be a boolean or a table", field.name),
            help,
        );
        return None;
    };
    let section = reader.table(field, &field.name)?;
    let mut dims = BTreeMap::new();
    for (dim, place, bounds) in section.fields() {
        let name = format!("`dynamic.{dim}`");
        let Some(inner) = reader.table(&bounds, &name) else {
            continue;
        };
        reader.check_keys(&inner, &["min", "max"], &[]);
        let min = reader
            .required(&inner, "min", "min = 1")
            .and_then(|f| inputs::positive(reader, &f));
        let max = reader
            .required(&inner, "max", "max = 512")
            .and_then(|f| inputs::positive(reader, &f));
        let (Some(min), Some(max)) = (min, max) else {
            continue;
        };
        if min >= max {
            reader.wrong_help(
                &place,
                format!("{name} goes from {min} to {max}, which leaves nothing dynamic"),
                "as in `seq = { min = 2, max = 512 }`",
            );
        }
        dims.insert(dim.to_owned(), Bounds { min, max });
    }
    if section.table.is_empty() {
        let message = format!("{} names no dimension", field.name);
        let help = "`true` makes every bucketed dimension dynamic, `false` none";
        reader.wrong_help(&field.place, message, help);
    }
    Some(Dynamic::Dims(dims))
}

fn options<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<compile::Options> {
    let section = reader.table(field, &field.name)?;
    let mut read = compile::Options::new();
    for (key, place, value) in section.fields() {
        match value.value {
            toml::de::DeValue::Table(_) if OPTION_GROUPS.contains(&key) => {
                let group = reader.table(&value, &value.name)?;
                for (inner, place, value) in group.fields() {
                    option(reader, &mut read, format!("{key}.{inner}"), &place, &value);
                }
            }
            _ => option(reader, &mut read, key.to_owned(), &place, &value),
        }
    }
    Some(read)
}

fn option<'t>(
    reader: &mut Reader<'t>,
    read: &mut compile::Options,
    name: String,
    place: &Place,
    value: &Field<'t>,
) {
    if OWN_OPTIONS.contains(&name.as_str()) {
        reader.wrong_help(
            place,
            format!("option `{name}` is precast's own and can't be set"),
            "leave it out",
        );
    } else if let Some(value) = reader.json(value)
        && read.insert(name.clone(), value).is_some()
    {
        let message = format!("option `{name}` is set twice");
        reader.wrong_help(place, message, "leave one of them out");
    }
}

fn passes<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<Vec<String>> {
    let items = reader.array(field, "strings")?;
    items.iter().map(|item| callable(reader, item)).collect()
}

/// Reads a list of FQN globs.
fn globs<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<Vec<String>> {
    let items = reader.strings(field)?;
    for (pattern, place) in &items {
        if let Some(problem) = glob::problem(pattern) {
            let help =
                "`*` is one component of a name, `**` any number of them, as in `encoder.layer.*`";
            reader.wrong_help(place, format!("the glob `{pattern}` {problem}"), help);
        }
    }
    Some(
        items
            .into_iter()
            .map(|(pattern, _)| pattern.to_owned())
            .collect(),
    )
}

fn steps<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<u32> {
    let value = reader.integer(field)?;
    if !(0..=1000).contains(&value) {
        reader.wrong_help(
            &field.place,
            format!("{} must be between 0 and 1000, not {value}", field.name),
            "3 is what is taken without it",
        );
    }
    u32::try_from(value).ok()
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
    let read: Vec<(Module, Place)> = read.into_iter().collect::<Option<_>>()?;
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
    Some(read.into_iter().map(|(module, _)| module).collect())
}

/// Returns whether a request could mean either module.
fn clash(a: &Module, b: &Module) -> bool {
    let names = |module: &Module| -> Option<BTreeSet<String>> {
        let inputs = module.inputs.as_ref()?;
        Some(inputs.iter().map(|input| input.name.clone()).collect())
    };
    a.name == b.name
        && match (names(a), names(b)) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        }
}

fn module<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<Module> {
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
    let buckets = optional(&section, "buckets", |field| buckets::buckets(reader, field));
    let gate = optional(&section, "gate", |field| gate(reader, field));
    let compile = overrides(reader, &section);
    let (inputs, buckets) = (inputs?, buckets?);
    if let Some(inputs) = &inputs {
        buckets::check(reader, &section, inputs, buckets.as_ref());
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
    Some(Module {
        name: name?,
        path: path?.unwrap_or_default(),
        method: method?.unwrap_or_else(|| "forward".to_owned()),
        inputs: inputs.map(|inputs| inputs.into_iter().map(|(input, _)| input).collect()),
        buckets: buckets.map_or_else(|| vec![BTreeMap::new()], |buckets| buckets.points),
        regions: regions?.unwrap_or_default(),
        compile,
        gate: gate?.unwrap_or_default(),
    })
}

fn gate<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<Gate> {
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
fn name<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<String> {
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

/// Reads `module:callable`.
fn callable<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<String> {
    let text = reader.string(field)?;
    let good = text.split_once(':').is_some_and(|(module, callable)| {
        module.split('.').all(inputs::is_identifier)
            && callable.split('.').all(inputs::is_identifier)
    });
    if !good {
        let message = format!("{} must be `module:callable`, not `{text}`", field.name);
        let help = match text.split_once(".py:") {
            Some((module, callable)) => format!("write `{}:{callable}`", module.replace('/', ".")),
            None => "write `model:load` for the function `load` in `model.py`".to_owned(),
        };
        reader.wrong_help(&field.place, message, help);
    }
    Some(text.to_owned())
}

/// Reads the FQN of a submodule.
fn path<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<String> {
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

fn method<'t>(reader: &mut Reader<'t>, field: &Field<'t>) -> Option<String> {
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

/// Reads a value that may be absent: `None` when it is there and wrong.
fn optional<'t, T>(
    section: &Section<'t>,
    key: &str,
    read: impl FnOnce(&Field<'t>) -> Option<T>,
) -> Option<Option<T>> {
    match section.field(key) {
        Some(field) => read(&field).map(Some),
        None => Some(None),
    }
}
