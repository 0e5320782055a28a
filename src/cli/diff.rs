//! `precast diff`: the differences between two programs, artifacts, releases or stores.

use std::path::Path;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;
use serde_json::Value;

use super::{
    Context,
    exit::Refusal,
    name::{self, Record},
    text::count,
};
use crate::{
    inspect::{
        diff::{self, Keys, Named, Programs, Sets},
        graph::{self, Graph},
    },
    record::{Program, Release, split_model},
    store::Store,
};

#[derive(clap::Args)]
#[command(
    after_help = "An ID stands for a program or an artifact, `MODEL@3` or `MODEL@NAME` for a release, `MODEL` \
    for the newest one, and a folder for a store."
)]
pub(super) struct DiffArgs {
    /// An ID, a program as "MODULE BUCKET", a release or a store
    a: String,
    /// The other one
    b: String,
}

/// `precast diff A B --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub(super) enum DiffDocument<'a> {
    /// Of two programs or two artifacts.
    Keys {
        #[cfg_attr(test, schemars(extend("enum" = ["program", "artifact"])))]
        of: &'a str,
        #[serde(flatten)]
        keys: &'a Keys,
        graph: Option<&'a Graph>,
    },
    /// Of two releases or two stores.
    Sets {
        #[cfg_attr(test, schemars(extend("enum" = ["releases", "stores"])))]
        of: &'a str,
        #[serde(flatten)]
        sets: &'a Sets,
        /// Of two releases.
        #[serde(skip_serializing_if = "Option::is_none")]
        same_weights: Option<bool>,
    },
}

enum Side {
    /// `program` or `artifact`, its explained key, and the program.
    Key(&'static str, Value, Option<Box<Program>>),
    Release(Box<Release>, Programs),
    Store(Store),
}

pub(super) fn run(args: &DiffArgs, context: &Context) -> Result<u8> {
    let (a, b) = (side(&args.a, context)?, side(&args.b, context)?);
    match (&a, &b) {
        (Side::Key(a, old, one), Side::Key(b, new, two)) if a == b => {
            let graph = match (one, two) {
                (Some(one), Some(two)) => {
                    let store = context.look()?;
                    graph::graph((&store, one), (&store, two))?
                }
                _ => None,
            };
            show_keys(a, &diff::keys(old, new), graph.as_ref(), context)?
        }
        (Side::Release(old, olds), Side::Release(new, news)) => {
            let store = context.look()?;
            let sets = diff::sets((&store, olds), (&store, news))?;
            show_sets("releases", &sets, Some(old.weights == new.weights), context)?;
        }
        (Side::Store(old), Side::Store(new)) => {
            let (olds, news) = (diff::of_store(old)?, diff::of_store(new)?);
            show_sets(
                "stores",
                &diff::sets((old, &olds), (new, &news))?,
                None,
                context,
            )?;
        }
        _ => {
            let message = format!("can't compare {} with {}", what(&a), what(&b));
            let hint = "compare two of a kind: programs, artifacts, releases or stores";
            return Err(Refusal::usage(message, hint).into());
        }
    }
    Ok(0)
}

fn what(side: &Side) -> &'static str {
    match side {
        Side::Key("program", ..) => "a program",
        Side::Key(..) => "an artifact",
        Side::Release(..) => "a release",
        Side::Store(..) => "a store",
    }
}

fn side(text: &str, context: &Context) -> Result<Side> {
    if Path::new(text).is_dir() {
        return Ok(Side::Store(context.look_at(Path::new(text))?));
    }
    let store = context.look()?;
    let (model, which) = split_model(text);
    if which.is_some() || store.releases().models()?.iter().any(|it| it == model) {
        let release = name::release(&store, text)?;
        let programs = diff::of_release(&store, &release)?;
        return Ok(Side::Release(Box::new(release), programs));
    }
    Ok(match name::record(&store, text)? {
        Record::Program(program) => Side::Key("program", program.request.clone(), Some(program)),
        Record::Artifact(artifact) => Side::Key("artifact", artifact.key, None),
        Record::Failure(_) | Record::Object(_) => {
            let message = format!("`{text}` is neither a program nor an artifact: it has no key");
            let hint = "`precast ls` lists programs, `precast ls --artifacts` artifacts";
            return Err(Refusal::usage(message, hint).into());
        }
    })
}

fn show_keys(kind: &str, keys: &Keys, graph: Option<&Graph>, context: &Context) -> Result<()> {
    if context.out.json() {
        return context.out.document(&DiffDocument::Keys {
            of: kind,
            keys,
            graph,
        });
    }
    if keys.fields.is_empty() {
        return context.out.line("the keys are the same");
    }
    for reason in &keys.reasons {
        context.out.line(reason)?;
    }
    if let Some(graph) = graph {
        context.out.line(graph)?;
    }
    if context.verbose > 0 || keys.reasons.is_empty() {
        context.out.line("")?;
        for field in &keys.fields {
            writeln!(context.out, "  {field}")?;
        }
    }
    Ok(())
}

fn show_sets(kind: &str, sets: &Sets, same_weights: Option<bool>, context: &Context) -> Result<()> {
    let out = &context.out;
    if out.json() {
        return out.document(&DiffDocument::Sets {
            of: kind,
            sets,
            same_weights,
        });
    }
    for Named { name, id } in &sets.removed {
        writeln!(out, "{} {name} {}", "-".red(), id.short().dimmed())?;
    }
    for Named { name, id } in &sets.added {
        writeln!(out, "{} {name} {}", "+".green(), id.short().dimmed())?;
    }
    for changed in &sets.changed {
        let ids = format!("{} -> {}", changed.old.short(), changed.new.short());
        writeln!(out, "{} {} {}", "~".yellow(), changed.name, ids.dimmed())?;
        for reason in &changed.reasons {
            writeln!(out, "    {reason}")?;
        }
        if let Some(graph) = &changed.graph {
            writeln!(out, "    {graph}")?;
        }
    }
    match same_weights {
        Some(true) => out.line("the weights are the same")?,
        Some(false) => out.line("the weights differ")?,
        None => {}
    }
    writeln!(
        out,
        "{} the same, {} changed, {} added, {} removed",
        count(sets.same, "program"),
        sets.changed.len(),
        sets.added.len(),
        sets.removed.len()
    )
}
