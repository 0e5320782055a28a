//! `precast push`, `precast pull`, `precast remote`, and remotes in the place of a store: what the program beside this
//! one, `precast-remote`, does.
//!
//! This program has no network code. It starts the other one, sends it one request, and shows what it says.

mod build;
mod document;
mod lock;
pub(super) mod names;
mod program;
pub(super) mod store;

use std::{
    io::{IsTerminal, stderr},
    path::Path,
};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

pub(super) use self::build::{BuildRemote, MACHINES, RemoteArgs};
use super::{
    Context,
    exit::{self, Refusal},
    libtorch::LibtorchFolder,
    table::{self, Column},
    text::{age, bytes, count, plain},
};
use crate::store::{
    Target,
    target::{DeviceKind, Torch},
    transfer::{Event, Listed, Moved, Plan, Request},
};

#[derive(clap::Args)]
pub(super) struct PushArgs {
    /// The model, with `@NUMBER` or `@NAME` for another release than the newest
    model: String,
    /// Where to: `s3://BUCKET/PATH`, `gs://…`, `az://…`, `oci://HOST/REPOSITORY`, `hf://OWNER/REPO`, `file:///PATH`, or a
    /// name of `precast remote`
    #[arg(env = "PRECAST_REMOTE", hide_env_values = true)]
    remote: String,
    /// Print what would move, and write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

#[derive(clap::Args)]
pub(super) struct PullArgs {
    /// Where from: as for `push`, or `https://HOST/PATH`
    #[arg(
        env = "PRECAST_REMOTE",
        hide_env_values = true,
        required_unless_present = "locked"
    )]
    remote: Option<String>,
    /// The model, with `@NUMBER` or `@NAME` for another release than the newest one that this host can run [default:
    /// all models]
    model: Option<String>,
    /// A release for the target of this name, as `torch211-cxx11-cu130-x86_64-linux-sm90`, in place of this host's
    #[arg(long = "for", value_name = "TARGET")]
    target: Option<String>,
    /// Every release of the model, or of all models, for whatever host
    #[arg(long, conflicts_with = "target")]
    all: bool,
    /// Write what was taken into `precast.lock`, here: number and digest of each release
    #[arg(long, conflicts_with = "all")]
    lock: bool,
    /// Take exactly the releases of `precast.lock`; with a model only that one
    #[arg(long, conflicts_with_all = ["all", "lock", "target"])]
    locked: bool,
    /// Print what would move, and write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    libtorch: LibtorchFolder,
}

/// `precast push` and `precast pull --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct MovedDocument {
    remote: String,
    dry_run: bool,
    releases: Vec<Moved>,
}

/// `precast ls REMOTE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct RemoteDocument {
    remote: String,
    releases: Vec<Listed>,
}

pub(super) fn push(args: &PushArgs, context: &Context) -> Result<u8> {
    let (model, which) = split(&args.model);
    let to = &names::resolve(&args.remote, true)?;
    let releases = pushed(to, model, which, args.dry_run, context)?;
    show(releases, to, args.dry_run, context, |moved| {
        push_line(moved, to, args.dry_run)
    })
}

/// Pushes a release after its build, and notes what moved.
fn push_release(to: &str, model: &str, seq: u64, context: &Context) -> Result<()> {
    let which = Some(seq.to_string());
    let releases = pushed(to, model.to_owned(), which, false, context)?;
    for moved in &releases {
        remarks(moved, to);
        note!("{}", push_line(moved, to, false));
    }
    Ok(())
}

fn pushed(
    to: &str,
    model: String,
    which: Option<String>,
    dry_run: bool,
    context: &Context,
) -> Result<Vec<Moved>> {
    let request = Request::Push {
        store: std::path::absolute(&context.store)?,
        remote: to.to_owned(),
        model,
        which,
        dry_run,
        shared: context.shared,
        trusted: context.options().trusted,
    };
    Ok(moved(&request, context)?.0)
}

fn push_line(moved: &Moved, to: &str, dry_run: bool) -> String {
    let model = &moved.plan.model;
    let own = moved.identity.short();
    let number = moved
        .to
        .map_or("the next number".to_owned(), |to| format!("release {to}"));
    let done = match (moved.published, dry_run) {
        (true, _) => "is now",
        (false, true) if moved.to.is_none() => "would be",
        (false, _) => "is already",
    };
    format!(
        "release {} of {model} ({own}) {done} {number} of {to}",
        moved.from
    )
}

pub(super) fn pull(args: &PullArgs, context: &Context) -> Result<u8> {
    // `precast pull MODEL`, with the place in the environment or in the lock.
    let place = std::env::var("PRECAST_REMOTE").ok();
    if args.locked {
        let model = args.remote.as_deref();
        let model = model.filter(|model| Some(*model) != place.as_deref());
        if model.is_some() && args.model.is_some() {
            let message = "`--locked` takes the place from `precast.lock`";
            return Err(Refusal::usage(message, "name the model only, or nothing").into());
        }
        let model = model.or(args.model.as_deref());
        let pulled = lock::pull(model, args.dry_run, context)?;
        let (mut places, releases): (Vec<_>, Vec<_>) = pulled.into_iter().unzip();
        places.dedup();
        let from = places.join(", ");
        return show(releases, &from, args.dry_run, context, came);
    }
    let first = args.remote.clone().unwrap_or_default();
    let (from, model) = match place {
        Some(place) if args.model.is_none() && names::known(&first)?.is_none() => {
            (place, Some(first))
        }
        _ => (first, args.model.clone()),
    };
    let from = names::resolve(&from, false)?;
    let (model, which) = model.as_deref().map(split).unzip();
    let which = which.flatten();
    if args.all && which.is_some() {
        let hint = "leave out `@…`, or `--all`";
        return Err(Refusal::usage("`--all` asks for every release of a model", hint).into());
    }
    let mut own = Vec::new();
    if !args.all && args.target.is_none() && which.is_none() {
        own = hosts(&args.libtorch);
        if own.is_empty() {
            note!("there is no torch here: the newest release comes, whatever host it is for");
        }
    }
    let request = Request::Pull {
        store: std::path::absolute(&context.store)?,
        remote: from.clone(),
        models: model.into_iter().collect(),
        which,
        hosts: own,
        target: args.target.clone(),
        all: args.all,
        dry_run: args.dry_run,
        shared: context.shared,
        trusted: context.options().trusted,
    };
    let (releases, listed) = moved(&request, context)?;
    if args.lock && !args.dry_run {
        lock::write(&from, listed)?;
    }
    show(releases, &from, args.dry_run, context, came)
}

/// Says what has become of a release that was pulled.
fn came(moved: &Moved) -> String {
    let (model, seq) = (&moved.plan.model, moved.from);
    let done = match (moved.published, moved.to) {
        (true, _) => "is here now".to_owned(),
        (false, None) => "would come".to_owned(),
        (false, Some(here)) if here != seq => format!("is here already, as release {here}"),
        (false, Some(_)) => "is here already".to_owned(),
    };
    format!(
        "release {seq} of {model} ({}) {done}",
        moved.identity.short()
    )
}

/// Lists the releases of a remote.
pub(super) fn list(remote: &str, context: &Context) -> Result<u8> {
    let mut releases = Vec::new();
    let request = Request::List {
        remote: remote.to_owned(),
    };
    ask(&request, context, &mut |event| {
        if let Event::Listed(listed) = event {
            releases.push(listed);
        }
    })?;
    let document = RemoteDocument {
        remote: remote.to_owned(),
        releases,
    };
    context.show(&document, || {
        const COLUMNS: [Column; 7] = [
            Column::left("MODEL", 0),
            Column::right("RELEASE", 0),
            Column::left("NAME", 0),
            Column::left("TARGET", 0),
            Column::right("PROGRAMS", 0),
            Column::right("SIZE", 0),
            Column::left("BUILT", 0),
        ];
        let rows = document.releases.iter().map(|one| {
            vec![
                plain(&one.model),
                one.seq.to_string(),
                plain(one.name.as_deref().unwrap_or_default()),
                plain(&one.targets.join(", ")),
                one.programs.to_string(),
                bytes(one.bytes),
                age(one.created),
            ]
        });
        table::print(&context.out, &COLUMNS, rows)
    })?;
    Ok(0)
}

/// Splits `MODEL@7` or `MODEL@NAME`.
fn split(text: &str) -> (String, Option<String>) {
    match text.rsplit_once('@') {
        Some((model, which)) => (model.to_owned(), Some(which.to_owned())),
        None => (text.to_owned(), None),
    }
}

/// Returns what this host is, with the torch that is in use; nothing without one.
fn hosts(libtorch: &LibtorchFolder) -> Vec<Target> {
    // <site-packages>/torch, also through a link as `.venv/libtorch`
    let folder = libtorch
        .find()
        .and_then(|folder| folder.canonicalize().ok());
    let packages = folder.as_deref().and_then(Path::parent);
    let Some(torch) = packages.and_then(|folder| Torch::find(&[folder])) else {
        return Vec::new();
    };
    let kinds = [DeviceKind::Cpu, DeviceKind::Cuda];
    let targets = kinds.map(|kind| Target::with_torch(kind, "native", &torch));
    let is_there = |target: &Target| target.device == DeviceKind::Cpu || target.sm.is_some();
    targets.into_iter().filter(is_there).collect()
}

/// Sends a request; returns the releases that have moved, and what a pull found.
fn moved(request: &Request, context: &Context) -> Result<(Vec<Moved>, Vec<Listed>)> {
    let (mut releases, mut listed) = (Vec::new(), Vec::new());
    ask(request, context, &mut |event| match event {
        Event::Moved(moved) => releases.push(moved),
        Event::Listed(one) => listed.push(one),
        _ => {}
    })?;
    Ok((releases, listed))
}

/// Warns of a storage that does not refuse to create a file twice.
fn tell_racy(remote: &str) {
    let text = format!("`{remote}` lets two writers create one file");
    let hint = "push from one place at a time: two at once could take one number";
    exit::tell_warning(&text, Some(hint));
}

/// Says what a user may not expect of a release that has moved.
fn remarks(moved: &Moved, remote: &str) {
    if moved.identity != moved.identity_there {
        let model = &moved.plan.model;
        let there = moved.identity_there.short();
        note!(
            "the other side has builds of its own for programs of {model}, which stay: its release is {there}"
        );
    }
    if moved.refuses_twice == Some(false) {
        tell_racy(remote);
    }
}

/// Prints releases that have moved.
fn show(
    releases: Vec<Moved>,
    remote: &str,
    dry_run: bool,
    context: &Context,
    line: impl Fn(&Moved) -> String,
) -> Result<u8> {
    for moved in &releases {
        remarks(moved, remote);
    }
    let document = MovedDocument {
        remote: remote.to_owned(),
        dry_run,
        releases,
    };
    context.show(&document, || {
        for moved in &document.releases {
            let plan = &moved.plan;
            let (files, size) = (count(plan.moves, "file"), bytes(plan.bytes));
            let (there, kept) = (plan.there, bytes(plan.there_bytes));
            let would = if dry_run { "would move" } else { "moved" };
            writeln!(
                context.out,
                "{}; {would} {files} ({size}), {there} were there ({kept})",
                line(moved)
            )?;
        }
        Ok(())
    })?;
    Ok(0)
}

/// Sends a request, shows its progress, and hands out the other events.
fn ask(request: &Request, context: &Context, each: &mut dyn FnMut(Event)) -> Result<()> {
    let bar = Bar::new(context);
    let done = program::ask(request, &context.cancel, &mut |event| match event {
        Event::Plan(plan) => bar.begin(&plan),
        Event::Bytes(moved) => bar.at(moved),
        other => each(other),
    });
    bar.clear();
    done
}

/// The bytes that have moved, on a terminal.
struct Bar(Option<ProgressBar>);

impl Bar {
    fn new(context: &Context) -> Self {
        if context.out.json() || !stderr().is_terminal() {
            return Self(None);
        }
        let style =
            ProgressStyle::with_template("{bar:30} {bytes} of {total_bytes}, {bytes_per_sec}");
        let bar = ProgressBar::new(0);
        Self(Some(match style {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }))
    }

    fn begin(&self, plan: &Plan) {
        let (files, size) = (count(plan.moves, "file"), bytes(plan.bytes));
        let there = bytes(plan.there_bytes);
        note!(
            "{}@{}: {files} to move ({size}); {there} are there",
            plan.model,
            plan.seq
        );
        if let Self(Some(bar)) = self {
            bar.set_length(plan.bytes);
            bar.set_position(0);
        }
    }

    fn at(&self, moved: u64) {
        if let Self(Some(bar)) = self {
            bar.set_position(moved);
        }
    }

    fn clear(&self) {
        if let Self(Some(bar)) = self {
            bar.finish_and_clear();
        }
    }
}
