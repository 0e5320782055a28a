//! The schedule of a build: a graph of tasks, each in a state, with a count per state.
//!
//! ```text
//! capture a program ──▶ compile every artifact that it lacks ──▶ gate the program, and publish it
//! store the weights, compile the shim ──────────────────────────────┘
//! ```
//!
//! A task is waiting until everything it needs has ended. Then it is ready, running, and done or failed. A capture adds
//! the compiles that its program lacks; an artifact that several programs lack is one task. A gate needs its compiles to
//! end, not to succeed: another option set may do without the one that failed. A failed capture fails its gate.
//!
//! Workers are equal: each takes the next ready task that it can do. Gates come first, since they finish a program, then
//! compiles, the largest first. A worker that holds the model prefers captures, which bring work for the others.
//!
//! A task that ran out of memory is retried once, with no other task running: see [`Schedule::wait_exclusive`].

use std::collections::{BTreeSet, HashMap};

use precast_store::Digest;

/// One thing to do; programs are numbered in the order of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Task {
    StoreWeights,
    Shim,
    Capture(usize),
    Compile(Digest),
    Gate(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    StoreWeights,
    Shim,
    Capture,
    Compile,
    Gate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Waiting,
    Ready,
    Running,
    Done,
    Failed,
}

/// What a worker can do about captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Captures {
    /// It holds the model.
    Holds,
    /// It may load the model, which takes a while.
    MayLoad,
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Run(Task),
    /// Load the model, to help with captures. It is no task: nothing waits for it.
    LoadModel,
    /// Nothing now, but a running task may bring more.
    Wait,
    Over,
}

/// How many tasks of one kind are in each state, in the order of [`State`].
pub(super) type Counts = [usize; 5];

#[derive(Default)]
pub(super) struct Schedule {
    nodes: Vec<Node>,
    index: HashMap<Task, usize>,
    /// By kind, the ready nodes behind the order in which they are taken.
    ready: [BTreeSet<(Order, usize)>; 5],
    counts: [Counts; 5],
    /// Workers that load the model now.
    loading: usize,
    /// Tasks that wait to run alone, and whether one does.
    waiting: usize,
    exclusive: bool,
}

/// Ready tasks of one kind are taken in this order.
type Order = (usize, usize);

struct Node {
    task: Task,
    state: State,
    order: Order,
    /// How many tasks it waits for, and which ones wait for it.
    needs: usize,
    needed_by: Vec<usize>,
}

impl Task {
    fn kind(self) -> Kind {
        match self {
            Self::StoreWeights => Kind::StoreWeights,
            Self::Shim => Kind::Shim,
            Self::Capture(_) => Kind::Capture,
            Self::Compile(_) => Kind::Compile,
            Self::Gate(_) => Kind::Gate,
        }
    }
}

impl Schedule {
    /// Starts with the capture and the gate of each program, the weights, and the shim if it must be compiled.
    pub fn new(programs: usize, shim: bool) -> Self {
        let mut schedule = Self::default();
        let weights = schedule.add(Task::StoreWeights, (0, 0));
        let shim = shim.then(|| schedule.add(Task::Shim, (0, 0)));
        for program in 0..programs {
            let capture = schedule.add(Task::Capture(program), (program, 0));
            let gate = schedule.add(Task::Gate(program), (program, 0));
            schedule.need(gate, weights);
            if let Some(shim) = shim {
                schedule.need(gate, shim);
            }
            schedule.need(gate, capture);
        }
        schedule
    }

    /// Adds an artifact that a program lacks; larger ones are compiled first. Returns whether it is a new task.
    pub fn lacks(&mut self, program: usize, artifact: Digest, size: usize) -> bool {
        let task = Task::Compile(artifact);
        let known = self.index.get(&task).copied();
        // Of equally large ones the later is taken first: buckets come in ascending order.
        let order = (usize::MAX - size, usize::MAX - self.nodes.len());
        let compile = known.unwrap_or_else(|| self.add(task, order));
        let gate = self.index[&Task::Gate(program)];
        self.need(gate, compile);
        known.is_none()
    }

    /// Takes the next task for a worker, which ends it with [`Self::ended`]. The last `reserved` compiles are left to others.
    pub fn next(&mut self, captures: Captures, may_load: bool, reserved: usize) -> Next {
        if self.exclusive || self.waiting > 0 {
            return Next::Wait;
        }
        use Kind::{Capture, Compile, Gate, Shim, StoreWeights};
        let kinds: &[Kind] = match captures {
            Captures::Holds => &[Capture, StoreWeights, Shim, Gate, Compile],
            _ => &[StoreWeights, Shim, Gate, Compile],
        };
        for kind in kinds {
            let ready = &self.ready[*kind as usize];
            if *kind == Compile && ready.len() <= reserved {
                continue;
            }
            if let Some((_, node)) = ready.first().copied() {
                self.set(node, State::Running);
                return Next::Run(self.nodes[node].task);
            }
        }
        // Another worker loads the model only if more than one capture waits.
        let waiting = self.ready[Capture as usize].len();
        if captures == Captures::MayLoad && may_load && waiting > self.loading + 1 {
            self.loading += 1;
            return Next::LoadModel;
        }
        match self.over() {
            true => Next::Over,
            false => Next::Wait,
        }
    }

    /// Takes note that a worker has loaded the model, or failed to.
    pub fn loaded(&mut self) {
        self.loading -= 1;
    }

    /// Returns whether a worker loads the model now.
    pub fn loads_model(&self) -> bool {
        self.loading > 0
    }

    /// Takes note that a running task ended: what waited only for it is ready.
    pub fn ended(&mut self, task: Task, done: bool) {
        let node = self.index[&task];
        let state = if done { State::Done } else { State::Failed };
        self.set(node, state);
        for waiting in std::mem::take(&mut self.nodes[node].needed_by) {
            self.nodes[waiting].needs -= 1;
            let state = self.nodes[waiting].state;
            if let (Task::Capture(_), false) = (task, done) {
                self.set(waiting, State::Failed);
            } else if self.nodes[waiting].needs == 0 && state == State::Waiting {
                self.set(waiting, State::Ready);
            }
        }
    }

    /// Returns whether nothing is left, and nothing runs that could bring more.
    pub fn over(&self) -> bool {
        use Kind::{Capture, Compile, Gate, Shim, StoreWeights};
        let mut kinds = [StoreWeights, Shim, Capture, Compile, Gate].into_iter();
        kinds.all(|kind| self.remaining(kind) == 0)
    }

    /// Returns whether a capture, a compile or the shim is left or running: what only a worker process can do.
    pub fn needs_workers(&self) -> bool {
        let kinds = [Kind::Capture, Kind::Compile, Kind::Shim];
        kinds.into_iter().any(|kind| self.remaining(kind) > 0)
    }

    /// Returns how many tasks of a kind have not ended.
    pub fn remaining(&self, kind: Kind) -> usize {
        let counts = self.counts(kind);
        counts[..State::Done as usize].iter().sum()
    }

    /// Returns how many tasks of a kind are in each state.
    pub fn counts(&self, kind: Kind) -> Counts {
        self.counts[kind as usize]
    }

    /// Asks, from within a running task, for the time in which no other task runs. Others begin no task from now on.
    pub fn wait_exclusive(&mut self) {
        self.waiting += 1;
    }

    /// Returns whether the caller of [`Self::wait_exclusive`] is the only one that runs now.
    pub fn begin_exclusive(&mut self) -> bool {
        let running = self
            .counts
            .iter()
            .map(|counts| counts[State::Running as usize]);
        let running: usize = running.sum();
        // Those that wait as well have their task running, and do nothing.
        let alone = !self.exclusive && running == self.waiting;
        self.exclusive |= alone;
        alone
    }

    pub fn end_exclusive(&mut self) {
        self.waiting -= 1;
        self.exclusive = false;
    }

    fn add(&mut self, task: Task, order: Order) -> usize {
        let node = self.nodes.len();
        self.nodes.push(Node {
            task,
            state: State::Ready,
            order,
            needs: 0,
            needed_by: Vec::new(),
        });
        self.index.insert(task, node);
        self.counts[task.kind() as usize][State::Ready as usize] += 1;
        self.ready[task.kind() as usize].insert((order, node));
        node
    }

    fn need(&mut self, node: usize, needed: usize) {
        let ended = matches!(self.nodes[needed].state, State::Done | State::Failed);
        if ended || self.nodes[needed].needed_by.contains(&node) {
            return;
        }
        self.nodes[needed].needed_by.push(node);
        self.nodes[node].needs += 1;
        self.set(node, State::Waiting);
    }

    fn set(&mut self, node: usize, state: State) {
        let Node {
            task,
            order,
            state: before,
            ..
        } = self.nodes[node];
        let kind = task.kind() as usize;
        self.counts[kind][before as usize] -= 1;
        self.counts[kind][state as usize] += 1;
        self.ready[kind].remove(&(order, node));
        if state == State::Ready {
            self.ready[kind].insert((order, node));
        }
        self.nodes[node].state = state;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(schedule: &mut Schedule, captures: Captures) -> Task {
        match schedule.next(captures, true, 0) {
            Next::Run(task) => task,
            other => panic!("{other:?}"),
        }
    }

    fn artifact(name: &str) -> Digest {
        Digest::of(name.as_bytes())
    }

    #[test]
    fn a_program_is_captured_compiled_and_gated() {
        let mut all = Schedule::new(1, false);
        assert_eq!(all.counts(Kind::Gate), [1, 0, 0, 0, 0]);
        assert_eq!(run(&mut all, Captures::Holds), Task::Capture(0));
        assert_eq!(run(&mut all, Captures::Never), Task::StoreWeights);
        assert_eq!(all.next(Captures::Never, true, 0), Next::Wait);
        all.ended(Task::StoreWeights, true);
        assert!(all.lacks(0, artifact("small"), 1));
        assert!(all.lacks(0, artifact("large"), 2));
        all.ended(Task::Capture(0), true);
        assert_eq!(
            run(&mut all, Captures::Never),
            Task::Compile(artifact("large"))
        );
        assert_eq!(
            run(&mut all, Captures::Never),
            Task::Compile(artifact("small"))
        );
        all.ended(Task::Compile(artifact("small")), true);
        assert_eq!(all.next(Captures::Holds, true, 0), Next::Wait);
        assert!(all.needs_workers());
        // The gate decides what the one that failed means.
        all.ended(Task::Compile(artifact("large")), false);
        assert!(!all.needs_workers());
        assert_eq!(all.counts(Kind::Compile), [0, 0, 0, 1, 1]);
        assert_eq!(run(&mut all, Captures::Never), Task::Gate(0));
        assert_eq!(all.next(Captures::Never, true, 0), Next::Wait);
        all.ended(Task::Gate(0), true);
        assert_eq!(all.next(Captures::Never, true, 0), Next::Over);
    }

    #[test]
    fn gates_wait_for_the_shim() {
        let mut all = Schedule::new(1, true);
        assert_eq!(run(&mut all, Captures::Holds), Task::Capture(0));
        assert_eq!(run(&mut all, Captures::Never), Task::StoreWeights);
        all.ended(Task::StoreWeights, true);
        all.ended(Task::Capture(0), true);
        assert!(all.needs_workers());
        assert_eq!(run(&mut all, Captures::Never), Task::Shim);
        assert_eq!(all.next(Captures::Holds, true, 0), Next::Wait);
        all.ended(Task::Shim, true);
        assert!(!all.needs_workers());
        assert_eq!(run(&mut all, Captures::Never), Task::Gate(0));
        // A build with nothing else to do compiles it too.
        let mut all = Schedule::new(0, true);
        assert_eq!(run(&mut all, Captures::Holds), Task::StoreWeights);
        assert_eq!(run(&mut all, Captures::Holds), Task::Shim);
    }

    #[test]
    fn programs_share_an_artifact() {
        let mut all = Schedule::new(2, false);
        for program in 0..2 {
            assert_eq!(run(&mut all, Captures::Holds), Task::Capture(program));
        }
        assert_eq!(run(&mut all, Captures::Never), Task::StoreWeights);
        all.ended(Task::StoreWeights, true);
        assert!(all.lacks(0, artifact("a"), 1));
        assert!(!all.lacks(1, artifact("a"), 1));
        all.ended(Task::Capture(0), true);
        all.ended(Task::Capture(1), true);
        assert_eq!(run(&mut all, Captures::Never), Task::Compile(artifact("a")));
        all.ended(Task::Compile(artifact("a")), true);
        assert_eq!(run(&mut all, Captures::Never), Task::Gate(0));
        assert_eq!(run(&mut all, Captures::Never), Task::Gate(1));
    }

    #[test]
    fn a_failed_capture_fails_its_gate_and_no_other() {
        let mut all = Schedule::new(2, false);
        assert_eq!(run(&mut all, Captures::Holds), Task::Capture(0));
        all.ended(Task::Capture(0), false);
        assert_eq!(all.counts(Kind::Gate), [1, 0, 0, 0, 1]);
        assert_eq!(run(&mut all, Captures::Holds), Task::Capture(1));
        all.ended(Task::Capture(1), true);
        assert_eq!(run(&mut all, Captures::Holds), Task::StoreWeights);
        all.ended(Task::StoreWeights, true);
        assert_eq!(run(&mut all, Captures::Holds), Task::Gate(1));
        all.ended(Task::Gate(1), true);
        assert!(all.over());
    }

    #[test]
    fn the_model_is_loaded_once_more_where_captures_wait() {
        let mut all = Schedule::new(3, false);
        assert_eq!(run(&mut all, Captures::Holds), Task::Capture(0));
        assert_eq!(run(&mut all, Captures::MayLoad), Task::StoreWeights);
        assert_eq!(all.next(Captures::MayLoad, false, 0), Next::Wait);
        assert_eq!(all.next(Captures::MayLoad, true, 0), Next::LoadModel);
        all.loaded();
        assert_eq!(run(&mut all, Captures::Holds), Task::Capture(1));
        // One that is left is not worth it.
        assert_eq!(all.next(Captures::MayLoad, true, 0), Next::Wait);
    }

    #[test]
    fn an_exclusive_task_runs_alone() {
        let mut all = Schedule::new(2, false);
        let tasks = [0, 1].map(|_| run(&mut all, Captures::Holds));
        all.wait_exclusive();
        assert!(!all.begin_exclusive());
        assert_eq!(all.next(Captures::Holds, true, 0), Next::Wait);
        all.wait_exclusive();
        // Both wait: one of them begins, the other one waits for its end.
        assert!(all.begin_exclusive());
        assert!(!all.begin_exclusive());
        all.end_exclusive();
        all.ended(tasks[0], true);
        assert!(all.begin_exclusive());
        assert_eq!(all.next(Captures::Holds, true, 0), Next::Wait);
        all.end_exclusive();
        all.ended(tasks[1], true);
        assert_eq!(run(&mut all, Captures::Never), Task::StoreWeights);
    }
}
