//! The native check of a call: that nothing which a record depends on was changed.
//!
//! A list of reads, made by `precast/record/watch.py`, which says what each kind compares. Nearly all compare pointers of
//! entries of dictionaries. The list is in the order of the reads, so that those of one dictionary are side by side.
//!
//! Python 3.12 says when a dictionary changes. Then reads of dictionaries are compared again only after a change of one
//! that is watched, and a call compares the others: classes, functions, lists and tensors. For a BERT these are 900 of
//! 3,100 reads, and a fifth of the time. Python 3.13 does not tell of attributes of objects: what is told is tried once.

#![allow(unsafe_code)]

use std::{
    collections::HashSet,
    ffi::{CStr, c_int, c_void},
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use precast_runtime::dlpack::Placement;
use pyo3::{
    PyTraverseError, PyVisit,
    exceptions::PyValueError,
    ffi,
    prelude::*,
    types::{PyDict, PyFunction, PyList, PyString, PyTuple},
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
    /// The code or the defaults of a function.
    Function {
        held: Py<PyAny>,
        read: FunctionRead,
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

/// A function of CPython that reads an attribute of a function: a borrowed reference, or null for none.
type FunctionRead = unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject;

/// The reads of one record.
#[pyclass(module = "precast")]
pub struct Watch {
    reads: Vec<Read>,
    /// The numbers of those that no dictionary tells of.
    others: Vec<usize>,
    /// The number of changes of dictionaries when all reads were last so. None where Python does not tell.
    seen: Option<AtomicU64>,
}

/// Changes of watched dictionaries so far, of all of them.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// Where Python tells of changes of dictionaries: the number of this library's listener, and how it is given one.
struct Listener {
    id: c_int,
    /// Whether it is told of the attributes of objects too.
    of_objects: bool,
    listen: unsafe extern "C" fn(c_int, *mut ffi::PyObject) -> c_int,
}

impl Listener {
    /// Returns the listener of this process; none before Python 3.12.
    fn get(py: Python<'_>) -> Option<&'static Self> {
        type Told = unsafe extern "C" fn(
            c_int,
            *mut ffi::PyObject,
            *mut ffi::PyObject,
            *mut ffi::PyObject,
        ) -> c_int;
        unsafe extern "C" fn told(
            _: c_int,
            _: *mut ffi::PyObject,
            _: *mut ffi::PyObject,
            _: *mut ffi::PyObject,
        ) -> c_int {
            CHANGES.fetch_add(1, Ordering::Relaxed);
            0
        }
        static LISTENER: OnceLock<Option<Listener>> = OnceLock::new();
        let made = || {
            let (add, listen) = (symbol(c"PyDict_AddWatcher")?, symbol(c"PyDict_Watch")?);
            // SAFETY: both are of CPython's C API, with these signatures since 3.12.
            let add: unsafe extern "C" fn(Told) -> c_int = unsafe { std::mem::transmute(add) };
            // SAFETY: as above.
            let listen = unsafe {
                std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, *mut ffi::PyObject) -> c_int,
                >(listen)
            };
            // SAFETY: with the GIL; the function lives as long as the process.
            let id = unsafe { add(told) };
            if id < 0 {
                // All of them are in use.
                // SAFETY: with the GIL.
                unsafe { ffi::PyErr_Clear() };
                return None;
            }
            let mut listener = Self {
                id,
                of_objects: false,
                listen,
            };
            let [objects, tables] = listener.tells(py).unwrap_or_default();
            listener.of_objects = objects;
            tables.then_some(listener)
        };
        LISTENER.get_or_init(made).as_ref()
    }

    /// Returns whether Python tells of every change of the attributes of an object, and of the variables of a module, also
    /// by code that it has specialised.
    fn tells(&self, py: Python<'_>) -> PyResult<[bool; 2]> {
        const COUNT: u64 = 600;
        let code = c"
class One:
    x = 0

def of_object(count):
    for at in range(1, count + 1):
        one.x = at

def of_module(count):
    global x
    for at in range(1, count + 1):
        x = at

one = One()
one.x = x = 0
";
        let scope = PyDict::new(py);
        py.run(code, Some(&scope), None)?;
        let item = |name: &str| scope.as_any().get_item(name);
        let told = |table: &Bound<'_, PyAny>, change: &str| -> PyResult<bool> {
            let before = CHANGES.load(Ordering::Relaxed);
            let listens = self.listen(table);
            item(change)?.call1((COUNT,))?;
            Ok(listens && CHANGES.load(Ordering::Relaxed) - before >= COUNT)
        };
        Ok([
            told(&item("one")?.getattr("__dict__")?, "of_object")?,
            told(scope.as_any(), "of_module")?,
        ])
    }

    /// Has Python tell of changes of a dictionary, as long as it lives.
    fn listen(&self, dict: &Bound<'_, PyAny>) -> bool {
        // SAFETY: a dictionary that lives, with the GIL.
        let code = unsafe { (self.listen)(self.id, dict.as_ptr()) };
        if code < 0 {
            drop(PyErr::take(dict.py()));
        }
        code >= 0
    }
}

/// Returns a function of this process's Python, which the stable ABI lacks.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a lookup among what the process has loaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
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
                "attribute" => match function_read(&held, &place) {
                    Some(read) => Read::Function {
                        held: held.unbind(),
                        read,
                        value: value.unbind(),
                    },
                    None => Read::Attribute {
                        held: held.unbind(),
                        name: place.cast_into::<PyString>()?.unbind(),
                        value: value.unbind(),
                    },
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
        let py = reads.py();
        // Before the reads are compared for the first time.
        let seen = CHANGES.load(Ordering::Relaxed);
        let reads = reads.iter().map(one).collect::<PyResult<Vec<_>>>()?;
        let listener = Listener::get(py);
        let of_objects = reads.iter().filter_map(|read| match read {
            Read::Own { dict, .. } => Some(dict.as_ptr()),
            _ => None,
        });
        let of_objects: HashSet<_> = of_objects.collect();
        let told = |read: &Read| {
            let (Some(dict), Some(listener)) = (read.dict(py), listener) else {
                return false;
            };
            (listener.of_objects || !of_objects.contains(&dict.as_ptr())) && listener.listen(&dict)
        };
        let others = reads.iter().enumerate().filter(|(_, read)| !told(read));
        let others = others.map(|(at, _)| at).collect();
        let seen = listener.map(|_| AtomicU64::new(seen.wrapping_sub(1)));
        Ok(Self {
            reads,
            others,
            seen,
        })
    }

    /// Returns the number of the first read that is no longer so, from `start` on; -1 if all are.
    #[pyo3(signature = (start = 0))]
    fn changed(&self, py: Python<'_>, start: usize) -> isize {
        let changed = |at: &usize| !self.reads[*at].same(py);
        let number =
            |at: Option<usize>| at.map_or(-1, |at| isize::try_from(at).unwrap_or(isize::MAX));
        let now = CHANGES.load(Ordering::Relaxed);
        let same = |seen: &AtomicU64| seen.load(Ordering::Relaxed) == now;
        if start == 0 && self.seen.as_ref().is_some_and(same) {
            return number(self.others.iter().copied().find(changed));
        }
        let found = (start..self.reads.len()).find(changed);
        if let (0, None, Some(seen)) = (start, found, &self.seen) {
            seen.store(now, Ordering::Relaxed);
        }
        number(found)
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
                Read::Function { held, value, .. } => {
                    visit.call(held)?;
                    visit.call(value)?;
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
        self.others.clear();
    }
}

/// Returns how an attribute of a function is read quickly: by the C API, where it has a function for it.
fn function_read(held: &Bound<'_, PyAny>, name: &Bound<'_, PyAny>) -> Option<FunctionRead> {
    if !held.is_exact_instance_of::<PyFunction>() {
        return None;
    }
    let name = match name.extract::<&str>().ok()? {
        "__code__" => c"PyFunction_GetCode",
        "__defaults__" => c"PyFunction_GetDefaults",
        "__kwdefaults__" => c"PyFunction_GetKwDefaults",
        _ => return None,
    };
    // SAFETY: these functions of CPython's C API have this signature.
    symbol(name).map(|found| unsafe { std::mem::transmute::<*mut c_void, FunctionRead>(found) })
}

impl Read {
    /// Returns the dictionary whose changes tell of this read.
    fn dict<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Item { held, .. } | Self::Keys { held, .. } => {
                Some(held.bind(py).clone().into_any())
            }
            Self::Length { held, .. } => {
                let held = held.bind(py);
                held.is_instance_of::<PyDict>().then(|| held.clone())
            }
            _ => None,
        }
    }

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
            Self::Function { held, read, value } => {
                // SAFETY: a function that lives, with the GIL; the reference is borrowed, and only compared.
                let found = unsafe { read(held.as_ptr()) };
                found == value.as_ptr() || (found.is_null() && value.is_none(py))
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
