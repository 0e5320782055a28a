//! CUDA streams of the caller, on which calls run.
#![allow(unsafe_code, reason = "takes a stream of the caller")]

use std::ffi::c_void;

use precast_runtime::{
    Device,
    cuda::{Scope, Stream},
};

use crate::error::{Code, Failure};

/// A stream of the caller, or none: the default stream of the device.
pub struct OwnStream(Option<Stream>);

impl OwnStream {
    /// Wraps a `cudaStream_t` of a device; null is the default stream.
    ///
    /// # Safety
    /// `raw` is null, or a stream of this device that is not destroyed before the result, and everything that ran on
    /// it, are dropped.
    pub unsafe fn new(raw: *mut c_void, device: Device) -> Result<Self, Failure> {
        if raw.is_null() {
            return Ok(Self(None));
        }
        let Device::Cuda(ordinal) = device else {
            let problem = "is not NULL, and the call is on the CPU";
            return Err(Failure::argument("stream", problem));
        };
        // SAFETY: as this function requires.
        let stream = unsafe { Stream::from_raw(raw, ordinal) };
        let stream =
            stream.map_err(|error| Failure::new(Code::CallFailed, error.to_string(), ""))?;
        Ok(Self(Some(stream)))
    }

    /// Makes it the stream of this thread, until the scope is dropped.
    pub fn enter(&self) -> Result<Option<Scope<'_>>, Failure> {
        let entered = self.0.as_ref().map(Stream::enter).transpose();
        entered.map_err(|error| Failure::new(Code::CallFailed, error.to_string(), ""))
    }
}
