//! The workers of one build: what each is started with, and those that are started before there is work for them.
//!
//! A worker is of use some seconds after it was started: Python imports torch, then the compiler with its tables. The
//! first compile of a machine also needs C++ headers that take ten seconds. So workers that there will surely be work for
//! start at once, and get ready while the first one imports the model and captures. Each makes its share of the headers.
//! What a capture brings says how many more there can be work for, and those start then, up to `-j`: never more than there
//! are distinct artifacts to compile.
//!
//! They are started, not forked from one process that has imported torch and the compiler. Those imports cost a worker
//! 4.4 s of CPU (`python -c "import torch, torch._inductor.compile_fx"` on two cores; torch alone 1.9 s), while another
//! one captures. A fork would save them and need a process that never runs an operator, owns no thread and no CUDA
//! context, hands descriptors over a socket and collects its children: the compiler's own warm-up, which is the larger
//! half of getting ready, breaks each of these.

use std::{path::Path, time::Duration};

use super::{
    BuildError, Options,
    limits::{Limits, Stop},
    progress::{Event, Progress},
    protocol::{Hello, Prepared, Request},
    worker::Worker,
};
use crate::plan::{Item, Plan, Reason, State};

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
    /// Returns how many workers to start before anything is captured, beside the first: one for each program that was
    /// never built, because it differs from the others in its sizes at least. Of one that was built before nobody knows
    /// whether there is anything to compile.
    pub fn ahead(&self, plan: &Plan) -> usize {
        let mut missing = plan.missing().filter(|item| item.form.compiled).peekable();
        let some = usize::from(missing.peek().is_some());
        let new = |item: &&Item| matches!(&item.state, State::Miss { reasons, .. } if reasons.contains(&Reason::NeverBuilt));
        let new = missing.filter(new).count();
        new.max(some).min(self.options.jobs.saturating_sub(1))
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

    /// Starts a worker that is to compile, and has it get ready; the first `ahead` of them make the headers.
    pub fn prepare(&self, number: usize, ahead: usize) -> Result<Worker, BuildError> {
        let (mut worker, _) = self.start(number)?;
        let target = &self.options.spec.target;
        let request = Request::Prepare {
            device: target.device.to_string(),
            isa: target.isa.clone(),
            share: number - 1,
            of: ahead.max(1),
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
