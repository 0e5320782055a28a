//! How outputs nest: a module's own tuples, lists, dicts and classes, around its tensors.

#![allow(unsafe_code)]

use std::{ffi::c_void, mem, ptr};

use precast_runtime::Tensor;
use pyo3::{
    ffi::{Py_tp_new, PyType_GetSlot, newfunc},
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyList, PyString, PyTuple, PyType},
};
use serde_json::Value;
use smallvec::SmallVec;

use crate::{
    tensors::{self, Library},
    values,
};

/// The nesting of one program's outputs, as its record has it.
pub enum Nesting {
    Tensor(usize),
    /// A value that is no tensor, such as `None`.
    Constant(Value),
    List(Vec<Self>),
    Tuple(Vec<Self>),
    Dict(Keyed),
    /// A class with fields, such as a dataclass or a named tuple: `precast.Fields`.
    Fields(Py<PyString>, Keyed),
}

/// Values by their keys, which are objects already: a new text for each call takes longer than its hash.
type Keyed = Vec<(Py<PyString>, Nesting)>;

impl Nesting {
    /// Reads a record's description; one tensor or a tuple of `count` without one.
    pub fn of(py: Python<'_>, described: &Value, count: usize) -> Self {
        Self::read(py, described).unwrap_or_else(|| match count {
            1 => Self::Tensor(0),
            _ => Self::Tuple((0..count).map(Self::Tensor).collect()),
        })
    }

    fn read(py: Python<'_>, described: &Value) -> Option<Self> {
        let (kind, held) = described.as_object()?.iter().next()?;
        let text = |text: &str| PyString::intern(py, text).unbind();
        let keyed = |held: &Value| -> Option<Keyed> {
            let fields = held.as_object()?.iter();
            fields
                .map(|(key, held)| Some((text(key), Self::read(py, held)?)))
                .collect()
        };
        let listed = |held: &Value| -> Option<Vec<Self>> {
            let items = held.as_array()?.iter();
            items.map(|held| Self::read(py, held)).collect()
        };
        Some(match kind.as_str() {
            "tensor" => Self::Tensor(usize::try_from(held.as_u64()?).ok()?),
            "value" => Self::Constant(held.clone()),
            "list" => Self::List(listed(held)?),
            "tuple" => Self::Tuple(listed(held)?),
            "dict" | "OrderedDict" => Self::Dict(keyed(held)?),
            class => match held {
                Value::Array(_) => Self::Tuple(listed(held)?),
                _ => Self::Fields(text(class), keyed(held)?),
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
            Self::Constant(value) => values::object(py, value),
            Self::List(items) => {
                let items = Self::all(py, items, outputs, library)?;
                Ok(PyList::new(py, items)?.into_any().unbind())
            }
            Self::Tuple(items) => {
                let items = Self::all(py, items, outputs, library)?;
                Ok(PyTuple::new(py, items)?.into_any().unbind())
            }
            Self::Dict(fields) => {
                let dict = PyDict::new(py);
                Self::fill(&dict, fields, outputs, library)?;
                Ok(dict.into_any().unbind())
            }
            Self::Fields(kind, fields) => {
                let object = Class::get(py)?.empty(py)?;
                object.setattr(intern!(py, "kind"), kind)?;
                Self::fill(object.cast::<PyDict>()?, fields, outputs, library)?;
                Ok(object.unbind())
            }
        }
    }

    fn all(
        py: Python<'_>,
        items: &[Self],
        outputs: &[Tensor],
        library: Library,
    ) -> PyResult<SmallVec<[Py<PyAny>; 8]>> {
        let built = items.iter().map(|item| item.build(py, outputs, library));
        built.collect()
    }

    fn fill(
        dict: &Bound<'_, PyDict>,
        fields: &Keyed,
        outputs: &[Tensor],
        library: Library,
    ) -> PyResult<()> {
        let py = dict.py();
        for (key, field) in fields {
            dict.set_item(key, field.build(py, outputs, library)?)?;
        }
        Ok(())
    }
}

/// `precast.Fields`, whose objects are made without its `__init__` of Python.
struct Class {
    fields: Py<PyType>,
    /// `dict.__new__` without its checks, which take as long as the object.
    new: newfunc,
    none: Py<PyTuple>,
}

impl Class {
    fn get(py: Python<'_>) -> PyResult<&Self> {
        static CLASS: PyOnceLock<Class> = PyOnceLock::new();
        CLASS.get_or_try_init(py, || {
            let module = py.import("precast.fields")?;
            // SAFETY: a type of Python, and the number of a slot that it has; the slot is of this type.
            let new = unsafe {
                let new = PyType_GetSlot(py.get_type::<PyDict>().as_type_ptr(), Py_tp_new);
                mem::transmute::<*mut c_void, newfunc>(new)
            };
            Ok(Self {
                fields: module.getattr("Fields")?.cast_into::<PyType>()?.unbind(),
                new,
                none: PyTuple::empty(py).unbind(),
            })
        })
    }

    fn empty<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let class = self.fields.bind(py).as_type_ptr();
        // SAFETY: `dict.__new__` for a class derived from `dict`, with a tuple of arguments and none by name.
        unsafe {
            let made = (self.new)(class, self.none.as_ptr(), ptr::null_mut());
            Bound::from_owned_ptr_or_err(py, made)
        }
    }
}
