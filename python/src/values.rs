//! JSON values as objects of Python, without a module of Python: an exit handler and a destructor can ask for them.

use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};
use serde_json::Value;

/// Returns a value as `json.loads` does.
pub fn object(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    Ok(match value {
        Value::Null => py.None(),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any().unbind(),
        Value::Number(number) => {
            if let Some(value) = number.as_i64() {
                value.into_pyobject(py)?.into_any().unbind()
            } else if let Some(value) = number.as_u64() {
                value.into_pyobject(py)?.into_any().unbind()
            } else {
                let value = number.as_f64().unwrap_or(f64::NAN);
                value.into_pyobject(py)?.into_any().unbind()
            }
        }
        Value::String(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Array(values) => {
            let values: Vec<_> = values
                .iter()
                .map(|value| object(py, value))
                .collect::<PyResult<_>>()?;
            PyList::new(py, values)?.into_any().unbind()
        }
        Value::Object(fields) => {
            let dict = PyDict::new(py);
            for (key, value) in fields {
                dict.set_item(key, object(py, value)?)?;
            }
            dict.into_any().unbind()
        }
    })
}
