//! The user's folders for settings and for caches, as the XDG base directory specification names them.

use std::{env, path::PathBuf};

/// Returns the folder for settings.
pub(super) fn config() -> Option<PathBuf> {
    folder("XDG_CONFIG_HOME", ".config")
}

/// Returns the folder of `precast` for caches.
pub(super) fn cache() -> Option<PathBuf> {
    Some(folder("XDG_CACHE_HOME", ".cache")?.join("precast"))
}

/// Returns the folder for settings as a user writes it.
pub(super) fn shown_config() -> PathBuf {
    named("XDG_CONFIG_HOME").unwrap_or_else(|| "~/.config".into())
}

fn folder(variable: &str, below_home: &str) -> Option<PathBuf> {
    named(variable).or_else(|| Some(named("HOME")?.join(below_home)))
}

fn named(variable: &str) -> Option<PathBuf> {
    let path = env::var_os(variable).map(PathBuf::from);
    path.filter(|path| path.is_absolute())
}
