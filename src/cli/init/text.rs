//! The text of a new spec.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::Value;

use crate::{
    build::{
        gate::tolerance,
        protocol::{Axis, Described, DescribedInput, Opened},
    },
    cli::text,
    target::DeviceKind,
};

/// What a spec is written from.
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
        let mut text = String::new();
        self.write(&mut text).unwrap_or_default(); // a String takes everything
        text
    }

    fn write(&self, to: &mut String) -> std::fmt::Result {
        let Described {
            class,
            inputs,
            notes,
            ..
        } = self.described;
        writeln!(
            to,
            "# How `{class}` is compiled. `precast check` says what will break, `precast build` builds it."
        )?;
        for note in notes {
            writeln!(to, "# Note: {}", line(note))?;
        }
        writeln!(to, "schema = 1\n\n[model]")?;
        writeln!(
            to,
            "name  = \"{}\"   # in the store; callers load the model by it",
            self.name()
        )?;
        writeln!(to, "entry = \"{}\"", self.entry)?;
        if let (Some(samples), None) = (self.samples, inputs) {
            writeln!(
                to,
                "samples = \"{samples}\"   # gives the inputs, which are more than named tensors"
            )?;
        }
        writeln!(to, "\n[target]\ndevice = \"{}\"", self.device)?;
        if self.device == DeviceKind::Cpu {
            writeln!(
                to,
                "# isa = \"x86-64-v3\"   # for a fleet; by default the machine that builds"
            )?;
        }
        self.declared(to)?;
        writeln!(to, "\n[[module]]\nname = \"forward\"")?;
        self.regions(to)?;
        if let Some(inputs) = inputs {
            self.inputs(inputs, to)?;
        }
        self.sizes(to)?;
        self.gate(to)
    }

    /// Returns a name for the model: the entry's module, or what it calls where that says nothing.
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

    /// Says what submodules say of themselves, which holds without being written here.
    fn declared(&self, to: &mut String) -> std::fmt::Result {
        const SHOWN: usize = 8;
        let declared = &self.opened.declared;
        if declared.is_empty() {
            return Ok(());
        }
        writeln!(
            to,
            "\n# What submodules say themselves holds unless it is said here:"
        )?;
        for (path, methods) in declared.iter().take(SHOWN) {
            for (method, says) in methods {
                let path = if path.is_empty() { "the model" } else { path };
                writeln!(to, "#   {path}.{method}: {}", line(&says.to_string()))?;
            }
        }
        match declared.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => writeln!(to, "#   and {more} more: `precast plan -v` shows all"),
        }
    }

    fn regions(&self, to: &mut String) -> std::fmt::Result {
        let regions = &self.described.regions;
        if regions.is_empty() {
            return Ok(());
        }
        let globs: Vec<String> = regions
            .iter()
            .map(|one| format!("\"{}\"", one.glob))
            .collect();
        let saved: u64 = regions.iter().map(|one| one.count - one.artifacts).sum();
        let count: u64 = regions.iter().map(|one| one.count).sum();
        let graphs: u64 = regions.iter().map(|one| one.artifacts).sum();
        let (graphs, saved) = (text::count(graphs, "graph"), text::count(saved, "compile"));
        writeln!(
            to,
            "# {count} submodules share {graphs}: for each bucket, {saved} fewer than with one for each of them"
        )?;
        writeln!(to, "regions = [{}]", globs.join(", "))
    }

    fn inputs(&self, inputs: &[DescribedInput], to: &mut String) -> std::fmt::Result {
        writeln!(
            to,
            "[module.inputs]   # in call order; `range` is the values that an integer may have"
        )?;
        for input in inputs {
            let shape: Vec<String> = input
                .shape
                .iter()
                .map(|axis| match axis {
                    Axis::Fixed(size) => size.to_string(),
                    Axis::Named(dim) => format!("\"{dim}\""),
                })
                .collect();
            let dtype = match serde_json::to_value(input.dtype) {
                Ok(Value::String(dtype)) => dtype,
                _ => String::new(),
            };
            write!(
                to,
                "{} = {{ dtype = \"{dtype}\", shape = [{}]",
                key(&input.name),
                shape.join(", ")
            )?;
            if input
                .shape
                .iter()
                .any(|axis| matches!(axis, Axis::Named(_)))
            {
                write!(to, ", pad = {}", input.pad)?;
            }
            if let Some([first, past]) = input.range {
                write!(to, ", range = [{first}, {past}]")?;
            }
            writeln!(to, " }}")?;
        }
        Ok(())
    }

    fn sizes(&self, to: &mut String) -> std::fmt::Result {
        if self.buckets.is_empty() {
            return Ok(());
        }
        let count: usize = self.buckets.values().map(Vec::len).product();
        let from = match self.from_file {
            true => "chosen to pad the least",
            false => "sizes that the model takes: list those that requests have",
        };
        writeln!(
            to,
            "[module.buckets]   # {from}; {count} in all, each compiled by itself"
        )?;
        for (dim, sizes) in &self.buckets {
            let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
            writeln!(to, "{dim} = [{}]", sizes.join(", "))?;
        }
        Ok(())
    }

    fn gate(&self, to: &mut String) -> std::fmt::Result {
        let Some(dtype) = self.described.dtype else {
            return Ok(());
        };
        let (rtol, atol) = tolerance(dtype);
        writeln!(
            to,
            "# The tolerance against eager, `atol + rtol * |eager|`. The default for {dtype}:"
        )?;
        writeln!(
            to,
            "# [module.gate]\n# rtol = {rtol:e}\n# atol = {atol:e}   # times the largest value"
        )
    }
}

/// Returns a key of a table, in quotes where it needs them.
fn key(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    match !name.is_empty() && name.chars().all(plain) {
        true => name.to_owned(),
        false => Value::from(name).to_string(),
    }
}

/// Returns text that stays on one line of a comment.
fn line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}
