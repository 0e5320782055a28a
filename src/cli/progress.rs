//! Progress of a build: bars on a terminal, plain lines elsewhere, JSON lines with `--format json`.

use std::{
    collections::HashMap,
    fmt,
    io::{IsTerminal, stderr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use owo_colors::OwoColorize;

use super::{
    Context,
    printer::{Printer, fitted, note},
    text::count,
};
use crate::{
    build::progress::{Event, Progress},
    inspect::receipt,
};

/// A [`Progress`] with an end.
pub(super) trait Reporter: Progress {
    fn finish(&self);
}

/// Chooses how to report.
pub(super) fn reporter(context: &Context) -> Box<dyn Reporter + '_> {
    if context.out.json() {
        return Box::new(Events(&context.out));
    }
    if context.quiet {
        return Box::new(Quiet);
    }
    match stderr().is_terminal() && context.verbose == 0 {
        true => Box::new(Bars::new()),
        false => Box::new(Lines {
            verbose: context.verbose,
        }),
    }
}

/// Has bars coloured as everything else on stderr is.
pub(super) fn colour(choice: anstream::ColorChoice) {
    console::set_colors_enabled_stderr(choice != anstream::ColorChoice::Never);
}

/// Returns a duration as people write it.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.1} s"),
        s => format!("{:.0} min {:.0} s", (s / 60.0).floor(), s % 60.0),
    }
}

/// Returns a guess at how long something will take, as roughly as it is known.
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

struct Quiet;

impl Progress for Quiet {
    fn event(&self, _: &Event<'_>) {}
}

impl Reporter for Quiet {
    fn finish(&self) {}
}

/// One JSON document per event on stdout.
struct Events<'a>(&'a Printer);

impl Progress for Events<'_> {
    fn event(&self, event: &Event<'_>) {
        // A reader that went away is found at the final document.
        let _ = self.0.event(event);
    }
}

impl Reporter for Events<'_> {
    fn finish(&self) {}
}

/// One line per step that took time.
struct Lines {
    verbose: u8,
}

impl Progress for Lines {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Planned { programs, missing } => note(format_args!(
                "plan: {missing} of {programs} programs are missing"
            )),
            Event::Missing {
                module,
                bucket,
                reasons,
            } if self.verbose > 0 => {
                let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                note(format_args!(
                    "missing: {module} {bucket}: {}",
                    reasons.join("; ")
                ));
            }
            Event::Worker {
                worker,
                python,
                torch,
                seconds: s,
            } if *worker == 0 || self.verbose > 0 => {
                note(format_args!(
                    "worker: Python {python}, torch {torch} ({})",
                    seconds(*s)
                ));
            }
            Event::Opened {
                sources,
                packages,
                seconds: s,
            } => {
                note(format_args!(
                    "model: {}, {} ({})",
                    count(*sources as u64, "source file"),
                    count(*packages as u64, "package"),
                    seconds(*s)
                ));
            }
            Event::Weights { object, bytes } => {
                note(format_args!(
                    "weights: {} ({})",
                    object.short(),
                    indicatif::HumanBytes(*bytes)
                ));
            }
            Event::Phase { worker, phase } if self.verbose > 1 => {
                note(format_args!("worker {worker}: {phase}"))
            }
            Event::End {
                job,
                what,
                seconds: s,
                ..
            } if !matches!(*job, "prepare" | "open") || self.verbose > 0 => {
                note(format_args!("{job}: {what} ({})", seconds(*s)))
            }
            Event::Again {
                job, what, message, ..
            } => note(format_args!("again: {job}: {what}, alone: {message}")),
            Event::Tuned {
                module,
                bucket,
                tried,
            } => {
                if let Some(choice) = receipt::choice(tried) {
                    note(format_args!("tuned: {module} {bucket}: {choice}"));
                }
            }
            Event::GatedBefore { module, bucket, by } => note(format_args!(
                "gate: {module} {bucket}: that of {} holds, it looked at the same",
                by.short()
            )),
            Event::Published {
                module,
                bucket,
                id,
                slower,
            } => {
                let slower = if *slower { ", slower than eager" } else { "" };
                note(format_args!(
                    "published: {module} {bucket} {}{slower}",
                    id.short()
                ))
            }
            Event::Failed {
                module,
                bucket,
                message,
                ..
            } => note(format_args!("failed: {module} {bucket}: {message}")),
            Event::Note { message } => note(format_args!("note: {message}")),
            _ => {}
        }
    }
}

impl Reporter for Lines {
    fn finish(&self) {}
}

/// How wide the column is in which lines of bars begin.
const PREFIX: usize = 9;

/// A bar for the whole, and one line per worker.
struct Bars {
    all: MultiProgress,
    whole: ProgressBar,
    /// When the build is thought to end.
    end: Arc<Mutex<Option<Instant>>>,
    workers: Mutex<HashMap<usize, ProgressBar>>,
}

impl Bars {
    fn new() -> Self {
        let all = MultiProgress::new();
        let whole = all.add(ProgressBar::no_length());
        let end: Arc<Mutex<Option<Instant>>> = Arc::default();
        let shared_end = Arc::clone(&end);
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

/// Returns how far a build is, in at most `room` characters: where all of it does not fit, the bar gets shorter, then the
/// word, the bar, words around the time and the time are left out.
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
            Event::Note { message } => {
                let line = match console::colors_enabled_stderr() {
                    true => format!("{} {message}", "note:".cyan().bold()),
                    false => format!("note: {message}"),
                };
                self.line(line);
            }
            Event::Failed {
                module,
                bucket,
                message,
                ..
            } => {
                self.whole.inc(1);
                let failed = match console::colors_enabled_stderr() {
                    true => "failed".red().bold().to_string(),
                    false => "failed".to_owned(),
                };
                self.line(format_args!("{failed} {module} {bucket}: {message}"));
            }
            _ => {}
        }
    }
}

impl Reporter for Bars {
    fn finish(&self) {
        for bar in self
            .workers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
        {
            bar.finish_and_clear();
        }
        self.whole.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::{remaining, whole_line};

    #[test]
    fn the_line_of_the_whole_fits() {
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
        assert_eq!(
            whole_line(60, 0, None, None),
            "[>                   ] 0/0 programs"
        );
    }

    #[test]
    fn how_long_it_will_take() {
        let texts = [
            0.0, 4.9, 5.0, 12.0, 54.0, 56.0, 89.0, 100.0, 3500.0, 3600.0, 5000.0, 8000.0,
        ];
        insta::assert_snapshot!(texts.map(remaining).join("\n"), @"
        a few seconds left
        a few seconds left
        about 5 s left
        about 15 s left
        about 55 s left
        about 1 min left
        about 1 min left
        about 2 min left
        about 58 min left
        about 1 h left
        about 1 h 20 min left
        about 2 h 10 min left
        ");
    }
}
