//! Read-only queries of a store: listings, reasons, differences, disk usage, reports, and exported copies.
//!
//! The command line prints the results of these functions; `--format json` prints the same data. Nothing here needs
//! torch.
//!
//! ## Layers
//!
//! A module uses only modules of earlier lines. A test checks this.
//!
//! ```text
//! words
//! checks, coverage, external, graph, host, libraries, list, receipt, stats, torches, training, usage
//! diff, export, report, sizes, why
//! ```

pub mod checks;
pub mod coverage;
pub mod diff;
pub mod export;
pub mod external;
pub mod graph;
pub mod host;
pub mod libraries;
pub mod list;
pub mod receipt;
pub mod report;
pub mod sizes;
pub mod stats;
pub mod torches;
pub mod training;
pub mod usage;
pub mod why;
pub mod words;

use std::path::Path;

use precast_store::{Options, Store, StoreError};

/// Opens a store read-only. Nothing in it changes, not even the time stamps of last use.
///
/// A damaged index is replaced by one in memory, built from the files. Its error is returned too.
pub fn open(path: &Path, options: Options) -> Result<(Store, Option<StoreError>), StoreError> {
    let looking = Options {
        read_only: true,
        ..options
    };
    match Store::open_with(path, looking) {
        Err(error) if error.is_index() => {
            Ok((Store::open_without_index(path, looking)?, Some(error)))
        }
        other => {
            let store = other?;
            let index_error = store.audit().index_error();
            Ok((store, index_error))
        }
    }
}
