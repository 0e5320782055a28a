//! The JSON schemas in docs/schema, generated from the types that the commands print.
//!
//! A doc comment of a type or a field is its description. After a change of a type, `UPDATE_SCHEMAS=1 cargo test
//! schemas_are_those_of_the_types` writes the files again.

use std::{collections::BTreeSet, fs, path::Path};

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Value, json};

use super::super::{
    build, deps, diff, doctor, du, exit, export, gc, init, log, ls, plan, printer, release, remote,
    show, stats, verify, version, why,
};
use crate::{
    build::progress::Event,
    inspect::{external, report, stats::Counts},
};

/// One line of `precast build --format json`.
#[derive(serde::Serialize, JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the two are printed by themselves")]
enum BuildLine<'a> {
    Event(Event<'a>),
    Last(build::Last<'a>),
}

/// One line of stderr.
#[derive(serde::Serialize, JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the three are printed by themselves")]
enum StderrLine<'a> {
    Error(exit::Report),
    Warning(exit::Warning<'a>),
    Note(printer::Note),
}

/// Returns each document's name and its schema.
fn documents() -> Vec<(&'static str, Value)> {
    vec![
        made::<BuildLine>("build", "one line of precast build --format json"),
        made::<StderrLine>(
            "error",
            "one line of stderr, of any command with --format json",
        ),
        made::<init::InitDocument>("init", "precast init --format json"),
        made::<crate::inspect::checks::Checks>("check", "precast check --format json"),
        made::<Counts>(
            "counts",
            "what Model::counts gives and precast run --counts writes",
        ),
        made::<deps::DepsDocument>("deps", "precast deps --format json"),
        made::<diff::DiffDocument>("diff", "precast diff --format json"),
        made::<doctor::DoctorDocument>("doctor", "precast doctor --format json"),
        made::<du::DuDocument>("du", "precast du --format json"),
        made::<export::ExportDocument>("export", "precast export --format json"),
        made::<gc::GcDocument>("gc", "precast gc --format json"),
        made::<external::Report>("inspect", "precast inspect --format json"),
        made::<log::LogDocument>("log", "precast log --format json"),
        made::<ls::LsDocument>("ls", "precast ls --format json"),
        made::<plan::PlanDocument>("plan", "precast plan --format json"),
        made::<remote::MovedDocument>("moved", "precast push and precast pull --format json"),
        made::<remote::RemoteDocument>("remote", "precast ls REMOTE --format json"),
        made::<remote::names::RemotesDocument>("remotes", "precast remote --format json"),
        made::<remote::store::RemoteVerifyDocument>(
            "remote-verify",
            "precast verify --store REMOTE --format json",
        ),
        made::<remote::store::RemoteGcDocument>(
            "remote-gc",
            "precast gc --store REMOTE --format json",
        ),
        made::<release::ReleaseDocument>("release", "precast release --format json"),
        made::<report::Page>("report", "precast report --format json"),
        made::<show::ShowDocument>("show", "precast show ID --format json"),
        made::<stats::StatsDocument>("stats", "precast stats --format json"),
        made::<verify::VerifyDocument>("verify", "precast verify --format json"),
        made::<version::VersionDocument>("version", "precast --version -v --format json"),
        made::<why::WhyDocument>("why", "precast why --format json"),
        made::<super::super::bench::BenchDocument>("bench", "precast bench --format json"),
        made::<super::super::run::RunDocument>("run", "precast run --format json"),
        made::<super::super::train::TrainDocument>("train", "precast train --format json"),
    ]
}

fn made<T: JsonSchema>(name: &'static str, title: &str) -> (&'static str, Value) {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let mut generator = settings.into_generator();
    let mut schema = T::json_schema(&mut generator).to_value();
    let mut definitions = Value::Object(generator.take_definitions(true));
    version(&mut schema, &mut definitions);
    let known = definitions.clone();
    inline(&mut schema, &known);
    inline(&mut definitions, &known);
    let text = format!("{schema}{definitions}");
    if let Value::Object(all) = &mut definitions {
        all.retain(|name, _| text.contains(&format!("\"#/$defs/{name}\"")));
    }
    close(&mut schema, false);
    let parts = definitions.as_object_mut().into_iter().flatten();
    parts.for_each(|(_, part)| close(part, false));
    let mut document = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title,
    });
    let fields = schema.as_object().into_iter().flatten();
    // The title replaces the type's own description.
    for (key, value) in fields.filter(|(key, _)| *key != "description") {
        document[key] = value.clone();
    }
    document["$defs"] = definitions;
    (name, document)
}

/// Adds the version, which every document has, to each form of a document.
fn version(schema: &mut Value, definitions: &mut Value) {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.trim_start_matches("#/$defs/").to_owned();
        let mut inside = definitions[&name].take();
        version(&mut inside, definitions);
        definitions[&name] = inside;
        return;
    }
    let forms = ["oneOf", "anyOf"]
        .into_iter()
        .find(|of| schema[of].is_array());
    match forms {
        Some(of) if schema["properties"].is_null() => {
            let mut forms = schema[of].take();
            let each = forms.as_array_mut().into_iter().flatten();
            each.for_each(|form| version(form, definitions));
            schema[of] = forms;
        }
        _ => {
            let mut properties = json!({ "schema": { "const": 1 } });
            let own = schema["properties"].as_object().into_iter().flatten();
            for (name, property) in own.filter(|(name, _)| *name != "schema") {
                properties[name] = property.clone();
            }
            schema["properties"] = properties;
            let mut required = schema["required"].as_array().cloned().unwrap_or_default();
            if !required.contains(&"schema".into()) {
                required.insert(0, "schema".into());
            }
            schema["required"] = required.into();
        }
    }
}

/// Replaces a reference with siblings by the fields of its definition.
fn inline(schema: &mut Value, definitions: &Value) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(|one| inline(one, definitions)),
        Value::Object(all) => {
            let name = match (all.get("$ref"), all.get("properties")) {
                (Some(Value::String(name)), Some(_)) => name.trim_start_matches("#/$defs/"),
                _ => "",
            };
            if let Some(Value::Object(more)) = definitions.get(name).cloned() {
                all.remove("$ref");
                for (key, value) in more {
                    match (all.get_mut(&key), value) {
                        (Some(Value::Object(own)), Value::Object(more)) => own.extend(more),
                        (Some(Value::Array(own)), Value::Array(more)) => own.extend(more),
                        (Some(_), _) => {}
                        (None, value) => drop(all.insert(key, value)),
                    }
                }
            }
            all.values_mut().for_each(|one| inline(one, definitions));
        }
        _ => {}
    }
}

/// Allows no other properties than the listed ones. Removes formats of numbers and the marks of links. With `part`,
/// another schema lists more properties.
fn close(schema: &mut Value, part: bool) {
    let Value::Object(all) = schema else {
        if let Value::Array(list) = schema {
            list.iter_mut().for_each(|one| close(one, false));
        }
        return;
    };
    all.remove("format");
    if let Some(Value::Array(required)) = all.get_mut("required") {
        let mut seen = BTreeSet::new();
        required.retain(|name| seen.insert(name.to_string()));
    }
    if let Some(Value::String(text)) = all.get_mut("description") {
        let plain = text.replace('\n', " ");
        *text = plain.replace("[`", "`").replace("`]", "`");
    }
    let lists = all
        .get("properties")
        .is_some_and(|properties| !part && properties.is_object());
    let composed = ["oneOf", "anyOf", "allOf"]
        .iter()
        .any(|of| all.contains_key(*of));
    for (key, value) in all.iter_mut() {
        match (key.as_str(), value) {
            ("oneOf" | "anyOf" | "allOf", Value::Array(forms)) => {
                forms.iter_mut().for_each(|form| close(form, part || lists));
            }
            ("properties" | "patternProperties", Value::Object(properties)) => {
                properties.values_mut().for_each(|one| close(one, false));
            }
            ("items" | "additionalProperties" | "prefixItems", one) => close(one, false),
            _ => {}
        }
    }
    if lists {
        let open = !all.contains_key("additionalProperties");
        let key = if composed {
            "unevaluatedProperties"
        } else {
            "additionalProperties"
        };
        if open && !all.contains_key(key) {
            all.insert(key.to_owned(), false.into());
        }
    }
}

/// Returns JSON text. A value that fits into one line has one.
fn render(value: &Value, indent: usize) -> String {
    let flat = value.to_string();
    if indent + flat.len() <= 120 {
        return flat;
    }
    let inner = " ".repeat(indent + 2);
    let (open, rows, close) = match value {
        Value::Object(all) => {
            let row = |(key, one)| format!("{}: {}", json!(key), render(one, indent + 2));
            ('{', all.iter().map(row).collect::<Vec<_>>(), '}')
        }
        Value::Array(list) => {
            let rows = list.iter().map(|one| render(one, indent + 2));
            ('[', rows.collect(), ']')
        }
        _ => return flat,
    };
    let rows = rows.join(&format!(",\n{inner}"));
    format!("{open}\n{inner}{rows}\n{}{close}", " ".repeat(indent))
}

#[test]
fn schemas_are_those_of_the_types() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/schema");
    let documents = documents();
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let made = documents.iter().any(|(made, _)| name == *made);
        assert!(made, "no type gives docs/schema/{name}.json");
    }
    for (name, schema) in documents {
        let path = folder.join(format!("{name}.json"));
        let text = format!("{}\n", render(&schema, 0));
        if std::env::var_os("UPDATE_SCHEMAS").is_some() {
            fs::write(&path, &text).unwrap();
        }
        let there = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            there == text,
            "docs/schema/{name}.json is not what the types say: `UPDATE_SCHEMAS=1 cargo test schemas_are_those_of_the_types` writes it"
        );
    }
}
