//! How outputs nest: a module's own tuples, lists, dicts and classes, around its tensors.

use precast_runtime::Tensor;
use pyo3::{
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyList, PyString, PyTuple},
};
use serde_json::Value;

use crate::tensors::{self, Library};

/// The nesting of one program's outputs, as its record has it.
pub enum Nesting {
    Tensor(usize),
    /// A value that is no tensor, such as `None`.
    Constant(Value),
    List(Vec<Self>),
    Tuple(Vec<Self>),
    Dict(Vec<(String, Self)>),
    /// A class with fields, such as a dataclass or a named tuple: `precast.Fields`.
    Fields(String, Vec<(String, Self)>),
}

impl Nesting {
    /// Reads a record's description; one tensor or a tuple of `count` without one.
    pub fn of(described: &Value, count: usize) -> Self {
        Self::read(described).unwrap_or_else(|| match count {
            1 => Self::Tensor(0),
            _ => Self::Tuple((0..count).map(Self::Tensor).collect()),
        })
    }

    fn read(described: &Value) -> Option<Self> {
        let (kind, held) = described.as_object()?.iter().next()?;
        let keyed = |held: &Value| -> Option<Vec<(String, Self)>> {
            let fields = held.as_object()?.iter();
            fields
                .map(|(key, held)| Some((key.clone(), Self::read(held)?)))
                .collect()
        };
        let listed = |held: &Value| -> Option<Vec<Self>> {
            held.as_array()?.iter().map(Self::read).collect()
        };
        Some(match kind.as_str() {
            "tensor" => Self::Tensor(usize::try_from(held.as_u64()?).ok()?),
            "value" => Self::Constant(held.clone()),
            "list" => Self::List(listed(held)?),
            "tuple" => Self::Tuple(listed(held)?),
            "dict" | "OrderedDict" => Self::Dict(keyed(held)?),
            class => match held {
                Value::Array(_) => Self::Tuple(listed(held)?),
                _ => Self::Fields(class.to_owned(), keyed(held)?),
            },
        })
    }

    /// Returns the outputs as objects of Python, with tensors of a library.
    pub fn build(
        &self,
        py: Python<'_>,
        outputs: &[Tensor],
        library: Library,
    ) -> PyResult<Py<PyAny>> {
        match self {
            Self::Tensor(at) => {
                // The same tensor may stand in two places.
                match outputs.get(*at) {
                    Some(tensor) => tensors::give(py, tensor, library),
                    None => Ok(py.None()),
                }
            }
            Self::Constant(value) => constant(py, value),
            Self::List(items) => {
                let items = Self::all(py, items, outputs, library)?;
                Ok(PyList::new(py, items)?.into_any().unbind())
            }
            Self::Tuple(items) => {
                let items = Self::all(py, items, outputs, library)?;
                Ok(PyTuple::new(py, items)?.into_any().unbind())
            }
            Self::Dict(fields) => {
                let dict = Self::dict(py, fields, outputs, library)?;
                Ok(dict.into_any().unbind())
            }
            Self::Fields(class, fields) => {
                let dict = Self::dict(py, fields, outputs, library)?;
                static FIELDS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
                let made = FIELDS.get_or_try_init(py, || {
                    let module = py.import("precast.fields")?;
                    Ok::<_, PyErr>(module.getattr("Fields")?.unbind())
                })?;
                made.call1(py, (class, dict))
            }
        }
    }

    fn all(
        py: Python<'_>,
        items: &[Self],
        outputs: &[Tensor],
        library: Library,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let built = items.iter().map(|item| item.build(py, outputs, library));
        built.collect()
    }

    fn dict<'py>(
        py: Python<'py>,
        fields: &[(String, Self)],
        outputs: &[Tensor],
        library: Library,
    ) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (key, field) in fields {
            let value = field.build(py, outputs, library)?;
            dict.set_item(PyString::intern(py, key), value)?;
        }
        Ok(dict)
    }
}

/// Returns a number, a text or `None`.
fn constant(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    Ok(match value {
        Value::Null => py.None(),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any().unbind(),
        Value::Number(value) => match value.as_i64() {
            Some(value) => value.into_pyobject(py)?.into_any().unbind(),
            None => value
                .as_f64()
                .unwrap_or(f64::NAN)
                .into_pyobject(py)?
                .into_any()
                .unbind(),
        },
        Value::String(value) => value.into_pyobject(py)?.into_any().unbind(),
        other => other.to_string().into_pyobject(py)?.into_any().unbind(),
    })
}
