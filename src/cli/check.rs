//! `precast check`: what will break, why, and what to write instead, before anything is built.

mod print;

pub(super) use self::print::finding;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use owo_colors::OwoColorize;

use super::{
    Context,
    build::{SpecFile, default_jobs},
    exit::{self, Usage},
    printer::note,
    python::PythonArgs,
    text::plain,
};
use crate::{
    build::{self, CheckOptions, protocol::Severity},
    inspect::{
        checks::{self, Checks, FindingRow, ModuleChecks, is_about, rows},
        sizes,
    },
    spec::{Spec, check::Allow},
    store::Store,
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    file: SpecFile,
    #[command(flatten)]
    python: PythonArgs,
    /// Look at every submodule too, not only at the modules of the spec
    #[arg(long)]
    all: bool,
    /// Say what torch.compile would compile again for, by guard and by line; takes several times as long
    #[arg(long)]
    recompiles: bool,
    /// Say what each bucket costs at least: FLOPs, bytes, and the time that this machine needs for them
    #[arg(long)]
    cost: bool,
    /// Sizes that requests have, to say how much of the work is padding: a JSON list, or an object of lists by dimension
    #[arg(long, value_name = "FILE")]
    sizes: Option<PathBuf>,
    /// End with 1 if there is a finding of at least this severity
    #[arg(long, value_enum, default_value_t = FailOn::High, value_name = "SEVERITY")]
    fail_on: FailOn,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum FailOn {
    Low,
    Medium,
    High,
}

impl From<FailOn> for Severity {
    fn from(fail_on: FailOn) -> Self {
        match fail_on {
            FailOn::Low => Self::Low,
            FailOn::Medium => Self::Medium,
            FailOn::High => Self::High,
        }
    }
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let spec = Spec::load(args.file.path())?;
    let padding = match &args.sizes {
        Some(file) => sizes::padding(&buckets(&spec), &sizes::RequestSizes::read(file)?)?,
        None => vec![],
    };
    let options = CheckOptions {
        spec: &spec,
        launcher: args.python.launcher(&spec.root),
        scratch: std::env::temp_dir(),
        all: args.all,
        recompiles: args.recompiles,
        cost: args.cost,
        cancel: Arc::clone(&context.cancel),
    };
    let say = |text: &str| {
        if !context.quiet {
            note(format_args!("{} {}", "note:".cyan().bold(), plain(text)));
        }
    };
    let begin = |module: &str| {
        if context.verbose > 0 {
            note(format_args!("{} {module}", "checking".cyan()));
        }
    };
    let modules = build::check(&options, &say, &begin)?;
    let torch = options.launcher.torch.as_deref();
    let store = store(context);
    let forecast = build::forecast(&spec, store.as_ref(), &modules, default_jobs(), torch)?;
    let modules: Vec<_> = modules
        .into_iter()
        .map(|module| ModuleChecks::new(module, &spec))
        .collect();
    let found = rows(&modules);
    let least = Severity::from(args.fail_on);
    let counts =
        |row: &FindingRow<'_>| row.needed && row.allowed.is_none() && row.finding.severity >= least;
    let failed = found.iter().any(counts);
    let unused: Vec<Allow> = (spec.allowed.iter())
        .filter(|allow| !found.iter().any(|row| is_about(allow, row.finding)))
        .cloned()
        .collect();
    let checks = Checks {
        model: spec.model.name.clone(),
        failed,
        modules,
        unused,
        build: forecast,
        padding,
    };
    match context.out.json() {
        true => context.out.document(&checks)?,
        false => print::print(&checks, context)?,
    }
    for allow in &checks.unused {
        exit::warning(&format!(
            "nothing is found that `{}`{} of [[check.allow]] allows",
            allow.finding,
            (allow.function.as_ref()).map_or(String::new(), |function| format!(" in `{function}`"))
        ));
    }
    Ok(if failed { exit::FAILED } else { 0 })
}

/// Reads what earlier checks printed.
pub(super) fn read(files: &[PathBuf]) -> Result<Vec<Checks>> {
    let read = |path: &PathBuf| {
        let text =
            std::fs::read(path).with_context(|| format!("can't use `{}`", path.display()))?;
        let checks = checks::parse(&text).ok_or_else(|| Usage {
            message: format!(
                "`{}` is not what this `precast check` prints",
                path.display()
            ),
            hint: "make it with `precast check --format json`".to_owned(),
        })?;
        Ok(checks)
    };
    files.iter().map(read).collect()
}

/// Returns the store, if there is one that can be read: what a check finds does not depend on it.
fn store(context: &Context) -> Option<Store> {
    match context.store.exists() {
        true => crate::inspect::open(&context.store, context.options())
            .ok()
            .map(|(store, _)| store),
        false => None,
    }
}

/// Returns the sizes that the buckets of all modules have, by dimension and in order.
fn buckets(spec: &Spec) -> BTreeMap<String, Vec<u64>> {
    let mut found: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for (dim, size) in spec.modules.iter().flat_map(|one| &one.buckets).flatten() {
        found
            .entry(dim.clone())
            .or_default()
            .insert(size.unsigned_abs());
    }
    found
        .into_iter()
        .map(|(dim, sizes)| (dim, sizes.into_iter().collect()))
        .collect()
}
