//! Points at which a test can stop a process, to run two processes against each other at every phase.
//!
//! Only with the feature `sync-points`, which only tests enable. When the folder `PRECAST_SYNC` has a file `NAME.stop`,
//! the first process that reaches point NAME renames it to `NAME.here` and waits for a file `NAME.go`.

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
