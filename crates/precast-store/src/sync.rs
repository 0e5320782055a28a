//! Points at which a test can stop a process, to run two of them against each other at every phase.
//!
//! Only with the feature `sync-points`, which nothing but the tests turns on. When `PRECAST_SYNC` names a folder that has
//! a file `NAME.stop`, the first process that comes to point NAME takes it (renames it to `NAME.here`), and goes on once
//! there is a file `NAME.go`.

/// Waits here when a test asks for it.
#[cfg(not(feature = "sync-points"))]
pub(crate) fn point(_name: &str) {}

/// Waits here when a test asks for it.
#[cfg(feature = "sync-points")]
pub(crate) fn point(name: &str) {
    let Some(folder) = std::env::var_os("PRECAST_SYNC") else {
        return;
    };
    let folder = std::path::Path::new(&folder);
    let at = |end: &str| folder.join(format!("{name}.{end}"));
    if std::fs::rename(at("stop"), at("here")).is_ok() {
        while !at("go").exists() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
