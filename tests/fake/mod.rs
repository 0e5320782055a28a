//! Fake artifacts and their records, for tests of everything but numerics in seconds, without AOTInductor.
//!
//! [`Fake`] compiles `misbehaving.cpp` with g++ (once per set of options and machine) and makes its record; [`Memory`]
//! is a source of such records.
#![allow(dead_code)]

mod records;

pub use records::*;
