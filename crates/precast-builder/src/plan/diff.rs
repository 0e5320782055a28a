//! The fields of two explained keys that differ.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use precast_store::Digest;

/// One field of two explained keys that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Field {
    /// Names and list positions, from the outside in.
    pub path: Vec<String>,
    /// The value in the older key; absent if it has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub old: Option<Value>,
    /// The value in the newer key; absent if it has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new: Option<Value>,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (old, new) = (shown(self.old.as_ref()), shown(self.new.as_ref()));
        write!(f, "{}: {old} -> {new}", self.path.join("."))
    }
}

/// Returns every field that differs, in the order of the old key. Lists of one length are compared item by item.
pub fn diff(old: &Value, new: &Value) -> Vec<Field> {
    let mut found = Vec::new();
    compare(&mut Vec::new(), Some(old), Some(new), &mut found);
    found
}

pub(super) fn compare(
    path: &mut Vec<String>,
    old: Option<&Value>,
    new: Option<&Value>,
    found: &mut Vec<Field>,
) {
    let mut at = |name: String, old: Option<&Value>, new: Option<&Value>| {
        path.push(name);
        compare(path, old, new, found);
        path.pop();
    };
    match (old, new) {
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            for (name, value) in old {
                at(name.clone(), Some(value), new.get(name));
            }
            for (name, value) in new.iter().filter(|(name, _)| !old.contains_key(*name)) {
                at(name.clone(), None, Some(value));
            }
        }
        (Some(Value::Array(old)), Some(Value::Array(new))) if old.len() == new.len() => {
            for (position, (old, new)) in old.iter().zip(new).enumerate() {
                at(position.to_string(), Some(old), Some(new));
            }
        }
        (old, new) if old == new => {}
        (old, new) => found.push(Field {
            path: path.clone(),
            old: old.cloned(),
            new: new.cloned(),
        }),
    }
}

/// Returns a value as people read it: text without quotes, digests short, null and absent as `none`.
pub(super) fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "none".to_owned(),
        Some(value) => format!("`{}`", bare(value)),
    }
}

pub(super) fn bare(value: &Value) -> String {
    match value {
        Value::String(text) => match text.parse::<Digest>() {
            Ok(digest) => digest.short(),
            Err(_) => text.clone(),
        },
        other => other.to_string(),
    }
}
