//! (being written)
#![allow(unsafe_code)]
