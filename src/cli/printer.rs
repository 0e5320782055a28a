//! Prints all data to stdout. A closed pipe ends the program quietly.

use std::{
    fmt,
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Format;
use crate::build::BuildError;

/// Writes data to stdout.
pub(super) struct Printer {
    format: Format,
    /// Set by Ctrl-C: a long listing ends at the next line.
    cancel: Arc<AtomicBool>,
}

impl Printer {
    pub(super) fn new(format: Format, cancel: Arc<AtomicBool>) -> Self {
        Self { format, cancel }
    }

    /// Returns how many characters a line may have: `COLUMNS`, or the width of the terminal, if stdout is one.
    pub(super) fn width(&self) -> Option<usize> {
        let columns = std::env::var("COLUMNS")
            .ok()
            .and_then(|text| text.parse().ok());
        columns.or_else(|| {
            let (width, _) = terminal_size::terminal_size_of(io::stdout())?;
            Some(width.0.into())
        })
    }

    /// Returns whether the caller asked for JSON.
    pub(super) fn json(&self) -> bool {
        self.format == Format::Json
    }

    /// Prints one line of text.
    pub(super) fn line(&self, line: impl fmt::Display) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(BuildError::Interrupted.into());
        }
        Ok(writeln!(anstream::stdout().lock(), "{line}")?)
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

/// Prints one line to stderr: what is neither data nor an error.
pub(super) fn note(line: impl fmt::Display) {
    // Nothing is left to tell when stderr is gone.
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}
