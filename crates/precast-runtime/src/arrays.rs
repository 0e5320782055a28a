//! Inputs and outputs as plain memory with a shape, for callers without tensors.
//!
//! [`Value`] is an input, [`Array`] an output. Both are copies, so that a call and its caller share no memory. Tensors
//! on the device of the model are not copied. With the feature `ndarray` a `Value` can be created from an array or a
//! view, and an `Array` converted to an array.

use precast_store::{
    Device,
    record::{Dtype, Layout, Pad},
};

use super::{Element, Outputs, RuntimeError, Tensor, TorchError, ffi::TensorRef, pad, threads};

/// An input of [`Model::run`](super::Model::run): a [`Tensor`], a [`Value`], or a reference to one; with the feature
/// `tch` a `tch::Tensor` as well.
pub trait Argument: sealed::Input {}

/// An input of a call: a copy of plain memory with a shape, in the host's memory.
///
/// A model on a CUDA device also accepts it and copies it to the device. Of several devices it goes to the one with the
/// fewest running calls.
///
/// ```
/// use precast_runtime::{RuntimeError, Value};
/// # let torch = std::env::var_os("LIBTORCH").map(std::path::PathBuf::from);
/// # precast_runtime::Runtime::libtorch(torch.as_deref(), false)?;
///
/// let ids = Value::new(&[101_i64, 7592, 102, 101, 2088, 102], &[2, 3])?;
/// assert_eq!((ids.dtype().name(), ids.shape()), ("int64", vec![2, 3]));
///
/// let error = Value::new(&[1.0_f32; 5], &[2, 3]).unwrap_err();
/// assert_eq!(error.to_string(), "an array of shape [2, 3] has 6 elements, got 5");
/// # Ok::<(), RuntimeError>(())
/// ```
#[derive(Debug)]
pub struct Value(Tensor);

impl Value {
    /// Returns the same memory.
    pub(super) fn share(&self) -> Self {
        Self(self.0.share())
    }

    /// Copies `data`, which has the elements of an array of `shape` with the last axis moving fastest.
    ///
    /// Fails with [`RuntimeError::Shape`] when there are more or fewer of them, and with [`RuntimeError::Array`] when
    /// there is no memory for the copy.
    pub fn new<T: Element>(data: &[T], shape: &[usize]) -> Result<Self, RuntimeError> {
        let elements = |n: usize, &size: &usize| n.checked_mul(size);
        let needed = shape.iter().try_fold(1, elements);
        let sizes: Result<Vec<i64>, _> = shape.iter().map(|&size| i64::try_from(size)).collect();
        match (needed, sizes) {
            (Some(needed), Ok(sizes)) if needed == data.len() => {
                let made = Tensor::from_slice(data, &sizes);
                made.map(Self).map_err(refused)
            }
            _ => Err(RuntimeError::Shape {
                shape: shape.to_vec(),
                needed,
                got: data.len(),
            }),
        }
    }

    /// Returns an array of a layout with one value everywhere.
    pub(super) fn filled(layout: &Layout, value: Pad) -> Result<Self, RuntimeError> {
        let filled = pad::filled(layout, value).map(Tensor);
        filled.map(Self).map_err(refused)
    }

    /// Returns rows of the first axis, in the same memory.
    pub(super) fn rows(&self, start: usize, count: usize) -> Result<Self, RuntimeError> {
        let rows = self.0.narrow(0, start as i64, count as i64);
        rows.map(Self).map_err(refused)
    }

    /// Returns the dtype of its elements.
    pub fn dtype(&self) -> Dtype {
        // Every element has one.
        self.0.dtype().unwrap_or(Dtype::Uint8)
    }

    /// Returns its sizes.
    pub fn shape(&self) -> Vec<usize> {
        shape_of(&self.0)
    }
}

/// Copies a tensor, from any device.
impl TryFrom<&Tensor> for Value {
    type Error = RuntimeError;

    fn try_from(tensor: &Tensor) -> Result<Self, RuntimeError> {
        let host = tensor.to_device(Device::Cpu);
        host.and_then(|host| host.contiguous())
            .map(Self)
            .map_err(refused)
    }
}

/// An output of a call: plain memory with a shape, the last axis moving fastest.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    shape: Vec<usize>,
    data: Vec<T>,
}

impl<T: Element> Array<T> {
    /// Returns its sizes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns its elements.
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// Returns its elements, without a copy.
    pub fn into_data(self) -> Vec<T> {
        self.data
    }

    /// Copies a tensor, from wherever it is.
    fn of(tensor: &Tensor) -> Result<Self, RuntimeError> {
        // A large one is copied in parallel.
        threads::find(Device::Cpu)?;
        let data = tensor.to_vec().map_err(refused)?;
        let shape = shape_of(tensor);
        Ok(Self { shape, data })
    }
}

impl Outputs {
    /// Copies an output into the host's memory; `output` counts from 0 in the module's order.
    ///
    /// On CUDA it waits for the output. Fails with [`RuntimeError::NoOutput`] when there are fewer outputs, with
    /// [`RuntimeError::OutputDtype`] when it has other elements, with the errors of [`Self::check`], and with
    /// [`RuntimeError::Array`] when libtorch can't copy it.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
    /// # use precast_runtime::{Device, Runtime, Store, Value};
    /// # use precast_store::record::Dtype;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
    /// let out = model.run("double", &[Value::new(&[1.0_f32, 2.0, 3.0], &[1, 3])?])?;
    /// assert_eq!(out.array::<f32>(0)?.data(), [2.0, 4.0, 6.0]);
    /// assert_eq!(out.array_named::<f32>("sum")?.shape(), [1]);
    ///
    /// let error = out.array::<i64>(0).unwrap_err();
    /// assert_eq!(error.to_string(), "output `y` of module `double` is float32, not int64");
    /// # Ok(()) }
    /// ```
    pub fn array<T: Element>(&self, output: usize) -> Result<Array<T>, RuntimeError> {
        let program = self.served().program();
        let (Some(tensor), Some(record)) = (self.get(output), program.outputs.get(output)) else {
            return Err(self.no_output(output.to_string()));
        };
        match tensor.dtype() {
            Some(dtype) if dtype == T::DTYPE => self.check().and_then(|()| Array::of(tensor)),
            _ => Err(RuntimeError::OutputDtype {
                module: program.module.as_str().into(),
                output: record.name.clone(),
                asked: T::DTYPE,
                got: record.layout.dtype,
            }),
        }
    }

    /// Copies the output of this name into the host's memory, as [`Self::array`] does.
    pub fn array_named<T: Element>(&self, output: &str) -> Result<Array<T>, RuntimeError> {
        let mut names = self.served().program().outputs.iter();
        match names.position(|known| known.name == output) {
            Some(index) => self.array(index),
            None => Err(self.no_output(format!("`{output}`"))),
        }
    }

    fn no_output(&self, output: String) -> RuntimeError {
        let program = self.served().program();
        let known = program.outputs.iter().map(|output| output.name.clone());
        RuntimeError::NoOutput {
            module: program.module.as_str().into(),
            output,
            known: known.collect(),
        }
    }
}

fn shape_of(tensor: &Tensor) -> Vec<usize> {
    let sizes = tensor.shape().into_iter();
    sizes.map(|size| size.unsigned_abs() as usize).collect()
}

/// Returns the error of a tensor that libtorch did not make or read.
pub(super) fn refused(reason: TorchError) -> RuntimeError {
    RuntimeError::Array { reason }
}

mod sealed {
    use super::TensorRef;

    /// The inputs of calls.
    pub trait Input {
        fn tensor(&self) -> TensorRef<'_>;
        /// Returns whether the runtime copies it to the device, even with `Inputs::AsGiven`.
        fn is_plain(&self) -> bool;
    }
}

impl Argument for Tensor {}
impl sealed::Input for Tensor {
    fn tensor(&self) -> TensorRef<'_> {
        self.into()
    }

    fn is_plain(&self) -> bool {
        false
    }
}

#[cfg(feature = "tch")]
impl Argument for tch::Tensor {}
#[cfg(feature = "tch")]
impl sealed::Input for tch::Tensor {
    fn tensor(&self) -> TensorRef<'_> {
        self.into()
    }

    fn is_plain(&self) -> bool {
        false
    }
}

impl Argument for Value {}
impl sealed::Input for Value {
    fn tensor(&self) -> TensorRef<'_> {
        (&self.0).into()
    }

    fn is_plain(&self) -> bool {
        true
    }
}

impl<A: Argument> Argument for &A {}
impl<A: Argument> sealed::Input for &A {
    fn tensor(&self) -> TensorRef<'_> {
        (**self).tensor()
    }

    fn is_plain(&self) -> bool {
        (**self).is_plain()
    }
}

pub(super) fn is_plain(argument: &impl Argument) -> bool {
    sealed::Input::is_plain(argument)
}

pub(super) fn tensor(argument: &impl Argument) -> TensorRef<'_> {
    sealed::Input::tensor(argument)
}

/// Returns an argument as a value, in the same memory.
pub(super) fn value(argument: &impl Argument) -> Value {
    Value(Tensor(tensor(argument).own()))
}

#[cfg(feature = "ndarray")]
mod with_ndarray {
    use ndarray::{ArrayBase, ArrayD, Data, Dimension, IxDyn};

    use super::{Array, Element, RuntimeError, Value};

    /// Copies an array or a view with any strides.
    impl<T: Element, S: Data<Elem = T>, D: Dimension> TryFrom<&ArrayBase<S, D>> for Value {
        type Error = RuntimeError;

        fn try_from(array: &ArrayBase<S, D>) -> Result<Self, RuntimeError> {
            match array.as_slice() {
                Some(data) => Self::new(data, array.shape()),
                None => Self::new(&array.iter().copied().collect::<Vec<T>>(), array.shape()),
            }
        }
    }

    impl<T: Element> From<Array<T>> for ArrayD<T> {
        fn from(array: Array<T>) -> Self {
            Self::from_shape_vec(IxDyn(&array.shape), array.data)
                .expect("an array has as many elements as its shape says")
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn round<T: Element + PartialEq + std::fmt::Debug>(data: [T; 6]) {
        let value = Value::new(&data, &[2, 3]).unwrap();
        assert_eq!(value.dtype(), T::DTYPE);
        let back = Array::<T>::of(&value.0).unwrap();
        assert_eq!((back.shape(), back.data()), (&[2, 3][..], &data[..]));
        // The elements of a view with other strides are in the order of its axes.
        let turned = Array::<T>::of(&value.0.transpose(0, 1).unwrap()).unwrap();
        assert_eq!(turned.shape(), [3, 2]);
        assert_eq!(turned.data()[..2], [data[0], data[3]]);
    }

    #[test]
    fn every_element_goes_in_and_comes_out() {
        round([1.5f32, -0.0, f32::INFINITY, 3.25, 1e-40, f32::MAX]);
        round([1.5f64, -0.0, 1e300, 3.25, 5e-324, f64::MIN]);
        round([1.5, -2.0, 65504.0, 3.25, 6e-8, 0.0].map(f16::from_f32));
        round([1.5, -2.0, 3e38, 3.25, 1e-40, 0.0].map(bf16::from_f32));
        round([i64::MIN, -1, 0, 1, 2, i64::MAX]);
        round([i32::MIN, -1, 0, 1, 2, i32::MAX]);
        round([i16::MIN, -1, 0, 1, 2, i16::MAX]);
        round([i8::MIN, -1, 0, 1, 2, i8::MAX]);
        round([0u8, 1, 2, 127, 128, 255]);
        round([true, false, true, true, false, false]);
    }

    #[test]
    fn a_value_of_a_tensor_has_memory_of_its_own() {
        let mut table = Tensor::from_slice(&[1i32, 2, 3, 4], &[2, 2]).unwrap();
        let value = Value::try_from(&table.transpose(0, 1).unwrap()).unwrap();
        table.zero().unwrap();
        assert_eq!(Array::<i32>::of(&value.0).unwrap().data(), [1, 3, 2, 4]);
    }

    #[test]
    fn a_bool_that_is_no_rust_bool_is_true() {
        let bools = Tensor::from_bytes(&[0, 1, 2, 255], &[4], Dtype::Bool).unwrap();
        let read = Array::<bool>::of(&bools).unwrap();
        assert_eq!(read.data(), [false, true, true, true]);
    }

    #[test]
    fn what_libtorch_says_comes_without_its_stack() {
        let error = Tensor::empty(&[1 << 50], Dtype::Int64, Device::Cpu).unwrap_err();
        let reason = refused(error).to_string();
        assert!(reason.contains("memory"), "{reason}");
        assert_eq!(reason.lines().count(), 1, "{reason}");
    }

    #[test]
    fn any_shape_of_as_many_elements_is_taken() {
        assert_eq!(Value::new(&[1.0f32], &[]).unwrap().shape(), [0usize; 0]);
        assert_eq!(Value::new::<f32>(&[], &[0, 3]).unwrap().shape(), [0, 3]);
        let shapes: [&[usize]; 4] = [&[], &[3], &[1, 1, 3], &[usize::MAX, usize::MAX]];
        for shape in shapes {
            let error = Value::new(&[1.0f32, 2.0], shape).unwrap_err();
            let shape = matches!(error, RuntimeError::Shape { got: 2, .. });
            assert!(shape, "{error}");
        }
        let error = Value::new(&[1.0f32], &[1 << 40, 1 << 40]).unwrap_err();
        insta::assert_snapshot!(error.to_string(), @"an array of shape [1099511627776, 1099511627776] has too many elements for any memory, got 1");
    }
}
