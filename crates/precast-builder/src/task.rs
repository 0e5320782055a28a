//! The tasks of a build, and their programs.
//!
//! ```text
//! capture a program ──▶ compile every artifact that it lacks ──▶ gate the program, and publish it
//! store the weights, compile the shim ──────────────────────────────┘
//! ```
//!
//! A capture adds the compiles that its program lacks; an artifact that several programs lack is one task. A gate needs
//! only the end of its compiles, not their success: another option set may not need the failed artifact. A failed
//! capture fails its gate.
//!
//! A worker that holds the model prefers captures, which add tasks for the others. Gates come before compiles, since
//! they finish a program. The largest compiles are first.
//!
//! **Large weights.** A capture and a gate map all weights, and a worker that has compiled keeps a gigabyte. So from
//! [`LARGE`] bytes on, gates come last and one after the other, when no worker is left: a build then has the weights in
//! one process at a time, and beside them little else. It costs the time for which a gate would have run beside compiles.

use std::ops::Range;

use precast_store::Digest;
use serde_json::Value;

use super::{
    BuildError,
    schedule::{Needs, Node, Schedule},
};
use crate::{
    plan::{Item, Plan, Reason, State},
    spec::{Module, Spec},
};

/// Bytes from which weights decide what a build may run at the same time.
pub const LARGE: u64 = 1 << 30;

/// A task; programs are numbered in the order of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Task {
    Capture(usize),
    StoreWeights,
    Shim,
    Gate(usize),
    Compile(Digest),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Capture,
    StoreWeights,
    Shim,
    Gate,
    Compile,
}

impl Node for Task {
    const KINDS: &'static [Needs] = &[
        Needs::Model,
        Needs::Nothing,
        Needs::Worker,
        Needs::Nothing,
        Needs::Worker,
    ];

    fn kind(self) -> usize {
        let kind = match self {
            Self::Capture(_) => Kind::Capture,
            Self::StoreWeights => Kind::StoreWeights,
            Self::Shim => Kind::Shim,
            Self::Gate(_) => Kind::Gate,
            Self::Compile(_) => Kind::Compile,
        };
        kind as usize
    }
}

impl Schedule<Task> {
    /// Starts with the capture and the gate of each program, the weights, and the shim if it must be compiled. With
    /// `large` weights, gates are last, one after the other.
    pub fn of_build(programs: usize, shim: bool, large: bool) -> Self {
        let mut schedule = Self::new();
        schedule.add(Task::StoreWeights, (0, 0));
        if shim {
            schedule.add(Task::Shim, (0, 0));
        }
        for program in 0..programs {
            let gate = Task::Gate(program);
            schedule.add(Task::Capture(program), (program, 0));
            schedule.add(gate, (program, 0));
            schedule.need(gate, Task::StoreWeights, false);
            if shim {
                schedule.need(gate, Task::Shim, false);
            }
            schedule.need(gate, Task::Capture(program), true);
        }
        for program in (0..programs).filter(|_| large) {
            for other in 0..programs {
                schedule.need(Task::Gate(program), Task::Capture(other), false);
            }
            // Each of them: one whose capture failed waits for nothing.
            for earlier in 0..program {
                schedule.need(Task::Gate(program), Task::Gate(earlier), false);
            }
        }
        schedule
    }

    /// Adds an artifact that the gates of programs wait for; larger ones are compiled first. Returns whether it is a new
    /// task.
    pub fn lacks(&mut self, programs: Range<usize>, artifact: Digest, size: usize) -> bool {
        // Of equally large artifacts the later one is taken first: buckets are in ascending order.
        let order = (usize::MAX - size, usize::MAX - self.len());
        let new = self.add(Task::Compile(artifact), order);
        for program in programs {
            self.need(Task::Gate(program), Task::Compile(artifact), false);
        }
        new
    }
}

/// The action of a thread, as progress names it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    LoadModel,
    Inputs,
    Capture,
    Check,
    Compile,
    Shim,
    Gate,
    Truth,
    Measure,
}

impl Action {
    pub fn name(self) -> &'static str {
        match self {
            Self::LoadModel => "open",
            Self::Inputs => "inputs",
            Self::Capture => "capture",
            Self::Check => "check",
            Self::Compile => "compile",
            Self::Shim => "shim",
            Self::Gate => "gate",
            Self::Truth => "truth",
            Self::Measure => "measure",
        }
    }

    /// Returns the kind of task whose time this is.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Self::Capture => Some(Kind::Capture),
            Self::Compile => Some(Kind::Compile),
            Self::Gate => Some(Kind::Gate),
            Self::Shim => Some(Kind::Shim),
            Self::LoadModel | Self::Inputs | Self::Check | Self::Truth | Self::Measure => None,
        }
    }
}

/// A program to build.
pub(super) struct Job<'a> {
    /// Index into the plan's items.
    pub index: usize,
    pub item: &'a Item,
    pub module: &'a Module,
    /// As `encode batch=1 seq=32`.
    pub name: String,
    /// As `batch=1 seq=32`.
    pub bucket: String,
    pub id: Digest,
    pub request: &'a Value,
    /// The previous program.
    pub before: Option<Digest>,
    pub reasons: &'a [Reason],
}

/// Returns the programs that a plan lacks.
pub(super) fn jobs<'a>(spec: &'a Spec, plan: &'a Plan) -> Vec<Job<'a>> {
    let job = |(index, item): (usize, &'a Item)| match &item.state {
        State::Miss {
            key: Some((id, request)),
            reasons,
            before,
            ..
        } => Some(Job {
            index,
            item,
            module: &spec.modules[item.module],
            name: item.name(spec),
            bucket: item.form.name(),
            id: *id,
            request,
            before: *before,
            reasons,
        }),
        _ => None,
    };
    plan.items.iter().enumerate().filter_map(job).collect()
}

/// A failed task, with the worker's log.
#[derive(Debug)]
pub(super) struct TaskFailure {
    pub error: BuildError,
    pub log: Vec<u8>,
}

impl<E: Into<BuildError>> From<E> for TaskFailure {
    fn from(error: E) -> Self {
        Self {
            error: error.into(),
            log: vec![],
        }
    }
}
