//! (being written)

mod ffi;
