//! `precast inspect`: the content of an external file.

use std::path::PathBuf;

use anyhow::Result;
use owo_colors::OwoColorize;

use super::{
    Context, exit,
    text::{bytes, count, plain},
};
use crate::inspect::external::{self, Content, Package, Report, SharedObject, Tensors};

#[derive(clap::Args)]
pub(super) struct InspectArgs {
    /// A shared object, a .pt2 package or a safetensors file; it is parsed, never run
    #[arg(value_name = "FILE", required = true)]
    file: PathBuf,
}

pub(super) fn run(args: &InspectArgs, context: &Context) -> Result<u8> {
    let report = external::inspect(&args.file)?;
    if context.out.json() {
        context.out.document(&report)?;
        return Ok(0);
    }
    let whole = context.verbose > 0;
    let mut lines = Lines::default();
    match &report.content {
        Content::SharedObject(object) => {
            lines.head(&report, "shared object");
            lines.object(object, whole);
        }
        Content::Package(package) => {
            lines.head(&report, "package");
            lines.package(package, whole);
        }
        Content::Tensors(tensors) => {
            lines.head(&report, "safetensors");
            lines.tensors(tensors, whole);
        }
    }
    for line in lines.0 {
        context.out.line(plain(&line).replace(MARK, "\x1b"))?;
    }
    for warning in &report.warnings {
        exit::warning(&plain(warning));
    }
    Ok(0)
}

/// Stands for the command's own escape sequences while those of the file are removed.
const MARK: char = '\u{f8ff}';

#[derive(Default)]
struct Lines(Vec<String>);

impl Lines {
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        let name = format!("{name:<12}")
            .dimmed()
            .to_string()
            .replace('\x1b', &MARK.to_string());
        self.0
            .push(format!("{name} {}", value.to_string().replace(MARK, "?")));
    }

    fn list(&mut self, name: &str, values: &[String], whole: bool) {
        const SOME: usize = 8;
        let shown = if whole {
            values.len()
        } else {
            SOME.min(values.len())
        };
        for (place, value) in values[..shown].iter().enumerate() {
            self.add(if place == 0 { name } else { "" }, value);
        }
        if shown < values.len() {
            self.add(
                "",
                format_args!("… and {} more (-v lists them)", values.len() - shown),
            );
        }
    }

    fn head(&mut self, report: &Report, what: &str) {
        self.add("file", report.path.display());
        self.add("kind", format_args!("{what}, {}", bytes(report.size)));
    }

    fn object(&mut self, object: &SharedObject, whole: bool) {
        self.add("machine", &object.machine);
        self.list("needs", &object.needed, whole);
        if !object.runpath.is_empty() {
            self.add("looks in", object.runpath.join(":"));
        }
        match &object.aotinductor {
            Some(points) => {
                let exported = count(points.exported as u64, "entry point");
                let all = if points.missing.is_empty() {
                    ", all that precast needs"
                } else {
                    ""
                };
                self.add("AOTInductor", format_args!("{exported}{all}"));
                self.list("missing", &points.missing, true);
            }
            None => self.add("AOTInductor", "no entry points"),
        }
        if object.weights > 0 {
            self.add("weights", bytes(object.weights));
        }
        for kernels in &object.kernels {
            let format = format!("{:?}", kernels.format).to_lowercase();
            let (sm, pieces) = (&kernels.sm, count(kernels.count, &format));
            self.add(
                "kernels",
                format_args!("sm {sm}: {pieces} ({})", bytes(kernels.bytes)),
            );
        }
        if object.kernels.is_empty() {
            self.add("kernels", "no device code inside");
        }
        self.list("reads", &object.kernel_files, whole);
    }

    fn package(&mut self, package: &Package, whole: bool) {
        let members = count(package.members.len(), "member");
        self.add(
            "holds",
            format_args!("{members}, {} unpacked", bytes(package.unpacked)),
        );
        if let Some(torch) = &package.torch {
            self.add("torch", torch);
        }
        let mut seen = Vec::new();
        for build in &package.builds {
            let word =
                |name: &str, value: &Option<String>| value.as_ref().map(|v| format!("{name} {v}"));
            let parts = [
                word("device", &build.device),
                word("machine", &build.machine),
                word("isa", &build.isa),
                word("sm", &build.sm),
            ];
            let line = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
            if !seen.contains(&line) {
                self.add("built for", &line);
                seen.push(line);
            }
        }
        for model in &package.models {
            self.add("model", &model.member);
            self.list("inputs", &model.inputs, whole);
            self.list("constants", &model.constants, whole);
        }
        if whole {
            for member in &package.members {
                self.add(
                    "member",
                    format_args!("{:>10}  {}", bytes(member.size), member.name),
                );
            }
        }
        for library in &package.libraries {
            self.0.push(String::new());
            self.add("library", &library.member);
            self.object(&library.object, whole);
        }
    }

    fn tensors(&mut self, tensors: &Tensors, whole: bool) {
        const SOME: usize = 20;
        self.add("holds", count(tensors.tensors.len(), "tensor"));
        for (dtype, elements) in &tensors.elements {
            self.add("elements", format_args!("{elements} of {dtype}"));
        }
        for (name, value) in &tensors.metadata {
            self.add("metadata", format_args!("{name} = {value}"));
        }
        let shown = if whole {
            tensors.tensors.len()
        } else {
            SOME.min(tensors.tensors.len())
        };
        for tensor in &tensors.tensors[..shown] {
            let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            let shape = format!("{}[{}]", tensor.dtype, shape.join(", "));
            self.add(
                "tensor",
                format_args!("{shape:<20} {:>10}  {}", bytes(tensor.bytes), tensor.name),
            );
        }
        if shown < tensors.tensors.len() {
            self.add(
                "",
                format_args!(
                    "… and {} more (-v lists them)",
                    tensors.tensors.len() - shown
                ),
            );
        }
    }
}
