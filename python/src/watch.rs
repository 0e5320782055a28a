//! The native check of a call: that nothing which a record depends on was changed.
//!
//! A list of reads, made by `precast/record/watch.py`, which says what each kind compares. Nearly all compare pointers of
//! entries of dictionaries. The list is in the order of the reads, so that those of one dictionary are side by side.

#![allow(unsafe_code)]

use std::ptr;

use precast_runtime::dlpack::Placement;
use pyo3::{
    PyTraverseError, PyVisit,
    exceptions::PyValueError,
    ffi,
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple},
};

use crate::exchange::torch;

/// One read.
enum Read {
    Item {
        held: Py<PyDict>,
        key: Py<PyAny>,
        /// None where there was no such key.
        value: Option<Py<PyAny>>,
    },
    Keys {
        held: Py<PyDict>,
        keys: Vec<Py<PyAny>>,
    },
    Length {
        held: Py<PyAny>,
        length: isize,
    },
    Place {
        held: Py<PyList>,
        at: isize,
        value: Py<PyAny>,
    },
    Class {
        held: Py<PyAny>,
        class: Py<PyAny>,
    },
    Own {
        held: Py<PyAny>,
        dict: Py<PyDict>,
    },
    Attribute {
        held: Py<PyAny>,
        name: Py<PyString>,
        value: Py<PyAny>,
    },
    Absent {
        held: Py<PyAny>,
        name: Py<PyString>,
    },
    Equal {
        held: Py<PyAny>,
        copy: Py<PyAny>,
    },
    Tensor {
        held: Py<PyAny>,
        placement: Placement,
    },
}

/// The reads of one record.
#[pyclass(module = "precast")]
pub struct Watch {
    reads: Vec<Read>,
}

#[pymethods]
impl Watch {
    /// Takes reads as `(kind, object, place, value)`; `missing` is the value of a place that has none.
    #[new]
    fn new(reads: &Bound<'_, PyList>, missing: &Bound<'_, PyAny>) -> PyResult<Self> {
        let one = |read: Bound<'_, PyAny>| -> PyResult<Read> {
            let (kind, held, place, value): (
                String,
                Bound<'_, PyAny>,
                Bound<'_, PyAny>,
                Bound<'_, PyAny>,
            ) = read.extract()?;
            Ok(match kind.as_str() {
                "item" => Read::Item {
                    held: held.cast_into::<PyDict>()?.unbind(),
                    key: place.unbind(),
                    value: (!value.is(missing)).then(|| value.unbind()),
                },
                "keys" => Read::Keys {
                    held: held.cast_into::<PyDict>()?.unbind(),
                    keys: value.cast::<PyTuple>()?.iter().map(Bound::unbind).collect(),
                },
                "length" => Read::Length {
                    length: value.extract()?,
                    held: held.unbind(),
                },
                "place" => Read::Place {
                    held: held.cast_into::<PyList>()?.unbind(),
                    at: place.extract()?,
                    value: value.unbind(),
                },
                "class" => Read::Class {
                    held: held.unbind(),
                    class: value.unbind(),
                },
                "own" => Read::Own {
                    held: held.unbind(),
                    dict: value.cast_into::<PyDict>()?.unbind(),
                },
                "attribute" => Read::Attribute {
                    held: held.unbind(),
                    name: place.cast_into::<PyString>()?.unbind(),
                    value: value.unbind(),
                },
                "absent" => Read::Absent {
                    held: held.unbind(),
                    name: place.cast_into::<PyString>()?.unbind(),
                },
                "equal" => Read::Equal {
                    held: held.unbind(),
                    copy: value.unbind(),
                },
                "tensor" => Read::Tensor {
                    placement: torch(held.py())
                        .and_then(|torch| Some(torch.lend(&held)?.placement()))
                        .ok_or_else(|| {
                            PyValueError::new_err("tensors of this torch are not known")
                        })?,
                    held: held.unbind(),
                },
                other => return Err(PyValueError::new_err(format!("a read of the kind {other}"))),
            })
        };
        let reads = reads.iter().map(one).collect::<PyResult<_>>()?;
        Ok(Self { reads })
    }

    /// Returns the number of the first read that is no longer so, from `start` on; -1 if all are.
    #[pyo3(signature = (start = 0))]
    fn changed(&self, py: Python<'_>, start: usize) -> isize {
        let same = |read: &Read| read.same(py);
        let rest = self.reads.get(start..).unwrap_or_default();
        match rest.iter().position(|read| !same(read)) {
            Some(at) => isize::try_from(start + at).unwrap_or(isize::MAX),
            None => -1,
        }
    }

    /// Takes the placement that the tensor of a read has now.
    fn retake(&mut self, py: Python<'_>, at: usize) {
        if let Some(Read::Tensor { held, placement }) = self.reads.get_mut(at)
            && let Some(torch) = torch(py)
            && let Some(now) = torch.lend_again(held.bind(py))
        {
            *placement = now.placement();
        }
    }

    fn __len__(&self) -> usize {
        self.reads.len()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for read in &self.reads {
            match read {
                Read::Item { held, key, value } => {
                    visit.call(held)?;
                    visit.call(key)?;
                    visit.call(value)?;
                }
                Read::Keys { held, keys } => {
                    visit.call(held)?;
                    for key in keys {
                        visit.call(key)?;
                    }
                }
                Read::Place { held, value, .. } => {
                    visit.call(held)?;
                    visit.call(value)?;
                }
                Read::Class { held, class } => {
                    visit.call(held)?;
                    visit.call(class)?;
                }
                Read::Own { held, dict } => {
                    visit.call(held)?;
                    visit.call(dict)?;
                }
                Read::Attribute { held, value, .. } => {
                    visit.call(held)?;
                    visit.call(value)?;
                }
                Read::Equal { held, copy } => {
                    visit.call(held)?;
                    visit.call(copy)?;
                }
                Read::Length { held, .. }
                | Read::Absent { held, .. }
                | Read::Tensor { held, .. } => {
                    visit.call(held)?;
                }
            }
        }
        Ok(())
    }

    fn __clear__(&mut self) {
        self.reads.clear();
    }
}

impl Read {
    fn same(&self, py: Python<'_>) -> bool {
        match self {
            Self::Item { held, key, value } => {
                // SAFETY: a dictionary and a key that live, with the GIL; the reference is borrowed, and only compared.
                let found = unsafe { ffi::PyDict_GetItemWithError(held.as_ptr(), key.as_ptr()) };
                let expected = value.as_ref().map_or(ptr::null_mut(), Py::as_ptr);
                found == expected && (!found.is_null() || PyErr::take(py).is_none())
            }
            Self::Keys { held, keys } => {
                let (mut at, mut key) = (0, ptr::null_mut());
                let mut expected = keys.iter();
                // SAFETY: as above; nothing changes the dictionary meanwhile.
                while unsafe { ffi::PyDict_Next(held.as_ptr(), &mut at, &mut key, ptr::null_mut()) }
                    != 0
                {
                    let Some(expected) = expected.next() else {
                        return false;
                    };
                    if expected.as_ptr() != key {
                        // SAFETY: the dictionary holds the key.
                        let key = unsafe { Bound::from_borrowed_ptr(py, key) };
                        if !expected.bind(py).eq(key).unwrap_or(false) {
                            return false;
                        }
                    }
                }
                expected.next().is_none()
            }
            Self::Length { held, length } => {
                // SAFETY: an object that lives, with the GIL.
                let found = unsafe { ffi::PyObject_Size(held.as_ptr()) };
                found == *length || (found < 0 && PyErr::take(py).is_none())
            }
            Self::Place { held, at, value } => {
                // SAFETY: a list that lives; the reference is borrowed, and only compared.
                let found = unsafe { ffi::PyList_GetItem(held.as_ptr(), *at) };
                if found.is_null() {
                    drop(PyErr::take(py));
                }
                found == value.as_ptr()
            }
            Self::Class { held, class } => {
                // SAFETY: an object that lives.
                let found = unsafe { ffi::Py_TYPE(held.as_ptr()) };
                ptr::eq(found.cast(), class.as_ptr())
            }
            Self::Own { held, dict } => {
                // SAFETY: an object that lives and has a dictionary; a new reference, or null with an exception.
                let found = unsafe {
                    Bound::from_owned_ptr_or_opt(
                        py,
                        ffi::PyObject_GenericGetDict(held.as_ptr(), ptr::null_mut()),
                    )
                };
                if found.is_none() {
                    drop(PyErr::take(py));
                }
                found.is_some_and(|found| found.is(dict))
            }
            Self::Attribute { held, name, value } => {
                let Ok(found) = held.bind(py).getattr(name) else {
                    return false;
                };
                found.is(value)
                    || (plain(&found, value.bind(py)) && found.eq(value).unwrap_or(false))
            }
            Self::Absent { held, name } => !held.bind(py).hasattr(name).unwrap_or(true),
            Self::Equal { held, copy } => held.bind(py).eq(copy).unwrap_or(false),
            Self::Tensor { held, placement } => torch(py)
                .and_then(|torch| Some(torch.lend_again(held.bind(py))?.is_at(placement)))
                .unwrap_or(false),
        }
    }
}

/// Returns whether two values are of one class of numbers or text, for which `==` is enough.
fn plain(one: &Bound<'_, PyAny>, other: &Bound<'_, PyAny>) -> bool {
    use pyo3::types::{PyBool, PyFloat, PyInt};
    let class = one.get_type();
    class.is(other.get_type())
        && (one.is_exact_instance_of::<PyInt>()
            || one.is_exact_instance_of::<PyFloat>()
            || one.is_exact_instance_of::<PyBool>()
            || one.is_exact_instance_of::<PyString>())
}
