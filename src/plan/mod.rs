//! (being written)

pub mod canon;
pub mod diff;
pub mod key;
pub mod reason;
