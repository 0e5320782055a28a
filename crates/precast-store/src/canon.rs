//! The bytes of a key: one canonical JSON text. It is hashed, kept in the record that the key names, and compared by
//! `why` and `diff`.
//!
//! A key is a JSON object whose fields are written by hand, never by a `derive`: a renamed field of a record must not
//! move a key unnoticed. Its digest is the SHA-256 of `precast-key 2`, a line feed, and the canonical text. Another
//! program can compute it from the record alone:
//!
//! | value | canonical text |
//! |---|---|
//! | object | no white space; names sorted by their UTF-8 bytes |
//! | list | no white space; in order |
//! | text | JSON, with the shortest escapes; every other character as UTF-8 |
//! | integer | decimal digits |
//! | float | the shortest decimal that reads back as the same `f64`, always with `.` or `e`: `1.0` is not `1`, `-0.0` is not `0.0` |
//! | NaN, an infinity | the text `NaN`, `inf`, `-inf` |
//! | digest | its 64 hexadecimal digits, as text |
//! | value of an enum | its name, as text |
//!
//! Adding, removing or renaming a field of a key, or changing any rule here, is a new [`FORMAT`], which makes every
//! older key miss.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::{
    Digest, Target,
    record::{Bounds, Constant, Dynamic, Input, Layout, Pad},
};

/// The version of the rules above and of the keys that use them.
pub const FORMAT: u32 = 2;

/// Returns the digest of a key.
pub fn digest(key: &Value) -> Digest {
    hash(&text(key))
}

/// Returns the digest of a key with `fields` and the field `name`. Does not copy the value of that field.
pub fn digest_with(fields: &Map<String, Value>, name: &str, shared: &Shared) -> Digest {
    let mut out = String::new();
    let own = fields
        .iter()
        .map(|(name, value)| (&**name, Member::Value(value)));
    object(own.chain([(name, Member::Text(&shared.text))]), &mut out);
    hash(&out)
}

/// Returns the target in a key.
pub fn target_of(key: &Value) -> &Value {
    let own = &key["target"];
    if own.is_null() {
        &key["common"]["target"]
    } else {
        own
    }
}

/// A value that many keys share. Its text is computed once.
#[derive(Clone, Debug)]
pub struct Shared {
    value: Value,
    text: String,
}

impl Shared {
    /// Wraps `value` and computes its text.
    pub fn new(value: Value) -> Self {
        let text = text(&value);
        Self { value, text }
    }

    /// Returns the value.
    pub fn value(&self) -> &Value {
        &self.value
    }
}

fn hash(text: &str) -> Digest {
    Digest::of(format!("precast-key {FORMAT}\n{text}").as_bytes())
}

fn text(value: &Value) -> String {
    let mut out = String::new();
    write(value, &mut out);
    out
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (place, item) in items.iter().enumerate() {
                if place > 0 {
                    out.push(',');
                }
                write(item, out);
            }
            out.push(']');
        }
        Value::Object(entries) => {
            let parts = entries
                .iter()
                .map(|(name, value)| (&**name, Member::Value(value)));
            object(parts, out);
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

enum Member<'a> {
    Value(&'a Value),
    Text(&'a str),
}

fn object<'a>(entries: impl Iterator<Item = (&'a str, Member<'a>)>, out: &mut String) {
    out.push('{');
    for (place, (name, part)) in entries.collect::<BTreeMap<_, _>>().into_iter().enumerate() {
        if place > 0 {
            out.push(',');
        }
        write(&Value::from(name), out);
        out.push(':');
        match part {
            Member::Value(value) => write(value, out),
            Member::Text(text) => out.push_str(text),
        }
    }
    out.push('}');
}

/// Returns the JSON value of a target in a key.
pub fn target(target: &Target) -> Value {
    let mut features = target.features.clone();
    features.sort();
    json!({
        "os": target.os,
        "arch": target.arch,
        "isa": target.isa,
        "features": features,
        "device": target.device.to_string(),
        "sm": target.sm,
        "torch": target.torch,
        "torch_git": target.torch_git,
        "cuda": target.cuda,
        "cxx11_abi": target.cxx11_abi,
    })
}

/// Returns the JSON value of an input in a key.
pub fn input(input: &Input) -> Value {
    let mut value = json!({
        "name": input.name,
        "dtype": input.layout.dtype.name(),
        "shape": input.layout.shape,
        "stride": input.layout.stride,
        "dims": input.dims,
        "pad": pad(input.pad),
        "range": input.range,
        "within": input.within,
    });
    // Absent where there is none, so that an input without one keeps its key.
    if let Some(default) = input.default {
        value["default"] = pad(default);
    }
    value
}

fn pad(value: Pad) -> Value {
    match value {
        Pad::Bool(value) => value.into(),
        Pad::Int(value) => value.into(),
        Pad::Float(value) => number(value),
    }
}

/// Returns the JSON value of a tensor's layout in a key.
pub fn layout(layout: &Layout) -> Value {
    json!({"dtype": layout.dtype.name(), "shape": layout.shape, "stride": layout.stride})
}

/// Returns the JSON value of a constant in a key.
pub fn constant(constant: &Constant) -> Value {
    json!({
        "name": constant.name,
        "dtype": constant.layout.dtype.name(),
        "shape": constant.layout.shape,
        "stride": constant.layout.stride,
    })
}

/// Returns the JSON value of the bounds of dynamic dimensions in a key.
pub fn dynamic(dynamic: &Dynamic) -> Value {
    let pair = |bounds: &Bounds| json!([bounds.min, bounds.max]);
    dynamic
        .iter()
        .map(|(dim, bounds)| (dim.clone(), pair(bounds)))
        .collect()
}

/// Returns the JSON value of a number in a key: text if JSON has no such number.
pub fn number(value: f64) -> Value {
    let finite = serde_json::Number::from_f64(value).map(Value::Number);
    finite.unwrap_or_else(|| value.to_string().into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_hashed_bytes_are_as_written_down() {
        let key = json!({"b": [null, true, -2], "a": {"y": "é\n", "x": 1.5}});
        let bytes = "precast-key 2\n{\"a\":{\"x\":1.5,\"y\":\"é\\n\"},\"b\":[null,true,-2]}";
        assert_eq!(digest(&key), Digest::of(bytes.as_bytes()));
        let shared = Shared::new(key["a"].clone());
        let own = Map::from_iter([("b".to_owned(), key["b"].clone())]);
        assert_eq!(digest_with(&own, "a", &shared), digest(&key));
    }

    #[test]
    fn a_default_is_in_the_key_of_an_input_that_has_one() {
        let mut one = crate::testing::program("m", 1, &[]).inputs.remove(0);
        let plain = input(&one);
        assert!(plain.get("default").is_none());
        one.default = Some(Pad::Float(0.0));
        assert_eq!(input(&one)["default"], json!(0.0));
        one.default = Some(Pad::Int(0));
        assert_ne!(digest(&input(&one)), digest(&plain));
    }

    #[test]
    fn values_that_read_alike_stay_apart() {
        let different = json!([
            null, false, 0, 0.0, -0.0, "", "0", [], {}, [[]], [0], ["a", "b"], ["ab"], [["a"], "b"], [["a", "b"]],
            {"a": "b"}, {"a": null}, {"a": {"b": 1}}, {"a": {}, "b": 1}, {"a.b": 1},
        ]);
        let different = different.as_array().unwrap();
        for (i, a) in different.iter().enumerate() {
            for b in &different[i + 1..] {
                assert_ne!(digest(a), digest(b), "{a} and {b}");
            }
        }
        let floats = [0.0, -0.0, 1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        let different = floats.map(|float| text(&number(float))).join(" ");
        assert_eq!(different, r#"0.0 -0.0 1.0 "inf" "-inf" "NaN""#);
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

        /// A record keeps the whole key. Two keys have the same digest only if they are equal.
        #[test]
        fn a_digest_follows_from_the_value_as_a_record_keeps_it(a in tree(), b in tree()) {
            let kept: Value = serde_json::from_str(&serde_json::to_string_pretty(&a).unwrap()).unwrap();
            prop_assert_eq!(digest(&kept), digest(&a));
            prop_assert_eq!(serde_json::from_str::<Value>(&text(&a)).unwrap(), a.clone());
            prop_assert_eq!(digest(&a) == digest(&b), a == b);
        }
    }
}
