//! Eager's list of operator calls, which the shim runs (`shim/eager.cpp`).

use std::{
    ffi::{CString, c_void},
    ptr::{self, NonNull},
};

use precast_store::Device;
use smallvec::SmallVec;

use super::{
    Handle,
    abi::{RawGiven, RawItem, RawTensor},
    shim::{
        checked, precast_calls_add, precast_calls_add_cond, precast_calls_delete,
        precast_calls_finish, precast_calls_new, precast_calls_run,
    },
};
use crate::TorchError;

/// One value of an argument: fixed, or the number of an earlier one.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    None,
    Value(i64),
    Bool(bool),
    Int(i64),
    Float(f64),
    Complex(f64, f64),
    Text(String),
    /// By the number in torch's export schema, as the next two.
    ScalarType(i64),
    Layout(i64),
    MemoryFormat(i64),
    /// As `cpu` or `cuda:0`.
    Device(String),
}

/// An argument of a call, with its name in the operator's schema.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    pub name: String,
    pub is_list: bool,
    pub items: Vec<Item>,
}

/// The use of one result of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Kept {
    /// A value; none if nothing reads it.
    One(Option<i64>),
    /// A list. Each of its values has a number.
    List(Vec<Option<i64>>),
}

/// A list of calls under construction.
pub struct Builder(NonNull<c_void>);

/// A whole list of calls.
pub struct Calls(Builder);

// SAFETY: it is the shim's own class, with no thread affinity; a run changes nothing in it (`Graph::run` is const).
unsafe impl Send for Calls {}

impl Builder {
    /// Begins a graph with so many inputs, for a device.
    pub fn new(device: Device, inputs: usize) -> Result<Self, TorchError> {
        let device = CString::new(device.to_string())?;
        let mut raw = ptr::null_mut();
        // SAFETY: a C string and a valid out pointer.
        checked(unsafe { precast_calls_new(device.as_ptr(), inputs, &mut raw) })?;
        Ok(Self(NonNull::new(raw).ok_or("no graph was made")?))
    }

    /// Adds a call of `operator`, as `aten::add.Tensor` or `number::add`.
    pub fn add(
        &mut self,
        operator: &str,
        given: &[Given],
        kept: &[Kept],
    ) -> Result<(), TorchError> {
        let (name, overload) = operator.split_once('.').unwrap_or((operator, ""));
        let (name, overload) = (CString::new(name)?, CString::new(overload)?);
        let (flat, results) = (FlatGiven::all(given)?, numbers(kept)?);
        let raw: Vec<RawGiven> = flat.iter().map(FlatGiven::raw).collect();
        // SAFETY: `self.0` is a graph of the shim; everything pointed to outlives the call, which copies it.
        checked(unsafe {
            precast_calls_add(
                self.0.as_ptr(),
                name.as_ptr(),
                overload.as_ptr(),
                raw.as_ptr(),
                raw.len(),
                results.as_ptr(),
                results.len(),
            )
        })
    }

    /// Adds a choice between two graphs by the first argument. The other arguments are the inputs of the chosen graph.
    pub fn add_cond(
        &mut self,
        [yes, no]: [Calls; 2],
        given: &[Given],
        kept: &[Kept],
    ) -> Result<(), TorchError> {
        let (flat, results) = (FlatGiven::all(given)?, numbers(kept)?);
        let raw: Vec<RawGiven> = flat.iter().map(FlatGiven::raw).collect();
        // SAFETY: as for `add`; the shim takes both graphs, also when it fails.
        checked(unsafe {
            precast_calls_add_cond(
                self.0.as_ptr(),
                yes.into_raw(),
                no.into_raw(),
                raw.as_ptr(),
                raw.len(),
                results.as_ptr(),
                results.len(),
            )
        })
    }

    /// Ends it with the values that it returns.
    pub fn finish(self, outputs: &[i64]) -> Result<Calls, TorchError> {
        // SAFETY: as for `add`.
        checked(unsafe { precast_calls_finish(self.0.as_ptr(), outputs.as_ptr(), outputs.len()) })?;
        Ok(Calls(self))
    }
}

impl Drop for Builder {
    fn drop(&mut self) {
        // SAFETY: `self` owns it.
        unsafe { precast_calls_delete(self.0.as_ptr()) }
    }
}

impl Calls {
    /// Runs the calls and returns `outputs` tensors. The inputs still belong to the caller.
    pub fn invoke(
        &mut self,
        inputs: &[&Handle],
        outputs: usize,
    ) -> Result<SmallVec<[Handle; 8]>, TorchError> {
        let raw: SmallVec<[RawTensor; 32]> = inputs.iter().map(|input| input.raw()).collect();
        let mut made: SmallVec<[RawTensor; 8]> = SmallVec::from_elem(ptr::null_mut(), outputs);
        // SAFETY: a graph of the shim. It borrows the inputs, and writes a new handle to every output, or to the first
        // of them before it fails.
        let result = checked(unsafe {
            precast_calls_run(
                self.0.0.as_ptr(),
                raw.as_ptr(),
                raw.len(),
                made.as_mut_ptr(),
                made.len(),
            )
        });
        // SAFETY: a new handle of the shim's, or null, which is no handle.
        let made = made.into_iter().map(|raw| unsafe { Handle::from_raw(raw) });
        let made: SmallVec<[Option<Handle>; 8]> = made.collect();
        result?;
        made.into_iter()
            .collect::<Option<_>>()
            .ok_or_else(|| "an output was not written".into())
    }

    fn into_raw(self) -> *mut c_void {
        std::mem::ManuallyDrop::new(self.0).0.as_ptr()
    }
}

/// An argument's parts, held while the shim reads them.
struct FlatGiven {
    name: CString,
    is_list: bool,
    items: Vec<RawItem>,
    // `items` points to these.
    _texts: Vec<CString>,
}

impl FlatGiven {
    fn all(given: &[Given]) -> Result<Vec<Self>, TorchError> {
        given.iter().map(Self::new).collect()
    }

    fn new(given: &Given) -> Result<Self, TorchError> {
        let (mut items, mut texts) = (Vec::new(), Vec::new());
        for item in &given.items {
            // The numbers are those of `Kind` in arguments.h.
            let (kind, integer, number, words) = match item {
                Item::None => (0, 0, 0.0, None),
                Item::Int(value) => (4, *value, 0.0, None),
                Item::Float(value) => (6, 0, *value, None),
                Item::Bool(value) => (8, i64::from(*value), 0.0, None),
                Item::Text(value) => (10, 0, 0.0, Some(CString::new(value.as_str())?)),
                Item::ScalarType(number) => (11, *number, 0.0, None),
                Item::Layout(number) => (12, *number, 0.0, None),
                Item::MemoryFormat(number) => (13, *number, 0.0, None),
                Item::Device(name) => (14, 0, 0.0, Some(CString::new(name.as_str())?)),
                Item::Complex(real, imaginary) => {
                    (15, 0, *real, Some(CString::new(imaginary.to_string())?))
                }
                Item::Value(number) => (16, *number, 0.0, None),
            };
            items.push(RawItem {
                kind,
                integer,
                number,
                text: words.as_ref().map_or(ptr::null(), |words| words.as_ptr()),
            });
            texts.extend(words);
        }
        Ok(Self {
            name: CString::new(&*given.name)?,
            is_list: given.is_list,
            items,
            _texts: texts,
        })
    }

    fn raw(&self) -> RawGiven {
        RawGiven {
            name: self.name.as_ptr(),
            is_list: i32::from(self.is_list),
            items: self.items.as_ptr(),
            n: self.items.len(),
        }
    }
}

/// Returns results as the shim takes them: a number, -1 for none, -2 - n and n of these for a list.
fn numbers(kept: &[Kept]) -> Result<Vec<i64>, TorchError> {
    let one = |number: &Option<i64>| number.unwrap_or(-1);
    let mut numbers = Vec::new();
    for result in kept {
        match result {
            Kept::One(number) => numbers.push(one(number)),
            Kept::List(list) => {
                let n = i64::try_from(list.len())?;
                numbers.push(-2 - n);
                numbers.extend(list.iter().map(one));
            }
        }
    }
    Ok(numbers)
}
