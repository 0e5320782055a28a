//! A program as one CUDA graph: all its steps are launched at once.
//!
//! A graph is captured after a few plain runs on the stream it is captured on, so that kernels are loaded and workspaces
//! are there. As captured it reads static inputs and writes static outputs: its kernels have their addresses as arguments.
//!
//! **In place.** A call of a bucket's own size needs no copies: before the launch, the kernels that have the address of a
//! static tensor are given that of the caller's input, or of a new output. The addresses are found in the captured
//! kernels' arguments. That this finds all of them can't be read anywhere, so each graph is tried when it is captured:
//! its answer for moved tensors, while the static ones hold what gives another, must be the same bit by bit. Integers
//! can't be made up for that, so such inputs are copied in, as are padded ones, and what a [`Session`] gave out, which a
//! replay may write over; an output that stays is copied out for the same reason. A graph that fails, as one without a
//! reproducible answer does, copies all. What is not tried is that no number among the arguments only looks like an address.
//!
//! What is wrong with values is noted by the graph itself: see flags.rs.
//!
//! All graphs of a device share one memory pool: what one frees while it is captured the next one uses, so activations
//! take as much as the largest bucket needs, when that one is captured first. It follows that replays of one device
//! must not overlap. [`Shared`] orders them: callers enqueue one after the other, and a stream that is not the last
//! one's waits for what that one has.

use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use smallvec::SmallVec;
use tch::Tensor;

use super::{
    RuntimeError,
    bits::{same, spread},
    error::first_line,
    ffi::{self, Graph, Pool, RawStream, Stream, cuda, share},
    flags::{Flags, Watch},
    host,
    lane::{Handles, Lane, Plan},
    pad,
    pool::{self, Wait},
    weights::{Weights, tch_device},
};

/// Runs before the capture.
const WARM_UP: usize = 3;

/// Why a tensor is copied that the proof had nothing to say about: see places.h, and integers.
const STAYS: &str =
    "they are integers, or share their memory, or too many kernels have their address";

/// What torch aligns memory to, at least: the captured kernels may have been chosen for it.
const ALIGNMENT: usize = 512;

/// The pool and the order of replays of one device.
pub(super) struct Shared {
    pool: Pool,
    /// Where graphs are warmed up and captured.
    stream: Stream,
    device: usize,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    /// The stream of the last replay.
    last: Option<RawStream>,
    /// Where the static outputs of the device's graphs are.
    outputs: Vec<Range<usize>>,
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
    /// What the graph notes of its static inputs, and of what it computes.
    flags: Option<Flags>,
    /// Of each input, then of each output: whether a call's own takes its place.
    moves: Vec<bool>,
    /// Why others are copied.
    copied: String,
    shared: Arc<Shared>,
    /// Where its outputs are, as `shared` knows.
    written: Vec<Range<usize>>,
    // Holds the kernels and the weights.
    _lane: Lane,
}

impl State {
    /// Loads a program's code and captures it; once more where there was no room for either.
    fn with_room(
        plan: &Plan,
        weights: &Arc<Weights>,
        shared: &Arc<Shared>,
    ) -> Result<Self, String> {
        host::with_room(|| {
            let lane = plan.shared_lane(weights.clone());
            Self::capture(plan, lane.map_err(|error| error.to_string())?, shared)
        })
    }

    fn capture(plan: &Plan, mut lane: Lane, shared: &Arc<Shared>) -> Result<Self, String> {
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
            spread(&mut buffer, &pad::one(input).map_err(text)?).map_err(text)?;
            inputs.push(buffer);
        }
        let device = tch_device(plan.device);
        let watch = Watch::new(&plan.program, &plan.module, plan.device, true);
        let run = |lane: &mut Lane| {
            let mut handles: Handles = inputs.iter().map(share).collect();
            let mut flags = watch.clamp(&mut handles, device).map_err(text)?;
            let made = plan.execute(lane, handles, raw).and_then(|mut made| {
                watch.outcomes(&mut made, flags.as_mut())?;
                Ok(made)
            });
            Ok((made.map_err(|error| error.to_string())?, flags))
        };
        {
            let _span = tracing::info_span!("warm_up").entered();
            for _ in 0..WARM_UP {
                run(&mut lane)?;
            }
            shared.stream.synchronize()?;
        }
        let (graph, (outputs, flags)) =
            Graph::capture(shared.pool, shared.device, || run(&mut lane))?;
        let mut state = Self {
            graph,
            inputs,
            outputs,
            flags,
            moves: Vec::new(),
            copied: String::new(),
            shared: shared.clone(),
            written: Vec::new(),
            _lane: lane,
        };
        state.settle_moves(plan)?;
        let written = state.outputs.iter().map(|output| {
            let meta = output.meta();
            meta.address()..meta.address() + meta.room().max(0) as usize
        });
        let written: Vec<_> = written.collect();
        let mut turn = turn;
        turn.0.outputs.extend(written.iter().cloned());
        state.written = written;
        drop(turn);
        drop(scope);
        Ok(state)
    }

    /// Finds out which tensors a call's own can take the place of.
    fn settle_moves(&mut self, plan: &Plan) -> Result<(), String> {
        let _span = tracing::info_span!("in_place").entered();
        let mut tensors: Handles = self.inputs.iter().map(share).collect();
        tensors.extend(self.outputs.iter().map(ffi::Handle::share));
        // What can't be read is no reason to go without the graph.
        let (mut moves, mut copied) = match self.graph.find(&tensors, self.inputs.len()) {
            Ok(moves) => (moves, STAYS.to_owned()),
            Err(reason) => (vec![false; tensors.len()], reason),
        };
        for (moves, input) in moves.iter_mut().zip(&self.inputs) {
            *moves &= input.is_floating_point();
        }
        if moves.contains(&true) {
            let refused = match host::with_room(|| self.proves(&moves)) {
                Ok(true) => None,
                Ok(false) => Some(
                    "its answer differs when they are elsewhere, or does not depend on them"
                        .to_owned(),
                ),
                Err(reason) => Some(reason),
            };
            if let Some(reason) = refused {
                moves.fill(false);
                copied = reason;
            }
        }
        tracing::debug!(?moves, copied, "in place");
        self.moves = moves;
        self.copied = copied;
        for (buffer, input) in self.inputs.iter_mut().zip(&plan.program.inputs) {
            let blank = pad::one(input).and_then(|one| spread(buffer, &one));
            blank.map_err(|error| first_line(&error))?;
        }
        Ok(())
    }

    /// Returns whether moved tensors change nothing in the answer, while those that they replace hold something else.
    fn proves(&mut self, moves: &[bool]) -> Result<bool, String> {
        let text = |error: tch::TchError| first_line(&error);
        let (ins, outs) = moves.split_at(self.inputs.len());
        let write = |inputs: &mut [Tensor], seed: u32| {
            for (input, _) in inputs.iter_mut().zip(ins).filter(|(_, moves)| **moves) {
                spread(input, &pattern(input, seed)?)?;
            }
            Ok(())
        };
        let copy = |handle: &ffi::Handle| pad::copy(&handle.share().into_tensor()).map(Into::into);
        write(&mut self.inputs, 1).map_err(text)?;
        self.graph.replay()?;
        let wanted: Result<Handles, _> = self.outputs.iter().map(copy).collect();
        let wanted = wanted.map_err(text)?;
        let mut own: SmallVec<[Option<ffi::Handle>; 16]> = SmallVec::new();
        for (input, &moves) in self.inputs.iter().zip(ins) {
            let copy = moves.then(|| copy(&share(input)));
            own.push(copy.transpose().map_err(text)?);
        }
        write(&mut self.inputs, 2).map_err(text)?;
        self.graph.replay()?;
        // Where the answer is the same anyway, it says nothing about what was read.
        if ins.contains(&true) && same(&self.outputs, &wanted).map_err(text)? {
            return Ok(false);
        }
        for (output, &moves) in self.outputs.iter().zip(outs) {
            if moves {
                let mut output = output.share().into_tensor();
                let one = Tensor::f_ones([], (output.kind(), tch::Device::Cpu)).map_err(text)?;
                spread(&mut output, &one).map_err(text)?;
            }
            let copy = moves.then(|| copy(output));
            own.push(copy.transpose().map_err(text)?);
        }
        let given: Vec<_> = own.iter().map(Option::as_ref).collect();
        self.graph.replay_on(&given)?;
        let answered = given[self.inputs.len()..].iter().zip(&self.outputs);
        let answered: Handles = answered
            .map(|(own, output)| own.unwrap_or(output).share())
            .collect();
        same(&answered, &wanted).map_err(text)
    }
}

/// Returns a row of numbers in (0, 1) for all rows of a tensor, on the CPU.
fn pattern(like: &Tensor, seed: u32) -> Result<Tensor, tch::TchError> {
    let row: Vec<f32> = (1..=like.size().last().copied().unwrap_or(1))
        .map(|i| (i as f32 * 0.618 * seed as f32).fract())
        .collect();
    let row = match like.size().is_empty() {
        true => Tensor::from(row[0]),
        false => Tensor::f_from_slice(&row)?,
    };
    row.f_to_kind(like.kind())
}

/// Returns whether a call's input can take a static one's place: where it starts and how it lies is what kernels were
/// chosen for, and it is not of the memory that replays write. Its sizes, dtype and device have been compared.
fn takes_place(input: &ffi::Handle, of: &Tensor, turn: &Turn<'_>) -> bool {
    let input = input.meta();
    let address = input.address();
    address.is_multiple_of(ALIGNMENT)
        && input.strides() == of.stride()
        && !turn
            .0
            .outputs
            .iter()
            .any(|output| output.contains(&address))
}

impl Drop for State {
    fn drop(&mut self) {
        if !self.written.is_empty() {
            let mut turns = self
                .shared
                .turns
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            turns
                .outputs
                .retain(|output| !self.written.contains(output));
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The next owner of the stream may be given memory that a replay on another one still reads.
        let _ = cuda().and_then(|cuda| cuda.synchronize(self.device));
    }
}

/// The right to replay on a device, with the thread's current stream in order behind the last replay.
pub(super) struct Turn<'a>(MutexGuard<'a, Turns>);

impl Shared {
    pub fn new(device: usize) -> Result<Self, String> {
        Ok(Self {
            pool: Pool::new()?,
            stream: Stream::apart(device)?,
            device,
            turns: Mutex::default(),
        })
    }

    fn turn(&self) -> Result<Turn<'_>, String> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let now = cuda()?.current_stream(self.device)?;
        if let Some(before) = turns.last.filter(|&before| before != now) {
            cuda()?.wait(now, before, self.device)?;
        }
        turns.last = Some(now);
        Ok(Turn(turns))
    }

    /// Waits until every replay is done.
    fn settle(&self) -> Result<(), String> {
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
    ) -> Result<Self, String> {
        let state = State::with_room(plan, weights, shared)?;
        Ok(Self {
            shared: shared.clone(),
            state: Mutex::new(state),
        })
    }

    /// Captures it again with other weights, whose addresses the kernels have in them. On failure nothing has changed.
    pub fn swap(&self, plan: &Plan, weights: Arc<Weights>) -> Result<(), String> {
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
        let failed = |message: String| plan.failed("graph", message);
        let text = |error: tch::TchError| failed(first_line(&error));
        // In this order everywhere: the program, then the device.
        let mut state = pool::lock(&self.state, wait).ok_or_else(|| plan.busy(1))?;
        let state = &mut *state;
        let turn = self.shared.turn().map_err(failed)?;
        let mut outputs = Handles::new();
        let mut given: SmallVec<[Option<&ffi::Handle>; 16]> = SmallVec::new();
        let span = padded.then(|| tracing::trace_span!("pad", module = &*plan.module).entered());
        for (((to, own), &moves), input) in state
            .inputs
            .iter_mut()
            .zip(inputs)
            .zip(&state.moves)
            .zip(&plan.program.inputs)
        {
            if moves && !padded && takes_place(own, to, &turn) {
                given.push(Some(own));
                continue;
            }
            given.push(None);
            let from = own.share().into_tensor();
            match padded {
                true => pad::fill(to, &from, input).map_err(text)?,
                false => to.f_copy_(&from).map_err(text)?,
            }
        }
        drop(span);
        let moves = &state.moves[state.inputs.len()..];
        for (output, &moves) in state.outputs.iter().zip(moves) {
            let output = output.share().into_tensor();
            outputs.push(match moves {
                true => output.f_empty_like().map_err(text)?.into(),
                false => output.into(),
            });
        }
        given.extend(
            outputs
                .iter()
                .zip(moves)
                .map(|(own, &moves)| moves.then_some(own)),
        );
        state.graph.replay_on(&given).map_err(failed)?;
        drop(given);
        for (output, _) in outputs.iter_mut().zip(moves).filter(|(_, moves)| !**moves) {
            *output = pad::copy(&output.share().into_tensor())
                .map_err(text)?
                .into();
        }
        let flags = state.flags.as_ref().map(|flags| flags.of_call(inputs));
        Ok((outputs, flags.transpose().map_err(text)?))
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
    pub fn inputs(&self) -> Vec<Tensor> {
        // Handles of their own: the graph reads these tensors, so none of them may be put elsewhere or dropped.
        let inputs = self.state.inputs.iter();
        inputs.map(Tensor::shallow_clone).collect()
    }

    /// Returns how many inputs and outputs a call by [`Model::run`](super::Model::run) copies when nothing is padded, and why
    /// it does not use the caller's where they are.
    pub fn copies(&self) -> ([usize; 2], &str) {
        let (inputs, outputs) = self.state.moves.split_at(self.state.inputs.len());
        let copied = |moves: &[bool]| moves.iter().filter(|moves| !**moves).count();
        ([copied(inputs), copied(outputs)], &self.state.copied)
    }

    /// Launches the program on the thread's current stream.
    pub fn replay(&mut self) -> Result<(), String> {
        let _turn = self.graphed.shared.turn()?;
        self.state.graph.replay()
    }

    /// Waits for the last replay on the thread's current stream, and fails with what was wrong with the values that it read,
    /// as [`Outputs::check`](super::Outputs::check) does: then the outputs are no answer.
    pub fn check(&self) -> Result<(), RuntimeError> {
        self.state.flags.as_ref().map_or(Ok(()), Flags::read)
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
