//! Checks JSON against the schemas in docs/schema.

use std::{fs, path::Path};

use serde_json::Value;

/// Returns the schema of this name.
pub fn schema(name: &str) -> jsonschema::Validator {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/schema/{name}.json"));
    let schema: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    jsonschema::validator_for(&schema).unwrap()
}

/// Fails with every place where the document does not match its schema.
pub fn check(name: &str, document: &Value) {
    let wrong: Vec<String> = schema(name)
        .iter_errors(document)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(wrong.is_empty(), "{name}: {wrong:#?}\n{document:#}");
}
