//! The text of a new spec.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    build::{
        gate::tolerance,
        protocol::{Axis, Described, DescribedInput, Opened},
    },
    cli::text,
    target::DeviceKind,
};

/// The content of a new spec.
pub(super) struct Draft<'a> {
    pub(super) entry: &'a str,
    pub(super) samples: Option<&'a str>,
    pub(super) device: DeviceKind,
    /// Dimension -> its sizes.
    pub(super) buckets: BTreeMap<String, Vec<u64>>,
    /// Whether some of them come from a file of sizes.
    pub(super) from_file: bool,
    pub(super) opened: &'a Opened,
    pub(super) described: &'a Described,
}

impl Draft<'_> {
    /// Returns the spec.
    pub(super) fn text(&self) -> String {
        let class = &self.described.class;
        let mut lines = vec![format!(
            "# How `{class}` is compiled. `precast check` says what will break, `precast build` builds it."
        )];
        let notes = self.described.notes.iter();
        lines.extend(notes.map(|note| format!("# Note: {}", one_line(note))));
        lines.push("schema = 1\n\n[model]".to_owned());
        let name = self.name();
        lines.push(format!(
            "name  = \"{name}\"   # in the store; callers load the model by it"
        ));
        lines.push(format!("entry = \"{}\"", self.entry));
        if let (Some(samples), None) = (self.samples, &self.described.inputs) {
            let why = "gives the inputs, which are more than named tensors";
            lines.push(format!("samples = \"{samples}\"   # {why}"));
        }
        lines.push(format!("\n[target]\ndevice = \"{}\"", self.device));
        if self.device == DeviceKind::Cpu {
            let why = "for a fleet; by default the machine that builds";
            lines.push(format!("# isa = \"x86-64-v3\"   # {why}"));
        }
        lines.extend(self.declared());
        lines.push("\n[[module]]\nname = \"forward\"".to_owned());
        lines.extend(self.regions());
        if let Some(inputs) = &self.described.inputs {
            let range = "`range` is the values that an integer may have";
            lines.push(format!("[module.inputs]   # in call order; {range}"));
            lines.extend(inputs.iter().map(input));
        }
        lines.extend(self.sizes());
        lines.extend(self.gate());
        lines.join("\n") + "\n"
    }

    /// Returns a name for the model: the entry's module, or its callable where the module has a common name.
    fn name(&self) -> String {
        let (module, callable) = self.entry.split_once(':').unwrap_or((self.entry, ""));
        let last = |dotted: &str| dotted.rsplit('.').next().unwrap_or_default().to_owned();
        match (last(module).as_str(), last(callable).as_str()) {
            ("model" | "models" | "main" | "entry", "load" | "model" | "make") => {
                self.described.class.to_lowercase()
            }
            (module, "load" | "model" | "make" | "") => module.to_owned(),
            (_, callable) => callable.to_owned(),
        }
    }

    /// Returns comments with the settings that submodules declare in Python.
    fn declared(&self) -> Vec<String> {
        const SHOWN: usize = 8;
        let declared = &self.opened.declared;
        if declared.is_empty() {
            return vec![];
        }
        let title = "\n# What submodules say themselves holds unless it is said here:";
        let mut lines = vec![title.to_owned()];
        for (path, methods) in declared.iter().take(SHOWN) {
            let path = if path.is_empty() { "the model" } else { path };
            let says = methods.iter();
            lines.extend(says.map(|(method, says)| {
                let says = one_line(&says.to_string());
                format!("#   {path}.{method}: {says}")
            }));
        }
        if let more @ 1.. = declared.len().saturating_sub(SHOWN) {
            lines.push(format!("#   and {more} more: `precast plan -v` shows all"));
        }
        lines
    }

    fn regions(&self) -> Vec<String> {
        let regions = &self.described.regions;
        if regions.is_empty() {
            return vec![];
        }
        let globs = regions.iter().map(|one| format!("\"{}\"", one.glob));
        let globs: Vec<String> = globs.collect();
        let all: u64 = regions.iter().map(|one| one.count).sum();
        let graphs: u64 = regions.iter().map(|one| one.artifacts).sum();
        let saved = text::count(all - graphs, "compile");
        let graphs = text::count(graphs, "graph");
        vec![
            format!(
                "# {all} submodules share {graphs}: for each bucket, {saved} fewer than with one for each of them"
            ),
            format!("regions = [{}]", globs.join(", ")),
        ]
    }

    fn sizes(&self) -> Vec<String> {
        if self.buckets.is_empty() {
            return vec![];
        }
        let count: usize = self.buckets.values().map(Vec::len).product();
        let from = if self.from_file {
            "chosen to pad the least"
        } else {
            "sizes that the model takes: list those that requests have"
        };
        let title = format!("[module.buckets]   # {from}; {count} in all, each compiled by itself");
        let rows = self
            .buckets
            .iter()
            .map(|(dim, sizes)| format!("{dim} = {sizes:?}"));
        [title].into_iter().chain(rows).collect()
    }

    fn gate(&self) -> Option<String> {
        let dtype = self.described.dtype?;
        let (rtol, atol) = tolerance(dtype);
        Some(format!(
            "# The tolerance against eager, `atol + rtol * |eager|`. The default for {dtype}:\n\
             # [module.gate]\n# rtol = {rtol:e}\n# atol = {atol:e}   # times the largest value"
        ))
    }
}

/// Returns the row of an input.
fn input(input: &DescribedInput) -> String {
    let shape = input.shape.iter().map(|axis| match axis {
        Axis::Fixed(size) => size.to_string(),
        Axis::Named(dim) => format!("\"{dim}\""),
    });
    let shape: Vec<String> = shape.collect();
    let (name, dtype, shape) = (key(&input.name), input.dtype, shape.join(", "));
    let mut row = format!("{name} = {{ dtype = \"{dtype}\", shape = [{shape}]");
    if input
        .shape
        .iter()
        .any(|axis| matches!(axis, Axis::Named(_)))
    {
        row += &format!(", pad = {}", input.pad);
    }
    if let Some([first, past]) = input.range {
        row += &format!(", range = [{first}, {past}]");
    }
    row + " }"
}

/// Returns a key of a table, in quotes where it needs them.
fn key(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if !name.is_empty() && name.chars().all(plain) {
        name.to_owned()
    } else {
        Value::from(name).to_string()
    }
}

/// Returns text that fits on one line of a comment.
fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}
