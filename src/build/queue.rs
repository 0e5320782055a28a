//! What is left to do, and what must be done first.
//!
//! A program is captured, its missing artifacts are compiled, and it is gated when the last of them is there. They are
//! queued as soon as it is known which they are, before eager has answered; if the capture fails after all, what it alone
//! wanted is taken out again. What seems slower than eager is measured once more when nothing else is left to do. An
//! artifact that several programs need is queued once. Longer compiles start first, as far as the size of the graph tells.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{
    BuildError,
    jobs::Done,
    pace::Left,
    publish::Draft,
    task::{Compile, Hands, Role, Task, Waiting},
};
use crate::Digest;

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
    /// What making the model in one more worker costs in seconds, and in how many that may be done; none: only the first
    /// one may.
    opening: Option<(f64, usize)>,
    /// Seconds of captures that are over, and how many.
    captured: (f64, u32),
    /// Programs, and whether they are compiled.
    captures: VecDeque<(usize, bool)>,
    /// Sorted by size of the graph, the largest last.
    compiles: Vec<Compile>,
    gates: VecDeque<usize>,
    waiting: BTreeMap<usize, Waiting>,
    /// Programs that are being captured, and what was queued for them meanwhile.
    capturing: BTreeSet<usize>,
    cut: BTreeMap<usize, BTreeSet<Digest>>,
    /// Programs that seemed slower than eager.
    doubts: VecDeque<(usize, Box<Draft>)>,
    /// Artifacts that are queued or being compiled.
    pending: BTreeSet<Digest>,
    /// Tasks that are being done; openings apart, which nothing waits for.
    running: usize,
    openings: usize,
    /// Threads that have nothing to do, and a worker that has the compiler at hand or is about to.
    compilers: usize,
    /// Workers that hold the model.
    capturers: usize,
    weights: Weights,
    /// Whether there is only one worker.
    alone: bool,
    /// Workers beside the first that live or are being started, and how many there may be.
    hired: usize,
    most: usize,
    /// How many compiles the last capture of a compiled program brought.
    brought: usize,
    pub done: Done,
    pub fatal: Option<BuildError>,
}

impl Queue {
    /// `workers` may live at once; beside the first, which holds the model, `hired` are there already or get ready for
    /// what is said of each. `opening`: the seconds that making the model in one more of them takes, and in how many that
    /// may be done.
    pub fn new(
        captures: impl Iterator<Item = (usize, bool)>,
        workers: usize,
        hired: &[Role],
        opening: Option<(f64, usize)>,
    ) -> Self {
        Self {
            opening,
            alone: workers == 1,
            most: workers - 1,
            hired: hired.len(),
            compilers: hired.iter().filter(|role| **role == Role::Compile).count(),
            openings: hired.iter().filter(|role| **role == Role::Open).count(),
            capturers: 1,
            captures: captures.collect(),
            ..Self::default()
        }
    }

    /// Takes the next task for a thread, which says with [`Self::ended`] when it is over. The first worker, which holds
    /// the model, captures; it is started again where it is needed. So do others that got ready for it, and those that
    /// have nothing else to do if making the model once more is sooner done than waiting for the first. A compile is
    /// left to a worker that has the compiler at hand, as long as there is one for each; such a worker leaves the weights
    /// and gates to threads that have none.
    pub fn next(&mut self, holds_model: bool, hands: Hands) -> Next {
        let next = self.choose(holds_model, hands);
        if matches!(next, Next::Do(_)) && hands.compile() {
            self.compilers -= 1;
        }
        next
    }

    fn choose(&mut self, holds_model: bool, hands: Hands) -> Next {
        if self.fatal.is_some() {
            return Next::Done;
        }
        // Threads without a worker do what needs none.
        let spare = hands.compile() && self.hired < self.most;
        // Writing the weights down takes long too: who can capture leaves that to others.
        let to_capture = !self.captures.is_empty() && hands.may_hold_model();
        let writes = self.alone || !holds_model && !to_capture && !spare;
        if self.weights == Weights::Todo && writes {
            self.weights = Weights::Running;
            self.running += 1;
            return Next::Do(Task::Weights);
        }
        if let Hands::Ready {
            role: Role::Open, ..
        } = hands
        {
            return Next::Do(Task::Open);
        }
        let captures = holds_model || matches!(hands, Hands::Ready { opened: true, .. });
        let capture = match captures {
            true => self.captures.pop_front().map(|(job, _)| Task::Capture(job)),
            false => None,
        };
        if let Some(Task::Capture(job)) = capture {
            self.capturing.insert(job);
        }
        if let Hands::Ready { role, .. } = hands
            && !captures
            && self.worth_opening(role)
        {
            self.openings += 1;
            return Next::Do(Task::Open);
        }
        let gate = || match self.weights {
            Weights::There => self.gates.pop_front().map(Task::Gate),
            _ => None,
        };
        let able = holds_model || matches!(hands, Hands::Ready { .. });
        let left_over = hands.compile() || self.compiles.len() > self.compilers;
        let mut compile = || match able && left_over {
            true => Some(Task::Compile(Box::new(self.compiles.pop()?))),
            false => None,
        };
        let task = match spare {
            true => capture.or_else(&mut compile).or_else(gate),
            false => capture.or_else(gate).or_else(&mut compile),
        };
        let measure = || match self.running == 0 && self.nothing_waits() {
            true => (self.doubts.pop_front()).map(|(job, draft)| Task::Measure(job, draft)),
            false => None,
        };
        let task = task.or_else(measure);
        let start = match hands {
            Hands::Empty if !holds_model && self.hired < self.wanted() => Some(Task::Start),
            _ => None,
        };
        if task.is_none() && start.is_some() {
            self.hired += 1;
        }
        match task.or(start) {
            Some(task) => {
                self.running += 1;
                Next::Do(task)
            }
            None if self.over() => Next::Done,
            None => Next::Wait,
        }
    }

    /// Returns whether a worker should make the model too, to take a part of the captures: one that got ready for it if
    /// nobody knows yet how long they take, others if they have nothing to compile.
    fn worth_opening(&self, role: Role) -> bool {
        let (Some((cost, more)), (seconds, count)) = (self.opening, self.captured) else {
            return false;
        };
        // The first one's model is none of them.
        if self.capturers - 1 + self.openings >= more {
            return false;
        }
        let left = self.captures.len();
        match (role, count) {
            (Role::Capture, 0) => left > self.openings,
            (_, 0) => false,
            (_, count) => {
                let saved = seconds / f64::from(count) * left as f64 / 2.0;
                self.compiles.is_empty() && left > 1 && cost < saved
            }
        }
    }

    /// Takes note of what a capture took.
    pub fn captured_in(&mut self, seconds: f64) {
        self.captured = (self.captured.0 + seconds, self.captured.1 + 1);
    }

    /// Takes note of whether a worker could make the same model as the first one; if not, no other one tries. None: it was
    /// ended before that could be known.
    pub fn opened(&mut self, same: Option<bool>) {
        self.openings -= 1;
        match same {
            Some(true) => self.capturers += 1,
            Some(false) => self.opening = None,
            None => {}
        }
    }

    /// Returns how many workers beside the first there can be work for: one for each artifact that is being compiled, is
    /// queued, or will be, if further captures bring as many as the last one.
    fn wanted(&self) -> usize {
        let to_come = self.captures.iter().filter(|(_, compiled)| *compiled);
        self.most
            .min(self.pending.len() + to_come.count() * self.brought)
    }

    /// Returns what nobody is at yet, and how many workers there will be for it; `name` names a program to capture.
    pub fn left_to_do(&self, name: impl Fn((usize, bool)) -> (String, bool)) -> (Left, usize) {
        let left = Left {
            captures: self.captures.iter().copied().map(name).collect(),
            brought: self.brought,
            compiles: self.compiles.iter().map(|c| c.name.clone()).collect(),
            gates: self.waiting.len() + self.doubts.len(),
            capturers: self.capturers,
        };
        (left, 1 + self.hired.max(self.wanted()))
    }

    /// Returns whether a compile waits for a worker.
    pub fn waits(&self) -> bool {
        !self.compiles.is_empty()
    }

    /// Takes note that a worker beside the first is gone.
    pub fn left(&mut self) {
        self.hired = self.hired.saturating_sub(1);
    }

    /// Takes note that a worker could not be started: those that are there must do.
    pub fn not_hired(&mut self) {
        self.left();
        self.most = self.hired;
    }

    /// Returns whether nothing is left, and nothing runs that could bring more.
    pub fn over(&self) -> bool {
        self.running == 0
            && self.nothing_waits()
            && self.doubts.is_empty()
            && self.weights == Weights::There
    }

    /// Returns whether every capture is over or under way.
    pub fn all_captured(&self) -> bool {
        self.captures.is_empty()
    }

    /// Returns whether nothing is left that a worker is for: nothing is captured or compiled any more, or will be.
    pub fn only_gates(&self) -> bool {
        self.captures.is_empty() && self.capturing.is_empty() && self.pending.is_empty()
    }

    fn nothing_waits(&self) -> bool {
        self.captures.is_empty() && self.compiles.is_empty() && self.gates.is_empty()
    }

    /// Returns how many programs beside those that are being gated will be, if all goes well.
    pub fn to_gate(&self) -> usize {
        self.captures.len() + self.capturing.len() + self.waiting.len()
    }

    pub fn weights_are_there(&mut self) {
        self.weights = Weights::There;
    }

    /// Takes note that a task is over, and what the thread's worker is ready for; its error, if it has one, ends the
    /// build.
    pub fn ended(&mut self, opening: bool, hands: Hands, result: Result<(), BuildError>) {
        self.running -= usize::from(!opening);
        self.compilers += usize::from(hands.compile());
        if let Err(error) = result {
            self.fatal.get_or_insert(error);
        }
    }

    /// Queues what a program lacks that is still being captured.
    pub fn cut(&mut self, job: usize, compiles: Vec<Compile>) {
        let keys = compiles.iter().map(|compile| compile.key);
        self.cut.entry(job).or_default().extend(keys);
        self.brought = self.add(compiles);
    }

    /// Returns what was queued for a program that is being captured.
    pub fn cut_for(&self, job: usize) -> BTreeSet<Digest> {
        self.cut.get(&job).cloned().unwrap_or_default()
    }

    /// Returns whether a program that is being captured lacks an artifact.
    pub fn cuts(&self, key: &Digest) -> bool {
        self.cut.values().any(|keys| keys.contains(key))
    }

    /// Takes note that the capture of a program is over, whatever came of it.
    pub fn capture_over(&mut self, job: usize) {
        self.capturing.remove(&job);
        if self.cut.remove(&job).is_some() {
            self.forget_unwanted();
        }
    }

    /// Queues compiles that are not yet, and returns how many those are.
    fn add(&mut self, compiles: Vec<Compile>) -> usize {
        let before = self.compiles.len();
        for compile in compiles {
            if self.pending.insert(compile.key) {
                self.compiles.push(compile);
            }
        }
        self.compiles
            .sort_by_key(|compile| compile.segment.graph.len());
        self.compiles.len() - before
    }

    /// Takes what nobody waits for any more out of the queue.
    fn forget_unwanted(&mut self) {
        let (waiting, cut, pending) = (&self.waiting, &self.cut, &mut self.pending);
        self.compiles.retain(|compile| {
            let waits = waiting.values().any(|w| w.missing.contains(&compile.key));
            waits
                || cut.values().any(|keys| keys.contains(&compile.key))
                || !pending.remove(&compile.key)
        });
    }

    /// Queues what a captured program lacks.
    pub fn captured(&mut self, job: usize, waiting: Waiting, compiles: Vec<Compile>) {
        let brought = self.add(compiles);
        let compiled = waiting.ways.iter().any(|way| !way.keys.is_empty());
        if compiled && !self.cut.contains_key(&job) {
            self.brought = brought;
        }
        if waiting.missing.is_empty() {
            self.gates.push_back(job);
        }
        self.capturing.remove(&job);
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
        self.forget_unwanted();
        without
    }

    /// Puts off a program until it can be measured alone.
    pub fn doubts(&mut self, job: usize, draft: Draft) {
        self.doubts.push_back((job, Box::new(draft)));
    }

    /// Takes a captured program out, to gate it.
    pub fn take(&mut self, job: usize) -> Option<Waiting> {
        self.waiting.remove(&job)
    }
}

#[cfg(test)]
mod tests;
