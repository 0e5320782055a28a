//! Fake artifacts and the records that go with them: everything but numerics in seconds, without AOTInductor.
//!
//! [`Fake`] compiles `misbehaving.cpp` with g++ (once per set of options and machine) and says what record it wants;
//! [`Memory`] is a source that holds such records.
#![allow(dead_code)]

mod records;

pub use records::*;
