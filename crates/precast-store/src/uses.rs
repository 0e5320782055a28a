//! The times of last use: kept in memory, and written to the index once, at the end.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{base::Base, rows, time::now};
use crate::Digest;

/// Maximum wait for other processes. A lost stamp costs at most a later rebuild, which is cheaper than a long wait.
const PATIENCE: Duration = Duration::from_secs(1);

/// The last-use stamps of this process, in seconds since 1970. They are written on drop.
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
}

impl Drop for Uses {
    fn drop(&mut self) {
        let stamps = mem::take(&mut *self.stamps.lock().unwrap_or_else(PoisonError::into_inner));
        if !stamps.is_empty() {
            let _ = self.base.index.write_within(Some(PATIENCE), |tx| {
                stamps
                    .iter()
                    .try_for_each(|(id, at)| rows::insert_use(tx, id, *at))
            });
        }
    }
}
