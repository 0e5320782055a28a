//! The gates of a release on another host than the one that built it: under a newer torch.
//!
//! An artifact needs functions that newer versions of torch keep, so it may run there. Whether it does, its gates say: each
//! program is compared with eager under that torch, with the tolerances of its first gate. If all pass, the release is published
//! again with the shim for that torch, and every host with it runs the release from then on.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

use precast_store::{
    Store, Target,
    record::{Release, Shim, receipt::Gate},
};

use super::{
    BuildError, Launcher,
    gate::{self, GateRequest},
    limits::{Limits, Stop},
    shims::{self, CompiledShim},
    worker::{self, Worker},
};

/// What the gates of a host are run with.
pub struct HostOptions<'a> {
    /// The store with the release.
    pub store: &'a Store,
    /// Starts a Python worker with the torch of the host, for its shim.
    pub launcher: Launcher,
    /// Starts the process that compares a program with eager.
    pub gate: gate::Launcher,
    /// Where private folders are made; they are removed at the end.
    pub scratch: PathBuf,
    /// Set from outside to end it early.
    pub cancel: Arc<AtomicBool>,
}

/// Returns the shim for a host's torch: that of an earlier release of the model, or one that a worker compiles.
pub fn shim(options: &HostOptions<'_>, model: &str, host: &Target) -> Result<Shim, BuildError> {
    if let Some(shim) = shims::known(options.store, model, host)? {
        return Ok(shim);
    }
    let HostOptions {
        store,
        launcher,
        scratch,
        cancel,
        ..
    } = options;
    let compile = |worker: &mut Worker| {
        let hello = worker.hello()?;
        if (&hello.torch, &hello.torch_git) != (&host.torch, &host.torch_git) {
            return Err(BuildError::OtherTorch {
                program: launcher.program.clone(),
                found: hello.torch,
                wanted: host.torch.clone(),
            });
        }
        let request = shims::request(host, worker.private());
        let compiled: CompiledShim = worker.call(&request, shims::LIMIT, &mut |_| {})?;
        shims::put(store, host, &compiled)
    };
    worker::alone(launcher, scratch, "shim", cancel, compile)
}

/// Runs one gate in a process of its own.
pub fn gate(options: &HostOptions<'_>, request: &GateRequest) -> Result<Gate, BuildError> {
    let (limits, stop) = (Limits::new(None), Stop::new(&options.cancel));
    gate::in_child(&options.gate, request, &limits, gate::LIMIT, &stop)
}

/// Publishes a release again, with one more shim. Returns it, and whether it is new.
pub fn publish(
    store: &Store,
    mut release: Release,
    shim: Shim,
) -> Result<(Release, bool), BuildError> {
    release.shims.retain(|other| !other.same_subject(&shim));
    release.shims.push(shim);
    Ok(store.put_release(&release)?)
}
