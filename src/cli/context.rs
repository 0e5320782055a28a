//! The options of every command, and the stores that they name.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Result;
use clap::{Args, ColorChoice};
use serde::Serialize;

use super::{
    exit,
    printer::{self, Format, Printer},
    trusted,
};
use crate::store::{Options, Store, StoreError, Unpacked};

/// The options of every command.
#[derive(Args)]
pub(super) struct Global {
    /// The store to use, or a remote for commands that read [default: `artifacts` in the current folder]
    #[arg(
        long,
        global = true,
        env = "PRECAST_STORE",
        value_name = "DIR",
        hide_env_values = true
    )]
    pub(super) store: Option<PathBuf>,
    /// Accept a store that a whole group can write
    #[arg(long, global = true)]
    pub(super) shared: bool,
    /// The format of data on stdout
    #[arg(long, global = true, value_enum, default_value_t = Format::Human)]
    pub(super) format: Format,
    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto)]
    pub(super) color: ColorChoice,
    /// Print only data and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Print more; twice for even more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(super) verbose: u8,
    /// End as after Ctrl-C when standard input ends: the caller was killed
    #[arg(long, global = true, hide = true)]
    pub(super) until_stdin_ends: bool,
}

/// The global options and the output of a command.
pub(super) struct Context {
    pub(super) store: PathBuf,
    /// The remote whose records `store` has, without its objects.
    pub(super) remote: Option<String>,
    pub(super) shared: bool,
    pub(super) verbose: u8,
    pub(super) out: Printer,
    /// Set by Ctrl-C.
    pub(super) cancel: Arc<AtomicBool>,
    /// Set when a record can't be read and is left out of the output.
    pub(super) damaged: AtomicBool,
}

impl Context {
    /// Prints a document with `--format json`, else calls `print`.
    pub(super) fn show(
        &self,
        document: &impl Serialize,
        print: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.out.json() {
            return self.out.document(document);
        }
        print()
    }

    /// Opens the store; prints a note when it has to wait for another process.
    pub(super) fn open(&self) -> Result<Store, StoreError> {
        self.ready(Store::open_with(&self.store, self.options())?)
    }

    /// Opens the store with this mode for unpacked weights.
    pub(super) fn open_with(&self, unpacked: Unpacked) -> Result<Store, StoreError> {
        let options = Options {
            unpacked,
            ..self.options()
        };
        self.ready(Store::open_with(&self.store, options)?)
    }

    /// Opens the store, and makes it when there is none. Makes a damaged index again.
    pub(super) fn create(&self) -> Result<Store, StoreError> {
        let created = match Store::create_with(&self.store, self.options()) {
            Err(error) if error.is_index() => {
                self.ready(Store::open_for_repair(&self.store, self.options())?)?
                    .audit()
                    .reindex()?;
                exit::warning("the index was damaged: it was made again from the files");
                Store::create_with(&self.store, self.options())
            }
            created => created,
        };
        self.ready(created?)
    }

    pub(super) fn options(&self) -> Options {
        self.options_for(&self.store)
    }

    pub(super) fn options_for(&self, store: &Path) -> Options {
        Options {
            shared: self.shared,
            trusted: trusted::names(store),
            ..Options::default()
        }
    }

    pub(super) fn ready(&self, store: Store) -> Result<Store, StoreError> {
        store.stop_waiting_when(self.cancel.clone());
        store.on_wait(|waiting| printer::note(waiting));
        Ok(store)
    }

    /// Opens the store for reading; prints a warning when its index is damaged.
    pub(super) fn look(&self) -> Result<Store> {
        self.look_at(&self.store)
    }

    /// Opens the store as gc does, so that objects held by a live process count as used; where that can't be, as
    /// [`Self::look`] does.
    pub(super) fn open_or_look(&self) -> Result<Store> {
        self.open().or_else(|_| self.look())
    }

    /// Opens another store as [`Self::look`] does.
    pub(super) fn look_at(&self, path: &Path) -> Result<Store> {
        let (store, damage) = crate::inspect::open(path, self.options_for(path))?;
        if let Some(error) = damage {
            exit::warn(&error);
            // Readable records are listed; unreadable ones are warnings.
            for error in store.audit().damaged() {
                self.damaged.store(true, Ordering::Relaxed);
                exit::warning(&error.to_string());
            }
        }
        Ok(store)
    }
}
