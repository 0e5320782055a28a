//! The keys of `[compile]`, which a module may also set.

use std::collections::BTreeMap;

use serde_json::Value;

use super::callable;
use crate::spec::{
    Backend, Bounds, Dynamic, FailPolicy, Mode, Overrides, compile, glob, inputs,
    reader::{KeyValue, Reader, Section, Span, list, nearest},
};

/// Inductor's own groups of options: tables of these names hold dotted options, other tables are values.
const OPTION_GROUPS: &[&str] = &["aot_inductor", "cpp", "cuda", "cutlass", "triton", "xpu"];

/// Options that the format of an artifact depends on; a spec may not set them.
const OWN_OPTIONS: &[&str] = &[
    "aot_inductor.embed_kernel_binary",
    "aot_inductor.output_path",
    "aot_inductor.package",
    "aot_inductor.package_constants_in_so",
    "aot_inductor.package_cpp_only",
];

/// Reads the settings of `[compile]` or of a module.
pub(super) fn overrides<'t>(reader: &mut Reader<'t>, section: &Section<'t>) -> Overrides {
    let mut read = Overrides::default();
    for (key, _, field) in section.fields() {
        setting(reader, &mut read, key, &field);
    }
    read
}

/// Reads one key of `[compile]`. Skips other keys.
pub(in crate::spec) fn setting<'t>(
    reader: &mut Reader<'t>,
    read: &mut Overrides,
    key: &str,
    field: &KeyValue<'t>,
) {
    match key {
        "enabled" => read.enabled = reader.boolean(field),
        "backend" => read.backend = reader.choice(field, "backend", Backend::WORDS),
        "mode" => read.mode = reader.choice(field, "mode", Mode::WORDS),
        "dynamic" => read.dynamic = dynamic(reader, field),
        "fullgraph" => read.fullgraph = reader.boolean(field),
        "options" => read.options = options(reader, field),
        "passes" => read.passes = passes(reader, field),
        "allowlist" => read.allowlist = globs(reader, field),
        "blocklist" => read.blocklist = globs(reader, field),
        "healthcheck" => read.healthcheck = reader.boolean(field),
        "smoketest_steps" => read.smoketest_steps = steps(reader, field),
        "fail_policy" => read.fail_policy = reader.choice(field, "fail_policy", FailPolicy::WORDS),
        _ => {}
    }
}

fn dynamic<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Dynamic> {
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

fn options<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<compile::InductorOptions> {
    let section = reader.table(field, &field.name)?;
    let mut read = compile::InductorOptions::new();
    for (key, place, value) in section.fields() {
        option(reader, &mut read, key, &place, &value);
    }
    Some(read)
}

/// Reads one option, or a table of a group's.
pub(in crate::spec) fn option<'t>(
    reader: &mut Reader<'t>,
    read: &mut compile::InductorOptions,
    name: &str,
    place: &Span,
    value: &KeyValue<'t>,
) {
    if OPTION_GROUPS.contains(&name)
        && let toml::de::DeValue::Table(_) = value.value
        && let Some(group) = reader.table(value, &value.name)
    {
        for (inner, place, value) in group.fields() {
            one_option(reader, read, format!("{name}.{inner}"), &place, &value);
        }
    } else {
        one_option(reader, read, name.to_owned(), place, value);
    }
}

fn one_option<'t>(
    reader: &mut Reader<'t>,
    read: &mut compile::InductorOptions,
    name: String,
    place: &Span,
    value: &KeyValue<'t>,
) {
    if OWN_OPTIONS.contains(&name.as_str()) {
        reader.wrong_help(
            place,
            format!("option `{name}` is precast's own and can't be set"),
            "leave it out",
        );
        return;
    }
    let word = value.value.as_str();
    let replaced = (compile::REPLACED.iter())
        .find(|(own, of, _)| *own == name && of.is_none_or(|of| word == Some(of)));
    if let Some((_, of, pass)) = replaced {
        let what = of.map_or_else(|| format!("`{name}`"), |of| format!("`{name} = \"{of}\"`"));
        reader.wrong_help(
            place,
            format!("option {what} is a graph pass now"),
            format!("install `precast-kernels` and write `passes = [\"{pass}\"]` beside `options`"),
        );
        return;
    }
    let value = match compile::WORDS.iter().find(|(own, _)| *own == name) {
        Some((own, words)) => {
            let words: Vec<_> = words.iter().map(|word| (*word, *word)).collect();
            reader.choice(value, own, &words).map(Value::from)
        }
        None => reader.json(value),
    };
    if let Some(value) = value
        && read.insert(name.clone(), value).is_some()
    {
        let message = format!("option `{name}` is set twice");
        reader.wrong_help(place, message, "leave one of them out");
    }
}

fn passes<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Vec<String>> {
    let items = reader.array(field, "strings")?;
    items.iter().map(|item| callable(reader, item)).collect()
}

/// Reads a list of FQN globs.
pub(super) fn globs<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Vec<String>> {
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

/// Notes each pattern of an allowlist or blocklist that matches none of the modules' paths.
pub(in crate::spec) fn reaches<'t>(
    reader: &mut Reader<'t>,
    key: &str,
    field: &KeyValue<'t>,
    paths: &[&str],
) {
    if !["allowlist", "blocklist"].contains(&key) || !reader.is_sound() {
        return;
    }
    for (pattern, place) in reader.strings(field).into_iter().flatten() {
        let listed = [pattern.to_owned()];
        if paths.iter().any(|path| glob::listed(&listed, path)) {
            continue;
        }
        let help = match nearest(pattern, paths).filter(|near| !near.is_empty()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("the paths of the modules: {}", list(paths)),
        };
        let message = format!("`{pattern}` of `{key}` matches the `path` of no [[module]]");
        reader.wrong_help(&place, message, help);
    }
}

fn steps<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<u32> {
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
