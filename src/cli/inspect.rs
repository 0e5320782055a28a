//! `precast inspect`: the content of an external file.

use std::{fmt::Display, path::PathBuf};

use anyhow::Result;
use owo_colors::OwoColorize;

use super::{
    Context, exit,
    text::{bytes, count, plain},
};
use crate::inspect::external::{self, Build, Content, Package, SharedObject, Tensor, Tensors};

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
    let lines = Lines(context);
    let kind = match &report.content {
        Content::SharedObject(_) => "shared object",
        Content::Package(_) => "package",
        Content::Tensors(_) => "safetensors",
    };
    lines.add("file", report.path.display())?;
    lines.add("kind", format!("{kind}, {}", bytes(report.size)))?;
    match &report.content {
        Content::SharedObject(object) => lines.object(object)?,
        Content::Package(package) => lines.package(package)?,
        Content::Tensors(tensors) => lines.tensors(tensors)?,
    }
    for warning in &report.warnings {
        exit::warning(&plain(warning));
    }
    Ok(0)
}

/// Prints lines of a name and a value, which is untrusted text.
struct Lines<'a>(&'a Context);

impl Lines<'_> {
    fn add(&self, name: &str, value: impl Display) -> Result<()> {
        let (name, value) = (format!("{name:<12}"), plain(&value.to_string()));
        writeln!(self.0.out, "{} {value}", name.dimmed())
    }

    /// Prints the first `some` values, or all with `-v`.
    fn list<T: Display>(
        &self,
        name: &str,
        some: usize,
        values: impl ExactSizeIterator<Item = T>,
    ) -> Result<()> {
        let all = values.len();
        let shown = if self.0.verbose > 0 { all } else { some };
        for (place, value) in values.take(shown).enumerate() {
            self.add(if place == 0 { name } else { "" }, value)?;
        }
        if shown < all {
            let more = all - shown;
            self.add("", format_args!("… and {more} more (-v lists them)"))?;
        }
        Ok(())
    }

    fn object(&self, object: &SharedObject) -> Result<()> {
        self.add("machine", &object.machine)?;
        self.list("needs", 8, object.needed.iter())?;
        match &object.aotinductor {
            None => self.add("AOTInductor", "no entry points")?,
            Some(points) => {
                let all = if points.missing.is_empty() {
                    ", all that precast needs"
                } else {
                    ""
                };
                let exported = count(points.exported as u64, "entry point");
                self.add("AOTInductor", exported + all)?;
                self.list("missing", usize::MAX, points.missing.iter())?;
            }
        }
        if object.weights > 0 {
            self.add("weights", bytes(object.weights))?;
        }
        for kernels in &object.kernels {
            let format = format!("{:?}", kernels.format).to_lowercase();
            let (sm, pieces) = (&kernels.sm, count(kernels.count, &format));
            let size = bytes(kernels.bytes);
            self.add("kernels", format_args!("sm {sm}: {pieces} ({size})"))?;
        }
        if object.kernels.is_empty() {
            self.add("kernels", "no device code inside")?;
        }
        Ok(())
    }

    fn package(&self, package: &Package) -> Result<()> {
        let members = count(package.members.len(), "member");
        let size = bytes(package.unpacked);
        self.add("holds", format_args!("{members}, {size} unpacked"))?;
        if let Some(torch) = &package.torch {
            self.add("torch", torch)?;
        }
        let mut targets: Vec<String> = package.builds.iter().map(target).collect();
        targets.dedup();
        targets
            .iter()
            .try_for_each(|target| self.add("built for", target))?;
        for model in &package.models {
            self.add("model", &model.member)?;
            self.list("inputs", 8, model.inputs.iter())?;
            self.list("constants", 8, model.constants.iter())?;
        }
        for member in package.members.iter().filter(|_| self.0.verbose > 0) {
            let (size, name) = (bytes(member.size), &member.name);
            self.add("member", format_args!("{size:>10}  {name}"))?;
        }
        for library in &package.libraries {
            self.0.out.line("")?;
            self.add("library", &library.member)?;
            self.object(&library.object)?;
        }
        Ok(())
    }

    fn tensors(&self, tensors: &Tensors) -> Result<()> {
        self.add("holds", count(tensors.tensors.len(), "tensor"))?;
        for (dtype, elements) in &tensors.elements {
            self.add("elements", format_args!("{elements} of {dtype}"))?;
        }
        for (name, value) in &tensors.metadata {
            self.add("metadata", format_args!("{name} = {value}"))?;
        }
        let line = |tensor: &Tensor| {
            let (shape, size) = (&tensor.shape, bytes(tensor.bytes));
            let shape = format!("{}{shape:?}", tensor.dtype);
            format!("{shape:<20} {size:>10}  {}", tensor.name)
        };
        self.list("tensor", 20, tensors.tensors.iter().map(line))
    }
}

/// Returns a target as `device cuda, machine x86_64, sm 90`.
fn target(build: &Build) -> String {
    let words = [
        ("device", &build.device),
        ("machine", &build.machine),
        ("isa", &build.isa),
        ("sm", &build.sm),
    ];
    let words = words.into_iter();
    let known = words.filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
    known.collect::<Vec<_>>().join(", ")
}
