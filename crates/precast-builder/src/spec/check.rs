//! `[[check.allow]]`: findings of `precast check` that are intended, each with a reason.

use serde::{Deserialize, Serialize};

use super::{
    inputs,
    reader::{KeyValue, Reader, list, nearest},
};

/// The categories of findings, as in the worker's `check/finding.py`.
pub const CATEGORIES: &[&str] = &[
    "control-flow",
    "value-read",
    "value-size",
    "python-object",
    "python-state",
    "python-branch",
    "list-input",
    "print",
    "numpy",
    "random",
    "custom-operator",
    "in-place",
    "training",
    "training-mode",
    "step",
    "expand",
    "fixed-size",
    "symbolic-flag",
    "size-one",
    "padding",
    "cuda-graph",
    "region",
    "graph-break",
    "recompile",
    "unsupported",
    "inputs",
];

const KEYS: &[&str] = &["finding", "function", "reason"];

/// A finding that is intended.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Allow {
    /// The category of the finding.
    pub finding: String,
    /// The function that it is in, as `Block.forward`; none for every function.
    pub function: Option<String>,
    /// The reason why it is intended, as the user wrote it.
    pub reason: String,
}

/// Reads `[check]`.
pub(super) fn check<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Vec<Allow>> {
    let section = reader.table(field, "[check]")?;
    reader.check_keys(&section, &["allow"], &[]);
    let Some(field) = section.field("allow") else {
        return Some(Vec::new());
    };
    let items = reader.array(&field, "tables")?;
    let read: Vec<_> = items.iter().map(|item| allow(reader, item)).collect();
    read.into_iter().collect()
}

fn allow<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Allow> {
    let section = reader.table(field, "[[check.allow]]")?;
    reader.check_keys(&section, KEYS, &[]);
    let finding = reader
        .required(&section, "finding", "finding = \"print\"")
        .and_then(|field| category(reader, &field));
    let reason = reader
        .required(&section, "reason", "reason = \"why this is intended\"")
        .and_then(|field| reason(reader, &field));
    let function = match section.field("function") {
        Some(field) => Some(function(reader, &field)?),
        None => None,
    };
    Some(Allow {
        finding: finding?,
        function,
        reason: reason?,
    })
}

fn category<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<String> {
    let text = reader.string(field)?;
    if !CATEGORIES.contains(&text) {
        let help = match nearest(text, CATEGORIES) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known: {}", list(CATEGORIES)),
        };
        reader.wrong_help(&field.place, format!("unknown finding `{text}`"), help);
    }
    Some(text.to_owned())
}

fn reason<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<String> {
    let text = reader.string(field)?;
    if text.trim().is_empty() {
        let help = "say in a few words why this is intended: the report shows it";
        reader.wrong_help(&field.place, format!("{} is empty", field.name), help);
    }
    Some(text.to_owned())
}

fn function<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<String> {
    let text = reader.string(field)?;
    if !text.split('.').all(inputs::is_identifier) {
        let message = format!("`{text}` is not the name of a function");
        let help = "write its qualified name, as `Block.forward`";
        reader.wrong_help(&field.place, message, help);
    }
    Some(text.to_owned())
}

impl Allow {
    /// Returns whether this is about a finding of a category in a function.
    pub fn matches(&self, category: &str, function: Option<&str>) -> bool {
        self.finding == category
            && self
                .function
                .as_deref()
                .is_none_or(|own| Some(own) == function)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::spec::{Spec, SpecError};

    const BASE: &str =
        "schema = 1\n[model]\nname = \"m\"\nentry = \"model:load\"\n[[module]]\nname = \"f\"\n";

    fn read(text: &str) -> Result<Spec, SpecError> {
        Spec::parse(&format!("{BASE}{text}"), Path::new("precast.toml"))
    }

    fn wrong(text: &str) -> String {
        read(text).unwrap_err().in_lines()
    }

    #[test]
    fn what_is_intended() {
        let spec = read(
            "[[check.allow]]\nfinding = \"print\"\nreason = \"for a week\"\n\
             [[check.allow]]\nfinding = \"random\"\nfunction = \"Block.forward\"\nreason = \"noise\"\n",
        )
        .unwrap();
        let [print, random] = &spec.allowed[..] else {
            panic!("{:?}", spec.allowed)
        };
        assert!(print.matches("print", None) && print.matches("print", Some("f")));
        assert!(!print.matches("random", None));
        assert!(random.matches("random", Some("Block.forward")));
        assert!(!random.matches("random", Some("forward")) && !random.matches("random", None));
        assert_eq!(read("").unwrap().allowed, []);
    }

    #[test]
    fn mistakes_are_named() {
        insta::assert_snapshot!(wrong("[[check.allow]]\nfinding = \"prints\"\nreason = \"x\"\n"), @"unknown finding `prints` | did you mean `print`?");
        insta::assert_snapshot!(wrong("[[check.allow]]\nfinding = \"print\"\n"), @r#"missing key `reason` in [[check.allow]] | add `reason = "why this is intended"`"#);
        insta::assert_snapshot!(wrong("[[check.allow]]\nfinding = \"print\"\nreason = \" \"\n"), @"`reason` in [[check.allow]] is empty | say in a few words why this is intended: the report shows it");
        insta::assert_snapshot!(wrong("[[check.allow]]\nfinding = \"print\"\nreason = \"x\"\nfunction = \"a b\"\n"), @"`a b` is not the name of a function | write its qualified name, as `Block.forward`");
        insta::assert_snapshot!(wrong("[check]\nallowed = []\n"), @"unknown key `allowed` in [check] | did you mean `allow`?");
        insta::assert_snapshot!(wrong("[[check.allow]]\nfinding = \"print\"\nreason = \"x\"\nmodule = \"f\"\n"), @"unknown key `module` in [[check.allow]] | known keys: `finding`, `function`, `reason`");
    }
}
