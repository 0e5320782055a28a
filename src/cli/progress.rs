//! Progress of a build: bars on a terminal, plain lines elsewhere, JSON lines with `--format json`.

use std::{
    collections::HashMap,
    fmt,
    io::{IsTerminal, stderr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use owo_colors::Style;
use serde_json::Value;

use super::{
    Context,
    printer::{Printer, fitted},
    text::{count, plain},
};
use crate::{
    build::progress::{Event, Progress},
    inspect::receipt,
};

/// Returns the progress report for the options and the terminal. A drop removes the bars.
pub(super) fn reporter(context: &Context) -> Box<dyn Progress + '_> {
    if context.out.json() {
        return Box::new(Events(&context.out));
    }
    if stderr().is_terminal() && context.verbose == 0 {
        return Box::new(Bars::new());
    }
    Box::new(PlainLines {
        verbose: context.verbose,
    })
}

/// Sets whether bars are coloured.
pub(super) fn colour(choice: anstream::ColorChoice) {
    console::set_colors_enabled_stderr(choice != anstream::ColorChoice::Never);
}

/// Returns a duration as `120 ms`, `12.3 s` or `2 min 5 s`.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.1} s"),
        s => format!("{:.0} min {:.0} s", (s / 60.0).floor(), s % 60.0),
    }
}

/// Returns a time that is left in few digits, as an estimate has them.
fn remaining(seconds: f64) -> String {
    match seconds {
        s if s < 5.0 => "a few seconds left".to_owned(),
        s if s < 55.0 => format!("about {:.0} s left", (s / 5.0).ceil() * 5.0),
        s if s < 3570.0 => format!("about {:.0} min left", (s / 60.0).round().max(1.0)),
        s => {
            let minutes = (s / 600.0).round() * 10.0;
            let (hours, minutes) = ((minutes / 60.0).floor(), minutes % 60.0);
            match minutes {
                0.0 => format!("about {hours:.0} h left"),
                _ => format!("about {hours:.0} h {minutes:.0} min left"),
            }
        }
    }
}

/// One JSON document per event on stdout.
struct Events<'a>(&'a Printer);

impl Progress for Events<'_> {
    fn event(&self, event: &Event<'_>) {
        // A reader that went away is found at the final document.
        let _ = self.0.event(event);
    }
}

/// One line per step that took time.
struct PlainLines {
    verbose: u8,
}

impl Progress for PlainLines {
    fn event(&self, event: &Event<'_>) {
        if let Some(line) = self.line(event) {
            note!("{line}");
        }
    }
}

impl PlainLines {
    fn line(&self, event: &Event<'_>) -> Option<String> {
        Some(match event {
            Event::Planned { programs, missing } => {
                format!("plan: {missing} of {programs} programs are missing")
            }
            Event::Worker {
                worker,
                python,
                torch,
                seconds: took,
            } if *worker == 0 || self.verbose > 0 => {
                format!(
                    "worker: Python {python}, torch {torch} ({})",
                    seconds(*took)
                )
            }
            Event::Opened {
                sources,
                packages,
                seconds: took,
            } => {
                let (sources, packages) =
                    (count(*sources, "source file"), count(*packages, "package"));
                format!("model: {sources}, {packages} ({})", seconds(*took))
            }
            Event::Weights { object, bytes } => {
                format!(
                    "weights: {} ({})",
                    object.short(),
                    indicatif::HumanBytes(*bytes)
                )
            }
            Event::End {
                job,
                what,
                seconds: took,
                ..
            } if !matches!(*job, "prepare" | "open") || self.verbose > 0 => {
                format!("{job}: {what} ({})", seconds(*took))
            }
            Event::Again {
                job, what, message, ..
            } => format!("again: {job}: {what}, alone: {message}"),
            Event::Tuned {
                module,
                bucket,
                tried,
            } => {
                format!("tuned: {module} {bucket}: {}", receipt::choice(tried)?)
            }
            Event::GatedBefore { module, bucket, by } => {
                let by = by.short();
                format!(
                    "gate: {module} {bucket}: the gate of {by} holds, with the same artifacts, weights and samples"
                )
            }
            Event::Published {
                module,
                bucket,
                id,
                slower,
            } => {
                let slower = if *slower { ", slower than eager" } else { "" };
                format!("published: {module} {bucket} {}{slower}", id.short())
            }
            Event::Failed {
                module,
                bucket,
                message,
                ..
            } => {
                format!("failed: {module} {bucket}: {message}")
            }
            Event::Fetched { .. } => fetched(event)?,
            Event::Builder { node, said, .. } => format!("{node}: {}", said_line(said)?),
            Event::Note { message } => format!("note: {message}"),
            _ => return self.detail(event),
        })
    }

    /// Returns the line of an event that is printed with `-v` or `-vv`.
    fn detail(&self, event: &Event<'_>) -> Option<String> {
        match event {
            Event::Missing {
                module,
                bucket,
                reasons,
            } if self.verbose > 0 => {
                let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                Some(format!(
                    "missing: {module} {bucket}: {}",
                    reasons.join("; ")
                ))
            }
            Event::Phase { worker, phase } if self.verbose > 1 => {
                Some(format!("worker {worker}: {phase}"))
            }
            _ => None,
        }
    }
}

/// Returns the line about what came from a remote.
fn fetched(event: &Event<'_>) -> Option<String> {
    match event {
        Event::Fetched {
            remote,
            what,
            count: number,
        } => Some(format!("from {}: {}", plain(remote), count(*number, what))),
        _ => None,
    }
}

/// Returns the line about what a builder on another machine said; none for what is of no interest here.
fn said_line(said: &Value) -> Option<String> {
    let text = |name: &str| said[name].as_str().map(plain);
    let program = || Some(format!("{} {}", text("module")?, text("bucket")?));
    for name in ["error", "warning", "log"] {
        if let Some(text) = text(name) {
            return Some(format!("{name}: {text}"));
        }
    }
    Some(match said["event"].as_str()? {
        "end" if !matches!(said["job"].as_str()?, "prepare" | "open") => {
            let took = seconds(said["seconds"].as_f64()?);
            format!("{}: {} ({took})", text("job")?, text("what")?)
        }
        "published" => format!("published: {}", program()?),
        "failed" => format!("failed: {}: {}", program()?, text("message")?),
        "note" => format!("note: {}", text("message")?),
        _ => return None,
    })
}

/// Width of the column in which lines of bars begin.
const PREFIX: usize = 9;

/// A bar for the whole, and one line per worker.
struct Bars {
    all: MultiProgress,
    whole: ProgressBar,
    /// The expected end of the build.
    end: Arc<Mutex<Option<Instant>>>,
    workers: Mutex<HashMap<usize, ProgressBar>>,
}

impl Bars {
    fn new() -> Self {
        let all = MultiProgress::new();
        let whole = all.add(ProgressBar::no_length());
        let end: Arc<Mutex<Option<Instant>>> = Arc::default();
        let shared_end = Arc::clone(&end);
        // Counted down between two events.
        let style = style("{prefix:>9.green.bold} {whole}").with_key(
            "whole",
            move |state: &ProgressState, out: &mut dyn fmt::Write| {
                let end = *shared_end.lock().unwrap_or_else(PoisonError::into_inner);
                let rest = end.map(|end| end.saturating_duration_since(Instant::now()));
                let rest = rest.map(|rest| remaining(rest.as_secs_f64()));
                let columns = usize::from(console::Term::stderr().size().1);
                let room = columns.saturating_sub(PREFIX + 1);
                let _ = out.write_str(&whole_line(room, state.pos(), state.len(), rest));
            },
        );
        whole.set_style(style);
        whole.set_prefix("Building");
        whole.enable_steady_tick(Duration::from_secs(1));
        Self {
            all,
            whole,
            end,
            workers: Mutex::default(),
        }
    }

    /// Prints above the bars.
    fn line(&self, text: impl fmt::Display) {
        let _ = self.all.println(fitted(text));
    }

    /// Shows what a builder on another machine is at, in a line of its own.
    fn builder(&self, number: usize, node: &str, said: &Value) {
        let bar = self.worker(number);
        match said["event"].as_str() {
            Some("begin") => {
                let text = |name: &str| said[name].as_str().map(plain).unwrap_or_default();
                bar.reset_elapsed();
                bar.set_message(format!("{node}: {} {}", text("job"), text("what")));
            }
            Some("finished") => bar.set_message(format!("{node}: done")),
            Some("published" | "left_out") => self.whole.inc(1),
            Some("end") => {}
            _ => {
                if let Some(line) = said_line(said) {
                    self.line(format_args!("{node}: {line}"));
                }
            }
        }
    }

    fn worker(&self, number: usize) -> ProgressBar {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = workers.entry(number).or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new_spinner());
            bar.set_style(style("{spinner:>9} {elapsed:>4.dim} {wide_msg}"));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        bar.clone()
    }
}

/// Returns the progress of a build in at most `room` characters. A narrow terminal gets a shorter bar, then no label,
/// no bar, no words around the time, and no time.
fn whole_line(room: usize, done: u64, of: Option<u64>, remaining: Option<String>) -> String {
    let of = of.unwrap_or(0);
    let bar = |width: usize| {
        let share = (done.min(of) as f64 / of.max(1) as f64 * width as f64) as usize;
        let head = if share < width { ">" } else { "" };
        format!("[{:<width$}] ", "=".repeat(share) + head)
    };
    let count = format!("{done}/{of}");
    let long = remaining
        .map(|remaining| format!(", {remaining}"))
        .unwrap_or_default();
    let short = long.replace("about ", "").replace(" left", "");
    let forms = [
        format!("{}{count} programs{long}", bar(20)),
        format!("{}{count} programs{long}", bar(10)),
        format!("{}{count}{long}", bar(10)),
        format!("{count}{long}"),
        format!("{count}{short}"),
    ];
    forms
        .into_iter()
        .find(|form| form.len() <= room)
        .unwrap_or(count)
}

/// Returns text with a colour, where stderr has colours: bars bypass the stream that strips them.
fn painted(text: &str, style: Style) -> String {
    if console::colors_enabled_stderr() {
        style.style(text).to_string()
    } else {
        text.to_owned()
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Progress for Bars {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Planned { missing, .. } => {
                self.whole.set_length(*missing as u64);
                if *missing > 0 {
                    self.worker(0).set_message("starting Python");
                }
            }
            Event::Worker { worker: 0, .. } => self.worker(0).set_message("importing the model"),
            Event::Begin { worker, job, what } => {
                let bar = self.worker(*worker);
                bar.reset_elapsed();
                bar.set_message(format!("{job} {what}"));
            }
            Event::Phase { worker, phase } => {
                let bar = self.worker(*worker);
                let message = bar.message();
                let task = message.split(" · ").next().unwrap_or_default();
                bar.set_message(format!("{task} · {phase}"));
            }
            Event::End { worker, .. } => {
                let bar = self.worker(*worker);
                bar.reset_elapsed();
                bar.set_message("idle");
            }
            Event::Tuned {
                module,
                bucket,
                tried,
            } => {
                if let Some(choice) = receipt::choice(tried) {
                    self.line(format_args!("tuned {module} {bucket}: {choice}"));
                }
            }
            Event::Remaining { seconds } => {
                let end = Instant::now().checked_add(Duration::from_secs_f64(*seconds));
                *self.end.lock().unwrap_or_else(PoisonError::into_inner) = end;
            }
            Event::Published { .. } | Event::LeftOut { .. } => self.whole.inc(1),
            Event::Builder {
                builder,
                node,
                said,
            } => self.builder(*builder, node, said),
            Event::Fetched { .. } => {
                if let Some(line) = fetched(event) {
                    self.line(line);
                }
            }
            Event::Note { message } => {
                let note = painted("note:", Style::new().cyan().bold());
                self.line(format_args!("{note} {message}"));
            }
            Event::Failed {
                module,
                bucket,
                message,
                ..
            } => {
                self.whole.inc(1);
                let failed = painted("failed", Style::new().red().bold());
                self.line(format_args!("{failed} {module} {bucket}: {message}"));
            }
            _ => {}
        }
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.values().for_each(ProgressBar::finish_and_clear);
        self.whole.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{remaining, said_line, whole_line};

    #[test]
    fn what_a_builder_says_is_a_line_where_it_is_of_interest() {
        let said = [
            json!({"event": "published", "module": "encode", "bucket": "batch=8"}),
            json!({"event": "end", "job": "compile", "what": "encode batch=8", "seconds": 2.0}),
            json!({"event": "end", "job": "open", "what": "model", "seconds": 2.0}),
            json!({"event": "note", "message": "something"}),
            json!({"event": "published"}),
            json!({"error": "no \u{1b}[31mspec", "hint": "write one"}),
            json!({"log": "text of a library"}),
        ];
        let lines = said.map(|said| said_line(&said).unwrap_or_default());
        insta::assert_snapshot!(lines.join("\n"), @r"
        published: encode batch=8
        compile: encode batch=8 (2.0 s)

        note: something

        error: no \u{1b}[31mspec
        log: text of a library
        ");
    }

    #[test]
    fn the_progress_line_fits_each_terminal() {
        let line = |columns: usize, seconds: Option<f64>, done: u64, of: u64| {
            let line = whole_line(columns - 10, done, Some(of), seconds.map(remaining));
            assert!(line.len() <= columns - 10, "{line}");
            format!("{columns:>3} {line}")
        };
        let some = [120, 80, 60, 40, 30, 20, 15].map(|columns| line(columns, Some(5000.0), 3, 12));
        insta::assert_snapshot!(some.join("\n"), @"
        120 [=====>              ] 3/12 programs, about 1 h 20 min left
         80 [=====>              ] 3/12 programs, about 1 h 20 min left
         60 [==>       ] 3/12 programs, about 1 h 20 min left
         40 3/12, about 1 h 20 min left
         30 3/12, 1 h 20 min
         20 3/12
         15 3/12
        ");
        let many = [80, 60, 40].map(|columns| line(columns, Some(5000.0), 9000, 10_000));
        insta::assert_snapshot!(many.join("\n"), @"
        80 [==================> ] 9000/10000 programs, about 1 h 20 min left
        60 [=========>] 9000/10000, about 1 h 20 min left
        40 9000/10000, 1 h 20 min
        ");
        let none = [80, 40].map(|columns| line(columns, None, 12, 12));
        insta::assert_snapshot!(none.join("\n"), @"
        80 [====================] 12/12 programs
        40 [==========] 12/12 programs
        ");
        let empty = whole_line(60, 0, None, None);
        assert_eq!(empty, "[>                   ] 0/0 programs");
    }

    #[test]
    fn how_long_it_will_take() {
        let texts = [
            0.0, 4.9, 5.0, 12.0, 54.0, 56.0, 89.0, 100.0, 3500.0, 3600.0, 5000.0, 8000.0,
        ];
        let texts =
            texts.map(|seconds| remaining(seconds).strip_suffix(" left").unwrap().to_owned());
        insta::assert_snapshot!(texts.join(", "), @"a few seconds, a few seconds, about 5 s, about 15 s, about 55 s, about 1 min, about 1 min, about 2 min, about 58 min, about 1 h, about 1 h 20 min, about 2 h 10 min");
    }
}
