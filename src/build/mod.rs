//! (being written)

pub mod protocol;
