//! The workers of one build: what each is started with, and those that are started before there is work for them.
//!
//! A worker is of use some seconds after it was started: Python imports torch, then the compiler with its tables. The
//! first compile of a machine also needs C++ headers that take ten seconds. So all workers that a plan can keep busy
//! start at once, and get ready while the first one imports the model and captures. Each makes its share of the headers.

use std::{path::Path, time::Duration};

use super::{
    BuildError, Options,
    limits::{Limits, Stop},
    progress::{Event, Progress},
    protocol::{Hello, Prepared, Request},
    worker::Worker,
};
use crate::plan::Plan;

/// How long getting ready may take.
const PREPARE_LIMIT: Duration = Duration::from_secs(600);

/// What every process of a build is started with.
pub(super) struct Crew<'a> {
    pub options: &'a Options<'a>,
    pub scratch: &'a Path,
    pub progress: &'a dyn Progress,
    pub limits: Limits,
    pub stop: Stop,
}

impl Crew<'_> {
    /// Returns how many workers a plan can keep busy: one captures, and a program has a piece or two to compile.
    pub fn size(&self, plan: &Plan) -> usize {
        let modules = &self.options.spec.modules;
        let compiled = plan.missing().filter(|item| item.form.compiled);
        let pieces = compiled.map(|item| match modules[item.module].regions.is_empty() {
            true => 1,
            false => 2,
        });
        self.options.jobs.clamp(1, 1 + pieces.sum::<usize>())
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

    /// Starts a worker that is to compile, and has it get ready.
    pub fn prepare(&self, number: usize, of: usize) -> Result<Worker, BuildError> {
        let (mut worker, _) = self.start(number)?;
        let target = &self.options.spec.target;
        let request = Request::Prepare {
            device: target.device.to_string(),
            isa: target.isa.clone(),
            share: number - 1,
            of: of - 1,
            out: self.scratch.join(format!("prepare-{number}")),
        };
        let started = std::time::Instant::now();
        let (job, what) = ("prepare", "the compiler");
        self.progress.event(&Event::Begin {
            worker: number,
            job,
            what,
        });
        let mut phase = |phase: &str| {
            self.progress.event(&Event::Phase {
                worker: number,
                phase,
            });
        };
        let prepared = worker.call::<Prepared>(&request, PREPARE_LIMIT, &mut phase);
        self.progress.event(&Event::End {
            worker: number,
            job,
            what,
            seconds: started.elapsed().as_secs_f64(),
        });
        match prepared {
            // What it could not do, a compile will say better.
            Ok(_) | Err(BuildError::Worker(_)) => Ok(worker),
            Err(error) => Err(error),
        }
    }
}
