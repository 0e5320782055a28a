//! The worker processes of one build: their start, and the number of them that hold the model.
//!
//! A worker needs some seconds to start: Python imports torch, then the compiler. The first compile on a machine also
//! precompiles C++ headers, in ten seconds. So if a build has new programs, workers for their compiles start while the
//! first one loads the model. Later workers start when there is a task for them.
//!
//! The first worker holds the model. Others also load it, to help with captures, while the sum of their models takes at
//! most an eighth of the machine's memory, or 2 GiB of a device.

use std::{path::Path, time::Duration};

use precast_store::target::DeviceKind;

use super::{
    BuildError, Launcher,
    launcher::Forks,
    limits::{Limits, Stop, machine_memory},
    names::Names,
    options::Options,
    progress::{Event, Progress},
    protocol::{Hello, Request, WarmedUp},
    sharing::FromRemote,
    worker::Worker,
};
use crate::plan::{Plan, Reason, State};

/// Maximum time of a warm-up.
const WARM_UP_LIMIT: Duration = Duration::from_secs(600);

/// The start of every process of a build.
pub(super) struct Workers<'a> {
    pub options: &'a Options<'a>,
    pub scratch: &'a Path,
    pub progress: &'a dyn Progress,
    pub remote: Option<&'a FromRemote<'a>>,
    /// Whether programs that other builds make are left to them.
    pub leave: bool,
    pub limits: Limits,
    pub stop: Stop,
}

impl Workers<'_> {
    /// Returns the number of further workers to start at once: one for each new program to compile. A program that was
    /// built before may find all of its artifacts.
    pub fn at_once(&self, plan: &Plan) -> usize {
        let new = plan.missing().filter(|item| {
            item.form.compiled
                && matches!(&item.state, State::Miss { reasons, .. } if reasons.contains(&Reason::NeverBuilt))
        });
        new.count().min(self.options.jobs.max(1) - 1)
    }

    /// Starts a worker and waits for its versions.
    pub fn start(&self, number: usize) -> Result<(Worker, Hello), BuildError> {
        let started = std::time::Instant::now();
        let mut worker = Worker::spawn(
            &self.launcher(),
            self.scratch,
            &format!("worker-{number}"),
            &self.limits,
            &self.stop,
        )?;
        let names = Names::of(self.options.spec, &self.options.request.command_line);
        let hello = worker.hello(names)?;
        self.progress.event(&Event::Worker {
            worker: number,
            python: &hello.python,
            torch: &hello.torch,
            seconds: started.elapsed().as_secs_f64(),
        });
        Ok((worker, hello))
    }

    /// Returns the launcher of the workers: several are forks of one process that has imported torch. Not yet for a device.
    fn launcher(&self) -> Launcher {
        let mut launcher = self.options.launcher.clone();
        let cpu = self.options.spec.target.device == DeviceKind::Cpu;
        if launcher.forks.is_none() && cpu && self.options.jobs > 1 {
            launcher.forks = Some(Forks {
                folder: self.scratch.join("forks"),
                owner: Some(std::process::id()),
            });
        }
        launcher
    }

    /// Starts a worker, and has it import the compiler and compile the headers of the machine.
    pub fn warm_up(&self, number: usize) -> Result<Worker, BuildError> {
        let target = &self.options.spec.target;
        let request = Request::WarmUp {
            device: target.device.to_string(),
            isa: target.isa.clone(),
            out: self.scratch.join(format!("warm-up-{number}")),
        };
        let (mut worker, _) = self.start(number)?;
        let mut on_event = |phase: &str| {
            let worker = number;
            self.progress.event(&Event::Phase { worker, phase });
        };
        let (job, what) = ("prepare", "the compiler");
        self.progress.event(&Event::Begin {
            worker: number,
            job,
            what,
        });
        let started = std::time::Instant::now();
        let warmed_up = worker.call::<WarmedUp>(&request, WARM_UP_LIMIT, &mut on_event);
        self.progress.event(&Event::End {
            worker: number,
            job,
            what,
            seconds: started.elapsed().as_secs_f64(),
        });
        match warmed_up {
            // A compile will report the cause better.
            Ok(_) | Err(BuildError::Worker(_)) => Ok(worker),
            Err(error) => Err(error),
        }
    }

    /// Returns the number of further workers that may hold a model with weights of so many bytes.
    pub fn more_models(&self, bytes: u64) -> usize {
        let room = room(
            self.options.spec.target.device,
            machine_memory().unwrap_or(0),
        );
        models(room, bytes)
    }
}

/// Returns the maximum bytes of all models except the first one.
fn room(device: DeviceKind, machine: u64) -> u64 {
    const OF_MACHINE: u64 = 8;
    const ON_DEVICE: u64 = 2 << 30;
    match device {
        DeviceKind::Cpu => machine / OF_MACHINE,
        DeviceKind::Cuda => ON_DEVICE.min(machine / OF_MACHINE),
    }
}

fn models(room: u64, bytes: u64) -> usize {
    let models = room.checked_div(bytes);
    models.map_or(usize::MAX, |models| {
        usize::try_from(models).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_model_may_be_in_several_workers() {
        assert_eq!(room(DeviceKind::Cpu, 64 << 30), 8 << 30);
        assert_eq!(room(DeviceKind::Cuda, 64 << 30), 2 << 30);
        assert_eq!(room(DeviceKind::Cuda, 8 << 30), 1 << 30);
        assert_eq!(models(8 << 30, 1 << 30), 8);
        assert_eq!(models(8 << 30, 3 << 30), 2);
        assert_eq!(models(8 << 30, 9 << 30), 0);
        assert_eq!(models(0, 0), usize::MAX);
    }
}
