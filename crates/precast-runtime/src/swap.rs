//! Another weight set for a model that answers calls meanwhile.

use std::sync::PoisonError;

use precast_store::{Device, Digest};

use super::{Model, RuntimeError, ending, weights::WeightSet};

impl Model {
    /// Makes every call that begins after it returns use another weight set. Calls under way finish with the one they
    /// began with; none sees both, and none fails.
    ///
    /// Every program that is loaded is asked first whether it accepts the set. When one does not, nothing is changed.
    pub fn swap(&self, weights: &WeightSet) -> Result<(), RuntimeError> {
        let _work = ending::work().ok_or_else(|| {
            let devices = self.replicas.iter().map(|replica| replica.device);
            RuntimeError::ending(devices.last().unwrap_or(Device::Cpu))
        })?;
        // One swap at a time; calls do not take this lock.
        let mut held = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = self
            .replicas
            .iter()
            .map(|replica| Ok((replica, weights.on(replica.device)?)));
        let pairs: Vec<_> = pairs.collect::<Result<_, RuntimeError>>()?;
        // Nothing is loaded meanwhile, so that every program has the one or the other.
        let mut next: Vec<_> = self
            .replicas
            .iter()
            .map(|replica| {
                let weights = &replica.loader.weights;
                weights.write().unwrap_or_else(PoisonError::into_inner)
            })
            .collect();
        for (replica, weights) in &pairs {
            replica
                .programs()
                .try_for_each(|ready| ready.accepts(weights))?;
        }
        for (i, (replica, new)) in pairs.iter().enumerate() {
            if let Err(error) = replica.programs().try_for_each(|ready| ready.swap(new)) {
                // A graph could not be captured again: back to the old set everywhere, which was captured before.
                for (replica, _) in &pairs[..=i] {
                    let old = held.on(replica.device)?;
                    replica.programs().for_each(|ready| {
                        if let Err(error) = ready.swap(&old) {
                            tracing::error!(%error, "a program has no graph after a swap that failed");
                        }
                    });
                }
                return Err(error);
            }
        }
        for (next, (_, weights)) in next.iter_mut().zip(&pairs) {
            **next = weights.clone();
        }
        *held = weights.clone();
        Ok(())
    }

    /// Returns the digest of the weight set that new calls use; none for a model without one.
    pub fn weights(&self) -> Option<Digest> {
        self.weights
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .digest()
    }
}
