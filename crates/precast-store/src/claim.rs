//! At most one live compile per key, over all processes: the owner of the claim on a key builds it, the others wait.
//!
//! A claim is a locked file under `locks/keys/`, removed when the claim is dropped. The lock of a killed owner ends
//! with its process, and the next waiting process takes over. After taking a claim, check again whether the result
//! exists.

use std::{
    fs::{self, File, TryLockError},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    thread,
};

use super::{
    error::{At, StoreError},
    leases::Leases,
    lock, publish, sync,
};
use crate::Digest;

/// The right to build one key, until it is dropped.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    // Closing the file unlocks it, after its name was removed.
    _file: File,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Leases {
    /// Returns the claim on `key`, or its current owner, as `pid 7 (build)`. The owner is empty if it is unknown.
    pub fn try_claim(&self, key: &Digest) -> Result<Result<Claim, String>, StoreError> {
        self.base.writable("claim a key")?;
        let folder = self.base.path().join("locks").join("keys");
        publish::folder_unsynced(&folder)?;
        let path = folder.join(key.hex());
        loop {
            let mut file = lock::open(&self.base.layout, &path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(Err(lock::owner(&mut file))),
                Err(TryLockError::Error(e)) => return Err(e).at("lock", &path),
            }
            sync::point("claim:locked");
            // The previous owner may have removed the name between our opening and locking.
            let ours = file.metadata().at("look at", &path)?.ino();
            if fs::symlink_metadata(&path).is_ok_and(|now| now.ino() == ours) {
                lock::sign(&mut file, "build");
                return Ok(Ok(Claim { path, _file: file }));
            }
        }
    }

    /// Waits for the claim on `key`. `waiting` is called with its owner at every attempt; when it returns false, the
    /// wait ends without a claim.
    pub fn claim(
        &self,
        key: &Digest,
        waiting: &mut dyn FnMut(&str) -> bool,
    ) -> Result<Option<Claim>, StoreError> {
        loop {
            match self.try_claim(key)? {
                Ok(claim) => return Ok(Some(claim)),
                Err(owner) if !waiting(&owner) => return Ok(None),
                Err(_) => thread::sleep(lock::TICK),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};
    use crate::Store;

    #[test]
    fn one_has_it_and_the_next_gets_it() {
        let (_dir, store) = testing::store();
        let key = Digest::of(b"key");
        let claim = store.leases().try_claim(&key).unwrap().unwrap();
        let other = Store::open(store.path()).unwrap();
        let owner = other.leases().try_claim(&key).unwrap().unwrap_err();
        assert_eq!(owner, format!("pid {} (build)", std::process::id()));
        let claimed = || other.leases().claim(&key, &mut |_| false).unwrap();
        assert!(claimed().is_none());
        drop(claim);
        drop(claimed().unwrap());
        let locks = fs::read_dir(store.path().join("locks/keys")).unwrap();
        assert_eq!(locks.count(), 0);
    }

    #[test]
    fn threads_take_turns() {
        let (_dir, store) = testing::store();
        let key = Digest::of(b"key");
        let inside = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let _claim = store.leases().claim(&key, &mut |_| true).unwrap().unwrap();
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
