//! `precast why`: the reasons for the build of a program or an artifact.

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::{AGAIN, Missing, tell_hint},
    name::{self, Named},
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
    store::{Filter, Found, Store},
};

/// How many files without effect are named.
const FILES: usize = 8;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    what: Named,
    /// Only programs of this model, or of the release that `MODEL@NUMBER` or `MODEL@NAME` says
    #[arg(long)]
    model: Option<String>,
    /// The spec of the module, to tell which files beside it had no effect
    #[arg(short, long, default_value = "precast.toml", value_name = "SPEC")]
    file: PathBuf,
}

/// `precast why WHAT --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document {
    why: Vec<Why>,
    /// Changes since the module was built that are no part of it.
    without_effect: Vec<Reason>,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let all = find(args, &store)?;
    let without_effect = without_effect(args, &store)?;
    if context.out.json() {
        let document = Document {
            why: all,
            without_effect,
        };
        context.out.document(&document)?;
        return Ok(0);
    }
    for why in &all {
        let id = why.id.short();
        let built = why.built.map(|at| format!(", built {}", date(at)));
        context.out.line(format_args!(
            "{} {}{}",
            why.name.bold(),
            id.dimmed(),
            built.unwrap_or_default()
        ))?;
        if let Some(before) = &why.before {
            context
                .out
                .line(format_args!("  it took the place of {}", before.short()))?;
        }
        for reason in &why.reasons {
            match reason {
                // It is built: "never" is said of what is not.
                Reason::NeverBuilt => context.out.line("  nothing was in its place before")?,
                reason => context.out.line(format_args!("  {reason}"))?,
            }
        }
        if let Some(graph) = &why.graph {
            context.out.line(format_args!("  {graph}"))?;
        }
        if let Some(choice) = receipt::choice(&why.tuned) {
            context.out.line(format_args!("  {choice}"))?;
        }
        if let (Some(before), true) = (&why.before, why.reasons.is_empty()) {
            context.out.line(format_args!(
                "  nothing that is explained differs from {}",
                before.short()
            ))?;
        }
    }
    let hints: BTreeSet<&str> = all.iter().filter_map(|why| why.hint.as_deref()).collect();
    hints.into_iter().for_each(tell_hint);
    for reason in without_effect {
        context.out.line(format_args!("not rebuilt: {reason}"))?;
    }
    Ok(0)
}

/// Returns what changed since the module was built and is no part of it, where there is a spec that has the module.
fn without_effect(args: &Args, store: &Store) -> Result<Vec<Reason>> {
    // The answer is about the store: a spec that is not there or not right only says nothing.
    let Ok(spec) = Spec::load(&args.file) else {
        return Ok(Vec::new());
    };
    let model = args
        .model
        .as_ref()
        .is_none_or(|model| split_model(model).0 == spec.model.name);
    let what = args.what.text();
    match model && spec.modules.iter().any(|module| module.name == what) {
        true => Ok(why::without_effect(&spec, store, &what, FILES)?),
        false => Ok(Vec::new()),
    }
}

fn find(args: &Args, store: &Store) -> Result<Vec<Why>> {
    let what = args.what.text();
    let modules = of_module(args, &what, store)?;
    if !modules.is_empty() {
        return Ok(modules);
    }
    let missing = |hint: &str| Missing {
        message: format!("`{what}` can't be explained"),
        hint: hint.to_owned(),
    };
    let found = name::find(store, &what)?;
    let gone = || missing(AGAIN);
    Ok(match found {
        Found::Program(id) => vec![why::program(
            store,
            &store.records().program(&id)?.ok_or_else(gone)?,
        )?],
        Found::Artifact(id) => {
            let artifact = store.records().artifact(&id)?.ok_or_else(gone)?;
            let none = || {
                missing(
                    "no program calls this artifact, so nothing asked for it; `precast gc` removes it",
                )
            };
            vec![why::artifact(store, &artifact)?.ok_or_else(none)?]
        }
        Found::Failure(_) => {
            return Err(missing("it failed and is not there; `precast log` shows why").into());
        }
        Found::Object(_) => {
            return Err(
                missing("it is an object, which has no key; give the ID of its artifact").into(),
            );
        }
    })
}

/// Returns the answers for the programs of a module in the newest releases, or for all where no release has one.
fn of_module(args: &Args, what: &str, store: &Store) -> Result<Vec<Why>> {
    let (model, release) = match &args.model {
        Some(model) => {
            let (model, release) = name::programs_of(store, model)?;
            (Some(model), release)
        }
        None => (None, None),
    };
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
