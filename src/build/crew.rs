//! The workers of one build: what each is started with, and those that are started before there is work for them.
//!
//! A worker is of use some seconds after it was started: Python imports torch, then the compiler with its tables. The
//! first compile of a machine also needs C++ headers that take ten seconds. So workers that there will surely be work for
//! start at once, and get ready while the first one imports the model and captures:
//!
//! | got ready | how many | then |
//! |---|---|---|
//! | to compile; the C++ compiler is at its share of the headers meanwhile | one for each artifact that new programs will bring: each its main part, and a region where the spec names some | compile |
//! | to capture | one for each further capture, as long as there are workers to compile what each brings | make the model, if its weights are small, and capture |
//!
//! What a capture brings says how many more there can be work for, and those start then, up to `-j`.
//!
//! Who makes the model imports what a capture needs at the same time, in a thread.
//!
//! A model may be large, and its size is known when it has been made once. All models beside the first one may take a
//! sixteenth of the memory together, and 1 GiB on a device: where the file that the spec names for its weights is larger,
//! none gets ready to capture. One worker makes the model while the first does, and may have all of that. If making it
//! takes more it is ended, and if its weights are more they go to no device, but for an entry that puts them there itself:
//! then the build goes on as if nobody had tried. The others wait for the size, and import what they need meanwhile; there
//! will be as many of them as there is room for.
//!
//! They are started, not forked from one process that has imported torch and the compiler. Those imports cost a worker
//! 4.4 s of CPU (`python -c "import torch, torch._inductor.compile_fx"` on two cores; torch alone 1.9 s), while another
//! one captures. A fork would save them and need a process that never runs an operator, owns no thread and no CUDA
//! context, hands descriptors over a socket and collects its children: the compiler's own warm-up, which is the larger
//! half of getting ready, breaks each of these.

use std::{
    path::Path,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, atomic::AtomicBool},
    thread::Scope,
    time::Duration,
};

use super::{
    BuildError, Options,
    engine::reopen,
    jobs::Ahead,
    limits::{Limits, Stop, machine_memory},
    progress::{Event, Progress},
    protocol::{Hello, Prepared, Request, Said},
    task::Role,
    worker::Worker,
};
use crate::{
    plan::{Item, Plan, Reason, State},
    target::DeviceKind,
};

/// How long getting ready may take.
const PREPARE_LIMIT: Duration = Duration::from_secs(600);

/// What a worker may take beside a model while it makes it, in bytes: for modules, and for the device's driver.
const BESIDE_MODEL: u64 = 1 << 29;

/// How many workers beside the first make the model before anybody knows its size.
const OPENERS: usize = 2;

/// What every process of a build is started with.
pub(super) struct Crew<'a> {
    pub options: &'a Options<'a>,
    pub scratch: &'a Path,
    pub progress: &'a dyn Progress,
    pub limits: Limits,
    pub stop: Stop,
    /// Held by every task, and by a worker that gets ready; alone by one that measures, so that what it chooses by is not what
    /// the others do.
    pub quiet: RwLock<()>,
    /// Ends those that are making the model: nothing is left to capture.
    pub late: Arc<AtomicBool>,
}

impl Crew<'_> {
    /// Returns what workers to start before anything is captured, beside the first, and what each gets ready for.
    pub fn ahead(&self, plan: &Plan) -> Vec<Role> {
        let spec = self.options.spec;
        let artifacts =
            |item: &Item| 1 + usize::from(!spec.modules[item.module].regions.is_empty());
        let missing: Vec<&Item> = plan.missing().collect();
        // What is only measured again has its artifacts, but for what gc has taken.
        let compiles = |item: &&&Item| item.form.compiled && item.measured_before().is_none();
        let compiled = || missing.iter().filter(compiles);
        let new = |item: &&&Item| matches!(&item.state, State::Miss { reasons, .. } if reasons.contains(&Reason::NeverBuilt));
        // Of a program that was built before nobody knows whether there is anything to compile.
        let new: usize = compiled().filter(new).map(|item| artifacts(item)).sum();
        let each = compiled().map(|item| artifacts(item)).max().unwrap_or(0);
        let workers = self.options.jobs.max(1);
        // Workers come in groups: one that captures, and those that compile what it brings.
        let capture = (workers / (1 + each)).clamp(1, missing.len().max(1)) - 1;
        let capture = capture.min(more_models(self, spec.model.weights.file()));
        let compile = new.max(usize::from(each > 0)).min(workers - 1 - capture);
        let mut roles = [vec![Role::Capture; capture], vec![Role::Compile; compile]].concat();
        roles[..capture.min(OPENERS)].fill(Role::Open);
        roles
    }

    /// Starts the workers of these roles in threads of their own.
    pub fn start_ahead<'s>(&'s self, roles: &[Role], scope: &'s Scope<'s, '_>) -> Vec<Ahead<'s>> {
        let compile = roles.iter().filter(|role| **role == Role::Compile).count();
        let mut share = 0..compile;
        let mut start = |(index, role): (usize, &Role)| {
            let (number, role) = (index + 1, *role);
            let share = (role == Role::Compile).then(|| share.next()).flatten();
            let handle = scope.spawn(move || match role {
                Role::Open => self.open(number),
                Role::Capture => self.rehearse(number),
                _ => self.prepare(number, share.map(|share| (share, compile))),
            });
            Ahead { role, handle }
        };
        roles.iter().enumerate().map(&mut start).collect()
    }

    /// Has those that measure wait until this is dropped, and waits for one that measures.
    pub fn beside(&self) -> RwLockReadGuard<'_, ()> {
        self.quiet.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a worker and waits until it says what it is.
    pub fn start(&self, number: usize) -> Result<(Worker, Hello), BuildError> {
        let started = std::time::Instant::now();
        let mut worker = Worker::spawn(
            &self.options.launcher,
            self.scratch,
            &format!("worker-{number}"),
            &self.limits,
            &self.stop,
        )?;
        let hello = worker.hello()?;
        self.progress.event(&Event::Worker {
            worker: number,
            python: &hello.python,
            torch: &hello.torch,
            seconds: started.elapsed().as_secs_f64(),
        });
        Ok((worker, hello))
    }

    /// Starts a worker that is to compile, and has it get ready. Of the headers it makes this share; none: it leaves them
    /// to the others.
    pub fn prepare(
        &self,
        number: usize,
        share: Option<(usize, usize)>,
    ) -> Result<Worker, BuildError> {
        let target = &self.options.spec.target;
        let (share, of) = share.unwrap_or((usize::MAX, 1));
        let request = Request::Prepare {
            device: target.device.to_string(),
            isa: target.isa.clone(),
            share,
            of,
            out: self.scratch.join(format!("prepare-{number}")),
        };
        self.ready(number, &request, "the compiler", Role::Compile)
    }

    /// Starts a worker that is to capture, and has it get ready.
    fn rehearse(&self, number: usize) -> Result<Worker, BuildError> {
        let out = self.scratch.join(format!("prepare-{number}"));
        self.ready(
            number,
            &Request::Rehearse { out },
            "to capture",
            Role::Capture,
        )
    }

    /// Starts a worker that makes the model while the first one does, within what all models beside it may take.
    fn open(&self, number: usize) -> Result<Worker, BuildError> {
        let _quiet = self.beside();
        let (mut worker, _) = self.start(number)?;
        worker.role = Role::Open;
        let most = most_bytes(self.options.spec.target.device);
        let room = most_bytes(DeviceKind::Cpu) + BESIDE_MODEL;
        worker.watch.allow(Some(room));
        let made = self.shown(number, "open", "the model", || {
            self.while_wanted(&mut worker, |worker| {
                reopen(self.options, worker, Some(most))
            })
        });
        worker.watch.allow(None);
        worker.made = Some(made?);
        Ok(worker)
    }

    fn ready(
        &self,
        number: usize,
        request: &Request,
        what: &str,
        role: Role,
    ) -> Result<Worker, BuildError> {
        let _quiet = self.beside();
        let (mut worker, _) = self.start(number)?;
        worker.role = role;
        let mut heard = |said| {
            if let Said::Phase(phase) = &said {
                let worker = number;
                self.progress.event(&Event::Phase { worker, phase });
            }
        };
        let prepared = self.shown(number, "prepare", what, || {
            worker.call::<Prepared>(request, PREPARE_LIMIT, &mut heard)
        });
        match prepared {
            // What it could not do, a compile will say better.
            Ok(_) | Err(BuildError::Worker(_)) => Ok(worker),
            Err(error) => Err(error),
        }
    }

    /// Lets `body` use a worker that is ended when nothing is left to capture.
    pub fn while_wanted<T>(&self, worker: &mut Worker, body: impl FnOnce(&mut Worker) -> T) -> T {
        let stop = worker.stop.clone();
        worker.stop = stop.or(&self.late);
        let result = body(worker);
        worker.stop = stop;
        result
    }

    /// Runs `body` between the two events of what is done before there are tasks.
    fn shown<T>(&self, worker: usize, job: &str, what: &str, body: impl FnOnce() -> T) -> T {
        let started = std::time::Instant::now();
        self.progress.event(&Event::Begin { worker, job, what });
        let result = body();
        self.progress.event(&Event::End {
            worker,
            job,
            what,
            seconds: started.elapsed().as_secs_f64(),
        });
        result
    }
}

/// Returns how many workers beside the first may hold a model with this file of weights: as many as take a small part of
/// the memory together.
pub(super) fn more_models(crew: &Crew<'_>, file: Option<&Path>) -> usize {
    let bytes = file.map_or(Ok(0), |file| std::fs::metadata(file).map(|meta| meta.len()));
    let most = most_bytes(crew.options.spec.target.device);
    bytes.map_or(0, |bytes| models(most, bytes))
}

/// Returns how many bytes of weights a model may have here that is made in workers beside the first too.
pub(super) fn most_bytes(device: DeviceKind) -> u64 {
    most(device, machine_memory().unwrap_or(0))
}

/// Returns how many more models of so many bytes there may be where each may have so many at most.
fn models(most: u64, bytes: u64) -> usize {
    let all = most.saturating_mul(OPENERS as u64).checked_div(bytes);
    match bytes <= most {
        true => all.map_or(usize::MAX, |all| usize::try_from(all).unwrap_or(usize::MAX)),
        false => 0,
    }
}

/// Returns how many bytes that is on a machine with so much memory.
fn most(device: DeviceKind, machine: u64) -> u64 {
    const OF_MACHINE: u64 = 16;
    const ON_DEVICE: u64 = 1 << 30;
    match device {
        DeviceKind::Cpu => machine / OF_MACHINE,
        DeviceKind::Cuda => ON_DEVICE.min(machine / OF_MACHINE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_model_may_be_in_several_workers() {
        assert_eq!(most(DeviceKind::Cpu, 64 << 30), 4 << 30);
        assert_eq!(most(DeviceKind::Cuda, 64 << 30), 1 << 30);
        assert_eq!(most(DeviceKind::Cuda, 8 << 30), 1 << 29);
        // In two if it is as large as that, in more if it is smaller.
        assert_eq!(models(4 << 30, 1 << 30), 8);
        assert_eq!(models(4 << 30, 3 << 30), 2);
        assert_eq!(models(4 << 30, 4 << 30), 2);
        assert_eq!(models(4 << 30, 5 << 30), 0);
        assert_eq!(models(0, 0), usize::MAX);
    }
}
