//! A tensor and the memory that it views.

use std::{ops::Range, sync::Arc};

use precast_store::{Device, Mapped, record::Dtype};

use super::Handle;
use crate::TorchError;

/// A bound tensor. It is dropped before the memory it views.
pub struct Weight {
    handle: Handle,
    /// The mapped memory, and the tensor's part of it.
    memory: Option<(Mapped, Range<usize>)>,
    /// Tensors whose memory it may view.
    _viewed: Vec<Arc<Weight>>,
}

impl Weight {
    /// Creates a tensor over a part of mapped memory, which stays mapped as long as the weight lives.
    ///
    /// Fails when the range does not hold exactly such a tensor or starts where the dtype can't.
    pub fn over(
        memory: &Mapped,
        range: Range<usize>,
        shape: &[i64],
        stride: &[i64],
        dtype: Dtype,
    ) -> Result<Self, TorchError> {
        let elements = shape
            .iter()
            .try_fold(1i64, |n, &size| n.checked_mul(size))
            .and_then(|n| usize::try_from(n).ok());
        let expected = elements.and_then(|n| n.checked_mul(dtype.size()));
        let part = memory
            .get(range.clone())
            .ok_or("it reaches past the end of the object")?;
        if expected != Some(part.len()) {
            let bytes = part.len();
            return Err(format!("{dtype} {shape:?} does not take {bytes} bytes").into());
        }
        if !(part.as_ptr() as usize).is_multiple_of(dtype.size()) {
            let start = range.start;
            return Err(format!("it starts at byte {start}, where no {dtype} can").into());
        }
        // SAFETY: the range lies in the map and has the tensor's size (checked above; strides are those of a dense
        // tensor of this shape); the map is read-only, immutable, and held for as long as the handle.
        let handle = unsafe { Handle::over(part.as_ptr(), shape, stride, dtype, Device::Cpu) }?;
        Ok(Self {
            handle,
            memory: Some((memory.clone(), range)),
            _viewed: Vec::new(),
        })
    }

    /// Creates a tensor in oneDNN's order over the first `bytes` of mapped memory.
    ///
    /// # Safety
    /// These bytes are those of a tensor of this shape, dtype and description.
    pub(super) unsafe fn over_opaque(
        memory: &Mapped,
        bytes: usize,
        shape: &[i64],
        dtype: Dtype,
        description: &[u8],
    ) -> Result<Self, TorchError> {
        let part = memory.get(..bytes).ok_or("the file is too short")?;
        // SAFETY: the caller guarantees the content; the map is read-only, immutable, and held for as long as the
        // handle.
        let handle = unsafe { Handle::over_opaque(part.as_ptr(), shape, dtype, description) }?;
        Ok(Self {
            handle,
            memory: Some((memory.clone(), 0..bytes)),
            _viewed: Vec::new(),
        })
    }

    /// Returns its part of the mapped memory; none for other memory.
    pub fn range(&self) -> Option<Range<usize>> {
        let memory = self.memory.as_ref();
        memory.map(|(_, range)| range.clone())
    }

    /// Gives back the memory of a mapped tensor's pages. A later access reads them again.
    pub fn release(&self) {
        if let Some((memory, range)) = &self.memory {
            memory.release(range.clone());
        }
    }

    /// Wraps a tensor that owns its memory.
    pub fn owned(handle: Handle) -> Self {
        Self::derived(handle, Vec::new())
    }

    /// Wraps a tensor that owns its memory or is a view of `viewed`.
    pub fn derived(handle: Handle, viewed: Vec<Arc<Weight>>) -> Self {
        Self {
            handle,
            memory: None,
            _viewed: viewed,
        }
    }

    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}
