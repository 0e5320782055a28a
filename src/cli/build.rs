//! `precast build`: makes whatever is missing.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context, check,
    exit::Usage,
    internal,
    printer::note,
    progress::{self, seconds},
    python::PythonArgs,
    text, trace,
};
use crate::{
    Digest,
    build::{self, BuildError, Built, Launcher, Outcome, Summary, protocol::Finding},
    plan::Request,
    spec::{CommandLine, Spec, SpecError},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) spec: SpecArgs,
    #[command(flatten)]
    python: PythonArgs,
    /// How many workers compile at once [default: by cores and memory]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// What each worker may take of memory, as `6GiB` [default: what the machine has, for all of them together]
    #[arg(long, value_name = "SIZE", value_parser = super::gc::bytes)]
    memory: Option<u64>,
    /// How long one capture, compile or check may take [default: from 15 minutes for a check to 2 hours for a compile]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    /// Fail instead of compiling
    #[arg(long)]
    locked: bool,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Write what every worker did when as a Chrome trace, for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Publish the result under this name, complete or not at all
    #[arg(long, value_name = "NAME")]
    release: Option<String>,
    /// Publish a release even if nothing answers this module; may be repeated
    #[arg(long, value_name = "MODULE")]
    without: Vec<String>,
}

/// Which spec, and how much of it.
#[derive(clap::Args)]
pub(super) struct SpecArgs {
    /// The spec
    #[arg(short, long, default_value = "precast.toml", value_name = "SPEC")]
    pub(super) file: PathBuf,
    /// Only modules or programs that match, as `encode` or `encode batch=8 *`
    #[arg(long, value_name = "GLOB")]
    pub(super) only: Option<String>,
    /// Decide a key of [compile] for this run, as `mode=max-autotune`, or `encode.mode=default` for one module; values
    /// are TOML, quotes around a word can be left out. May be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
    /// Try several option sets for every program, and keep the fastest one that passes; takes several times as long
    #[arg(long)]
    pub(super) tune: bool,
}

impl SpecArgs {
    pub(super) fn request(&self, spec: &Spec) -> Result<Request, SpecError> {
        Ok(Request {
            only: self.only.clone(),
            command_line: CommandLine::parse(&self.set, spec)?,
            tune: self.tune,
        })
    }
}

/// Returns what this program is started with to check a candidate: with the torch that compiles it.
pub(super) fn gate_args(launcher: &Launcher) -> Vec<OsString> {
    let mut args = vec![OsString::from(internal::GATE)];
    if !launcher.replaces_worker {
        args.extend(["--python".into(), launcher.program.clone().into()]);
    }
    if launcher.untried {
        args.push("--untried-libtorch".into());
    }
    args
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    if args.dry_run {
        return super::plan::show(&args.spec, &args.python, context);
    }
    let spec = Spec::load(&args.spec.file)?;
    known_modules(&args.without, &spec)?;
    let store = context.create()?;
    let launcher = args.python.launcher(&spec.root);
    let gate_args = gate_args(&launcher);
    let options = build::Options {
        launcher,
        gate: build::gate::Launcher {
            program: match &args.python.gate {
                Some(gate) => gate.clone(),
                None => internal::own_program()?,
            },
            args: gate_args,
        },
        scratch: std::env::temp_dir(),
        request: args.spec.request(&spec)?,
        jobs: args.jobs.map_or_else(default_jobs, usize::from),
        memory: args.memory,
        timeout: args.timeout.map(Duration::from_secs),
        locked: args.locked,
        release: args.release.clone(),
        without: args.without.clone(),
        cancel: Arc::clone(&context.cancel),
        spec: &spec,
        store: &store,
    };
    let progress = progress::reporter(context);
    let traced = trace::Traced::new(progress.as_ref());
    let result = build::build(&options, &traced);
    progress.finish();
    if let Some(path) = &args.trace {
        traced.write(path)?;
    }
    let summary = result?;
    tell(&summary, context)?;
    if !summary.unanswered.is_empty() {
        let modules = summary.unanswered.clone();
        return Err(BuildError::Unanswered { modules }.into());
    }
    let (failed, raised) = summary.failed();
    match raised {
        0 => Ok(0),
        _ => Err(BuildError::Failed {
            failed,
            total: summary.programs.len(),
        }
        .into()),
    }
}

/// Refuses names of modules that the spec does not have.
fn known_modules(names: &[String], spec: &Spec) -> Result<(), Usage> {
    let titles: Vec<String> = (0..spec.modules.len())
        .map(|index| spec.title(index))
        .collect();
    let known = |name: &&String| {
        titles.contains(name) || spec.modules.iter().any(|module| module.name == **name)
    };
    match names.iter().find(|name| !known(name)) {
        Some(name) => Err(Usage {
            message: format!("the spec has no module `{name}`"),
            hint: format!("it has {}", titles.join(", ")),
        }),
        None => Ok(()),
    }
}

/// Removes and reports the temporary folders of killed builds; with `dry_run`, only reports them.
pub(super) fn note_swept(context: &Context, dry_run: bool) {
    let swept = build::sweep(&std::env::temp_dir(), dry_run);
    if swept.is_empty() || context.quiet {
        return;
    }
    let folders = text::count(swept.len() as u64, "folder");
    let what = if dry_run { "would remove" } else { "removed" };
    note(format_args!("{what} {folders} of builds that were killed"));
}

pub(super) fn default_jobs() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    jobs_for(cores, build::machine_memory())
}

/// One worker per core, as far as memory goes: a worker with torch and a model takes gigabytes.
fn jobs_for(cores: usize, memory: Option<u64>) -> usize {
    const PER_WORKER: u64 = 3 << 30;
    let fit = memory.map_or(u64::MAX, |bytes| bytes / PER_WORKER);
    cores.min(usize::try_from(fit).unwrap_or(cores)).max(1)
}

fn tell(summary: &Summary, context: &Context) -> Result<()> {
    if context.out.json() {
        return context.out.event(&document(summary));
    }
    if context.quiet {
        return Ok(());
    }
    let count = |is: fn(&Outcome) -> bool| {
        summary
            .programs
            .iter()
            .filter(|(_, outcome)| is(outcome))
            .count()
    };
    let hits = count(|outcome| matches!(outcome, Outcome::Hit(_)));
    let built = count(|outcome| matches!(outcome, Outcome::Built(_)));
    let (failed, _) = summary.failed();
    for (name, outcome) in &summary.programs {
        if let Outcome::Failed {
            key,
            message,
            location,
            hint,
            ..
        } = outcome
        {
            let place = location
                .as_ref()
                .map(|place| format!("{place}: "))
                .unwrap_or_default();
            note(format_args!(
                "{} {name}: {place}{message}",
                "failed".red().bold()
            ));
            note(format_args!("       {} {hint}", "hint:".cyan().bold()));
            if let Some(key) = key {
                note(format_args!(
                    "       `precast log {}` prints the whole log",
                    key.short()
                ));
            }
        }
    }
    for (module, findings) in &summary.findings {
        for finding in findings {
            note(format_args!("\n{}", check::finding(finding).join("\n")));
        }
        note(format_args!(
            "\n{} {module}: `precast check` says what else it finds",
            "note:".cyan().bold()
        ));
    }
    for (why, names) in left_out(summary) {
        note(format_args!(
            "{} {}: {why}",
            "left out".yellow(),
            few(&names)
        ));
    }
    for (why, names) in exact_only(summary) {
        note(format_args!(
            "{} {}: {why}",
            "exact sizes only".yellow(),
            few(&names)
        ));
        note(format_args!("       {} {PADDING}", "hint:".cyan().bold()));
    }
    if !summary.eager_unasked.is_empty() {
        note(format_args!(
            "{} {}: eager {EAGER}",
            "also".cyan(),
            few(&summary.eager_unasked)
        ));
    }
    let time = seconds(summary.seconds);
    let total = summary.programs.len();
    let mut line = match (built, failed) {
        (0, 0) => format!(
            "{} {hits} of {total} programs are in the store, nothing to compile ({time})",
            "fresh".green().bold()
        ),
        _ => format!(
            "{} {}, {} compiled, {hits} there already ({time})",
            "built".green().bold(),
            text::count(built as u64, "program"),
            text::count(summary.compiled as u64, "artifact")
        ),
    };
    let before =
        count(|outcome| matches!(outcome, Outcome::Built(built) if built.gated_by.is_some()));
    if before > 0 {
        line.push_str(&format!(", {before} not gated again"));
    }
    if failed > 0 {
        line.push_str(&format!(", {} failed", failed.red()));
    }
    note(line);
    if let (true, Some(release)) = (summary.published, &summary.release) {
        let name = release
            .name
            .as_deref()
            .map(|name| format!(" `{name}`"))
            .unwrap_or_default();
        note(format_args!(
            "{} {} release {}{name}{}",
            "published".green().bold(),
            release.model,
            release.seq,
            if release.is_partial() {
                ", a partial one"
            } else {
                ""
            }
        ));
        if release.is_partial() {
            note(format_args!(
                "        it lacks {}: only `{}@{}` loads it, {}",
                few(&release.lacks),
                release.model,
                release.seq,
                match summary.before {
                    Some(before) => format!("release {before} stays the newest"),
                    None => "until `precast build` makes the rest".to_owned(),
                }
            ));
        }
    }
    if let (true, Some((old, new))) = (summary.published, &summary.weights_changed) {
        note(format_args!(
            "        its weights changed: {} -> {}",
            old.short(),
            new.short()
        ));
    }
    if let (false, Some(before)) = (summary.lost.is_empty(), summary.before) {
        note(format_args!(
            "{} {}: release {before} has it, the new one does not",
            "lost".yellow().bold(),
            few(&summary.lost)
        ));
    }
    if !summary.without.is_empty() {
        note(format_args!(
            "{} {}: nothing answers it",
            "without".yellow().bold(),
            few(&summary.without)
        ));
    }
    Ok(())
}

/// Returns some names, and how many more there are.
fn few<T: AsRef<str>>(names: &[T]) -> String {
    const SOME: usize = 3;
    let some: Vec<&str> = names.iter().take(SOME).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(SOME) {
        0 => some.join(", "),
        more => format!("{} and {more} more", some.join(", ")),
    }
}

/// Returns the programs that a model does without, by the reason why.
fn left_out(summary: &Summary) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, outcome) in &summary.programs {
        if let Outcome::Skipped { why } = outcome {
            found.entry(why).or_default().push(name);
        }
    }
    found
}

/// What to do about a bucket that no smaller request can be padded into.
pub(super) const PADDING: &str = "list the sizes that requests have as buckets, or set `dynamic`; a mask among the \
    inputs can make the module ignore its padding";

/// What eager is there for that no spec asked for.
pub(super) const EAGER: &str =
    "answers sizes that no bucket covers; `fail_policy = \"raise\"` leaves it out";

/// Returns the programs that were built and take no smaller request, by the reason why.
fn exact_only(summary: &Summary) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, outcome) in &summary.programs {
        if let Outcome::Built(Built {
            padding_refused: Some(why),
            ..
        }) = outcome
        {
            found.entry(why).or_default().push(name);
        }
    }
    found
}

/// The last line of `precast build --format json`, after its events.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Last<'a> {
    Finished {
        programs: Vec<Line<'a>>,
        /// What stops the build of modules that could not be captured.
        findings: Vec<Stopped<'a>>,
        /// How many artifacts were compiled.
        compiled: usize,
        /// The newest release; null where there is none.
        release: Option<Newest<'a>>,
        /// Whether that release is new.
        published: bool,
        /// Names of programs that the release before had.
        lost: &'a [String],
        /// Requests that nothing answers.
        unanswered: &'a [String],
        /// Modules without any program.
        without: &'a [String],
        seconds: f64,
    },
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Stopped<'a> {
    /// The module's title in the spec.
    module: &'a str,
    /// As `precast check` prints them.
    findings: &'a [Finding],
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Newest<'a> {
    seq: u64,
    name: Option<&'a str>,
    /// Names of programs that a narrowed build left out.
    lacks: &'a [String],
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Line<'a> {
    /// Its module and bucket.
    program: &'a str,
    #[serde(flatten)]
    ended: Ended<'a>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "state", rename_all = "lowercase")]
enum Ended<'a> {
    /// It was there.
    Hit {
        id: &'a Digest,
    },
    Built {
        id: &'a Digest,
        /// How many distinct artifacts it calls.
        artifacts: usize,
        /// How many of them were compiled for it.
        compiled: usize,
        /// The program whose gate it is, where it was not gated again.
        gated_by: Option<&'a Digest>,
        /// Why smaller requests are not padded into it.
        padding_refused: Option<&'a str>,
    },
    Failed {
        id: Option<&'a Digest>,
        message: &'a str,
        /// The user's file and line that caused it.
        location: Option<&'a str>,
        hint: &'a str,
        /// Whether it fails the build.
        raise: bool,
    },
    Skipped {
        why: &'a str,
    },
}

impl<'a> Line<'a> {
    fn of((program, outcome): &'a (String, Outcome)) -> Self {
        let ended = match outcome {
            Outcome::Hit(id) => Ended::Hit { id },
            Outcome::Built(built) => Ended::Built {
                id: &built.id,
                artifacts: built.artifacts,
                compiled: built.compiled,
                gated_by: built.gated_by.as_ref(),
                padding_refused: built.padding_refused.as_deref(),
            },
            Outcome::Failed {
                key,
                message,
                location,
                hint,
                raise,
                ..
            } => Ended::Failed {
                id: key.as_ref(),
                message,
                location: location.as_deref(),
                hint,
                raise: *raise,
            },
            Outcome::Skipped { why } => Ended::Skipped { why },
        };
        Self { program, ended }
    }
}

fn document(summary: &Summary) -> Last<'_> {
    Last::Finished {
        programs: summary.programs.iter().map(Line::of).collect(),
        findings: (summary.findings.iter())
            .map(|(module, findings)| Stopped { module, findings })
            .collect(),
        compiled: summary.compiled,
        release: summary.release.as_ref().map(|release| Newest {
            seq: release.seq,
            name: release.name.as_deref(),
            lacks: &release.lacks,
        }),
        published: summary.published,
        lost: &summary.lost,
        unanswered: &summary.unanswered,
        without: &summary.without,
        seconds: summary.seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::jobs_for;

    #[test]
    fn workers_by_cores_and_memory() {
        let gib = |count: u64| Some(count << 30);
        assert_eq!(jobs_for(16, gib(128)), 16);
        assert_eq!(jobs_for(16, gib(24)), 8);
        assert_eq!(jobs_for(16, gib(1)), 1);
        assert_eq!(jobs_for(4, None), 4);
        assert_eq!(jobs_for(1, gib(512)), 1);
    }
}
