//! The short end of a process: without the destructors of libtorch and CUDA.

use std::io::{self, Write as _};

use crate::{ending::shut_down, ffi};

/// Like [`shut_down`]; then ends the process, without the destructors of libtorch and of CUDA's libraries.
///
/// The destructors free memory that the system reclaims in any case, and take long: 0.2 s after a start of 1 s on an
/// H200. For a command that ends with its answer. A service with exit handlers calls [`shut_down`] and exits in its
/// usual way.
pub fn exit(code: u8) -> ! {
    shut_down();
    // The reader of stdout may have closed it.
    let _ = io::stdout().flush();
    ffi::exit(code.into())
}
