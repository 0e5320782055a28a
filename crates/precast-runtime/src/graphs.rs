//! A program as one CUDA graph: all its steps are launched at once.
//!
//! A graph is captured after a few plain runs on the stream it is captured on, so that kernels are loaded and workspaces
//! are there. It reads static inputs and writes static outputs: its kernels have their addresses as arguments. A call copies
//! its inputs in, padded where they are smaller than the bucket, and its outputs out. A [`Session`] hands the static tensors out,
//! so a caller that writes the inputs there and reads the outputs there copies nothing.
//!
//! What is wrong with values is noted by the graph itself: see flags.rs.
//!
//! All graphs of a device share one memory pool: what one frees while it is captured the next one uses, so activations
//! take as much as the largest bucket needs, when that one is captured first. It follows that replays of one device
//! must not overlap. [`Shared`] orders them: callers enqueue one after the other, and a stream that is not the last
//! one's waits for what that one has.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    RuntimeError, Tensor, TorchError,
    context::{ExecutionContext, Plan},
    ffi::{Graph, Handle, Handles, Pool, RawStream, Stream, cuda},
    flags::{Flags, Watch},
    host,
    pad::Buffer,
    pool::{self, Wait},
    weights::Weights,
};

/// Runs before the capture.
const WARM_UP: usize = 3;

/// The pool and the order of replays of one device.
pub(super) struct Shared {
    pool: Pool,
    /// Where graphs are warmed up and captured.
    stream: Stream,
    device: usize,
    /// The stream of the last replay.
    last: Mutex<Option<RawStream>>,
}

/// The right to replay on a device, with the thread's current stream in order behind the last replay.
type Turn<'a> = MutexGuard<'a, Option<RawStream>>;

/// One program, captured.
pub(super) struct Graphed {
    shared: Arc<Shared>,
    state: Mutex<State>,
}

struct State {
    // Before what it points to.
    graph: Graph,
    inputs: Vec<Buffer>,
    outputs: Handles,
    /// What the graph notes of its static inputs, and of what it computes.
    flags: Option<Flags>,
    // Holds the kernels and the weights.
    _context: ExecutionContext,
}

impl State {
    /// Loads a program's code and captures it; once more where there was no room for either.
    fn with_room(
        plan: &Plan,
        weights: &Arc<Weights>,
        shared: &Arc<Shared>,
    ) -> Result<Self, TorchError> {
        host::with_room(|| {
            let context = plan.shared_context(weights.clone());
            Self::capture(plan, context?, shared)
        })
    }

    fn capture(
        plan: &Plan,
        mut context: ExecutionContext,
        shared: &Arc<Shared>,
    ) -> Result<Self, TorchError> {
        let _span = tracing::info_span!("graph", module = &*plan.module).entered();
        let current = Stream::current(shared.device)?;
        shared.stream.wait_for(&current)?;
        let _scope = shared.stream.enter()?;
        // Behind the last replay, on the capture stream.
        let _turn = shared.turn()?;
        let raw = shared.stream.raw();
        let mut inputs = Vec::new();
        for input in &plan.program.inputs {
            inputs.push(Buffer::new(input, plan.device)?);
        }
        let watch = Watch::new(&plan.program, &plan.module, plan.device, true);
        let run = |context: &mut ExecutionContext| {
            let mut handles: Handles = inputs.iter().map(|input| input.tensor.share()).collect();
            let mut flags = watch.clamp(&mut handles, plan.device)?;
            let made = plan.execute(context, handles, raw).and_then(|mut made| {
                watch.outcomes(&mut made, flags.as_mut())?;
                Ok(made)
            });
            Ok((made?, flags))
        };
        {
            let _span = tracing::info_span!("warm_up").entered();
            for _ in 0..WARM_UP {
                run(&mut context)?;
            }
            shared.stream.synchronize()?;
        }
        let (graph, (outputs, flags)) =
            Graph::capture(shared.pool, shared.device, || run(&mut context))?;
        Ok(Self {
            graph,
            inputs,
            outputs,
            flags,
            _context: context,
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The next owner of the stream may be given memory that a replay on another one still reads.
        let _ = cuda().and_then(|cuda| cuda.synchronize(self.device));
    }
}

impl Shared {
    pub fn new(device: usize) -> Result<Self, TorchError> {
        Ok(Self {
            pool: Pool::new()?,
            stream: Stream::apart(device)?,
            device,
            last: Mutex::default(),
        })
    }

    fn turn(&self) -> Result<Turn<'_>, TorchError> {
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
        let _turn = self.turn()?;
        Stream::current(self.device)?.synchronize()
    }
}

impl Graphed {
    /// Captures a program. The reason, when it can't be captured.
    pub fn capture(
        plan: &Plan,
        weights: &Arc<Weights>,
        shared: &Arc<Shared>,
    ) -> Result<Self, TorchError> {
        let state = State::with_room(plan, weights, shared)?;
        Ok(Self {
            shared: shared.clone(),
            state: Mutex::new(state),
        })
    }

    /// Captures it again with other weights, whose addresses the kernels have in them. On failure nothing has changed.
    pub fn swap(&self, plan: &Plan, weights: Arc<Weights>) -> Result<(), TorchError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let next = State::with_room(plan, &weights, &self.shared)?;
        // What was launched must be done before its graph and its weights go.
        self.shared.settle()?;
        *state = next;
        Ok(())
    }

    /// Replays it on the thread's current stream.
    ///
    /// With `padded`, inputs are smaller than the bucket and are padded into the static ones.
    pub fn run(
        &self,
        plan: &Plan,
        inputs: &Handles,
        padded: bool,
        wait: Wait,
    ) -> Result<(Handles, Option<Flags>), RuntimeError> {
        let failed = |message: TorchError| plan.failed("graph", message);
        // In this order everywhere: the program, then the device.
        let mut state = pool::lock(&self.state, wait).ok_or_else(|| plan.busy(1))?;
        let state = &mut *state;
        let _turn = self.shared.turn().map_err(failed)?;
        let span = padded.then(|| tracing::trace_span!("pad", module = &*plan.module).entered());
        for (to, from) in state.inputs.iter_mut().zip(inputs) {
            match padded {
                true => to.fill(from).map_err(failed)?,
                false => to.tensor.copy_from(from).map_err(failed)?,
            }
        }
        drop(span);
        state.graph.replay().map_err(failed)?;
        // The next replay writes over the static ones.
        let mut outputs = Handles::new();
        for output in &state.outputs {
            outputs.push(output.copied().map_err(failed)?);
        }
        let flags = state.flags.as_ref().map(|flags| flags.of_call(inputs));
        Ok((outputs, flags.transpose().map_err(failed)?))
    }

    /// Gives a caller the static tensors and the launch, with no copies.
    pub fn session(&self) -> Session<'_> {
        Session {
            graphed: self,
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// A captured program whose static inputs and outputs the caller has to itself, from
/// [`Model::session`](super::Model::session).
///
/// The fastest way to call one program again and again from one thread: write to the inputs, replay, and read the outputs
/// before the next replay of this program or any other of the device. Nothing is copied. Other callers of the program
/// wait; a call of it on this thread would wait forever.
///
/// ```no_run
/// # fn example(model: &precast_runtime::Model, features: &precast_runtime::Tensor) -> Result<(), Box<dyn std::error::Error>> {
/// let sizes = [("batch".to_owned(), 8)].into();
/// let mut session = model.session("forward", &sizes).ok_or("not a CUDA graph")?;
/// let (mut inputs, outputs) = (session.inputs(), session.outputs());
/// inputs[0].copy_from(features)?; // or any operator that takes a tensor to write to
/// session.replay()?;
/// session.check()?;
/// let answer = outputs[0].to_vec::<f32>()?;
/// # Ok(())
/// # }
/// ```
pub struct Session<'a> {
    graphed: &'a Graphed,
    state: MutexGuard<'a, State>,
}

impl Session<'_> {
    /// Returns the static inputs in the module's order, to write to. Their sizes are the bucket's. They hold the pad value, or the
    /// inputs of the last call. Never make one larger: torch would free the memory that the graph reads.
    pub fn inputs(&self) -> Vec<Tensor> {
        let inputs = self.state.inputs.iter();
        inputs.map(|input| alias(&input.tensor)).collect()
    }

    /// Launches the program on the thread's current stream.
    pub fn replay(&mut self) -> Result<(), TorchError> {
        let _turn = self.graphed.shared.turn()?;
        self.state.graph.replay()
    }

    /// Waits for the last replay on the thread's current stream, and fails with what was wrong with the values that it read,
    /// as [`Outputs::check`](super::Outputs::check) does: then the outputs are no answer.
    pub fn check(&self) -> Result<(), RuntimeError> {
        self.state.flags.as_ref().map_or(Ok(()), Flags::read)
    }

    /// Returns the static outputs, to read. The next replay on the device writes over them.
    pub fn outputs(&self) -> Vec<Tensor> {
        let outputs = self.state.outputs.iter();
        outputs.map(alias).collect()
    }
}

/// Returns a handle of a static tensor whose own sizes and storage a caller may change.
fn alias(handle: &Handle) -> Tensor {
    // Where it has no other handle, it would be given out as it is.
    let other = handle.share();
    Tensor(other.borrow().own())
}
