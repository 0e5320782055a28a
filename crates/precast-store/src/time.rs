//! The clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the time in seconds since 1970.
pub(crate) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}
