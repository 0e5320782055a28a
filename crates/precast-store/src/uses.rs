//! When things were used last: kept in memory, and written to the index once, at the end.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{base::Base, error::StoreError, rows, time::now};
use crate::Digest;

/// The last-use stamps of this process, in seconds since 1970.
pub(crate) struct Uses {
    base: Arc<Base>,
    stamps: Mutex<BTreeMap<Digest, i64>>,
}

impl Uses {
    pub fn new(base: &Arc<Base>) -> Self {
        Self {
            base: base.clone(),
            stamps: Mutex::default(),
        }
    }

    /// Records that `id` was used now.
    pub fn add(&self, id: &Digest) {
        if !self.base.is_read_only() {
            let mut stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
            stamps.insert(*id, now());
        }
    }

    /// Writes the stamps; waits for other processes no longer than `patience`.
    pub fn save(&self, patience: Option<Duration>) -> Result<(), StoreError> {
        let stamps = mem::take(&mut *self.stamps.lock().unwrap_or_else(PoisonError::into_inner));
        if stamps.is_empty() {
            return Ok(());
        }
        self.base.index.write_within(patience, |tx| {
            for (id, at) in &stamps {
                rows::insert_use(tx, id, *at)?;
            }
            Ok(())
        })
    }
}

impl Drop for Uses {
    fn drop(&mut self) {
        // A lost stamp costs a later rebuild at most: less than a long wait would.
        let _ = self.save(Some(Duration::from_secs(1)));
    }
}
