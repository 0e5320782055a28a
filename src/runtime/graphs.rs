//! A program as one CUDA graph: all its steps are launched at once.
//!
//! A graph is captured after a few plain runs on the stream it is captured on, so that kernels are loaded and workspaces
//! are there. It reads static inputs and writes static outputs: a call copies its inputs in, launches once, and copies
//! the outputs out, because the next replay writes over them.
//!
//! All graphs of a device share one memory pool: what one frees while it is captured the next one uses, so activations
//! take as much as the largest bucket needs, when that one is captured first. It follows that replays of one device
//! must not overlap. [`Shared`] orders them: callers enqueue one after the other, and a stream that is not the last
//! one's waits for what that one has.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::{
    RuntimeError,
    error::first_line,
    ffi::{self, Graph, Pool, RawStream, Stream, cuda, share},
    lane::{Handles, Lane, Plan},
    pad,
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
    last: Mutex<Option<RawStream>>,
}

/// One program, captured.
pub(super) struct Graphed {
    shared: Arc<Shared>,
    state: Mutex<State>,
}

struct State {
    // Before what it points to.
    graph: Graph,
    inputs: Vec<Tensor>,
    outputs: Handles,
    // Holds the kernels and the weights.
    _lane: Lane,
}

impl State {
    fn capture(plan: &Plan, mut lane: Lane, shared: &Shared) -> Result<Self, String> {
        let _span = tracing::info_span!("graph", module = &*plan.module).entered();
        let text = |error: tch::TchError| first_line(&error);
        let current = Stream::current(shared.device)?;
        shared.stream.wait_for(&current)?;
        let scope = shared.stream.enter()?;
        // Behind the last replay, on the capture stream.
        let turn = shared.turn()?;
        let raw = shared.stream.raw();
        let mut inputs = Vec::new();
        for input in &plan.program.inputs {
            let mut buffer = pad::buffer(&input.layout, plan.device).map_err(text)?;
            pad::blank(&mut buffer, input).map_err(text)?;
            inputs.push(buffer);
        }
        let run = |lane: &mut Lane| {
            let handles: Handles = inputs.iter().map(share).collect();
            plan.execute(lane, handles, raw)
                .map_err(|error| error.to_string())
        };
        {
            let _span = tracing::info_span!("warm_up").entered();
            for _ in 0..WARM_UP {
                run(&mut lane)?;
            }
            shared.stream.synchronize()?;
        }
        let (graph, outputs) = Graph::capture(shared.pool, shared.device, || run(&mut lane))?;
        drop(turn);
        drop(scope);
        Ok(Self {
            graph,
            inputs,
            outputs,
            _lane: lane,
        })
    }
}

/// The right to replay on a device, with the thread's current stream in order behind the last replay.
pub(super) struct Turn<'a> {
    _last: MutexGuard<'a, Option<RawStream>>,
}

impl Shared {
    pub fn new(device: usize) -> Result<Self, String> {
        Ok(Self {
            pool: Pool::new()?,
            stream: Stream::new(device)?,
            device,
            last: Mutex::new(None),
        })
    }

    fn turn(&self) -> Result<Turn<'_>, String> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = cuda()?.current_stream(self.device)?;
        if let Some(before) = last.filter(|&before| before != now) {
            cuda()?.wait(now, before, self.device)?;
        }
        *last = Some(now);
        Ok(Turn { _last: last })
    }

    /// Waits until every replay is done.
    fn settle(&self) -> Result<(), String> {
        let _turn = self.turn()?;
        Stream::current(self.device)?.synchronize()
    }
}

impl Graphed {
    /// Captures a program. The lane is the graph's from now on. The reason, when it can't be captured.
    pub fn capture(plan: &Plan, lane: Lane, shared: &Arc<Shared>) -> Result<Self, String> {
        let state = State::capture(plan, lane, shared)?;
        Ok(Self {
            shared: shared.clone(),
            state: Mutex::new(state),
        })
    }

    /// Captures it again with other weights, whose addresses the kernels have in them. On failure nothing has changed.
    pub fn swap(&self, plan: &Plan, weights: Arc<Weights>) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let lane = plan
            .shared_lane(weights)
            .map_err(|error| error.to_string())?;
        let next = State::capture(plan, lane, &self.shared)?;
        // What was launched must be done before its graph and its weights go.
        self.shared.settle()?;
        *state = next;
        Ok(())
    }
    /// Replays it on the thread's current stream: inputs copied in, outputs copied out.
    ///
    /// With `padded`, inputs are smaller than the bucket and are padded into the static ones.
    pub fn run(
        &self,
        plan: &Plan,
        inputs: &Handles,
        padded: bool,
    ) -> Result<Handles, RuntimeError> {
        let failed = |message: String| plan.failed("graph", message);
        let text = |error: tch::TchError| failed(first_line(&error));
        // In this order everywhere: the program, then the device.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let _turn = self.shared.turn().map_err(failed)?;
        let span = padded.then(|| tracing::trace_span!("pad", module = &*plan.module).entered());
        for ((to, from), input) in state
            .inputs
            .iter_mut()
            .zip(inputs)
            .zip(&plan.program.inputs)
        {
            let from = from.share().into_tensor();
            match padded {
                true => pad::fill(to, &from, input).map_err(text)?,
                false => to.f_copy_(&from).map_err(text)?,
            }
        }
        drop(span);
        state.graph.replay().map_err(failed)?;
        let mut outputs = Handles::new();
        for output in &state.outputs {
            outputs.push(
                pad::copy(&output.share().into_tensor())
                    .map_err(text)?
                    .into(),
            );
        }
        Ok(outputs)
    }

    /// Gives a caller the static tensors and the launch, with no copies.
    pub fn session(&self) -> Session<'_> {
        Session {
            graphed: self,
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// A captured program whose static inputs and outputs the caller has to itself.
///
/// The fastest way to call one program again and again from one thread: write the inputs in place, replay, read the
/// outputs before the next replay, of this program or any other of the device. Other callers of the program wait.
pub struct Session<'a> {
    graphed: &'a Graphed,
    state: MutexGuard<'a, State>,
}

impl Session<'_> {
    /// Returns the static inputs, to write to in place. Their sizes are the bucket's.
    pub fn inputs(&mut self) -> &mut [Tensor] {
        &mut self.state.inputs
    }

    /// Launches the program on the thread's current stream.
    pub fn replay(&mut self) -> Result<(), String> {
        let _turn = self.graphed.shared.turn()?;
        self.state.graph.replay()
    }

    /// Returns the static outputs. The next replay on the device writes over them.
    pub fn outputs(&self) -> Vec<Tensor> {
        self.state
            .outputs
            .iter()
            .map(|output| ffi::Handle::share(output).into_tensor())
            .collect()
    }
}
