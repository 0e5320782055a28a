//! Uploads a file to a device block through a ring of pinned buffers that a few threads fill; see `upload.h`.

use std::{io, ops::Range, os::fd::AsRawFd, sync::LazyLock, thread::available_parallelism};

use precast_store::{Device, Mapped, record::Dtype};

use super::{
    Handle,
    cuda::{Piece, cuda, ordinal},
};
use crate::TorchError;

/// The reason that an upload failed.
pub enum UploadError {
    File(io::Error),
    Device(TorchError),
}

impl<E: Into<TorchError>> From<E> for UploadError {
    fn from(reason: E) -> Self {
        Self::Device(reason.into())
    }
}

/// Copies parts of a mapped file into a uint8 block on a CUDA device, and returns when the copies are done. They are
/// read from the file: the map's pages stay untouched.
///
/// `parts` are offsets in the block and ranges of the file, ascending and not overlapping in the block. A `limit` in
/// bytes a second leaves bandwidth of the bus for running calls. No other code writes to the block.
pub fn upload(
    block: &Handle,
    file: &Mapped,
    parts: &[(usize, Range<usize>)],
    limit: Option<u64>,
) -> Result<(), UploadError> {
    let meta = block.meta();
    let (Some(Device::Cuda(device)), Some(Dtype::Uint8), &[bytes], &[1]) =
        (meta.device(), meta.dtype(), meta.sizes(), meta.strides())
    else {
        return Err("the block is not a row of bytes on a CUDA device".into());
    };
    let bytes = usize::try_from(bytes)?;
    let mut end = 0;
    let mut pieces = Vec::with_capacity(parts.len());
    for (to, range) in parts {
        let from = file
            .get(range.clone())
            .ok_or("a part reaches past the end of the file")?;
        if *to < end || to.checked_add(from.len()).is_none_or(|end| end > bytes) {
            return Err("parts overlap or reach past the end of the block".into());
        }
        end = to + from.len();
        pieces.push(Piece {
            to: *to as u64,
            from: range.start as u64,
            bytes: from.len() as u64,
        });
    }
    let functions = cuda()?.functions()?;
    let address = meta.address() as *mut u8;
    let limit = limit.unwrap_or(0);
    // SAFETY: the block is a contiguous tensor without other writers, the pieces lie in the block (checked above), the
    // file is open as long as its map, and the call waits for its copies.
    let code = unsafe {
        (functions.upload)(
            ordinal(device)?,
            address,
            bytes as u64,
            file.file().as_raw_fd(),
            pieces.as_ptr(),
            pieces.len(),
            readers(),
            limit,
        )
    };
    match code {
        ..0 => Err(UploadError::File(io::Error::from_raw_os_error(-code))),
        _ => Ok(functions.check(code)?),
    }
}

/// Returns the number of threads that read the file: one for each core except the caller's.
fn readers() -> usize {
    static READERS: LazyLock<usize> =
        LazyLock::new(|| available_parallelism().map_or(0, |cores| cores.get() - 1));
    *READERS
}

/// Returns whether [`upload`] can work here.
pub fn can_upload() -> bool {
    cuda().and_then(|cuda| cuda.functions()).is_ok()
}
