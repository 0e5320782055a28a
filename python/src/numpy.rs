//! NumPy's class and functions, looked up once: a look-up takes as long as the conversion itself.

use pyo3::{
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyModule, PyType},
};

use crate::exchange;

pub struct Numpy {
    array: Py<PyType>,
    /// `numpy.ndarray.__dlpack__`.
    dlpack: Py<PyAny>,
    from_dlpack: Py<PyAny>,
}

static NUMPY: PyOnceLock<Numpy> = PyOnceLock::new();

impl Numpy {
    /// Returns NumPy, if the process has imported it.
    pub fn imported(py: Python<'_>) -> Option<&Self> {
        NUMPY
            .get(py)
            .or_else(|| Self::of(&exchange::imported(intern!(py, "numpy"))?).ok())
    }

    /// Returns NumPy, imported now if need be.
    pub fn get(py: Python<'_>) -> PyResult<&Self> {
        match NUMPY.get(py) {
            Some(numpy) => Ok(numpy),
            None => Self::of(&py.import(intern!(py, "numpy"))?),
        }
    }

    fn of<'py>(module: &Bound<'py, PyModule>) -> PyResult<&'py Self> {
        let py = module.py();
        NUMPY.get_or_try_init(py, || {
            let array = module.getattr(intern!(py, "ndarray"))?;
            Ok(Self {
                dlpack: array.getattr(intern!(py, "__dlpack__"))?.unbind(),
                array: array.cast_into::<PyType>()?.unbind(),
                from_dlpack: module.getattr(intern!(py, "from_dlpack"))?.unbind(),
            })
        })
    }

    /// Returns whether an object is an array, and none of a class derived from it.
    pub fn is_array(&self, object: &Bound<'_, PyAny>) -> bool {
        object.is_exact_instance(self.array.bind(object.py()))
    }

    /// Returns the capsule of an array, of DLPack before 1.0: a call without names is shorter.
    pub fn capsule<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.dlpack.bind(array.py()).call1((array,))
    }

    /// Returns an array over the memory of an object with `__dlpack__`.
    pub fn over(&self, object: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.from_dlpack.call1(object.py(), (object,))
    }
}
