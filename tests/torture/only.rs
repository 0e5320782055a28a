//! Which parts of a torture suite run: all of them, or those whose names begin with the words of `PRECAST_TORTURE_ONLY`.

use std::{collections::BTreeMap, fs};

use serde_json::Value;

pub struct Only(Option<String>);

impl Only {
    pub fn asked_for() -> Self {
        let text = std::env::var("PRECAST_TORTURE_ONLY").ok();
        Self(text.filter(|text| !text.is_empty()))
    }

    /// Returns whether a part is run.
    pub fn has(&self, name: &str) -> bool {
        let begins = |only: &str| only.split(' ').zip(name.split(' ')).all(|(a, b)| a == b);
        self.0.as_deref().is_none_or(begins)
    }

    /// Returns the parts of an earlier run's file that stay, because they are not run now.
    pub fn kept(&self, file: &str) -> BTreeMap<String, Value> {
        let text = fs::read_to_string(file).unwrap_or_default();
        let before: Value = serde_json::from_str(&text).unwrap_or_default();
        let parts = serde_json::from_value(before["parts"].clone());
        let mut parts: BTreeMap<String, Value> = parts.unwrap_or_default();
        parts.retain(|name, _| !self.has(name));
        parts
    }
}
