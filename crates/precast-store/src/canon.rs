//! One canonical walk with two sinks: the digest, and the explanation that `why` and `diff` print.
//!
//! A key type implements [`Canon`] by hand and walks its fields once into a [`Sink`]. [`digest`] runs the walk into a
//! hasher; [`explain`] runs the same walk into JSON. So an explanation has exactly the fields that were hashed.
//!
//! The bytes of the hash, in full, so that another program can compute it:
//!
//! | item | bytes |
//! |---|---|
//! | start of every key | `precast-key`, then the format version as a `u32` |
//! | null | `00` |
//! | boolean | `01`, then `00` or `01` |
//! | integer | `02`, then the `i64` |
//! | float | `03`, then the bits of the `f64`; every NaN is `7ff8000000000000`; `-0.0` is not `0.0` |
//! | text | `04`, then its length in bytes as a `u64`, then its UTF-8 |
//! | digest | `05`, then its 32 bytes |
//! | word (a value of an enum) | `06`, then its ordinal as a `u32`: words may be renamed, ordinals never move |
//! | list | `07`, then its length as a `u64`, then its items |
//! | map or record | `08`, then its length as a `u64`, then for each entry its name as text and its value |
//! | shared | `09`, then the 32 bytes of the digest of a value that was walked once on its own |
//!
//! Numbers are little-endian. Maps are sorted by the bytes of their names; records keep the order in which the code
//! writes their fields. Adding, removing or renaming a field of a record, or changing any rule here, is a new
//! [`FORMAT`], which makes every older key miss.

pub mod again;
mod records;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{Digest, digest::Hasher};

/// The version of the rules above and of the key types that use them.
pub const FORMAT: u32 = 1;

/// A value that can be walked.
pub trait Canon {
    /// Feeds the whole value to `sink` as exactly one item.
    fn walk(&self, sink: &mut dyn Sink);
}

/// What a walk is fed to. [`Sink::begin_list`] and [`Sink::begin_map`] are followed by as many items as they say and
/// by [`Sink::end`]; in a map each item follows its [`Sink::name`].
pub trait Sink {
    /// The absence of a value.
    fn null(&mut self);
    /// A truth value.
    fn boolean(&mut self, value: bool);
    /// A whole number.
    fn integer(&mut self, value: i64);
    /// A number with a fraction. All NaNs are the same value; `-0.0` is not `0.0`.
    fn float(&mut self, value: f64);
    /// UTF-8 text of any length.
    fn text(&mut self, value: &str);
    /// A digest, fed as its 32 bytes.
    fn digest(&mut self, value: &Digest);
    /// A value of an enum.
    fn word(&mut self, ordinal: u32, word: &str);
    /// The start of a list of `len` items.
    fn begin_list(&mut self, len: usize);
    /// The start of a map or record of `len` entries.
    fn begin_map(&mut self, len: usize);
    /// The name of the entry whose value comes next.
    fn name(&mut self, name: &str);
    /// The end of the innermost open list or map.
    fn end(&mut self);
    /// A value that many keys have in common.
    fn shared(&mut self, value: &SharedValue);
}

/// Returns the digest of `value`.
pub fn digest(value: &impl Canon) -> Digest {
    let mut sink = DigestSink(Hasher::default());
    sink.0.update(b"precast-key");
    sink.0.update(&FORMAT.to_le_bytes());
    value.walk(&mut sink);
    sink.0.finish()
}

/// Returns what [`digest`] hashes, as JSON.
pub fn explain(value: &impl Canon) -> Value {
    let mut sink = ExplainSink::default();
    value.walk(&mut sink);
    sink.done
}

/// Returns the digest of `value` and its explanation.
pub fn key(value: &impl Canon) -> (Digest, Value) {
    (digest(value), explain(value))
}

/// A value that is walked once and then part of many keys.
#[derive(Clone, Debug)]
pub struct SharedValue {
    digest: Digest,
    explained: Value,
}

impl SharedValue {
    /// Walks `value`.
    pub fn new(value: &impl Canon) -> Self {
        let (digest, explained) = key(value);
        Self { digest, explained }
    }

    /// Returns one of which only the digest is known, for a walk that is hashed.
    pub(crate) fn known(digest: Digest) -> Self {
        let explained = Value::Null;
        Self { digest, explained }
    }
}

impl Canon for SharedValue {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.shared(self);
    }
}

struct DigestSink(Hasher);

impl DigestSink {
    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.0.update(&[tag]);
        self.0.update(bytes);
    }

    fn length(&mut self, tag: u8, len: usize) {
        self.tagged(tag, &(len as u64).to_le_bytes());
    }
}

impl Sink for DigestSink {
    fn null(&mut self) {
        self.tagged(0x00, &[]);
    }

    fn boolean(&mut self, value: bool) {
        self.tagged(0x01, &[u8::from(value)]);
    }

    fn integer(&mut self, value: i64) {
        self.tagged(0x02, &value.to_le_bytes());
    }

    fn float(&mut self, value: f64) {
        let bits = match value.is_nan() {
            true => 0x7ff8_0000_0000_0000,
            false => value.to_bits(),
        };
        self.tagged(0x03, &bits.to_le_bytes());
    }

    fn text(&mut self, value: &str) {
        self.length(0x04, value.len());
        self.0.update(value.as_bytes());
    }

    fn digest(&mut self, value: &Digest) {
        self.tagged(0x05, value.as_bytes());
    }

    fn word(&mut self, ordinal: u32, _word: &str) {
        self.tagged(0x06, &ordinal.to_le_bytes());
    }

    fn begin_list(&mut self, len: usize) {
        self.length(0x07, len);
    }

    fn begin_map(&mut self, len: usize) {
        self.length(0x08, len);
    }

    fn name(&mut self, name: &str) {
        self.text(name);
    }

    fn end(&mut self) {}

    fn shared(&mut self, value: &SharedValue) {
        self.tagged(0x09, value.digest.as_bytes());
    }
}

#[derive(Default)]
struct ExplainSink {
    /// The lists and maps that are open, with the name under which each goes into the one before it.
    open: Vec<(Option<String>, Value)>,
    name: Option<String>,
    done: Value,
}

impl ExplainSink {
    fn put(&mut self, value: Value) {
        let name = self.name.take();
        self.put_named(name, value);
    }

    fn put_named(&mut self, name: Option<String>, value: Value) {
        match self.open.last_mut() {
            Some((_, Value::Array(items))) => items.push(value),
            Some((_, Value::Object(entries))) => {
                entries.insert(name.unwrap_or_default(), value);
            }
            _ => self.done = value,
        }
    }

    fn begin(&mut self, empty: Value) {
        let name = self.name.take();
        self.open.push((name, empty));
    }
}

impl Sink for ExplainSink {
    fn null(&mut self) {
        self.put(Value::Null);
    }

    fn boolean(&mut self, value: bool) {
        self.put(Value::from(value));
    }

    fn integer(&mut self, value: i64) {
        self.put(Value::from(value));
    }

    fn float(&mut self, value: f64) {
        let finite = serde_json::Number::from_f64(value).map(Value::Number);
        self.put(finite.unwrap_or_else(|| Value::from(value.to_string())));
    }

    fn text(&mut self, value: &str) {
        self.put(Value::from(value));
    }

    fn digest(&mut self, value: &Digest) {
        self.put(Value::from(value.hex()));
    }

    fn word(&mut self, _ordinal: u32, word: &str) {
        self.put(Value::from(word));
    }

    fn begin_list(&mut self, _len: usize) {
        self.begin(Value::Array(Vec::new()));
    }

    fn begin_map(&mut self, _len: usize) {
        self.begin(Value::Object(Map::new()));
    }

    fn name(&mut self, name: &str) {
        self.name = Some(name.to_owned());
    }

    fn end(&mut self) {
        if let Some((name, value)) = self.open.pop() {
            self.put_named(name, value);
        }
    }

    fn shared(&mut self, value: &SharedValue) {
        self.put(value.explained.clone());
    }
}

/// Feeds a record: fields with fixed names, in the order in which the code writes them.
pub fn record(sink: &mut dyn Sink, fields: &[(&str, &dyn Canon)]) {
    sink.begin_map(fields.len());
    for (name, value) in fields {
        sink.name(name);
        value.walk(sink);
    }
    sink.end();
}

/// Feeds a list.
pub fn list<T: Canon>(sink: &mut dyn Sink, items: &[T]) {
    sink.begin_list(items.len());
    for item in items {
        item.walk(sink);
    }
    sink.end();
}

impl Canon for bool {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.boolean(*self);
    }
}

impl Canon for i64 {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.integer(*self);
    }
}

impl Canon for u32 {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.integer(i64::from(*self));
    }
}

impl Canon for f64 {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.float(*self);
    }
}

impl Canon for str {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.text(self);
    }
}

impl Canon for String {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.text(self);
    }
}

impl Canon for Digest {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.digest(self);
    }
}

impl<T: Canon + ?Sized> Canon for &T {
    fn walk(&self, sink: &mut dyn Sink) {
        (**self).walk(sink);
    }
}

impl<T: Canon> Canon for Option<T> {
    fn walk(&self, sink: &mut dyn Sink) {
        match self {
            Some(value) => value.walk(sink),
            None => sink.null(),
        }
    }
}

impl<T: Canon> Canon for [T] {
    fn walk(&self, sink: &mut dyn Sink) {
        list(sink, self);
    }
}

impl<T: Canon> Canon for Vec<T> {
    fn walk(&self, sink: &mut dyn Sink) {
        list(sink, self);
    }
}

impl<K: AsRef<str> + Ord, T: Canon> Canon for BTreeMap<K, T> {
    fn walk(&self, sink: &mut dyn Sink) {
        sink.begin_map(self.len());
        for (name, value) in self {
            sink.name(name.as_ref());
            value.walk(sink);
        }
        sink.end();
    }
}

/// JSON, as options have it. An object is sorted by name, whatever order it has.
impl Canon for Value {
    fn walk(&self, sink: &mut dyn Sink) {
        match self {
            Self::Null => sink.null(),
            Self::Bool(value) => sink.boolean(*value),
            Self::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(integer), _) => sink.integer(integer),
                (None, Some(float)) => sink.float(float),
                (None, None) => sink.text(&number.to_string()),
            },
            Self::String(text) => sink.text(text),
            Self::Array(items) => list(sink, items),
            Self::Object(entries) => entries.iter().collect::<BTreeMap<_, _>>().walk(sink),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_bytes_are_as_written_down() {
        let value = json!({"b": [null, true, -2], "a": {"x": 1.5, "y": "é"}});
        let mut bytes = b"precast-key\x01\0\0\0".to_vec();
        let length = |n: u8| [n, 0, 0, 0, 0, 0, 0, 0];
        let name = |text: &str| [&[4][..], &length(text.len() as u8), text.as_bytes()].concat();
        bytes.extend([&[8][..], &length(2)].concat());
        bytes.extend([name("a"), [&[8][..], &length(2)].concat()].concat());
        bytes.extend(
            [
                name("x"),
                [&[3][..], &1.5_f64.to_bits().to_le_bytes()].concat(),
            ]
            .concat(),
        );
        bytes.extend([name("y"), name("é")].concat());
        bytes.extend([name("b"), [&[7][..], &length(3)].concat()].concat());
        bytes.extend([&[0, 1, 1, 2][..], &(-2_i64).to_le_bytes()].concat());
        assert_eq!(digest(&value), Digest::of(&bytes));
    }

    #[test]
    fn values_that_read_alike_stay_apart() {
        let different = [
            json!(null),
            json!(false),
            json!(0),
            json!(0.0),
            json!(-0.0),
            json!(""),
            json!("0"),
            json!([]),
            json!({}),
            json!([[]]),
            json!([0]),
            json!(["a", "b"]),
            json!(["ab"]),
            json!([["a"], "b"]),
            json!([["a", "b"]]),
            json!({"a": "b"}),
            json!({"a": null}),
            json!({"a": {"b": 1}}),
            json!({"a": {}, "b": 1}),
            json!({"a.b": 1}),
        ];
        for (i, a) in different.iter().enumerate() {
            for b in &different[i + 1..] {
                assert_ne!(digest(a), digest(b), "{a} and {b}");
            }
        }
    }

    #[test]
    fn every_type_is_fed_as_the_json_that_it_is() {
        fn same(value: &impl Canon, json: &Value) {
            assert_eq!(digest(value), digest(json), "{json}");
            assert_eq!(explain(value), *json);
        }
        same(&true, &json!(true));
        same(&-7_i64, &json!(-7));
        same(&7_u32, &json!(7));
        same(&1.5_f64, &json!(1.5));
        same(&"a", &json!("a"));
        same(&"a".to_owned(), &json!("a"));
        same(&Some(0.25), &json!(0.25));
        same(&None::<f64>, &json!(null));
        same(&Vec::from([0.5, -0.5]), &json!([0.5, -0.5]));
        same(&BTreeMap::from([("a", 2.5)]), &json!({"a": 2.5}));
        // JSON has no such numbers, and keys have.
        assert_eq!(explain(&f64::NAN), json!("NaN"));
        assert_eq!(digest(&f64::NAN), digest(&-f64::NAN));
        let floats = [0.0, -0.0, 1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        let different: std::collections::BTreeSet<_> = floats.iter().map(digest).collect();
        assert_eq!(different.len(), floats.len());
    }

    #[test]
    fn a_shared_value_is_explained_in_place() {
        let inner = json!({"a": [1, 2]});
        let shared = SharedValue::new(&inner);
        let outer: BTreeMap<&str, &dyn Canon> = [("x", &shared as &dyn Canon)].into();
        struct Outer<'a>(BTreeMap<&'a str, &'a dyn Canon>);
        impl Canon for Outer<'_> {
            fn walk(&self, sink: &mut dyn Sink) {
                let fields: Vec<(&str, &dyn Canon)> =
                    self.0.iter().map(|(name, value)| (*name, *value)).collect();
                record(sink, &fields);
            }
        }
        let (key, explained) = key(&Outer(outer));
        assert_eq!(explained, json!({"x": inner}));
        assert_eq!(explain(&shared), inner);
        let other = SharedValue::new(&json!({"a": [1, 3]}));
        assert_ne!(key, digest(&Outer([("x", &other as &dyn Canon)].into())));
    }

    fn tree() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            prop::num::f64::NORMAL.prop_map(Value::from),
            ".{0,4}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((".{0,3}", inner), 0..4)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// The explanation has everything that is hashed: equal explanations and equal digests go together.
        #[test]
        fn explanations_and_digests_agree(a in tree(), b in tree()) {
            prop_assert_eq!(&explain(&a), &a);
            prop_assert_eq!(digest(&explain(&a)), digest(&a));
            prop_assert_eq!(digest(&a) == digest(&b), a == b);
        }
    }
}
