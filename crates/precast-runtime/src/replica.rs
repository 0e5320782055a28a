//! A model on one device: its programs, the calls under way, and whether the device can be trusted.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock, atomic::Ordering},
};

use precast_store::Device;

use super::{
    RuntimeError,
    ending::{self, Count},
    ffi::{TensorRef, cuda},
    host::make_room,
    loader::{Loader, Slot},
    outputs::Outputs,
    program::Ready,
    variant::{Call, Variant},
};

/// A model on one device.
pub(super) struct Replica {
    pub device: Device,
    pub modules: HashMap<String, Vec<Variant>>,
    pub loader: Arc<Loader>,
    /// Calls under way.
    pub running: Arc<Count>,
    /// Why its device answers nothing right any more.
    pub broken: OnceLock<String>,
}

impl Replica {
    pub fn new(
        device: Device,
        modules: HashMap<String, Vec<Variant>>,
        loader: Arc<Loader>,
    ) -> Self {
        Self {
            device,
            modules,
            loader,
            running: ending::count(),
            broken: OnceLock::new(),
        }
    }

    /// Returns every program, loaded or not.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        let variants = self.modules.values().flatten();
        variants.flat_map(|variant| &variant.programs)
    }

    /// Returns the programs that are loaded.
    pub fn programs(&self) -> impl Iterator<Item = &Ready> {
        self.slots().filter_map(Slot::ready)
    }

    /// Runs on it, and counts the call while it lasts.
    ///
    /// When a call fails on CUDA, the device is asked whether its error is one that stays (an illegal access, a failed
    /// assertion). From then on every call is refused: what such a context answers can't be trusted. When there was too
    /// little memory, what torch's allocator keeps unused is given back before the caller has the error and may try again.
    pub fn answer(
        &self,
        variant: &Variant,
        inputs: &[TensorRef<'_>],
        call: Call,
    ) -> Result<Outputs, RuntimeError> {
        if let Some(reason) = self.broken.get() {
            let (device, reason) = (self.device, reason.clone());
            return Err(RuntimeError::Unready { device, reason });
        }
        let Some(entered) = ending::enter(&self.running) else {
            return Err(RuntimeError::ending(self.device));
        };
        let result = variant.answer(inputs, call);
        drop(entered);
        if let (Err(error), Device::Cuda(ordinal)) = (&result, self.device) {
            self.after(error, ordinal);
        }
        result
    }

    fn after(&self, error: &RuntimeError, ordinal: usize) {
        if let RuntimeError::Failed { .. } | RuntimeError::Tensor { .. } = error
            && let Err(reason) = cuda().and_then(|cuda| cuda.health(ordinal))
        {
            tracing::error!(device = %self.device, %reason, "a device answers no more calls in this process");
            let _ = self.broken.set(reason.to_string());
            return;
        }
        make_room(self.device, error);
    }
}

/// Returns the replica for a call whose inputs are on the device `at`: of those on this device, or of all where none is,
/// one with the fewest calls under way. Of several such the one whose `turn` it is: on CUDA a call is over when its work
/// is in the stream, so one caller alone would always find the first one idle.
pub(super) fn choose(replicas: &[Replica], at: Option<Device>, turn: usize) -> &Replica {
    &replicas[pick(replicas.len(), turn, |index| {
        let replica = &replicas[index];
        let elsewhere = Some(replica.device) != at;
        (elsewhere, replica.running.load(Ordering::Relaxed))
    })]
}

/// Returns the index of the least load of `count`: first of those that are not elsewhere, then by calls, then counted from
/// `turn`.
fn pick(count: usize, turn: usize, load: impl Fn(usize) -> (bool, usize)) -> usize {
    let distance = |index: usize| (index + count - turn % count) % count;
    let least = (0..count).min_by_key(|&index| (load(index), distance(index)));
    least.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// None is a load elsewhere.
    fn picked(loads: &[Option<usize>], turn: usize) -> usize {
        pick(loads.len(), turn, |index| {
            (loads[index].is_none(), loads[index].unwrap_or(0))
        })
    }

    #[test]
    fn the_least_busy_one_has_it() {
        for turn in 0..7 {
            assert_eq!(picked(&[Some(2), Some(1), Some(3)], turn), 1);
            assert_eq!(picked(&[None, Some(9), None], turn), 1);
            assert_eq!(picked(&[None, None], turn), turn % 2);
        }
    }

    #[test]
    fn equally_busy_ones_have_it_in_turns() {
        let turns = |loads: &[Option<usize>]| -> Vec<usize> {
            (0..6).map(|turn| picked(loads, turn)).collect()
        };
        assert_eq!(turns(&[Some(0); 3]), [0, 1, 2, 0, 1, 2]);
        assert_eq!(turns(&[Some(1), None, Some(1)]), [0, 2, 2, 0, 2, 2]);
        assert_eq!(picked(&[Some(0), Some(0)], usize::MAX), 1);
    }
}
