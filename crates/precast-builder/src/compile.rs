//! Compiles an artifact once, across the workers of this build and across builds.

use std::{sync::Arc, time::Duration};

use precast_store::Digest;

use super::{
    BuildError,
    progress::Event,
    protocol::{Compiled, Request},
    shims::{self, CompiledShim},
    task::Compile,
    work::{Action, Slot, Work},
};

/// How long a compile may take.
const COMPILE_LIMIT: Duration = Duration::from_secs(7200);

impl Work<'_> {
    /// Compiles an artifact. Returns whether it is there; why not is kept for the gates that wait for it.
    pub(super) fn compile(&self, slot: &mut Slot, artifact: Digest) -> Result<bool, BuildError> {
        let Some(compile) = self.lock().compiles.remove(&artifact) else {
            return Err(BuildError::Protocol {
                message: "a compile was scheduled twice".to_owned(),
            });
        };
        let store = self.options.store;
        // Another process may be at it: then its result is ours.
        let mut waiting = |_: &str| !self.workers.stop.is_set();
        let Some(claim) = store.leases().claim(&artifact, &mut waiting)? else {
            return Err(BuildError::Interrupted);
        };
        if store.records().keep_artifact(&artifact)? {
            return Ok(true);
        }
        let failed = self.make(slot, compile)?;
        drop(claim);
        let mut state = self.lock();
        match failed {
            None => state.done.compiled += 1,
            Some(failure) => {
                state.failures.insert(artifact, Arc::new(failure));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Compiles and publishes one artifact. Returns an error of this artifact alone, with the worker's log.
    fn make(
        &self,
        slot: &mut Slot,
        compile: Compile,
    ) -> Result<Option<(BuildError, Vec<u8>)>, BuildError> {
        let folder = format!("artifact-{}", compile.key.short());
        let request = Request::Compile {
            file: compile.segment.file.clone(),
            device: self.options.spec.target.device.to_string(),
            isa: self.options.spec.target.isa.clone(),
            mode: compile.set.mode.name().to_owned(),
            options: compile.set.options.clone().into_iter().collect(),
            passes: compile.set.passes.clone(),
            out: self.workers.scratch.join(folder),
        };
        let action = (Action::Compile, &*compile.name.clone());
        let (answer, log) = self.ask::<Compiled>(slot, action, &request, COMPILE_LIMIT);
        let kept = answer.and_then(|compiled| self.keep(compile, compiled, &log));
        match kept {
            Ok(()) => Ok(None),
            Err(error) if error.ends_build() => Err(error),
            Err(error) => Ok(Some((error, log))),
        }
    }

    /// Compiles the shim and puts it into the store. Without it nothing could run: an error ends the build.
    pub(super) fn compile_shim(&self, slot: &mut Slot) -> Result<(), BuildError> {
        let Some(known) = &self.plan.known else {
            return Err(BuildError::Protocol {
                message: "the shim is compiled before the target is known".to_owned(),
            });
        };
        let request = shims::request(&known.target, self.workers.scratch);
        let what = format!("torch {}", known.target.torch);
        let (answer, _) =
            self.ask::<CompiledShim>(slot, (Action::Shim, &what), &request, shims::LIMIT);
        let answer = answer?;
        if let Some(why) = &answer.why {
            let message = format!("no CUDA graphs: {why}");
            self.progress.event(&Event::Note { message: &message });
        }
        let shim = shims::put(self.options.store, &known.target, &answer)?;
        self.shim.get_or_init(|| shim);
        Ok(())
    }
}
