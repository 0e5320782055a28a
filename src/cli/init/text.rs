//! The text of a new spec.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    build::{
        gate::tolerance,
        protocol::{Axis, Described, DescribedInput, DescribedModule, Opened},
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
        if self.described.generative
            && let Some(context) = self.buckets.get("context").and_then(|sizes| sizes.last())
        {
            let why = "tokens of its cache: the largest of the buckets below";
            lines.push(format!("context = {context}   # {why}"));
        }
        let nested = self
            .described
            .modules
            .iter()
            .any(|one| one.inputs.is_none());
        if let (Some(samples), true) = (self.samples, nested) {
            let why = "gives the inputs, which are more than named tensors";
            lines.push(format!("samples = \"{samples}\"   # {why}"));
        }
        lines.push(format!("\n[target]\ndevice = \"{}\"", self.device));
        if self.device == DeviceKind::Cpu {
            let why = "for a fleet; by default the machine that builds";
            lines.push(format!("# isa = \"x86-64-v3\"   # {why}"));
        }
        lines.extend(self.declared());
        if self.described.generative {
            let why = "no program for other sizes: a prompt goes through the buckets";
            lines.push(format!("\n[compile]\nfail_policy = \"raise\"   # {why}"));
        }
        for module in &self.described.modules {
            lines.extend(self.module(module));
        }
        lines.join("\n") + "\n"
    }

    fn module(&self, module: &DescribedModule) -> Vec<String> {
        let mut lines = vec![format!("\n[[module]]\nname = \"{}\"", module.name)];
        if module.method != "forward" {
            lines.push(format!("method = \"{}\"", module.method));
        }
        lines.extend(regions(module));
        if let Some(inputs) = &module.inputs {
            let range = "`range` is the values that an integer may have";
            lines.push(format!("[module.inputs]   # in call order; {range}"));
            lines.extend(inputs.iter().map(input));
        }
        if !module.state.is_empty() {
            lines.push("[module.state]   # kept from call to call in a session".to_owned());
            let row = |(glob, axes): (&String, &Vec<Axis>)| {
                format!("{} = {{ shape = [{}] }}", key(glob), shape(axes))
            };
            lines.extend(module.state.iter().map(row));
        }
        lines.extend(self.sizes(module));
        lines.extend(self.gate());
        lines
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

    /// Returns the buckets of the dimensions that a module has; all of them where only a callable gives its inputs.
    fn sizes(&self, module: &DescribedModule) -> Vec<String> {
        let inputs = module.inputs.iter().flatten().map(|input| &input.shape);
        let axes: Vec<&Axis> = inputs.chain(module.state.values()).flatten().collect();
        let has = |dim: &String| {
            axes.iter()
                .any(|axis| matches!(axis, Axis::Named(own) if own == dim))
        };
        let own = self.buckets.iter();
        let own = own.filter(|(dim, _)| module.inputs.is_none() || has(dim));
        let own: Vec<_> = own.collect();
        if own.is_empty() {
            return vec![];
        }
        let count: usize = own.iter().map(|(_, sizes)| sizes.len()).product();
        let from = match (self.described.generative, self.from_file) {
            (true, _) => "tokens of a call, and of the cache",
            (false, true) => "chosen to pad the least",
            (false, false) => "sizes that the model takes: list those that requests have",
        };
        let title = format!("[module.buckets]   # {from}; {count} in all, each compiled by itself");
        let rows = own.iter().map(|(dim, sizes)| format!("{dim} = {sizes:?}"));
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

fn regions(module: &DescribedModule) -> Vec<String> {
    let regions = &module.regions;
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

/// Returns the row of an input.
fn input(input: &DescribedInput) -> String {
    let (name, dtype, sizes) = (key(&input.name), input.dtype, shape(&input.shape));
    let mut row = format!("{name} = {{ dtype = \"{dtype}\", shape = [{sizes}]");
    let padded = |axis: &Axis| matches!(axis, Axis::Named(_));
    if input.shape.iter().any(padded) && !input.pad.is_null() {
        row += &format!(", pad = {}", input.pad);
    }
    if let Some((first, past)) = &input.range {
        row += &format!(", range = [{first}, {}]", axis(past));
    }
    if let Some(default) = &input.default {
        row += &format!(", default = {default}");
    }
    row + " }"
}

/// Returns the sizes and dimensions of a list of axes.
fn shape(axes: &[Axis]) -> String {
    let axes: Vec<String> = axes.iter().map(axis).collect();
    axes.join(", ")
}

fn axis(axis: &Axis) -> String {
    match axis {
        Axis::Fixed(size) => size.to_string(),
        Axis::Named(dim) => format!("\"{dim}\""),
    }
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
