//! Callables of the project, as `module:callable`.

use super::{
    inputs::is_identifier,
    reader::{KeyValue, Reader},
};

/// Reads `module:callable`.
pub(super) fn callable<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<String> {
    let text = reader.string(field)?;
    if !is_callable(text) {
        let message = format!("{} must be `module:callable`, not `{text}`", field.name);
        reader.wrong_help(&field.place, message, callable_help(text));
    }
    Some(text.to_owned())
}

/// Returns whether a text has the form `module:callable`.
pub fn is_callable(text: &str) -> bool {
    text.split_once(':').is_some_and(|(module, callable)| {
        module.split('.').all(is_identifier) && callable.split('.').all(is_identifier)
    })
}

/// Returns a hint for a text that is no `module:callable`.
pub fn callable_help(text: &str) -> String {
    match text.split_once(".py:") {
        Some((module, callable)) => format!("write `{}:{callable}`", module.replace('/', ".")),
        None => "write `model:load` for the function `load` in `model.py`".to_owned(),
    }
}
