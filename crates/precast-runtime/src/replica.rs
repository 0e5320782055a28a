//! A model on one device: its programs, the calls under way, and whether the device can be trusted.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock, atomic::Ordering},
};

use precast_store::{Device, record};

use super::{
    RuntimeError,
    ending::{self, Count},
    ffi::cuda,
    host::make_room,
    loaded::Loaded,
    loader::Loader,
    pool::Pool,
    program::Program,
    states::States,
    variant::Variant,
};

/// A model on one device.
pub(super) struct Replica {
    pub device: Device,
    pub modules: HashMap<String, Vec<Variant>>,
    pub loader: Arc<Loader>,
    /// The states of sessions.
    pub sessions: Pool<States>,
    /// The states that modules fill.
    pub fills: Vec<Fill>,
    /// Calls under way.
    pub running: Arc<Count>,
    /// The device's persistent error, after which its answers can't be trusted.
    pub broken: OnceLock<String>,
}

/// A state whose first value is an output of a module.
pub(super) struct Fill {
    pub module: String,
    /// Position among its outputs.
    pub output: usize,
    pub state: record::State,
}

/// Returns the states of programs that modules fill, each once.
fn fills<'p>(programs: impl Iterator<Item = &'p Program>) -> Vec<Fill> {
    let mut fills: Vec<Fill> = Vec::new();
    for state in programs.flat_map(|program| &program.record.states) {
        if let record::First::Output { module, index } = &state.first
            && fills.iter().all(|fill| fill.state.name != state.name)
        {
            fills.push(Fill {
                module: module.clone(),
                output: *index,
                state: state.clone(),
            });
        }
    }
    fills
}

impl Replica {
    pub fn new(
        device: Device,
        modules: HashMap<String, Vec<Variant>>,
        loader: Arc<Loader>,
        sessions: usize,
    ) -> Self {
        let programs = modules.values().flatten();
        let programs = programs.flat_map(|variant| &variant.programs);
        Self {
            device,
            fills: fills(programs),
            modules,
            loader,
            sessions: Pool::new(sessions),
            running: ending::count(),
            broken: OnceLock::new(),
        }
    }

    /// Returns every program, loaded or not.
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        let variants = self.modules.values().flatten();
        variants.flat_map(|variant| &variant.programs)
    }

    /// Returns the programs that are loaded.
    pub fn loaded(&self) -> impl Iterator<Item = &Loaded> {
        self.programs().filter_map(Program::loaded)
    }

    /// Runs `work` on it, and counts the call as running.
    ///
    /// After a call that failed on CUDA, checks whether the device has a persistent error (an illegal access, a failed
    /// assertion). From then on every call is refused, because the answers of such a context can't be trusted. After an
    /// out-of-memory error, releases the unused memory of torch's allocator, before the error is returned and the
    /// caller may try again.
    pub fn admit<R>(
        &self,
        work: impl FnOnce() -> Result<R, RuntimeError>,
    ) -> Result<R, RuntimeError> {
        if let Some(reason) = self.broken.get() {
            let (device, reason) = (self.device, reason.clone());
            return Err(RuntimeError::Unready { device, reason });
        }
        let Some(entered) = ending::enter(&self.running) else {
            return Err(RuntimeError::ending(self.device));
        };
        let result = work();
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

/// Returns the replica for a call whose inputs are on the device `at`: of those on this device, or of all where none
/// is, one with the fewest calls under way. Of several such it takes the next one from `call`, the number of the call:
/// on CUDA a call is over when its work is in the stream, so a single caller would always find the first one idle.
pub(super) fn choose(replicas: &[Replica], at: Option<Device>, call: usize) -> &Replica {
    &replicas[pick(replicas.len(), call, |index| {
        let replica = &replicas[index];
        let elsewhere = Some(replica.device) != at;
        (elsewhere, replica.running.load(Ordering::Relaxed))
    })]
}

/// Returns the replica for a new session: one with the fewest open sessions, and among several the first. Calls under
/// way do not count: the tensors of an idle session keep their memory, and its next calls go to the same device.
pub(super) fn for_session(replicas: &[Replica]) -> &Replica {
    let open = |&index: &usize| replicas[index].sessions.taken();
    &replicas[(0..replicas.len()).min_by_key(open).unwrap_or_default()]
}

/// Returns the index of the minimum `load` of `count`: first by its flag, then by its calls, then in order from
/// `first`.
fn pick(count: usize, first: usize, load: impl Fn(usize) -> (bool, usize)) -> usize {
    let distance = |index: usize| (index + count - first % count) % count;
    let best = (0..count).min_by_key(|&index| (load(index), distance(index)));
    best.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A missing load is on another device.
    fn picked(loads: &[Option<usize>], first: usize) -> usize {
        pick(loads.len(), first, |index| {
            (loads[index].is_none(), loads[index].unwrap_or(0))
        })
    }

    #[test]
    fn the_replica_with_the_fewest_calls_is_chosen() {
        for first in 0..7 {
            assert_eq!(picked(&[Some(2), Some(1), Some(3)], first), 1);
            assert_eq!(picked(&[None, Some(9), None], first), 1);
            assert_eq!(picked(&[None, None], first), first % 2);
        }
    }

    #[test]
    fn equally_busy_replicas_are_chosen_one_after_the_other() {
        let six = |loads: &[Option<usize>]| -> Vec<usize> {
            (0..6).map(|first| picked(loads, first)).collect()
        };
        assert_eq!(six(&[Some(0); 3]), [0, 1, 2, 0, 1, 2]);
        assert_eq!(six(&[Some(1), None, Some(1)]), [0, 2, 2, 0, 2, 2]);
        assert_eq!(picked(&[Some(0), Some(0)], usize::MAX), 1);
    }
}
