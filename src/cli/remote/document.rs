//! Documents in TOML that people keep: `remotes.toml` and `precast.lock`. A mistake is named with its line.

use std::path::Path;

use anyhow::Result;
use serde::{Deserialize, de::DeserializeOwned};
use toml::Spanned;

use super::super::exit::Refusal;

/// The version of both documents.
pub(super) const SCHEMA: u32 = 1;

/// The field that documents of all versions have.
#[derive(Deserialize)]
struct Version {
    schema: Spanned<i64>,
}

/// Reads a document. `hint` says how to mend one.
pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &str, hint: &str) -> Result<T> {
    if let Ok(Version { schema }) = toml::from_str(text)
        && *schema.get_ref() != i64::from(SCHEMA)
    {
        let found = *schema.get_ref();
        let message = format!("it has version {found}, this precast knows version {SCHEMA}");
        let hint = "use the precast that wrote it, or a newer one";
        return Err(wrong(path, text, schema.span().start, &message, hint));
    }
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        wrong(path, text, at, error.message(), hint)
    })
}

/// Returns the error for a mistake at this byte of a document.
pub(super) fn wrong(
    path: &Path,
    text: &str,
    at: usize,
    message: &str,
    hint: &str,
) -> anyhow::Error {
    let before = text.as_bytes().iter().take(at);
    let line = before.filter(|byte| **byte == b'\n').count() + 1;
    Refusal::usage(format!("`{}` line {line}: {message}", path.display()), hint).into()
}
