//! `precast plan`: what `build` would do, and why.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde_json::json;

use super::{
    Context,
    build::{EAGER, PADDING, SpecArgs},
};
use crate::{
    Digest,
    plan::{self, State},
    record::Padding,
    spec::Spec,
    store::Store,
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    spec: SpecArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    show(&args.spec, context)
}

/// Returns why no smaller request can be padded into a program's bucket, if none can.
fn refused(store: &Store, id: &Digest) -> Result<Option<String>> {
    let program = store.program(id)?;
    Ok(program.and_then(|program| match program.padding {
        Padding::Refused { why } => Some(why),
        Padding::Allowed => None,
    }))
}

/// Prints the plan; shared with `build --dry-run`.
pub(super) fn show(args: &SpecArgs, context: &Context) -> Result<u8> {
    let spec = Spec::load(&args.file)?;
    // A plan changes nothing: a store that is not there yet is an empty one.
    let store = match context.store.exists() {
        true => Some(context.open()?),
        false => None,
    };
    let known = match &store {
        Some(store) => plan::known(&spec, store)?,
        None => None,
    };
    let plan = plan::plan(&spec, store.as_ref(), known, &args.request(&spec)?)?;
    let missing = plan.missing().count();
    if context.out.json() {
        let items = plan.items.iter().map(|item| {
            let module = &spec.modules[item.module].name;
            let (state, id, why) = match &item.state {
                State::Hit { id } => ("hit", Some(*id), json!([])),
                State::Miss { key, reasons, .. } => ("miss", key.as_ref().map(|(id, _)| *id), json!(reasons)),
                State::Skipped { key, why } => ("skipped", Some(*key), json!([why])),
            };
            json!({
                "module": module, "inputs": spec.modules[item.module].input_names(), "bucket": item.form.name(), "sizes": item.form.sizes,
                "dynamic": item.form.dynamic, "compiled": item.form.compiled, "state": state, "id": id, "why": why,
                "capture_only": matches!(item.state, State::Miss { capture_only: true, .. }),
                "left_to_eager": item.left_to_eager, "settings": item.settings,
            })
        });
        let items: Vec<_> = items.collect();
        let target = plan.known.as_ref().map(|known| known.target.clone());
        context.out.document(json!({ "model": spec.model.name, "target": target, "missing": missing, "programs": items }))?;
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
            let line = format_args!("           exact sizes only: {why}; {PADDING}");
            context.out.line(line)?;
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
    Ok(0)
}
