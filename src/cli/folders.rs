//! The user's folders for settings and for caches, as the XDG base directory specification names them.

use std::{env, path::PathBuf};

/// The path of the list of trusted stores in the folder for settings.
const TRUSTED: &str = "precast/trusted-stores";

/// Returns the path of the file with the names of remotes.
pub(super) fn remotes() -> Option<PathBuf> {
    Some(folder("XDG_CONFIG_HOME", ".config")?.join("precast/remotes.toml"))
}

/// Returns the path of the list of trusted stores.
pub(super) fn trusted() -> Option<PathBuf> {
    Some(folder("XDG_CONFIG_HOME", ".config")?.join(TRUSTED))
}

/// Returns the folder of `precast` for caches.
pub(super) fn cache() -> Option<PathBuf> {
    Some(folder("XDG_CACHE_HOME", ".cache")?.join("precast"))
}

/// Returns the path of the list of trusted stores as a user writes it.
pub(super) fn shown_trusted() -> PathBuf {
    let config = named("XDG_CONFIG_HOME").unwrap_or_else(|| "~/.config".into());
    config.join(TRUSTED)
}

fn folder(variable: &str, below_home: &str) -> Option<PathBuf> {
    named(variable).or_else(|| Some(named("HOME")?.join(below_home)))
}

fn named(variable: &str) -> Option<PathBuf> {
    let path = env::var_os(variable).map(PathBuf::from);
    path.filter(|path| path.is_absolute())
}
