//! Typed access to a TOML document, with positions. It collects all problems instead of stopping at the first.

use std::{collections::BTreeMap, ops::Range, path::Path};

use serde_json::Value;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::error::Problem;

/// Maximum number of problems that are kept: more would not be read, and each costs a search for its place.
const MAX_PROBLEMS: usize = 100;

/// Bytes of the text.
pub(super) type Span = Range<usize>;

/// Reads one text and collects its problems.
pub(super) struct Reader<'t> {
    text: &'t str,
    file: &'t Path,
    problems: Vec<Problem>,
}

/// A table of the document and the name that problems call it by, as `[compile]`.
#[derive(Clone)]
pub(super) struct Section<'t> {
    pub name: String,
    pub table: &'t DeTable<'t>,
    pub place: Span,
}

/// A key's value and the name that problems call it by, as `` `mode` in [compile] ``.
#[derive(Clone)]
pub(super) struct KeyValue<'t> {
    pub name: String,
    pub value: &'t DeValue<'t>,
    pub place: Span,
}

impl<'t> Section<'t> {
    pub fn new(name: &str, table: &'t DeTable<'t>, place: Span) -> Self {
        Self {
            name: name.to_owned(),
            table,
            place,
        }
    }

    /// Returns the value under `key`.
    pub fn field(&self, key: &str) -> Option<KeyValue<'t>> {
        let value = self.table.get(key)?;
        Some(self.named(key, value))
    }

    /// Returns every key with its place and its value, in the order of the file.
    pub fn fields(&self) -> Vec<(&'t str, Span, KeyValue<'t>)> {
        let mut found: Vec<_> = (self.table.iter())
            .map(|(key, value)| {
                (
                    &**key.get_ref(),
                    key.span(),
                    self.named(key.get_ref(), value),
                )
            })
            .collect();
        found.sort_by_key(|(_, place, _)| (place.start, place.end));
        found
    }

    fn named(&self, key: &str, value: &'t Spanned<DeValue<'t>>) -> KeyValue<'t> {
        KeyValue {
            name: format!("`{key}` in {}", self.name),
            value: value.get_ref(),
            place: value.span(),
        }
    }
}

impl<'t> Reader<'t> {
    pub fn new(text: &'t str, file: &'t Path) -> Self {
        Self {
            text,
            file,
            problems: Vec::new(),
        }
    }

    /// Returns the problems, in the order of the file.
    pub fn into_problems(mut self) -> Vec<Problem> {
        self.problems
            .sort_by_key(|problem| (problem.line, problem.column));
        self.problems
    }

    /// Returns whether nothing was wrong so far.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }

    /// Returns the number of the line where a place starts.
    pub fn line(&self, place: &Span) -> usize {
        self.text
            .bytes()
            .take(place.start)
            .filter(|byte| *byte == b'\n')
            .count()
            + 1
    }

    /// Records a problem, with a hint.
    pub fn wrong_help(
        &mut self,
        place: &Span,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        if self.problems.len() >= MAX_PROBLEMS {
            return;
        }
        let (file, place) = (self.file.to_owned(), place.clone());
        (self.problems).push(Problem::new(
            file,
            self.text,
            place,
            message.into(),
            help.into(),
        ));
    }

    /// Records every key that is not in `allowed`, with the nearest one. `elsewhere` has the right table of keys of
    /// other tables.
    pub fn check_keys(
        &mut self,
        section: &Section<'_>,
        allowed: &[&str],
        elsewhere: &[(&str, &str)],
    ) {
        for (key, place, _) in section.fields() {
            if allowed.contains(&key) || self.problems.len() >= MAX_PROBLEMS {
                continue;
            }
            let message = format!("unknown key `{key}` in {}", section.name);
            let moved = elsewhere.iter().find(|(name, _)| *name == key);
            match (moved, nearest(key, allowed)) {
                (Some((_, home)), _) => {
                    self.wrong_help(&place, message, format!("`{key}` belongs in {home}"))
                }
                (None, Some(near)) => {
                    self.wrong_help(&place, message, format!("did you mean `{near}`?"))
                }
                (None, None) => {
                    self.wrong_help(&place, message, format!("known keys: {}", list(allowed)))
                }
            }
        }
    }

    /// Returns a value that must be there.
    pub fn required(
        &mut self,
        section: &Section<'t>,
        key: &str,
        example: &str,
    ) -> Option<KeyValue<'t>> {
        let field = section.field(key);
        if field.is_none() {
            let message = format!("missing key `{key}` in {}", section.name);
            self.wrong_help(&section.place, message, format!("add `{example}`"));
        }
        field
    }

    pub fn string(&mut self, field: &KeyValue<'t>) -> Option<&'t str> {
        match field.value {
            DeValue::String(text) => Some(text),
            _ => self.mistyped(field, "a string"),
        }
    }

    pub fn boolean(&mut self, field: &KeyValue<'t>) -> Option<bool> {
        match field.value {
            DeValue::Boolean(value) => Some(*value),
            _ => self.mistyped(field, "true or false"),
        }
    }

    /// Returns a 64-bit integer.
    pub fn integer(&mut self, field: &KeyValue<'t>) -> Option<i64> {
        let DeValue::Integer(digits) = field.value else {
            return self.mistyped(field, "an integer");
        };
        let value = i64::from_str_radix(digits.as_str(), digits.radix()).ok();
        if value.is_none() {
            let message = format!("{} does not fit 64 bits", field.name);
            self.wrong_help(&field.place, message, "write a smaller number");
        }
        value
    }

    /// Returns a finite number, written as an integer or a float.
    pub fn number(&mut self, field: &KeyValue<'t>) -> Option<f64> {
        let value = match field.value {
            DeValue::Float(digits) => digits.as_str().parse().ok(),
            DeValue::Integer(digits) => i64::from_str_radix(digits.as_str(), digits.radix())
                .ok()
                .map(|v| v as f64),
            _ => return self.mistyped(field, "a number"),
        };
        let finite = value.filter(|value: &f64| value.is_finite());
        if finite.is_none() {
            self.wrong_help(
                &field.place,
                format!("{} must be a finite number", field.name),
                "write a smaller number",
            );
        }
        finite
    }

    /// Returns the items of an array.
    pub fn array(&mut self, field: &KeyValue<'t>, of: &str) -> Option<Vec<KeyValue<'t>>> {
        let DeValue::Array(items) = field.value else {
            return self.mistyped(field, &format!("an array of {of}"));
        };
        let name = format!("each item of {}", field.name);
        let items = items.iter().map(|item| KeyValue {
            name: name.clone(),
            value: item.get_ref(),
            place: item.span(),
        });
        Some(items.collect())
    }

    /// Returns the strings of an array with their places.
    pub fn strings(&mut self, field: &KeyValue<'t>) -> Option<Vec<(&'t str, Span)>> {
        let items = self.array(field, "strings")?;
        let read = |item: &KeyValue<'t>| Some((self.string(item)?, item.place.clone()));
        items.iter().map(read).collect()
    }

    /// Returns a table under the name `name`.
    pub fn table(&mut self, field: &KeyValue<'t>, name: &str) -> Option<Section<'t>> {
        match field.value {
            DeValue::Table(table) => Some(Section::new(name, table, field.place.clone())),
            _ => self.mistyped(field, "a table"),
        }
    }

    /// Returns the value of one of a few words.
    pub fn choice<T: Copy>(
        &mut self,
        field: &KeyValue<'t>,
        what: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let text = self.string(field)?;
        let found = choices.iter().find(|(word, _)| *word == text);
        if found.is_none() {
            let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
            let help = match nearest(text, &words) {
                Some(near) => format!("did you mean `{near}`? known: {}", list(&words)),
                None => format!("known: {}", list(&words)),
            };
            self.wrong_help(&field.place, format!("unknown {what} `{text}`"), help);
        }
        found.map(|(_, value)| *value)
    }

    /// Returns any value as JSON.
    pub fn json(&mut self, field: &KeyValue<'t>) -> Option<Value> {
        match field.value {
            DeValue::String(text) => Some(Value::from(&**text)),
            DeValue::Boolean(value) => Some(Value::from(*value)),
            DeValue::Integer(_) => self.integer(field).map(Value::from),
            DeValue::Float(_) => self.number(field).map(Value::from),
            DeValue::Datetime(_) => self.mistyped(
                field,
                "a string, a number, true, false, an array or a table",
            ),
            DeValue::Array(_) => {
                let items = self.array(field, "values")?;
                let items: Option<Vec<Value>> = items.iter().map(|item| self.json(item)).collect();
                items.map(Value::from)
            }
            DeValue::Table(_) => {
                let section = self.table(field, &field.name)?;
                let mut sorted = BTreeMap::new();
                for (key, _, inner) in section.fields() {
                    sorted.insert(key.to_owned(), self.json(&inner)?);
                }
                Some(Value::Object(sorted.into_iter().collect()))
            }
        }
    }

    fn mistyped<T>(&mut self, field: &KeyValue<'_>, expected: &str) -> Option<T> {
        let found = match field.value {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "an integer",
            DeValue::Float(_) => "a float",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Datetime(_) => "a date or time",
            DeValue::Array(_) => "an array",
            DeValue::Table(_) => "a table",
        };
        self.wrong_help(
            &field.place,
            format!("{} must be {expected}, not {found}", field.name),
            example(expected),
        );
        None
    }
}

/// Returns an example of a value of a kind.
fn example(expected: &str) -> &'static str {
    match expected {
        "a string" => "text stands in quotes",
        "true or false" => "write `true` or `false`, without quotes",
        "an integer" | "a number" => "write its digits, without quotes",
        "a table" => "as in `{ key = value }`, or under a heading of its own",
        _ if expected.starts_with("an array") => {
            "put it in brackets, as in `[1, 8]` or `[\"a\", \"b\"]`"
        }
        _ => "write it as text, in quotes",
    }
}

/// Returns the word that is most similar to `text`.
pub(super) fn nearest<'w>(text: &str, words: &[&'w str]) -> Option<&'w str> {
    let distance =
        |word: &str| strsim::damerau_levenshtein(&text.to_lowercase(), &word.to_lowercase());
    let (found, near) = words.iter().map(|word| (distance(word), *word)).min()?;
    let len = near.chars().count().max(text.chars().count());
    (found <= (len / 3).max(1)).then_some(near)
}

/// Returns `` `a`, `b`, `c` ``.
pub(super) fn list(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    quoted.join(", ")
}
