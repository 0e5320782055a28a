//! What is left to do, and what must be done first.
//!
//! A program is captured, its missing artifacts are compiled, and it is gated when the last of them is there. An
//! artifact that several programs need is queued once. Longer compiles start first, as far as the size of the graph
//! tells.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::Value;

use super::{
    BuildError,
    jobs::Done,
    protocol::{Captured, Segment},
    tune::{Set, Way},
};
use crate::Digest;

/// An artifact to compile.
pub(super) struct Compile {
    pub key: Digest,
    pub explained: Value,
    pub segment: Segment,
    pub set: Set,
    /// What progress calls it.
    pub name: String,
}

/// A captured program that waits for its artifacts.
pub(super) struct Waiting {
    pub captured: Captured,
    /// How it is compiled: the first way is kept unless another is faster.
    pub ways: Vec<Way>,
    /// The program whose choice of a way this is, where it was made before.
    pub chosen_by: Option<Digest>,
    pub missing: BTreeSet<Digest>,
    pub compiled: usize,
}

pub(super) enum Task {
    /// Put the weight set into the store.
    Weights,
    Capture(usize),
    Compile(Box<Compile>),
    Gate(usize),
}

/// What a worker does next.
pub(super) enum Next {
    Do(Task),
    /// Nothing now, but a task that is running may bring more.
    Wait,
    Done,
}

/// Whether the weight set is in the store: nothing is gated before.
#[derive(Default, PartialEq)]
enum Weights {
    #[default]
    Todo,
    Running,
    There,
}

#[derive(Default)]
pub(super) struct Queue {
    captures: VecDeque<usize>,
    /// Sorted by size of the graph, the largest last.
    compiles: Vec<Compile>,
    gates: VecDeque<usize>,
    waiting: BTreeMap<usize, Waiting>,
    /// Artifacts that are queued or being compiled.
    pending: BTreeSet<Digest>,
    running: usize,
    weights: Weights,
    /// Whether there is only one worker.
    alone: bool,
    pub done: Done,
    pub fatal: Option<BuildError>,
}

impl Queue {
    pub fn new(captures: impl Iterator<Item = usize>, alone: bool) -> Self {
        Self {
            alone,
            captures: captures.collect(),
            ..Self::default()
        }
    }

    /// Takes the next task for a worker, which says with [`Self::ended`] when it is over. Only a worker that holds the
    /// model captures, and one that is not ready yet does only what needs no worker.
    pub fn next(&mut self, holds_model: bool, ready: bool) -> Next {
        if self.fatal.is_some() {
            return Next::Done;
        }
        if self.weights == Weights::Todo && (self.alone || !holds_model) {
            self.weights = Weights::Running;
            self.running += 1;
            return Next::Do(Task::Weights);
        }
        let capture = match holds_model {
            true => self.captures.pop_front().map(Task::Capture),
            false => None,
        };
        let gate = || match self.weights {
            Weights::There => self.gates.pop_front().map(Task::Gate),
            _ => None,
        };
        let task = capture.or_else(gate);
        let compile = || match ready {
            true => Some(Task::Compile(Box::new(self.compiles.pop()?))),
            false => None,
        };
        match task.or_else(compile) {
            Some(task) => {
                self.running += 1;
                Next::Do(task)
            }
            None if self.over() => Next::Done,
            None => Next::Wait,
        }
    }

    /// Returns whether nothing is left, and nothing runs that could bring more.
    fn over(&self) -> bool {
        self.running == 0
            && self.captures.is_empty()
            && self.compiles.is_empty()
            && self.gates.is_empty()
            && self.weights == Weights::There
    }

    pub fn weights_are_there(&mut self) {
        self.weights = Weights::There;
    }

    /// Takes note that a task is over; its error, if it has one, ends the build.
    pub fn ended(&mut self, result: Result<(), BuildError>) {
        self.running -= 1;
        if let Err(error) = result {
            self.fatal.get_or_insert(error);
        }
    }

    /// Queues what a captured program lacks.
    pub fn captured(&mut self, job: usize, waiting: Waiting, compiles: Vec<Compile>) {
        for compile in compiles {
            if self.pending.insert(compile.key) {
                self.compiles.push(compile);
            }
        }
        self.compiles
            .sort_by_key(|compile| compile.segment.graph.len());
        if waiting.missing.is_empty() {
            self.gates.push_back(job);
        }
        self.waiting.insert(job, waiting);
    }

    /// Takes note that an artifact is there: programs that lacked nothing else can be gated.
    pub fn compiled(&mut self, key: &Digest) {
        self.pending.remove(key);
        for (job, waiting) in &mut self.waiting {
            if waiting.missing.remove(key) && waiting.missing.is_empty() {
                self.gates.push_back(*job);
            }
        }
    }

    /// Takes note that an artifact can't be made and why, and returns the programs that can do in no way without it.
    pub fn failed(&mut self, key: &Digest, why: &str) -> Vec<usize> {
        self.pending.remove(key);
        let mut without = Vec::new();
        for (job, waiting) in &mut self.waiting {
            if !waiting.missing.contains(key) {
                continue;
            }
            let ways = &mut waiting.ways;
            for way in ways.iter_mut().filter(|way| way.keys.contains(key)) {
                way.refused.get_or_insert_with(|| why.to_owned());
            }
            let left = |key: &Digest| {
                let mut left = ways.iter().filter(|way| way.refused.is_none());
                left.any(|way| way.keys.contains(key))
            };
            waiting.missing.retain(left);
            if ways.iter().all(|way| way.refused.is_some()) {
                without.push(*job);
            } else if waiting.missing.is_empty() {
                self.gates.push_back(*job);
            }
        }
        for job in &without {
            self.waiting.remove(job);
        }
        // What nobody waits for any more is not made.
        let (waiting, pending) = (&self.waiting, &mut self.pending);
        self.compiles.retain(|compile| {
            let wanted = waiting.values().any(|w| w.missing.contains(&compile.key));
            wanted || !pending.remove(&compile.key)
        });
        without
    }

    /// Takes a captured program out, to gate it.
    pub fn take(&mut self, job: usize) -> Option<Waiting> {
        self.waiting.remove(&job)
    }
}
