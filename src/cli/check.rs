//! `precast check`: reports code that will break, with the reason and a fix, before a build.

mod print;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use owo_colors::OwoColorize;

use super::{
    Context,
    exit::{self, Refusal},
    python::PythonArgs,
    spec::{SpecFile, default_jobs},
    text::plain,
};
use crate::{
    build::{self, CheckOptions, protocol::Severity},
    inspect::{
        checks::{self, Checks, FindingRow, rows},
        sizes,
    },
    spec::{Spec, check::Allow},
    store::Store,
};

#[derive(clap::Args)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    file: SpecFile,
    #[command(flatten)]
    python: PythonArgs,
    /// Check every submodule too, not only the modules of the spec
    #[arg(long)]
    all: bool,
    /// Report the guards for which torch.compile would compile again, with their lines; takes several times as long
    #[arg(long)]
    recompiles: bool,
    /// Report the least cost of each bucket: FLOPs, bytes, and the time that this machine needs for them
    #[arg(long)]
    cost: bool,
    /// Sizes of requests, to report the share of padding: a JSON list, or an object of lists by dimension
    #[arg(long, value_name = "FILE")]
    sizes: Option<PathBuf>,
    /// Exit with 1 if there is a finding of at least this severity
    #[arg(long, default_value = "high", value_name = "SEVERITY", value_parser = ["low", "medium", "high"])]
    fail_on: String,
}

pub(super) fn run(args: &CheckArgs, context: &Context) -> Result<u8> {
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
    let say = |text: &str| note!("{} {}", "note:".cyan().bold(), plain(text));
    let begin = |module: &str| {
        if context.verbose > 0 {
            note!("{} {module}", "checking".cyan());
        }
    };
    let mut modules = build::check(&options, &say, &begin)?;
    let torch = options.launcher.torch.as_deref();
    let store = store(context);
    let forecast = build::forecast(&spec, store.as_ref(), &modules, default_jobs(&spec), torch)?;
    checks::allow(&mut modules, &spec);
    let found = rows(&modules);
    let least = match args.fail_on.as_str() {
        "low" => Severity::Low,
        "medium" => Severity::Medium,
        _ => Severity::High,
    };
    let counts = |row: &FindingRow<'_>| {
        row.needed && row.finding.allowed.is_none() && row.finding.severity >= least
    };
    let failed = found.iter().any(counts);
    let used = |allow: &&Allow| found.iter().any(|row| row.finding.is_of(allow));
    let unused = spec.allowed.iter().filter(|allow| !used(allow)).cloned();
    let checks = Checks {
        model: spec.model.name.clone(),
        failed,
        unused: unused.collect(),
        modules,
        build: forecast,
        padding,
    };
    context.show(&checks, || print::print(&checks, context))?;
    for Allow {
        finding, function, ..
    } in &checks.unused
    {
        let function = function.iter().map(|function| format!(" in `{function}`"));
        let function: String = function.collect();
        let allow = "of [[check.allow]] allows";
        exit::warning(&format!(
            "nothing is found that `{finding}`{function} {allow}"
        ));
    }
    Ok(exit::code(!failed))
}

/// Reads the JSON documents of earlier checks.
pub(super) fn read(files: &[PathBuf]) -> Result<Vec<Checks>> {
    let wrong = "is not what this `precast check` prints";
    let hint = "make it with `precast check --format json`";
    documents(files, checks::parse, wrong, hint)
}

/// Reads JSON documents that a command printed earlier. Refuses a file that is none with `wrong`, what is said of it.
pub(super) fn documents<T>(
    files: &[PathBuf],
    parse: impl Fn(&[u8]) -> Option<T>,
    wrong: &str,
    hint: &str,
) -> Result<Vec<T>> {
    let read = |path: &PathBuf| {
        let shown = path.display();
        let text = std::fs::read(path).with_context(|| format!("can't use `{shown}`"))?;
        let refused = || Refusal::usage(format!("`{shown}` {wrong}"), hint);
        Ok(parse(&text).ok_or_else(refused)?)
    };
    files.iter().map(read).collect()
}

/// Returns the store, if it can be read. The findings do not depend on it.
fn store(context: &Context) -> Option<Store> {
    let opened = crate::inspect::open(&context.store, context.options());
    Some(opened.ok()?.0)
}

/// Returns the sizes of all buckets by dimension, in ascending order.
fn buckets(spec: &Spec) -> BTreeMap<String, Vec<u64>> {
    let mut found: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for (dim, size) in spec.modules.iter().flat_map(|one| &one.buckets).flatten() {
        let sizes = found.entry(dim.clone()).or_default();
        sizes.insert(size.unsigned_abs());
    }
    let sorted = found
        .into_iter()
        .map(|(dim, sizes)| (dim, sizes.into_iter().collect()));
    sorted.collect()
}
