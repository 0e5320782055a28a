//! Reads everything and changes nothing: what is in a store, why, and what it is worth.
//!
//! The command line prints what these functions return; `--format json` is the same data. Nothing here needs torch.

pub mod foreign;
pub mod list;
pub mod usage;
pub mod why;
