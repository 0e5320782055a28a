//! A release for this host: found, its programs read and compared with the host, its shims opened.

use std::sync::Arc;

use precast_store::{
    Device, Digest, Hold, Target,
    record::{Program, Release, Shim, bucket_name, split_model},
};

use super::Runtime;
use crate::{RuntimeError, error::in_store, identity, shims};

impl Runtime {
    /// Finds a release and takes a lease on it. Where gc removes the release between the two, the newest one takes its
    /// place; a named release is missing then.
    pub(super) fn release<'a>(
        &self,
        model: &'a str,
    ) -> Result<(&'a str, Release, Option<Hold>), RuntimeError> {
        let (name, which) = split_model(model);
        let what = || in_store(format!("model `{model}`"));
        loop {
            let found = self.source.release(name, which);
            let mut release = found.map_err(|error| match error.downcast() {
                Ok(missing) => RuntimeError::NoRelease(*missing),
                Err(error) => what()(error),
            })?;
            if which.is_none() && !self.may_run(&release) {
                let fits = |release: &Release| self.may_run(release);
                if let Some(fitting) = self.source.find_release(name, &fits).map_err(what())? {
                    let (newest, seq) = (release.seq, fitting.seq);
                    tracing::warn!(model, newest, seq, "the newest release is for another host");
                    release = fitting;
                }
            }
            let hold = self.source.hold(&release).unwrap_or_else(|error| {
                let seq = release.seq;
                tracing::warn!(
                    "no lease on release {seq} of `{name}`: gc may delete what this process reads: {error}"
                );
                None
            });
            if self.source.has_release(&release) {
                return Ok((name, release, hold));
            }
        }
    }

    /// Returns whether a release is for this host, by its first program: all programs of a release have one target.
    fn may_run(&self, release: &Release) -> bool {
        let first = release.programs.first();
        let program = first.and_then(|id| self.source.program(id).ok());
        program.is_none_or(|program| {
            let mut hosts = self.hosts.iter();
            hosts.all(|host| shims::may_run(host, &release.shims, &program))
        })
    }

    /// Reads the programs of a release.
    pub(super) fn programs(&self, release: &Release) -> Result<Vec<Arc<Program>>, RuntimeError> {
        let read = |id: &Digest| Ok(Arc::new(identity::program(&*self.source, id)?));
        release.programs.iter().map(read).collect()
    }

    /// Opens the shim, and returns the host for each device, as targets are compared with it. Fails where a program is
    /// for another host: before anything is loaded.
    pub(super) fn fit(
        &self,
        programs: &[Arc<Program>],
        shims: &[Shim],
    ) -> Result<Vec<Arc<Target>>, RuntimeError> {
        let all: Vec<&Program> = programs.iter().map(|program| &**program).collect();
        let hosts = self.hosts.iter();
        let hosts: Vec<_> = hosts
            .map(|host| Arc::new(shims::counting(host, shims, &all)))
            .collect();
        for (host, &device) in hosts.iter().zip(&self.devices) {
            for program in programs {
                check_target(program, device, host)?;
            }
        }
        self.open_shims(shims)?;
        Ok(hosts)
    }

    /// Opens the shim of this torch for each device.
    pub(super) fn open_shims(&self, shims: &[Shim]) -> Result<(), RuntimeError> {
        let devices = self.devices.iter().zip(&self.hosts).enumerate();
        for (i, (&device, host)) in devices {
            let trials = self.trials.get(i).map(|trials| &**trials);
            shims::open(&*self.source, shims, device, host, trials)?;
        }
        Ok(())
    }
}

fn check_target(program: &Program, device: Device, host: &Target) -> Result<(), RuntimeError> {
    let mismatches = program.target.mismatches(host);
    if mismatches.is_empty() {
        return Ok(());
    }
    Err(RuntimeError::WrongTarget {
        program: program.id,
        module: program.module.clone(),
        bucket: bucket_name(&program.sizes),
        device,
        mismatches,
    })
}
