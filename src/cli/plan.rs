//! `precast plan`: the programs that `build` would make, and why.

use std::collections::BTreeSet;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    build::{EAGER, PADDING, SpecArgs},
    exit::tell_hint,
    python::PythonArgs,
};
use crate::{
    Digest, Target,
    inspect::torches,
    plan::{self, Item, Plan, Reason, State},
    record::{Dynamic, Sizes, bounds_name},
    spec::{Effective, Spec},
    store::Store,
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    spec: SpecArgs,
    #[command(flatten)]
    python: PythonArgs,
}

/// `precast plan --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document<'a> {
    model: &'a str,
    /// Null while it is not known: torch was not asked yet.
    target: Option<&'a Target>,
    missing: usize,
    programs: Vec<Line<'a>>,
    /// Digest of the file of weights, where a build would publish a release with it.
    weights: Option<Digest>,
    /// What to do in place of a build, where a newer torch is the only reason.
    hint: Option<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Line<'a> {
    module: &'a str,
    /// Names of its inputs; null where the model says them when it runs.
    inputs: Option<BTreeSet<String>>,
    bucket: String,
    sizes: &'a Sizes,
    /// Dimensions that may have any size within bounds.
    dynamic: &'a Option<Dynamic>,
    /// False where eager runs it.
    compiled: bool,
    state: Word,
    /// The request key, where it is known.
    id: Option<Digest>,
    why: Vec<Cause<'a>>,
    /// Captured for its graph alone; eager runs it.
    capture_only: bool,
    /// Why eager runs the module.
    left_to_eager: &'a Option<String>,
    settings: &'a Effective,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
enum Word {
    Hit,
    Miss,
    Skipped,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
enum Cause<'a> {
    Missing(&'a Reason),
    /// Why it is skipped.
    Skipped(&'a str),
}

impl<'a> Line<'a> {
    fn of(spec: &'a Spec, item: &'a Item) -> Self {
        let module = &spec.modules[item.module];
        let (state, id, why) = match &item.state {
            State::Hit { id } => (Word::Hit, Some(*id), vec![]),
            State::Miss { key, reasons, .. } => {
                let why = reasons.iter().map(Cause::Missing).collect();
                (Word::Miss, key.as_ref().map(|(id, _)| *id), why)
            }
            State::Skipped { key, why } => (Word::Skipped, Some(*key), vec![Cause::Skipped(why)]),
        };
        Self {
            module: &module.name,
            inputs: module.input_names(),
            bucket: item.form.name(),
            sizes: &item.form.sizes,
            dynamic: &item.form.dynamic,
            compiled: item.form.compiled,
            state,
            id,
            why,
            capture_only: matches!(
                item.state,
                State::Miss {
                    capture_only: true,
                    ..
                }
            ),
            left_to_eager: &item.left_to_eager,
            settings: &item.settings,
        }
    }
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    show(&args.spec, &args.python, context)
}

/// Returns in which dimensions no smaller request can be padded into a program's bucket, and why.
fn refused(store: &Store, id: &Digest) -> Result<Option<String>> {
    let program = store.records().program(id)?;
    Ok(program.and_then(|program| program.padding.refusal(&program.sizes)))
}

/// Returns what to do in place of a build, where a newer torch is the only reason for one.
fn hint(plan: &Plan, store: Option<&Store>) -> Option<String> {
    let (store, known) = (store?, plan.known.as_ref()?);
    let mut missing = plan.missing();
    missing.find_map(|item| match &item.state {
        State::Miss { reasons, .. } => {
            torches::hint(store, plan.release.as_ref(), &known.target, reasons)
        }
        _ => None,
    })
}

/// Returns the digest of the spec's file of weights, where the newest release has other weights.
fn new_weights(spec: &Spec, plan: &Plan, store: Option<&Store>) -> Result<Option<Digest>> {
    let (Some(path), Some(store), Some(release)) =
        (spec.model.weights.file(), store, &plan.release)
    else {
        return Ok(None);
    };
    let digest = plan::file_digest(path, store)?;
    Ok(Some(digest).filter(|_| release.weights != Some(digest)))
}

/// Prints the plan; shared with `build --dry-run`.
pub(super) fn show(args: &SpecArgs, python: &PythonArgs, context: &Context) -> Result<u8> {
    let spec = Spec::load(args.file.path())?;
    // A plan changes nothing: a store that is not there yet is an empty one.
    let store = match context.store.exists() {
        true => Some(context.open()?),
        false => None,
    };
    let known = match &store {
        Some(store) => plan::known(&spec, store, python.launcher(&spec.root).torch.as_deref())?,
        None => None,
    };
    let plan = plan::plan(&spec, store.as_ref(), known, &args.request(&spec)?)?;
    let missing = plan.missing().count();
    let hint = hint(&plan, store.as_ref());
    let weights = new_weights(&spec, &plan, store.as_ref())?;
    if context.out.json() {
        let programs = plan.items.iter().map(|item| Line::of(&spec, item));
        context.out.document(&Document {
            model: &spec.model.name,
            target: plan.known.as_ref().map(|known| &known.target),
            missing,
            programs: programs.collect(),
            weights,
            hint,
        })?;
        return Ok(0);
    }
    for item in &plan.items {
        let module = spec.title(item.module);
        let bucket = item.form.name();
        match &item.state {
            State::Hit { id } => context.out.line(format_args!(
                "{:<8} {module} {bucket}  {}",
                "hit".green(),
                id.short().dimmed()
            ))?,
            State::Miss {
                reasons,
                capture_only,
                ..
            } => {
                let why: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                context.out.line(format_args!(
                    "{:<8} {module} {bucket}  {}",
                    if *capture_only { "capture" } else { "build" }.yellow(),
                    why.join("; ")
                ))?;
            }
            State::Skipped { why, .. } => context.out.line(format_args!(
                "{:<8} {module} {bucket}  {why}",
                "skip".blue()
            ))?,
        }
        if let (State::Hit { id }, Some(store)) = (&item.state, &store)
            && let Some(why) = refused(store, id)?
        {
            let line = format_args!("           {why}; {PADDING}");
            context.out.line(line)?;
        }
        if let (State::Hit { id }, Some(store)) = (&item.state, &store)
            && let Some(program) = store.records().program(id)?
            && let Some(dynamic) = &program.dynamic
            && item.form.is_narrowed_by(dynamic)
        {
            let sizes = bounds_name(dynamic, &program.sizes);
            context.out.line(format_args!("           {sizes}"))?;
        }
        if item.eager_unasked() && !matches!(item.state, State::Skipped { .. }) {
            context.out.line(format_args!("           {EAGER}"))?;
        }
        if context.verbose > 0 {
            if let Some(why) = &item.left_to_eager {
                let line = format_args!("           left to eager: {why}");
                context.out.line(line)?;
            }
            for (key, value, origin) in item.settings.rows() {
                context.out.line(format_args!(
                    "           {key} = {value}  {}",
                    format!("({origin})").dimmed()
                ))?;
            }
        }
    }
    let captured = plan.missing().filter(|item| {
        matches!(
            item.state,
            State::Miss {
                capture_only: true,
                ..
            }
        )
    });
    let only = match captured.count() {
        0 => String::new(),
        count => format!(", {count} of them captured only: nothing is compiled for them"),
    };
    context.out.line(format_args!(
        "{} of {} programs would be built{only}",
        missing,
        plan.wanted()
    ))?;
    if let (Some(_), Some(path)) = (weights, spec.model.weights.file()) {
        let file = path.strip_prefix(&spec.root).unwrap_or(path).display();
        context.out.line(format_args!(
            "`{file}` changed: a release with these weights would be published"
        ))?;
    }
    if let Some(hint) = hint {
        tell_hint(&hint);
    }
    Ok(0)
}
