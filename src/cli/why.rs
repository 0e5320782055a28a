//! `precast why`: the reasons for the build of a program or an artifact.

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::{Refusal, tell_hint},
    name::{self, NameArgs, Record},
    printer::Printer,
};
use crate::{
    inspect::{
        receipt,
        why::{self, Why},
        words::date,
    },
    plan::Reason,
    record::split_model,
    spec::Spec,
    store::{Filter, Store},
};

/// The number of files without effect that are named.
const FILES: usize = 8;

#[derive(clap::Args)]
pub(super) struct WhyArgs {
    #[command(flatten)]
    what: NameArgs,
    /// Only programs of this model, or of the release `MODEL@NUMBER` or `MODEL@NAME`
    #[arg(long)]
    model: Option<String>,
    /// The spec of the module, for the list of changed files that had no effect
    #[arg(short, long, default_value = "precast.toml", value_name = "SPEC")]
    file: PathBuf,
}

/// `precast why ID --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct WhyDocument {
    why: Vec<Why>,
    /// Changes since the module was built that are no part of it.
    without_effect: Vec<Reason>,
}

pub(super) fn run(args: &WhyArgs, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let all = find(args, &store)?;
    let without_effect = without_effect(args, &store)?;
    if context.out.json() {
        let document = WhyDocument {
            why: all,
            without_effect,
        };
        context.out.document(&document)?;
        return Ok(0);
    }
    for why in &all {
        print(why, &context.out)?;
    }
    let hints: BTreeSet<&str> = all.iter().filter_map(|why| why.hint.as_deref()).collect();
    hints.into_iter().for_each(tell_hint);
    for reason in without_effect {
        writeln!(context.out, "not rebuilt: {reason}")?;
    }
    Ok(0)
}

fn print(why: &Why, out: &Printer) -> Result<()> {
    let built = why.built.map(|at| format!(", built {}", date(at)));
    let (name, id) = (why.name.bold(), why.id.short());
    writeln!(out, "{name} {}{}", id.dimmed(), built.unwrap_or_default())?;
    if let Some(before) = &why.before {
        writeln!(out, "  it replaced {}", before.short())?;
    }
    for reason in &why.reasons {
        match reason {
            // The text of the reason is only that the program is not built.
            Reason::NeverBuilt => out.line("  it replaced nothing")?,
            reason => writeln!(out, "  {reason}")?,
        }
    }
    if let Some(graph) = &why.graph {
        writeln!(out, "  {graph}")?;
    }
    if let Some(choice) = receipt::choice(&why.tuned) {
        writeln!(out, "  {choice}")?;
    }
    match &why.before {
        Some(before) if why.reasons.is_empty() => {
            let before = before.short();
            writeln!(out, "  nothing that is explained differs from {before}")
        }
        _ => Ok(()),
    }
}

/// Returns changes since the module was built that are no part of it. Without a spec that has the module there are
/// none.
fn without_effect(args: &WhyArgs, store: &Store) -> Result<Vec<Reason>> {
    // The answer is about the store: a missing or wrong spec is no error.
    let Ok(spec) = Spec::load(&args.file) else {
        return Ok(Vec::new());
    };
    let model = args.model.as_deref().map(|model| split_model(model).0);
    let what = args.what.text();
    if model.is_some_and(|model| model != spec.model.name)
        || spec.modules.iter().all(|module| module.name != what)
    {
        return Ok(Vec::new());
    }
    Ok(why::without_effect(&spec, store, &what, FILES)?)
}

fn find(args: &WhyArgs, store: &Store) -> Result<Vec<Why>> {
    let what = args.what.text();
    let modules = of_module(args, &what, store)?;
    if !modules.is_empty() {
        return Ok(modules);
    }
    let missing = |hint| Refusal::missing(format!("`{what}` can't be explained"), hint);
    Ok(match name::record(store, &what)? {
        Record::Program(program) => vec![why::program(store, &program)?],
        Record::Artifact(artifact) => {
            let uncalled =
                "no program calls this artifact, so nothing asked for it; `precast gc` removes it";
            vec![why::artifact(store, &artifact)?.ok_or_else(|| missing(uncalled))?]
        }
        Record::Failure(_) => {
            return Err(missing("it failed and is not there; `precast log` shows why").into());
        }
        Record::Object(_) => {
            let hint = "it is an object, which has no key; give the ID of its artifact";
            return Err(missing(hint).into());
        }
    })
}

/// Returns the answers for the module's programs in the newest releases; where these have none, for all its programs.
fn of_module(args: &WhyArgs, what: &str, store: &Store) -> Result<Vec<Why>> {
    let (model, release) = name::model_and_programs(store, args.model.as_deref())?;
    let filter = Filter {
        model,
        module: Some(what.to_owned()),
        ..Filter::default()
    };
    let rows = match &release {
        Some(programs) => name::of_programs(store, &[filter], programs)?,
        None => name::live_or_all(store, &[filter])?,
    };
    let mut answers = Vec::new();
    for row in rows {
        if let Some(program) = store.records().program(&row.id)? {
            answers.push(why::program(store, &program)?);
        }
    }
    Ok(answers)
}
