//! Prints data to stdout and everything else to stderr. A closed pipe ends the program quietly.
//!
//! On a terminal, lines are broken between words. With `--format json` each line of stderr is a JSON document too.

use std::{
    fmt,
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::text::wrap;
use crate::build::BuildError;

/// The format of data on stdout.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    Human,
    Json,
}

/// `--format json` was given: a setting of the process, because notes and errors come from everywhere.
static JSON: AtomicBool = AtomicBool::new(false);

/// Whether `--quiet` is set.
static QUIET: AtomicBool = AtomicBool::new(false);

pub(super) fn set_format(format: Format) {
    JSON.store(format == Format::Json, Ordering::Relaxed);
}

/// Prints no notes from now on.
pub(super) fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// Returns whether the output is JSON.
pub(super) fn json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// Writes data to stdout.
pub(super) struct Printer {
    /// Set by Ctrl-C: a long listing ends at the next line.
    cancel: Arc<AtomicBool>,
}

impl Printer {
    pub(super) fn new(cancel: Arc<AtomicBool>) -> Self {
        Self { cancel }
    }

    /// Returns the maximum number of characters of a line: `COLUMNS`, or the width of the terminal, if stdout is one.
    pub(super) fn width(&self) -> Option<usize> {
        let columns = std::env::var("COLUMNS")
            .ok()
            .and_then(|text| text.parse().ok());
        columns.or_else(|| terminal(io::stdout()))
    }

    /// Returns whether the output is JSON.
    pub(super) fn json(&self) -> bool {
        json()
    }

    /// Prints text. On a terminal, lines are broken between words.
    pub(super) fn line(&self, text: impl fmt::Display) -> Result<()> {
        self.verbatim(wrap(&text.to_string(), terminal(io::stdout())))
    }

    /// Prints a line as [`Self::line`] does: `writeln!(printer, …)` calls this method.
    pub(super) fn write_fmt(&self, text: fmt::Arguments<'_>) -> Result<()> {
        let text = text.to_string();
        self.line(text.strip_suffix('\n').unwrap_or(&text))
    }

    /// Prints unchanged text.
    pub(super) fn verbatim(&self, text: impl fmt::Display) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(BuildError::Interrupted.into());
        }
        Ok(writeln!(anstream::stdout().lock(), "{text}")?)
    }

    /// Prints one JSON document with the list `name`, an item a line, without holding the items.
    pub(super) fn list<T: Serialize>(
        &self,
        name: &str,
        items: impl Iterator<Item = Result<T>>,
    ) -> Result<()> {
        let mut out = io::BufWriter::new(io::stdout().lock());
        let mut head = serde_json::to_string(&versioned(&json!({}))?)?;
        head.pop();
        write!(out, "{head},{}:[", Value::from(name))?;
        for (place, item) in items.enumerate() {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(BuildError::Interrupted.into());
            }
            writeln!(out, "{}", if place == 0 { "" } else { "," })?;
            serde_json::to_writer(&mut out, &item?)?;
        }
        writeln!(out, "\n]}}")?;
        Ok(out.flush()?)
    }

    /// Prints one JSON document over several lines; `fields` must be an object.
    pub(super) fn document(&self, fields: &impl Serialize) -> Result<()> {
        let document = versioned(fields)?;
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &document)?;
        Ok(writeln!(out)?)
    }

    /// Prints one JSON document of a stream, on one line; `fields` must be an object.
    pub(super) fn event(&self, fields: &impl Serialize) -> Result<()> {
        let document = versioned(fields)?;
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &document)?;
        Ok(writeln!(out)?)
    }
}

fn versioned(fields: &impl Serialize) -> Result<Map<String, Value>> {
    let mut document = Map::from_iter([("schema".to_owned(), json!(1))]);
    if let Value::Object(fields) = serde_json::to_value(fields)? {
        document.extend(fields);
    }
    Ok(document)
}

/// Returns the width of the terminal of a stream.
fn terminal(stream: impl std::os::fd::AsFd) -> Option<usize> {
    let (width, _) = terminal_size::terminal_size_of(stream)?;
    Some(width.0.into())
}

/// Returns text for stderr. On a terminal, lines are broken between words.
pub(super) fn fitted(text: impl fmt::Display) -> String {
    wrap(&text.to_string(), terminal(io::stderr()))
}

/// A line of stderr that is no error and no warning.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Note {
    note: String,
}

/// Prints a note to stderr, unless `--quiet` is set.
pub(super) fn note(text: impl fmt::Display) {
    if !QUIET.load(Ordering::Relaxed) {
        message(text);
    }
}

/// Prints a line to stderr, under `--quiet` too.
pub(super) fn message(text: impl fmt::Display) {
    if !json() {
        return verbatim_message(fitted(text));
    }
    let note = anstream::adapter::strip_str(&text.to_string()).to_string();
    say(&Note { note });
}

/// Prints unchanged text to stderr.
pub(super) fn verbatim_message(text: impl fmt::Display) {
    // An error of stderr can't be reported.
    let _ = writeln!(anstream::stderr().lock(), "{text}");
}

/// Prints one JSON document to stderr, on one line; `fields` must be an object.
pub(super) fn say(fields: &impl Serialize) {
    let document = versioned(fields).map(Value::Object);
    verbatim_message(document.unwrap_or_default());
}
