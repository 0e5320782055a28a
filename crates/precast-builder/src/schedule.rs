//! A graph of tasks, each in a state, with a count per state. It does not know the work of a task.
//!
//! A task is waiting until everything it needs has ended. Then it is ready, running, and done or failed. A dependency
//! may require the success of the other task, which then also fails this one, or only its end.
//!
//! Each task is of a kind. Ready tasks of lower kinds are taken first, and tasks of one kind in their order. Workers
//! are equal: each takes the next ready task that it can do.
//!
//! A task that ran out of memory is retried once, with no other task running: see [`Schedule::wait_exclusive`].

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
};

/// The resource that tasks of a kind need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// A worker that holds the model.
    Model,
    /// A worker.
    Worker,
    Nothing,
}

/// A task, as the schedule sees it.
pub(super) trait Node: Copy + Eq + Hash {
    /// The needs of each kind, in the order in which kinds are taken.
    const KINDS: &'static [Needs];

    /// Returns its place in [`Self::KINDS`].
    fn kind(self) -> usize;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskState {
    Waiting,
    Ready,
    Running,
    Done,
    Failed,
}

/// Whether a worker can do tasks that need the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Captures {
    Holds,
    /// It may load the model, which takes a while.
    MayLoad,
    Never,
}

/// The abilities of a thread that requests a task.
#[derive(Clone, Copy)]
pub(super) struct Able {
    pub captures: Captures,
    /// Whether it has a worker.
    pub worker: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next<T> {
    Run(T),
    /// Load the model, to help with tasks that need it. It is no task: nothing waits for it.
    LoadModel,
    /// End the worker: no task needs one.
    EndWorker,
    /// No task now, but a running one may add some.
    Wait,
    Over,
}

/// The number of tasks in each state, in the order of [`TaskState`].
pub(super) type Counts = [usize; 5];

/// Ready tasks of one kind are taken in this order.
pub(super) type Order = (usize, usize);

pub(super) struct Schedule<T> {
    tasks: Vec<Entry<T>>,
    index: HashMap<T, usize>,
    /// By kind, the ready tasks in their order.
    ready: Vec<BTreeSet<(Order, usize)>>,
    counts: Vec<Counts>,
    /// Workers that load the model now.
    loading: usize,
    /// Tasks that wait to run exclusively, and whether one does.
    waiting: usize,
    exclusive: bool,
}

struct Entry<T> {
    task: T,
    state: TaskState,
    order: Order,
    /// The number of tasks that it waits for.
    needs: usize,
    /// The tasks that wait for it, and whether they need its success.
    needed_by: Vec<(usize, bool)>,
}

impl<T: Node> Schedule<T> {
    pub fn new() -> Self {
        Self {
            tasks: Vec::new(),
            index: HashMap::new(),
            ready: vec![BTreeSet::new(); T::KINDS.len()],
            counts: vec![Counts::default(); T::KINDS.len()],
            loading: 0,
            waiting: 0,
            exclusive: false,
        }
    }

    /// Returns the number of tasks.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Adds a task. Returns whether it is new.
    pub fn add(&mut self, task: T, order: Order) -> bool {
        if self.index.contains_key(&task) {
            return false;
        }
        let place = self.tasks.len();
        self.tasks.push(Entry {
            task,
            state: TaskState::Ready,
            order,
            needs: 0,
            needed_by: Vec::new(),
        });
        self.index.insert(task, place);
        self.counts[task.kind()][TaskState::Ready as usize] += 1;
        self.ready[task.kind()].insert((order, place));
        true
    }

    /// Makes a task wait for the end of another one. With `success` it fails if the other one fails.
    pub fn need(&mut self, task: T, needed: T, success: bool) {
        let (task, needed) = (self.index[&task], self.index[&needed]);
        let ended = |place: usize| {
            let state = self.tasks[place].state;
            matches!(state, TaskState::Done | TaskState::Failed)
        };
        if ended(task) || ended(needed) {
            return;
        }
        let needed = &mut self.tasks[needed];
        if needed.needed_by.iter().any(|(other, _)| *other == task) {
            return;
        }
        needed.needed_by.push((task, success));
        self.tasks[task].needs += 1;
        self.set(task, TaskState::Waiting);
    }

    /// Takes the next task for a worker, which ends it with [`Self::ended`]. `may_load`: whether another worker may
    /// load the model. `idle`: the number of workers without a task; as many tasks are left to them before others are
    /// started.
    pub fn next(&mut self, able: Able, may_load: bool, idle: usize) -> Next<T> {
        if able.worker && !self.needs_workers() {
            return Next::EndWorker;
        }
        if self.exclusive || self.waiting > 0 {
            return Next::Wait;
        }
        let reserved = if able.worker { 0 } else { idle };
        for (kind, needs) in T::KINDS.iter().enumerate() {
            let can = match needs {
                Needs::Model => able.captures == Captures::Holds,
                Needs::Worker => self.ready[kind].len() > reserved,
                Needs::Nothing => true,
            };
            if can && let Some((_, place)) = self.ready[kind].first().copied() {
                self.set(place, TaskState::Running);
                return Next::Run(self.tasks[place].task);
            }
        }
        // Another worker loads the model only if more than one task waits for it.
        let waiting: usize = (kinds::<T>(|needs| needs == Needs::Model))
            .map(|kind| self.ready[kind].len())
            .sum();
        if able.captures == Captures::MayLoad && may_load && waiting > self.loading + 1 {
            self.loading += 1;
            return Next::LoadModel;
        }
        if self.over() { Next::Over } else { Next::Wait }
    }

    /// Notes that a worker has loaded the model, or failed to.
    pub fn loaded(&mut self) {
        self.loading -= 1;
    }

    /// Returns whether a worker loads the model now.
    pub fn loads_model(&self) -> bool {
        self.loading > 0
    }

    /// Notes that a running task ended: a task that waited only for it is ready.
    pub fn ended(&mut self, task: T, done: bool) {
        let mut ended = vec![(self.index[&task], done)];
        while let Some((place, done)) = ended.pop() {
            let state = [TaskState::Failed, TaskState::Done][usize::from(done)];
            self.set(place, state);
            for (waiting, success) in std::mem::take(&mut self.tasks[place].needed_by) {
                let entry = &mut self.tasks[waiting];
                entry.needs -= 1;
                let ready = entry.needs == 0 && entry.state == TaskState::Waiting;
                if success && !done {
                    ended.push((waiting, false));
                } else if ready {
                    self.set(waiting, TaskState::Ready);
                }
            }
        }
    }

    /// Returns whether no task is left or running.
    pub fn over(&self) -> bool {
        kinds::<T>(|_| true).all(|kind| self.remaining(kind) == 0)
    }

    /// Returns whether a task that needs a worker is left or running.
    pub fn needs_workers(&self) -> bool {
        kinds::<T>(|needs| needs != Needs::Nothing).any(|kind| self.remaining(kind) > 0)
    }

    /// Returns the number of tasks of a kind that have not ended.
    pub fn remaining(&self, kind: usize) -> usize {
        self.counts[kind][..TaskState::Done as usize].iter().sum()
    }

    /// Requests, from within a running task, a time in which no other task runs. No other task begins from now on.
    pub fn wait_exclusive(&mut self) {
        self.waiting += 1;
    }

    /// Returns whether no other task runs now. The caller has called [`Self::wait_exclusive`].
    pub fn begin_exclusive(&mut self) -> bool {
        let counts = self.counts.iter();
        let running: usize = counts
            .map(|counts| counts[TaskState::Running as usize])
            .sum();
        // Other tasks that wait for exclusive time count as running, but do nothing.
        let begins = !self.exclusive && running == self.waiting;
        self.exclusive |= begins;
        begins
    }

    pub fn end_exclusive(&mut self) {
        self.waiting -= 1;
        self.exclusive = false;
    }

    fn set(&mut self, place: usize, state: TaskState) {
        let entry = &mut self.tasks[place];
        let (kind, order) = (entry.task.kind(), entry.order);
        let before = std::mem::replace(&mut entry.state, state);
        self.counts[kind][before as usize] -= 1;
        self.counts[kind][state as usize] += 1;
        self.ready[kind].remove(&(order, place));
        if state == TaskState::Ready {
            self.ready[kind].insert((order, place));
        }
    }
}

/// Returns the kinds with such needs.
fn kinds<T: Node>(which: impl Fn(Needs) -> bool) -> impl Iterator<Item = usize> {
    let kinds = T::KINDS.iter().enumerate();
    kinds.filter_map(move |(kind, needs)| which(*needs).then_some(kind))
}

#[cfg(test)]
mod tests {
    use precast_store::Digest;

    use super::*;
    use crate::task::{Kind, Task};

    const HOLDS: Able = able(Captures::Holds);
    const MAY_LOAD: Able = able(Captures::MayLoad);
    const NEVER: Able = able(Captures::Never);

    const fn able(captures: Captures) -> Able {
        let worker = false;
        Able { captures, worker }
    }

    fn run(schedule: &mut Schedule<Task>, able: Able) -> Task {
        match schedule.next(able, true, 0) {
            Next::Run(task) => task,
            other => panic!("{other:?}"),
        }
    }

    fn artifact(name: &str) -> Digest {
        Digest::of(name.as_bytes())
    }

    #[test]
    fn a_program_is_captured_compiled_and_gated() {
        let mut all = Schedule::of_build(1, false, false);
        assert_eq!(all.counts[Kind::Gate as usize], [1, 0, 0, 0, 0]);
        assert_eq!(run(&mut all, HOLDS), Task::Capture(0));
        assert_eq!(run(&mut all, NEVER), Task::StoreWeights);
        assert_eq!(all.next(NEVER, true, 0), Next::Wait);
        all.ended(Task::StoreWeights, true);
        assert!(all.lacks(0..1, artifact("small"), 1));
        assert!(all.lacks(0..1, artifact("large"), 2));
        all.ended(Task::Capture(0), true);
        assert_eq!(run(&mut all, NEVER), Task::Compile(artifact("large")));
        assert_eq!(run(&mut all, NEVER), Task::Compile(artifact("small")));
        all.ended(Task::Compile(artifact("small")), true);
        assert_eq!(all.next(HOLDS, true, 0), Next::Wait);
        assert!(all.needs_workers());
        // The gate decides about the failed one.
        all.ended(Task::Compile(artifact("large")), false);
        assert!(!all.needs_workers());
        assert_eq!(all.counts[Kind::Compile as usize], [0, 0, 0, 1, 1]);
        assert_eq!(run(&mut all, NEVER), Task::Gate(0));
        assert_eq!(all.next(NEVER, true, 0), Next::Wait);
        all.ended(Task::Gate(0), true);
        assert_eq!(all.next(NEVER, true, 0), Next::Over);
        let able = Able {
            worker: true,
            ..NEVER
        };
        assert_eq!(all.next(able, true, 0), Next::EndWorker);
    }

    #[test]
    fn gates_wait_for_the_shim() {
        let mut all = Schedule::of_build(1, true, false);
        assert_eq!(run(&mut all, HOLDS), Task::Capture(0));
        assert_eq!(run(&mut all, NEVER), Task::StoreWeights);
        all.ended(Task::StoreWeights, true);
        all.ended(Task::Capture(0), true);
        assert!(all.needs_workers());
        assert_eq!(run(&mut all, NEVER), Task::Shim);
        assert_eq!(all.next(HOLDS, true, 0), Next::Wait);
        all.ended(Task::Shim, true);
        assert!(!all.needs_workers());
        assert_eq!(run(&mut all, NEVER), Task::Gate(0));
        // A build with nothing else to do compiles it too.
        let mut all = Schedule::of_build(0, true, false);
        assert_eq!(run(&mut all, HOLDS), Task::StoreWeights);
        assert_eq!(run(&mut all, HOLDS), Task::Shim);
    }

    #[test]
    fn programs_share_an_artifact() {
        let mut all = Schedule::of_build(2, false, false);
        for program in 0..2 {
            assert_eq!(run(&mut all, HOLDS), Task::Capture(program));
        }
        assert_eq!(run(&mut all, NEVER), Task::StoreWeights);
        all.ended(Task::StoreWeights, true);
        assert!(all.lacks(0..1, artifact("a"), 1));
        assert!(!all.lacks(1..2, artifact("a"), 1));
        all.ended(Task::Capture(0), true);
        all.ended(Task::Capture(1), true);
        assert_eq!(run(&mut all, NEVER), Task::Compile(artifact("a")));
        all.ended(Task::Compile(artifact("a")), true);
        assert_eq!(run(&mut all, NEVER), Task::Gate(0));
        assert_eq!(run(&mut all, NEVER), Task::Gate(1));
    }

    #[test]
    fn a_failed_capture_fails_its_gate_and_no_other() {
        let mut all = Schedule::of_build(2, false, false);
        assert_eq!(run(&mut all, HOLDS), Task::Capture(0));
        all.ended(Task::Capture(0), false);
        assert_eq!(all.counts[Kind::Gate as usize], [1, 0, 0, 0, 1]);
        assert_eq!(run(&mut all, HOLDS), Task::Capture(1));
        all.ended(Task::Capture(1), true);
        assert_eq!(run(&mut all, HOLDS), Task::StoreWeights);
        all.ended(Task::StoreWeights, true);
        assert_eq!(run(&mut all, HOLDS), Task::Gate(1));
        all.ended(Task::Gate(1), true);
        assert!(all.over());
    }

    #[test]
    fn gates_of_large_weights_are_last_and_one_after_the_other() {
        let mut all = Schedule::of_build(3, false, true);
        for program in 0..2 {
            assert_eq!(run(&mut all, HOLDS), Task::Capture(program));
        }
        assert!(all.lacks(0..3, artifact("a"), 1));
        all.ended(Task::Capture(0), true);
        // The gate of the failed capture, and those that wait for it.
        all.ended(Task::Capture(1), false);
        assert_eq!(run(&mut all, NEVER), Task::StoreWeights);
        all.ended(Task::StoreWeights, true);
        assert_eq!(run(&mut all, HOLDS), Task::Capture(2));
        assert_eq!(run(&mut all, NEVER), Task::Compile(artifact("a")));
        assert!(all.lacks(0..3, artifact("b"), 1));
        all.ended(Task::Capture(2), true);
        all.ended(Task::Compile(artifact("a")), true);
        assert_eq!(run(&mut all, NEVER), Task::Compile(artifact("b")));
        assert_eq!(all.next(HOLDS, true, 0), Next::Wait);
        all.ended(Task::Compile(artifact("b")), true);
        assert!(!all.needs_workers());
        assert_eq!(run(&mut all, HOLDS), Task::Gate(0));
        assert_eq!(all.next(NEVER, true, 0), Next::Wait);
        all.ended(Task::Gate(0), true);
        assert_eq!(run(&mut all, NEVER), Task::Gate(2));
        all.ended(Task::Gate(2), true);
        assert!(all.over());
    }

    #[test]
    fn the_model_is_loaded_once_more_where_captures_wait() {
        let mut all = Schedule::of_build(3, false, false);
        assert_eq!(run(&mut all, HOLDS), Task::Capture(0));
        assert_eq!(run(&mut all, MAY_LOAD), Task::StoreWeights);
        assert_eq!(all.next(MAY_LOAD, false, 0), Next::Wait);
        assert_eq!(all.next(MAY_LOAD, true, 0), Next::LoadModel);
        all.loaded();
        assert_eq!(run(&mut all, HOLDS), Task::Capture(1));
        // A single capture does not pay for a load.
        assert_eq!(all.next(MAY_LOAD, true, 0), Next::Wait);
    }

    #[test]
    fn an_exclusive_task_runs_alone() {
        let mut all = Schedule::of_build(2, false, false);
        let tasks = [0, 1].map(|_| run(&mut all, HOLDS));
        all.wait_exclusive();
        assert!(!all.begin_exclusive());
        assert_eq!(all.next(HOLDS, true, 0), Next::Wait);
        all.wait_exclusive();
        // Both wait: one of them begins, and the other one waits for its end.
        assert!(all.begin_exclusive());
        assert!(!all.begin_exclusive());
        all.end_exclusive();
        all.ended(tasks[0], true);
        assert!(all.begin_exclusive());
        assert_eq!(all.next(HOLDS, true, 0), Next::Wait);
        all.end_exclusive();
        all.ended(tasks[1], true);
        assert_eq!(run(&mut all, NEVER), Task::StoreWeights);
    }
}
