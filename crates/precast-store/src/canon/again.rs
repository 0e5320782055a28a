//! A key's digest, computed again from its explanation.
//!
//! A record has the explanation of its key beside the digest that names it. Both come from one walk, so the digest can be
//! computed from the explanation and three facts that JSON lacks: which texts are digests, which are words of an enum, and
//! which objects are records. The tables below have these facts, with fields in the order in which the code writes them.

use serde_json::{Map, Value};

use super::{Canon, SharedValue, Sink};
use crate::{Digest, canon, record::Dtype};

/// What a part of an explanation was before it was JSON. Null may be anywhere.
enum Was {
    /// What JSON says: numbers, text, lists, and maps by any name.
    Plain,
    Digest,
    /// A number, where what JSON has no number for is text.
    Number,
    Dtype,
    /// A word by its place.
    Word(&'static [&'static str]),
    List(&'static Was),
    Map(&'static Was),
    Record(&'static [(&'static str, Was)]),
    Shared(&'static Was),
}

const TARGET: Was = Was::Record(&[
    ("os", Was::Plain),
    ("arch", Was::Plain),
    ("isa", Was::Plain),
    ("features", Was::Plain),
    ("device", Was::Word(&["cpu", "cuda"])),
    ("sm", Was::Plain),
    ("torch", Was::Plain),
    ("torch_git", Was::Plain),
    ("cuda", Was::Plain),
    ("cxx11_abi", Was::Plain),
]);

const COMMON: Was = Was::Record(&[
    ("model", Was::Plain),
    ("entry", Was::Plain),
    ("samples", Was::Plain),
    ("sources", Was::Map(&Was::Digest)),
    ("packages", Was::Plain),
    ("target", TARGET),
    ("weights", Was::Plain),
]);

const INPUT: Was = Was::Record(&[
    ("name", Was::Plain),
    ("dtype", Was::Dtype),
    ("shape", Was::Plain),
    ("stride", Was::Plain),
    ("dims", Was::Plain),
    ("pad", Was::Number),
    ("range", Was::Plain),
]);

const LAYOUT: Was = Was::Record(&[
    ("dtype", Was::Dtype),
    ("shape", Was::Plain),
    ("stride", Was::Plain),
]);

const CONSTANT: Was = Was::Record(&[
    ("name", Was::Plain),
    ("dtype", Was::Dtype),
    ("shape", Was::Plain),
    ("stride", Was::Plain),
]);

const PASS: Was = Was::Record(&[("callable", Was::Plain), ("source", Was::Digest)]);

const BACKEND: Was = Was::Word(&["inductor", "eager"]);

const MODE: Was = Was::Word(&[
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
]);

const REQUEST: Was = Was::Record(&[
    ("kind", Was::Plain),
    ("format", Was::Plain),
    ("protocol", Was::Plain),
    ("common", Was::Shared(&COMMON)),
    ("module", Was::Plain),
    ("path", Was::Plain),
    ("method", Was::Plain),
    ("inputs", Was::List(&INPUT)),
    ("sizes", Was::Plain),
    ("regions", Was::Plain),
    ("compiles", Was::Plain),
    ("dynamic", Was::Plain),
    ("backend", BACKEND),
    ("mode", MODE),
    ("options", Was::Plain),
    ("passes", Was::Plain),
    ("tuned", Was::Plain),
]);

const ARTIFACT: Was = Was::Record(&[
    ("kind", Was::Plain),
    ("format", Was::Plain),
    ("protocol", Was::Plain),
    ("graph", Was::Digest),
    ("inputs", Was::List(&LAYOUT)),
    ("outputs", Was::List(&LAYOUT)),
    ("constants", Was::List(&CONSTANT)),
    ("backend", BACKEND),
    ("mode", MODE),
    ("options", Was::Plain),
    ("passes", Was::List(&PASS)),
    ("target", TARGET),
]);

const HELD: Was = Was::Record(&[
    (
        "kind",
        Was::Word(&["library", "archive", "constants", "graph"]),
    ),
    ("format", Was::Plain),
    ("protocol", Was::Plain),
    ("object", Was::Digest),
    ("libraries", Was::List(&Was::Digest)),
    ("target", TARGET),
]);

/// Returns the digest of the key that is explained so; none when it is no explanation of a key of this format.
pub fn digest(explained: &Value) -> Option<Digest> {
    let was = match explained["kind"].as_str()? {
        "request" => &REQUEST,
        "artifact" => &ARTIFACT,
        _ => &HELD,
    };
    part(explained, was)
}

/// Returns the target in the explanation of a key.
pub fn target(explained: &Value) -> &Value {
    let own = &explained["target"];
    if own.is_null() {
        &explained["common"]["target"]
    } else {
        own
    }
}

fn part(value: &Value, was: &Was) -> Option<Digest> {
    fits(value, was).then(|| canon::digest(&Part { value, was }))
}

/// A part of an explanation that fits what it was.
struct Part<'a> {
    value: &'a Value,
    was: &'a Was,
}

fn fits(value: &Value, was: &Was) -> bool {
    match (was, value) {
        (_, Value::Null) | (Was::Plain, _) => true,
        (Was::Digest, Value::String(text)) => text.parse::<Digest>().is_ok(),
        (Was::Number, Value::String(text)) => text.parse::<f64>().is_ok(),
        (Was::Number, other) => other.is_number() || other.is_boolean(),
        (Was::Dtype, Value::String(text)) => Dtype::from_name(text).is_some(),
        (Was::Word(words), Value::String(text)) => ordinal(text, words).is_some(),
        (Was::List(item), Value::Array(items)) => items.iter().all(|value| fits(value, item)),
        (Was::Map(item), Value::Object(entries)) => entries.values().all(|value| fits(value, item)),
        (Was::Record(fields), Value::Object(entries)) => {
            // A record has no other fields; the last ones may be left out.
            let known = |name: &String| fields.iter().any(|(field, _)| field == name);
            entries.keys().all(known)
                && there(entries, fields).all(|(_, value, was)| fits(value, was))
        }
        (Was::Shared(inner), value) => fits(value, inner),
        _ => false,
    }
}

fn there<'a>(
    entries: &'a Map<String, Value>,
    fields: &'static [(&'static str, Was)],
) -> impl Iterator<Item = (&'static str, &'a Value, &'static Was)> {
    let of = |(name, was): &'static (&'static str, Was)| Some((*name, entries.get(*name)?, was));
    fields.iter().filter_map(of)
}

fn ordinal(word: &str, words: &[&str]) -> Option<u32> {
    let at = words.iter().position(|known| *known == word)?;
    u32::try_from(at).ok()
}

impl Canon for Part<'_> {
    fn walk(&self, sink: &mut dyn Sink) {
        let Self { value, was } = *self;
        match (was, value) {
            (Was::Digest, Value::String(text)) => match text.parse::<Digest>() {
                Ok(digest) => sink.digest(&digest),
                Err(_) => sink.text(text),
            },
            (Was::Number, Value::String(text)) => sink.float(text.parse().unwrap_or(f64::NAN)),
            (Was::Dtype, Value::String(text)) => match Dtype::from_name(text) {
                Some(dtype) => dtype.walk(sink),
                None => sink.text(text),
            },
            (Was::Word(words), Value::String(text)) => {
                sink.word(ordinal(text, words).unwrap_or(u32::MAX), text);
            }
            (Was::List(was), Value::Array(items)) => {
                sink.begin_list(items.len());
                items
                    .iter()
                    .for_each(|value| Part { value, was }.walk(sink));
                sink.end();
            }
            (Was::Map(was), Value::Object(entries)) => {
                let mut sorted: Vec<_> = entries.iter().collect();
                sorted.sort_by_key(|(name, _)| *name);
                sink.begin_map(sorted.len());
                for (name, value) in sorted {
                    sink.name(name);
                    Part { value, was }.walk(sink);
                }
                sink.end();
            }
            (Was::Record(fields), Value::Object(entries)) => {
                sink.begin_map(there(entries, fields).count());
                for (name, value, was) in there(entries, fields) {
                    sink.name(name);
                    Part { value, was }.walk(sink);
                }
                sink.end();
            }
            (Was::Shared(was), value) => {
                sink.shared(&SharedValue::known(canon::digest(&Part { value, was })));
            }
            (_, value) => value.walk(sink),
        }
    }
}
