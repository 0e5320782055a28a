//! A field that may be absent, or of a type that this version does not know.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use serde_json::Value;

/// A field of a record that nothing depends on. Reading it never fails, and writing it gives what was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Lenient<T> {
    /// The record has no such field.
    #[default]
    Absent,
    /// A value of the type that this version expects.
    Known(T),
    /// A value of another type, or null.
    Other(Value),
}

impl<T> Lenient<T> {
    /// Returns the value, where it is one that this version knows.
    pub fn get(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Absent | Self::Other(_) => None,
        }
    }

    /// Returns whether the record has no such field: what serde needs to leave it out again.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

impl<T> From<T> for Lenient<T> {
    fn from(value: T) -> Self {
        Self::Known(value)
    }
}

/// Writes none as null.
impl<T> From<Option<T>> for Lenient<T> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Other(Value::Null), Self::Known)
    }
}

impl<T: Serialize> Serialize for Lenient<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Absent => serializer.serialize_unit(),
            Self::Known(value) => value.serialize(serializer),
            Self::Other(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Lenient<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        Ok(match T::deserialize(&value) {
            Ok(known) => Self::Known(known),
            Err(_) => Self::Other(value),
        })
    }
}

#[cfg(feature = "schema")]
impl<T: schemars::JsonSchema> schemars::JsonSchema for Lenient<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        Option::<T>::schema_name()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        Option::<T>::json_schema(generator)
    }
}
