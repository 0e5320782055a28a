//! A program as one CUDA graph: all its steps are launched at once.
//!
//! One thread of a device captures all programs: cuBLAS keeps a workspace of 33 MiB for each thread and stream that
//! multiplies. Graphs write to it. Other code in the process may have torch free all workspaces, as `torch.compile`
//! does before it captures, so this one is made in a pool of its own, which gives its memory to nobody else. The thread
//! captures a program after a few plain runs on the stream of the capture, so that kernels and the workspace are
//! loaded. These warm-ups write states. A state that a call or the caller has written is not given to them: they get
//! another tensor for it. The others, which have their first values, get these again afterwards. So the first step of a
//! training takes no second copy of parameters and moments. A capture itself runs nothing and changes no state. A graph
//! reads static inputs and writes static outputs, because its kernels have their addresses as arguments. A caller
//! writes its inputs to the static ones, padded where they are smaller than the bucket, and copies the outputs.
//!
//! The graph itself notes bad values: see flags.rs.
//!
//! A graph that lends gives its outputs to the caller as they are. The next replay writes over them. An output that
//! somebody still holds then is copied before the replay and written back after it, and this call's answer is a copy.
//!
//! | [`Lends`] | for | |
//! |---|---|---|
//! | `Pairs` | the two programs of a training pair: gradients and the values that the backward program reads are as large as the model, and a copy of each takes memory and time | The backward graph has the forward graph's outputs as static inputs, so that nothing is copied between the two; where a call gives another tensor, or the static one is held by somebody else, the same is done as above. Such a graph has a pool of its own: no other graph writes over its outputs |
//! | `Outputs` | calls of a wrapped module: logits take as long to copy as a layer takes to compute | A caller that holds an output over a call, as a loop with a variable does, would pay three copies each time: from then on that graph's answers are copies. Graphs of one pool write over each other's outputs: before a replay all that are lent are looked at |
//!
//! Each slot of a program has a separate graph; the containers for captures are created once per program. All graphs of
//! a device share one memory pool: a graph uses the memory that earlier graphs freed during their capture, so
//! activations take as much as the largest bucket needs, if that one is captured first. Therefore replays of one device
//! must not overlap, and a replay may overwrite the outputs of any other graph. [`Shared`] orders them: callers enqueue
//! in sequence, each copies its outputs before the next replay, and a stream waits for the stream of the previous
//! replay.

use std::{
    collections::{BTreeMap, HashSet},
    panic,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use precast_store::Device;
use rayon_core::{ThreadPool, ThreadPoolBuilder};
use tracing::{Dispatch, Span, dispatcher};

use super::{
    TorchError, ending,
    ffi::{Graph, GraphPool, Handle, Handles, RawStream, Stream, cuda},
    flags::{Flags, Watch},
    host,
    pad::Buffer,
    plan::{Bindings, Containers, Plan},
    weights::Weights,
};

/// Runs before the capture.
const WARM_UP: usize = 3;

/// The pool and the order of replays of one device.
pub(super) struct Shared {
    /// The pool, and the number of graphs that use it. torch gives a pool up with its last graph: then the next graph
    /// begins another.
    pool: Mutex<(GraphPool, usize)>,
    /// The thread of warm-ups and captures, and its stream.
    thread: OneThread,
    stream: Stream,
    device: usize,
    /// The stream of the last replay.
    last: Mutex<Option<RawStream>>,
    /// The outputs that graphs of pairs lend, by address.
    lent: Mutex<BTreeMap<usize, Handle>>,
    /// Those that graphs in the pool lend.
    outputs: Mutex<Vec<Lent>>,
}

/// Which outputs graphs give as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Lends {
    /// None: answers are copies.
    #[default]
    Nothing,
    /// Those of graphs in a pool of their own, always.
    Pairs,
    /// Those that callers drop before the next call.
    Outputs,
}

/// An output of a graph in the pool of a device that is given as it is.
struct Lent {
    output: Handle,
    /// Whether its graph still lends.
    by: Arc<AtomicBool>,
}

/// A thread that does one work after the other.
struct OneThread(ThreadPool);

impl OneThread {
    fn new(name: &'static str) -> Result<Self, TorchError> {
        let thread = ThreadPoolBuilder::new().num_threads(1);
        let thread = thread.thread_name(move |_| name.to_owned()).build();
        Ok(Self(thread.map_err(|error| error.to_string())?))
    }

    /// Does `work` on the thread. Its spans are the caller's, for whoever listens to the caller.
    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let (listener, caller) = (dispatcher::get_default(Dispatch::clone), Span::current());
        let work = || dispatcher::with_default(&listener, || caller.in_scope(work));
        // A caller that is a thread of another pool would do other work of that pool while it waits, with its locks.
        let waiting = || self.0.install(work);
        thread::scope(|scope| scope.spawn(waiting).join())
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

/// The right to replay on a device.
type Replaying<'a> = MutexGuard<'a, Option<RawStream>>;

/// Captures one program, once for each slot.
pub(super) struct Capture {
    shared: Arc<Shared>,
    prepared: Mutex<Prepared>,
    pub lends: Lends,
}

/// What the captures of one program share.
#[derive(Default)]
struct Prepared {
    /// Made with the first graph. Graphs run the code that these loaded.
    containers: Option<Containers>,
    /// Whether the program was warmed up.
    warm: bool,
}

/// A captured program.
pub(super) struct Captured {
    // Before the memory that it reads.
    graph: Graph,
    outputs: Handles,
    /// For each output, whether callers receive it as it is, if the graph lends.
    lent: Vec<bool>,
    lends: Arc<AtomicBool>,
    /// The graph's notes of its static inputs, and of computed values.
    flags: Option<Flags>,
    _bindings: Option<Bindings>,
    _weights: Arc<Weights>,
    capture: Arc<Capture>,
}

/// The memory that a replay writes and that somebody else holds.
#[derive(Default)]
pub(super) struct Held {
    tensors: Handles,
    addresses: HashSet<usize>,
    /// Copies of them from before the replay.
    values: Handles,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A replay on another stream may still read memory that the next owner of this stream receives.
        let _ = cuda().and_then(|cuda| cuda.synchronize(self.device));
    }
}

impl Shared {
    pub fn new(device: usize) -> Result<Self, TorchError> {
        Ok(Self {
            pool: Mutex::new((GraphPool::new()?, 0)),
            thread: OneThread::new("precast-capture")?,
            stream: Stream::exclusive(device)?,
            device,
            last: Mutex::default(),
            lent: Mutex::default(),
            outputs: Mutex::default(),
        })
    }

    /// Returns the pool for one more graph.
    fn enter_pool(&self) -> Result<GraphPool, TorchError> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.1 == 0 {
            // The allocator keeps the memory of a pool without graphs, and gives none of it to another pool.
            host::release();
            pool.0 = GraphPool::new()?;
        }
        pool.1 += 1;
        Ok(pool.0)
    }

    fn leave_pool(&self) {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        pool.1 = pool.1.saturating_sub(1);
    }

    /// Returns the output of a graph that has the memory of this tensor, if one lends it.
    pub fn lent(&self, tensor: &Handle) -> Option<Handle> {
        let lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let output = lent.get(&tensor.meta().address())?;
        output.is_like(tensor).then(|| output.share())
    }

    fn lend<'a>(&self, outputs: impl Iterator<Item = (&'a Handle, &'a bool)>) {
        let lent = outputs.filter(|(_, lent)| **lent);
        let by_address = lent.map(|(output, _)| (output.meta().address(), output.share()));
        let mut all = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(by_address);
    }

    fn take_back<'a>(&self, outputs: impl Iterator<Item = (&'a Handle, &'a bool)>) {
        let mut all = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        for (output, _) in outputs.filter(|(_, lent)| **lent) {
            all.remove(&output.meta().address());
        }
    }

    fn lend_in_pool<'a>(
        &self,
        outputs: impl Iterator<Item = (&'a Handle, &'a bool)>,
        by: &Arc<AtomicBool>,
    ) {
        let lent = outputs.filter(|(_, lent)| **lent).map(|(output, _)| Lent {
            output: output.share(),
            by: by.clone(),
        });
        let mut all = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(lent);
    }

    fn take_back_of(&self, by: &Arc<AtomicBool>) {
        let mut all = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|lent| !Arc::ptr_eq(&lent.by, by));
    }

    /// Returns the lent outputs of the pool that somebody holds. Their graphs lend no more.
    fn held(&self) -> Result<Held, TorchError> {
        let all = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        let held = all.iter().filter(|lent| lent.output.is_held());
        let held: Vec<&Lent> = held.collect();
        for lent in &held {
            lent.by.store(false, Ordering::Relaxed);
        }
        Held::of(held.iter().map(|lent| &lent.output))
    }

    /// Waits for the right to replay, and puts the thread's current stream after the last replay.
    fn order(&self) -> Result<Replaying<'_>, TorchError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = cuda()?.current_stream(self.device)?;
        if let Some(before) = last.filter(|&before| before != now) {
            cuda()?.wait(now, before, self.device)?;
        }
        *last = Some(now);
        Ok(last)
    }

    /// Waits until every replay is done.
    fn settle(&self) -> Result<(), TorchError> {
        let _order = self.order()?;
        Stream::current(self.device)?.synchronize()
    }
}

impl Capture {
    pub fn new(shared: &Arc<Shared>, lends: Lends) -> Arc<Self> {
        Arc::new(Self {
            shared: shared.clone(),
            prepared: Mutex::default(),
            lends,
        })
    }

    /// Returns the output of another graph that has the memory of this tensor, if this graph may read it there.
    pub fn lent(&self, tensor: &Handle) -> Option<Handle> {
        match self.lends {
            Lends::Pairs => self.shared.lent(tensor),
            _ => None,
        }
    }

    fn leave_pool(&self) {
        if self.lends != Lends::Pairs {
            self.shared.leave_pool();
        }
    }

    /// Captures the program with its weights. Tries again after an out-of-memory error. The graph reads `inputs`, and
    /// reads and writes `states`. Those that are not `written` have other values afterwards, also after an error.
    pub fn capture(
        self: &Arc<Self>,
        plan: &Plan,
        weights: &Arc<Weights>,
        inputs: &[Option<Buffer>],
        (states, written): (&Handles, &[bool]),
    ) -> Result<Captured, TorchError> {
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let Prepared { containers, warm } = &mut *prepared;
        let shared = &self.shared;
        shared.stream.wait_for(&Stream::current(shared.device)?)?;
        let mut capture = || {
            let _scope = shared.stream.enter()?;
            let containers = match &mut *containers {
                Some(containers) => containers,
                none => none.insert(plan.shared_containers()?),
            };
            plan.bind(containers, weights)?;
            let first = (!*warm).then(|| plan.writable(states, written));
            let first = first.transpose()?;
            let captured = self.record(plan, weights, (inputs, states), first, containers)?;
            *warm = true;
            Ok(captured)
        };
        shared.thread.run(|| host::with_room(&mut capture))
    }

    /// Captures the program, after warm-ups on the states `first`, if there are any.
    fn record(
        self: &Arc<Self>,
        plan: &Plan,
        weights: &Arc<Weights>,
        (inputs, states): (&[Option<Buffer>], &Handles),
        first: Option<Handles>,
        containers: &mut Containers,
    ) -> Result<Captured, TorchError> {
        let shared = &self.shared;
        let _span = tracing::info_span!("graph", module = &*plan.module).entered();
        let _order = shared.order()?;
        let raw = shared.stream.raw();
        let watch = Watch::new(&plan.program, &plan.module, plan.device, true);
        let run = |containers: &mut Containers, states: &Handles| {
            let buffers = inputs.iter().flatten();
            let mut handles: Handles = buffers.map(|buffer| buffer.tensor.share()).collect();
            let flags = watch
                .as_ref()
                .map(|watch| watch.clamp(&mut handles, plan.device));
            let mut flags = flags.transpose()?;
            handles.extend(states.iter().map(Handle::share));
            let mut outputs = plan.execute(containers, handles, raw)?;
            if let (Some(watch), Some(flags)) = (&watch, &mut flags) {
                watch.outcomes(&mut outputs, flags)?;
            }
            Ok((outputs, flags))
        };
        Graph::workspaces(shared.device)?;
        let mut warmed = Ok(());
        if let Some(first) = &first {
            let _span = tracing::info_span!("warm_up").entered();
            // What the allocator keeps for other streams is of no use to the warm-ups.
            host::release();
            warmed = (0..WARM_UP).try_for_each(|_| run(containers, first).map(drop));
        }
        // Also after an error: the caller writes the states next, on another stream.
        shared.stream.synchronize()?;
        warmed?;
        if first.is_some() {
            // The warm-ups' memory serves the capture, and others: the allocator keeps it for this stream alone.
            drop(first);
            host::release();
        }
        let pool = match self.lends {
            Lends::Pairs => GraphPool::new()?,
            _ => shared.enter_pool()?,
        };
        let captured = Graph::capture(pool, shared.device, || run(containers, states));
        let captured = captured.inspect_err(|_| self.leave_pool());
        let (graph, (outputs, flags)) = captured?;
        let static_inputs = inputs.iter().flatten().map(|buffer| &buffer.tensor);
        let mut others: HashSet<usize> = static_inputs
            .chain(states)
            .map(|given| given.meta().storage())
            .collect();
        let lent = outputs.iter().map(|output| {
            let storage = output.meta().storage();
            let own = others.insert(storage)
                && !output.is_held()
                && !containers.prepared(storage)
                && !plan.owns(weights, storage);
            self.lends != Lends::Nothing && own
        });
        let lent: Vec<bool> = lent.collect();
        let by = Arc::new(AtomicBool::new(self.lends != Lends::Nothing));
        if self.lends == Lends::Pairs {
            shared.lend(outputs.iter().zip(&lent));
        } else {
            shared.lend_in_pool(outputs.iter().zip(&lent), &by);
        }
        Ok(Captured {
            graph,
            outputs,
            lent,
            lends: by,
            flags,
            _bindings: containers.bindings(),
            _weights: weights.clone(),
            capture: self.clone(),
        })
    }
}

impl Captured {
    /// Replays the graph on the thread's current stream: `fill` writes these static inputs, `read` takes the outputs.
    pub fn replay<R>(
        &mut self,
        inputs: &[&Handle],
        fill: impl FnOnce() -> Result<(), TorchError>,
        read: impl FnOnce(&Self, &Held) -> Result<R, TorchError>,
    ) -> Result<R, TorchError> {
        let _order = self.capture.shared.order()?;
        let held = match self.capture.lends {
            Lends::Pairs => {
                let lent = self.outputs.iter().zip(&self.lent);
                let lent = lent.filter_map(|(output, lent)| lent.then_some(output));
                Held::of(inputs.iter().copied().chain(lent))?
            }
            _ => self.capture.shared.held()?,
        };
        let replayed = fill().and_then(|()| self.graph.replay());
        let answer = replayed.and_then(|()| read(self, &held));
        held.write_back()?;
        answer
    }

    /// Copies the outputs into other tensors.
    pub fn copy_to(&self, to: &[Handle]) -> Result<(), TorchError> {
        Handle::copy_all(to.iter().zip(&self.outputs))
    }

    /// Returns copies of the outputs.
    pub fn copied(&self) -> Result<Handles, TorchError> {
        Handle::copied_all(&self.outputs)
    }

    /// Returns the outputs that it lends as they are, and copies of the others and of those that somebody holds.
    pub fn lend(&self, held: &Held) -> Result<Handles, TorchError> {
        if !self.lends.load(Ordering::Relaxed) {
            return self.copied();
        }
        let outputs = self.outputs.iter().zip(&self.lent);
        let given = outputs.map(|(output, lent)| {
            let address = output.meta().address();
            match *lent && !held.addresses.contains(&address) {
                true => output.alias(),
                false => output.empty_like(),
            }
        });
        let given: Handles = given.collect::<Result<_, _>>()?;
        let copied = given.iter().zip(&self.outputs);
        Handle::copy_all(copied.filter(|(given, output)| !given.is_like(output)))?;
        Ok(given)
    }

    /// Returns the notes of values of a call with these inputs.
    pub fn flags(&self, inputs: &Handles) -> Result<Option<Flags>, TorchError> {
        match &self.flags {
            Some(flags) => flags.of_call(inputs, Device::Cuda(self.capture.shared.device)),
            None => Ok(None),
        }
    }
}

impl Held {
    fn of<'a>(written: impl Iterator<Item = &'a Handle>) -> Result<Self, TorchError> {
        let held = written.filter(|one| one.is_held());
        let tensors: Handles = held.map(Handle::share).collect();
        Ok(Self {
            values: Handle::copied_all(&tensors)?,
            addresses: tensors.iter().map(|one| one.meta().address()).collect(),
            tensors,
        })
    }

    fn write_back(&self) -> Result<(), TorchError> {
        Handle::copy_all(self.tensors.iter().zip(&self.values))
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        let shared = &self.capture.shared;
        self.capture.leave_pool();
        match self.capture.lends {
            Lends::Pairs => shared.take_back(self.outputs.iter().zip(&self.lent)),
            _ => shared.take_back_of(&self.lends),
        }
        // A replay that was launched still reads the weights and the static inputs.
        if !ending::ended()
            && let Err(error) = shared.settle()
        {
            tracing::debug!(%error, "a replay was not waited for");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{thread::current, time::Duration};

    use super::*;

    #[test]
    fn all_work_is_done_on_one_thread() {
        let one = OneThread::new("one").unwrap();
        let first = one.run(|| current().id());
        assert_eq!(one.run(|| current().id()), first);
        assert_ne!(current().id(), first);
        let panicked =
            panic::catch_unwind(panic::AssertUnwindSafe(|| one.run(|| panic!("it fails"))));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"it fails"));
        assert_eq!(one.run(|| current().id()), first);
    }

    #[test]
    fn a_caller_in_another_pool_does_nothing_else_while_it_waits() {
        let one = OneThread::new("one").unwrap();
        let callers = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let (lock, done) = (Mutex::new(()), Mutex::new(0));
        callers.scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|_| {
                    // A second work of the same thread would wait for itself here.
                    let _held = lock.try_lock().unwrap();
                    one.run(|| thread::sleep(Duration::from_millis(5)));
                    *done.lock().unwrap() += 1;
                });
            }
        });
        assert_eq!(*done.lock().unwrap(), 4);
    }

    #[test]
    fn the_callers_listener_hears_of_the_work() {
        use tracing_subscriber::{layer::SubscriberExt, registry::LookupSpan};

        struct Names(Arc<Mutex<Vec<String>>>);
        impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for Names {
            fn on_new_span(
                &self,
                span: &tracing::span::Attributes<'_>,
                id: &tracing::span::Id,
                context: tracing_subscriber::layer::Context<'_, S>,
            ) {
                let parent = context.span(id).unwrap().parent().map(|span| span.name());
                let name = format!("{} in {parent:?}", span.metadata().name());
                self.0.lock().unwrap().push(name);
            }
        }
        let one = OneThread::new("one").unwrap();
        let names = Arc::default();
        let listener = tracing_subscriber::registry().with(Names(Arc::clone(&names)));
        tracing::subscriber::with_default(listener, || {
            tracing::info_span!("outer")
                .in_scope(|| one.run(|| tracing::info_span!("inner").in_scope(|| ())));
        });
        let heard = ["outer in None", "inner in Some(\"outer\")"];
        assert_eq!(*names.lock().unwrap(), heard);
    }
}
