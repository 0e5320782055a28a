//! Errors of a spec, with their places.
//!
//! A spec is checked as a whole: every [`Problem`] that can be found is reported at once, each with its place.
//! [`SpecError`]'s `Display` is one line for logs; [`SpecError::render`] is the block that people read.

use std::{fmt, io, ops::Range, path::PathBuf};

use serde::Serialize;

/// The reason why a spec can't be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The spec's file can't be opened or read.
    #[error("cannot read the spec `{}`", path.display())]
    Read {
        /// Path as it was given.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The spec's file is not UTF-8.
    #[error("the spec `{}` is not UTF-8 text (byte {offset})", path.display())]
    NotText {
        /// Path as it was given.
        path: PathBuf,
        /// Bytes before the first invalid one.
        offset: usize,
    },
    /// The spec's file is too long to be a spec.
    #[error("the spec `{}` has more than {most} bytes", path.display())]
    TooLarge {
        /// Path as it was given.
        path: PathBuf,
        /// Bytes that a spec may have.
        most: u64,
    },
    /// The text is wrong in these places; there is at least one.
    #[error("{}", summary(.0))]
    Invalid(Vec<Problem>),
}

fn summary(problems: &[Problem]) -> String {
    match problems {
        [] => "the spec is invalid".to_owned(),
        [one] => one.to_string(),
        [first, rest @ ..] => format!("{first} (and {} more)", rest.len()),
    }
}

#[cfg(test)]
impl SpecError {
    /// Returns the problems of a wrong text, each in a line: message and help.
    pub fn in_lines(&self) -> String {
        let Self::Invalid(problems) = self else {
            panic!("{self:?}")
        };
        let lines = problems
            .iter()
            .map(|one| format!("{} | {}", one.message, one.help));
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl SpecError {
    /// Returns a hint for the user; with several problems, the hint for the first one.
    pub fn help(&self) -> &str {
        match self {
            Self::Read { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => "name a spec with `-f`, or run where `precast.toml` is",
                io::ErrorKind::IsADirectory => "name the file in it, as `-f DIR/precast.toml`",
                _ => "check who may read it",
            },
            Self::NotText { .. } => "a spec is TOML: save it as UTF-8",
            Self::TooLarge { .. } => "no spec is as long: is it this file that was meant?",
            Self::Invalid(problems) => problems.first().map_or("", |problem| &problem.help),
        }
    }

    /// Returns the text for people: for each problem its message, place, source line, caret and help, without colour.
    pub fn render(&self) -> String {
        let help = self.help();
        match self {
            Self::Read { source, .. } => format!("error: {self}: {source}\n  = help: {help}\n"),
            Self::NotText { .. } | Self::TooLarge { .. } => {
                format!("error: {self}\n  = help: {help}\n")
            }
            Self::Invalid(problems) => {
                let blocks: Vec<String> = problems.iter().map(Problem::render).collect();
                blocks.join("\n")
            }
        }
    }
}

/// One problem, and its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Problem {
    /// A lower-case fragment with the name of the subject.
    pub message: String,
    /// Instructions for the user.
    pub help: String,
    /// Path of the spec, as it was given.
    pub file: PathBuf,
    /// Counts from 1.
    pub line: usize,
    /// In characters, counts from 1.
    pub column: usize,
    /// The whole source line, tabs widened and control characters replaced.
    #[serde(skip)]
    pub source_line: String,
    /// Characters of `source_line` that the carets cover.
    #[serde(skip)]
    pub marked: Range<usize>,
}

impl Problem {
    /// Finds the place of the bytes `at` in `text`.
    pub(super) fn new(
        file: PathBuf,
        text: &str,
        at: Range<usize>,
        message: String,
        help: String,
    ) -> Self {
        let start = floor_boundary(text, at.start);
        let end = floor_boundary(text, at.end).max(start);
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..]
            .find('\n')
            .map_or(text.len(), |newline| start + newline);
        let shown_end = end.min(line_end).max(start);
        let before = printable(&text[line_start..start]);
        let inside = printable(&text[start..shown_end]);
        let after = printable(text[shown_end..line_end].trim_end());
        let from = before.chars().count();
        let width = inside.trim_end().chars().count().max(1);
        Self {
            message,
            help,
            file,
            line: text[..start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            source_line: format!("{before}{inside}{after}").trim_end().to_owned(),
            marked: from..from + width,
        }
    }

    /// Returns the block for this problem, ending in a newline.
    pub fn render(&self) -> String {
        let number = self.line.to_string();
        let gutter = " ".repeat(number.len());
        let file = self.file.display();
        let carets = format!(
            "{}{}",
            " ".repeat(self.marked.start),
            "^".repeat(self.marked.len())
        );
        let source = format!("{number} | {}", self.source_line);
        format!(
            "error: {}\n{gutter}--> {file}:{}:{}\n{gutter} |\n{}\n{gutter} | {carets}\n{gutter} = help: {}\n",
            self.message,
            self.line,
            self.column,
            source.trim_end(),
            self.help,
        )
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}:{}: {}",
            self.file.display(),
            self.line,
            self.column,
            self.message
        )
    }
}

/// Returns the last character boundary at or before `index`.
fn floor_boundary(text: &str, index: usize) -> usize {
    let mut index = index.min(text.len());
    while !text.is_char_boundary(index) {
        index -= 1;
    }
    index
}

/// Widens tabs, and replaces characters that could move a terminal's cursor.
fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| match c {
            '\t' => "    ".chars().collect::<Vec<_>>(),
            c if c.is_control() => vec!['\u{fffd}'],
            c => vec![c],
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_points_at_the_characters() {
        let text = "a = 1\n\tmodée = \"x\u{1b}[31m\"\r\nb = 2\n";
        let at = text.find("mod").unwrap();
        let help = "did you mean `mode`?".to_owned();
        let problem = Problem::new(
            "p.toml".into(),
            text,
            at..at + 6,
            "unknown key `modée`".to_owned(),
            help,
        );
        assert_eq!((problem.line, problem.column), (2, 2));
        insta::assert_snapshot!(problem.render(), @r#"
        error: unknown key `modée`
         --> p.toml:2:2
          |
        2 |     modée = "x�[31m"
          |     ^^^^^
          = help: did you mean `mode`?
        "#);
    }

    #[test]
    fn places_outside_the_text_and_over_several_lines_are_clamped() {
        let text = "é = [\n1,\n]";
        for at in [0..text.len(), 1..3, 90..99, 5..5] {
            let problem = Problem::new(
                "p.toml".into(),
                text,
                at,
                "bad".to_owned(),
                "fix".to_owned(),
            );
            assert!(
                !problem.marked.is_empty() && problem.render().contains('^'),
                "{problem:?}"
            );
        }
    }
}
