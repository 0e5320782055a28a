//! All data goes to stdout through here, so that a closed pipe ends the program quietly.

use std::{
    fmt,
    io::{self, Write},
};

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::Format;

/// Writes data to stdout.
pub(super) struct Printer {
    format: Format,
}

impl Printer {
    pub(super) fn new(format: Format) -> Self {
        Self { format }
    }

    /// Returns whether the caller asked for JSON.
    pub(super) fn json(&self) -> bool {
        self.format == Format::Json
    }

    /// Prints one line of text.
    pub(super) fn line(&self, line: impl fmt::Display) -> Result<()> {
        Ok(writeln!(anstream::stdout().lock(), "{line}")?)
    }

    /// Prints one JSON document over several lines; `fields` must be an object.
    pub(super) fn document(&self, fields: Value) -> Result<()> {
        let mut out = io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &versioned(fields))?;
        Ok(writeln!(out)?)
    }

    /// Prints one JSON document of a stream, on one line; `fields` must be an object.
    pub(super) fn event(&self, fields: &Value) -> Result<()> {
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &versioned(fields.clone()))?;
        Ok(writeln!(out)?)
    }
}

fn versioned(fields: Value) -> Map<String, Value> {
    let mut document = Map::from_iter([("schema".to_owned(), json!(1))]);
    if let Value::Object(fields) = fields {
        document.extend(fields);
    }
    document
}

/// Prints one line to stderr: what is neither data nor an error.
pub(super) fn note(line: impl fmt::Display) {
    // Nothing is left to tell when stderr is gone.
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}
