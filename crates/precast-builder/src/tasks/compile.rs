//! Compiles an artifact once, across the workers of this build and across builds.

use std::time::Duration;

use precast_store::PartKind;

use crate::{
    BuildError,
    protocol::{Compiled, Request},
    publish::{self, MissingArtifact},
    remote::Turn,
    sharing::FromRemote,
    slot::Slot,
    task::{Action, TaskFailure},
};

/// Maximum time of a compile.
const LIMIT: Duration = Duration::from_secs(7200);

/// Compiles an artifact and publishes it. Returns whether it was missing.
pub(crate) fn compile(slot: &mut Slot<'_>, compile: MissingArtifact) -> Result<bool, TaskFailure> {
    let context = slot.context;
    let options = context.options();
    // Another process may compile it: then its result is used.
    let mut waiting = |_: &str| !context.workers.stop.is_set();
    let Some(_claim) = options.store.leases().claim(&compile.key, &mut waiting)? else {
        return Err(BuildError::Interrupted.into());
    };
    if options.store.records().keep_artifact(&compile.key)? {
        return Ok(false);
    }
    // So may another machine. Its lease is held until the artifact can be found.
    let remote = context.workers.remote;
    let stop = || context.workers.stop.is_set();
    let lease = |remote: &FromRemote<'_>| {
        (remote.remote).lease(PartKind::Artifact, &compile.key, true, &stop)
    };
    let turn = remote.and_then(lease);
    if stop() {
        return Err(BuildError::Interrupted.into());
    }
    if let (Some(remote), Some(Turn::Made)) = (remote, &turn)
        && !remote.fetch_artifacts(&[compile.key]).is_empty()
        && options.store.records().keep_artifact(&compile.key)?
    {
        return Ok(false);
    }
    let key = compile.key;
    let folder = format!("artifact-{}", compile.key.short());
    let request = Request::Compile {
        file: compile.segment.file.clone(),
        device: options.spec.target.device.to_string(),
        isa: options.spec.target.isa.clone(),
        mode: compile.set.mode.name().to_owned(),
        options: compile.set.options.clone().into_iter().collect(),
        passes: compile.set.passes.clone(),
        out: context.workers.scratch.join(folder),
    };
    let (compiled, log) = slot.ask::<Compiled>(Action::Compile, &compile.name, &request, LIMIT)?;
    publish::artifact(options.store, &context.model.known, compile, compiled, &log)
        .map_err(|error| TaskFailure { error, log })?;
    if let (Some(remote), Some(Turn::Own(_))) = (remote, &turn) {
        remote.remote.offer(PartKind::Artifact, &[key]);
    }
    Ok(true)
}
