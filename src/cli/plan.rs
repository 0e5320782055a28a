//! `precast plan`: the programs that `build` would build, with the reasons.

use std::collections::BTreeSet;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::tell_hint,
    python::PythonArgs,
    spec::{EAGER, PADDING, SpecArgs},
};
use crate::{
    Digest, Target,
    build::Checkpoint,
    inspect::torches,
    plan::{self, Item, Plan, Reason, State},
    record::{Dynamic, Sizes, bounds_name},
    spec::{Effective, Spec},
    store::Store,
};

#[derive(clap::Args)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    spec: SpecArgs,
    #[command(flatten)]
    python: PythonArgs,
}

/// `precast plan --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct PlanDocument<'a> {
    model: &'a str,
    /// Null while it is not known, before the first build.
    target: Option<&'a Target>,
    missing: usize,
    programs: Vec<PlanLine<'a>>,
    /// Digest of the file of weights, where a build would publish a release with it.
    weights: Option<Digest>,
    /// An alternative to a build, where a newer torch is its only reason.
    hint: Option<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct PlanLine<'a> {
    module: &'a str,
    /// Names of its inputs; null if only the running model knows them.
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
    /// Captured only for its graph, which eager runs.
    capture_only: bool,
    /// The reason why eager runs the module.
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
    /// The reason why it is skipped.
    Skipped(&'a str),
}

impl<'a> PlanLine<'a> {
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
            capture_only: capture_only(item),
            left_to_eager: &item.left_to_eager,
            settings: &item.settings,
        }
    }
}

pub(super) fn run(args: &PlanArgs, context: &Context) -> Result<u8> {
    show(&args.spec, &args.python, context)
}

/// Prints the plan; shared with `build --dry-run`.
pub(super) fn show(args: &SpecArgs, python: &PythonArgs, context: &Context) -> Result<u8> {
    let spec = Spec::load(args.file.path())?;
    // A plan changes nothing: a missing store is an empty one.
    let store = context.store.exists().then(|| context.open()).transpose()?;
    let known = match &store {
        Some(store) => plan::known(&spec, store, python.launcher(&spec.root).torch.as_deref())?,
        None => None,
    };
    let plan = plan::plan(&spec, store.as_ref(), known, &args.request(&spec)?)?;
    let programs = plan.items.iter().map(|item| PlanLine::of(&spec, item));
    let document = PlanDocument {
        model: &spec.model.name,
        target: plan.known.as_ref().map(|known| &known.target),
        missing: plan.missing().count(),
        programs: programs.collect(),
        weights: new_weights(&spec, &plan, store.as_ref())?,
        hint: hint(&plan, store.as_ref()),
    };
    if context.out.json() {
        context.out.document(&document)?;
        return Ok(0);
    }
    let out = &context.out;
    for item in &plan.items {
        print(item, &spec, store.as_ref(), context)?;
    }
    let only = match plan.missing().filter(|item| capture_only(item)).count() {
        0 => String::new(),
        count => format!(", {count} of them captured only: nothing is compiled for them"),
    };
    let (missing, wanted) = (document.missing, plan.wanted());
    writeln!(out, "{missing} of {wanted} programs would be built{only}")?;
    if let (Some(_), Some(path)) = (document.weights, spec.model.weights.file()) {
        let file = path.strip_prefix(&spec.root).unwrap_or(path).display();
        writeln!(
            out,
            "`{file}` changed: a release with these weights would be published"
        )?;
    }
    if let Some(hint) = &document.hint {
        tell_hint(hint);
    }
    Ok(0)
}

fn print(item: &Item, spec: &Spec, store: Option<&Store>, context: &Context) -> Result<()> {
    const INDENT: &str = "           ";
    let out = &context.out;
    // Padded before it is coloured.
    let word = |word: &str| format!("{word:<8}");
    let (state, why) = match &item.state {
        State::Hit { id } => (
            word("hit").green().to_string(),
            id.short().dimmed().to_string(),
        ),
        State::Miss { reasons, .. } => {
            let state = if capture_only(item) {
                "capture"
            } else {
                "build"
            };
            let why: Vec<String> = reasons.iter().map(ToString::to_string).collect();
            (word(state).yellow().to_string(), why.join("; "))
        }
        State::Skipped { why, .. } => (word("skip").blue().to_string(), why.to_string()),
    };
    let (module, bucket) = (spec.title(item.module), item.form.name());
    writeln!(out, "{state} {module} {bucket}  {why}")?;
    if let (State::Hit { id }, Some(store)) = (&item.state, store)
        && let Some(program) = store.records().program(id)?
    {
        if let Some(why) = program.padding_refused() {
            writeln!(out, "{INDENT}{why}; {PADDING}")?;
        }
        if let Some(dynamic) = &program.dynamic
            && item.form.is_narrowed_by(dynamic)
        {
            writeln!(out, "{INDENT}{}", bounds_name(dynamic, &program.sizes))?;
        }
    }
    if item.eager_unasked() && !matches!(item.state, State::Skipped { .. }) {
        writeln!(out, "{INDENT}{EAGER}")?;
    }
    if context.verbose > 0 {
        if let Some(why) = &item.left_to_eager {
            writeln!(out, "{INDENT}left to eager: {why}")?;
        }
        for (key, value, origin) in item.settings.rows() {
            let origin = format!("({origin})");
            writeln!(out, "{INDENT}{key} = {value}  {}", origin.dimmed())?;
        }
    }
    Ok(())
}

fn capture_only(item: &Item) -> bool {
    matches!(
        item.state,
        State::Miss {
            capture_only: true,
            ..
        }
    )
}

/// Returns an alternative to a build, where a newer torch is its only reason.
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
    let digest = Checkpoint::open(path)?.digest(store)?;
    Ok(Some(digest).filter(|_| release.weights != Some(digest)))
}
