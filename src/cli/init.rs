//! `precast init`: writes a spec for a model.

mod text;

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use owo_colors::OwoColorize;
use serde::Serialize;

use self::text::Draft;
use super::{Context, exit::Refusal, python::PythonArgs, text::plain};
use crate::{
    build::{
        self, DescribeOptions,
        protocol::{AskedInput, Axis},
    },
    inspect::{self, sizes::RequestSizes},
    spec::{self, Spec, is_identifier},
    target::DeviceKind,
};

#[derive(clap::Args)]
pub(super) struct InitArgs {
    /// The function that returns the model, as `model:load` for `load` in `model.py`
    #[arg(value_name = "MODULE:CALLABLE")]
    entry: String,
    /// A function that returns the model's arguments, or a list of them. Parameters with a number as their default are
    /// sizes, as in `def samples(batch=1, seq=32)`
    #[arg(long, value_name = "MODULE:CALLABLE", conflicts_with = "input")]
    sample: Option<String>,
    /// An input, with names for the sizes that vary, as `ids=int64[batch,seq]`; once for each, in call order
    #[arg(long, value_name = "NAME=DTYPE[SIZES]", value_parser = input)]
    input: Vec<AskedInput>,
    /// Sizes of requests, to choose buckets by: a JSON list, or an object of lists by dimension
    #[arg(long, value_name = "FILE")]
    sizes: Option<PathBuf>,
    /// The device to build for
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda"])]
    device: String,
    /// The file to write
    #[arg(short, long, default_value = "precast.toml", value_name = "SPEC")]
    file: PathBuf,
    /// Overwrite an existing spec
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    python: PythonArgs,
}

pub(super) fn run(args: &InitArgs, context: &Context) -> Result<u8> {
    callable(&args.entry, "the entry")?;
    if let Some(sample) = &args.sample {
        callable(sample, "`--sample`")?;
    }
    if !args.force && args.file.exists() {
        let message = format!("`{}` is there already", args.file.display());
        let hint = "`--force` writes over it, `-f FILE` writes another one";
        return Err(Refusal::usage(message, hint).into());
    }
    let wanted = args.sizes.as_deref().map(RequestSizes::read).transpose()?;
    let root = match args.file.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    let device = match args.device.as_str() {
        "cuda" => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    };
    let (opened, described) = build::describe(&DescribeOptions {
        launcher: args.python.launcher(&root),
        scratch: std::env::temp_dir(),
        root,
        entry: args.entry.clone(),
        device,
        samples: args.sample.clone(),
        inputs: args.input.clone(),
        cancel: Arc::clone(&context.cancel),
    })?;
    let draft = Draft {
        entry: &args.entry,
        samples: args.sample.as_deref(),
        device,
        buckets: inspect::sizes::buckets(&described.sizes, wanted.as_ref())?,
        from_file: args.sizes.is_some(),
        opened: &opened,
        described: &described,
    };
    let text = draft.text();
    Spec::parse(&text, &args.file)
        .context("what `precast init` would write is no spec: this is a bug of precast")?;
    write(&args.file, &text, args.force)
        .with_context(|| format!("can't write `{}`", args.file.display()))?;
    let document = InitDocument {
        file: &args.file.display().to_string(),
        text: &text,
        notes: opened.notes.iter().chain(&described.notes).collect(),
    };
    context.show(&document, || {
        for text in &document.notes {
            note!("{} {}", "note:".cyan().bold(), plain(text));
        }
        let next = "`precast check` says what will break, `precast build` builds it";
        note!("{} `{}`: {next}", "wrote".green().bold(), document.file);
        Ok(())
    })?;
    Ok(0)
}

/// `precast init --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct InitDocument<'a> {
    /// The spec that was written.
    file: &'a str,
    /// Its text.
    text: &'a str,
    /// Remarks about the model for the user.
    notes: Vec<&'a String>,
}

fn write(path: &Path, text: &str, force: bool) -> std::io::Result<()> {
    if force {
        return fs::write(path, text);
    }
    // A file that appeared meanwhile is kept.
    File::create_new(path)?.write_all(text.as_bytes())
}

fn callable(text: &str, what: &str) -> Result<(), Refusal> {
    // The file's name passes for a module `py` in a package.
    if spec::is_callable(text) && !text.contains(".py:") {
        return Ok(());
    }
    let message = format!("{what} must be `module:callable`, not `{text}`");
    Err(Refusal::usage(message, spec::callable_help(text)))
}

/// Parses `ids=int64[batch,seq]`.
fn input(text: &str) -> Result<AskedInput, String> {
    let wrong = || "expected a name, a dtype and sizes, as `ids=int64[batch,seq]`".to_owned();
    let parts = || {
        let (name, rest) = text.strip_suffix(']')?.split_once('=')?;
        let (dtype, sizes) = rest.split_once('[')?;
        Some((name.trim(), dtype.trim(), sizes.trim()))
    };
    let (name, dtype, sizes) = parts().ok_or_else(wrong)?;
    if !is_identifier(name) {
        return Err(format!("`{name}` is not the name of an input"));
    }
    let known = serde_json::from_value(dtype.into());
    let axis = |size: &str| match size.trim().parse::<u64>() {
        Ok(size) if size > 0 => Ok(Axis::Fixed(size)),
        _ if is_identifier(size.trim()) => Ok(Axis::Named(size.trim().to_owned())),
        _ => Err(format!(
            "`{}` is neither a size nor a name for one",
            size.trim()
        )),
    };
    let axes = sizes.split(',').filter(|_| !sizes.is_empty());
    Ok(AskedInput {
        name: name.to_owned(),
        dtype: known.map_err(|_| format!("unknown dtype `{dtype}`"))?,
        shape: axes.map(axis).collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Dtype;

    #[test]
    fn inputs_as_they_are_written() {
        let read = input("ids = int64[batch, seq, 3]").unwrap();
        assert_eq!((read.name.as_str(), read.dtype), ("ids", Dtype::Int64));
        let named = |name: &str| Axis::Named(name.to_owned());
        assert_eq!(read.shape, [named("batch"), named("seq"), Axis::Fixed(3)]);
        assert_eq!(input("x=float32[]").unwrap().shape, []);
        let wrong =
            "ids;ids=int64;ids=int63[2];=int64[2];1x=int64[2];x=int64[0];x=int64[a b];x=int64[2,]";
        for wrong in wrong.split(';') {
            assert!(input(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_callable_names_a_module_and_a_function() {
        assert!(callable("a.b:c.d", "entry").is_ok());
        let error = callable("net/model.py:load", "entry").unwrap_err();
        assert_eq!(error.hint, "write `net.model:load`");
        for wrong in ["model", "model.py:load", ":load", "model:", "1a:b", "a b:c"] {
            assert!(callable(wrong, "entry").is_err(), "{wrong}");
        }
    }
}
