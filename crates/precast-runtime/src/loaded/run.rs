//! One call of a program: inputs padded to its bucket, its steps, its graph or eager, and outputs cut and checked.

use std::sync::atomic::Ordering;

use precast_store::Device;
use smallvec::SmallVec;

use super::Loaded;
use crate::{
    RuntimeError, Tensor,
    ffi::{Handle, Handles, Meta, RawStream, cuda},
    flags::Flags,
    graphs::Captured,
    pad::{self, Buffer, Buffers, Cut},
    pool::Wait,
    slot::{Runner, Slot},
};

/// The sizes of a request.
#[derive(Clone, Copy)]
pub(crate) enum Sizes<'a> {
    /// The bucket's own.
    Exact,
    /// Smaller ones, in the order of the bucket's dimensions.
    Padded(&'a [i64]),
    /// Any within the bounds of a dynamic program, in the order of its dimensions.
    Dynamic(&'a [i64]),
}

/// The outputs of a call, and the device's notes of its values.
pub(crate) type Answer = (SmallVec<[Tensor; 4]>, Option<Flags>);

impl Loaded {
    /// Runs it on checked inputs, in a slot that the call has for its time.
    pub fn serve(
        &self,
        inputs: Handles,
        sizes: Sizes<'_>,
        wait: Wait,
    ) -> Result<Answer, RuntimeError> {
        let place = self.calls.take(wait);
        let mut place = place.ok_or_else(|| self.plan.busy(self.calls.limit()))?;
        // Read after the slot is the caller's: a swap that was over before the call is seen.
        let mut slot = match place.item.take() {
            Some(slot) if slot.swaps == self.swaps.load(Ordering::Acquire) => slot,
            idle => self.bind(idle, &inputs)?,
        };
        // A panic loses the slot, which may be in an inconsistent state.
        let result = self.run_slot(&mut slot, inputs, sizes);
        place.item = Some(slot);
        result
    }

    /// Runs it in a slot that the caller has.
    pub(crate) fn run_slot(
        &self,
        slot: &mut Slot,
        mut inputs: Handles,
        sizes: Sizes<'_>,
    ) -> Result<Answer, RuntimeError> {
        if let Runner::Graph(graph) = &mut slot.runner {
            return self.replay(graph, &slot.buffers, &inputs, sizes);
        }
        let device = self.plan.device;
        let flags = self
            .watch
            .as_ref()
            .map(|watch| watch.clamp(&mut inputs, device));
        let mut flags = flags.transpose().map_err(|error| self.plan.tensor(error))?;
        let stream = match device {
            Device::Cpu => RawStream::NONE,
            Device::Cuda(ordinal) => self.stream(ordinal)?,
        };
        if let Sizes::Padded(_) = sizes {
            inputs = self.padded(&mut slot.buffers, inputs, stream)?;
        }
        inputs.extend(slot.states.iter().map(Handle::share));
        // Outputs are the caller's: never the memory of an input that somebody has, a state, a padding buffer or a weight.
        // The memory of an input that the call took may be free by then, and an output's.
        let sources: SmallVec<[usize; 8]> = inputs.iter().map(|i| i.meta().storage()).collect();
        let mut outputs = match &mut slot.runner {
            Runner::Eager(calls) => calls.evaluate(&self.plan, &inputs)?,
            Runner::Containers(containers) => self.plan.execute(containers, inputs, stream)?,
            Runner::Graph(_) => Handles::new(),
        };
        if let (Some(watch), Some(flags)) = (&self.watch, &mut flags) {
            watch.outcomes(&mut outputs, flags)?;
        }
        let outputs = self.finish(outputs, sizes, |output, storage| {
            slot.owns(&self.plan, storage) || sources.contains(&storage) && !output.is_sole()
        })?;
        match (device, flags) {
            // There is nothing to wait for.
            (Device::Cpu, Some(flags)) => flags.check().map(|()| (outputs, None)),
            (Device::Cuda(_), Some(flags)) => {
                let sent = flags
                    .sent(device)
                    .map_err(|error| self.plan.tensor(error))?;
                Ok((outputs, sent))
            }
            (_, None) => Ok((outputs, None)),
        }
    }

    /// Runs a slot on its static inputs, for a fixed program, and copies the outputs to `outputs`. Returns the device's
    /// notes of its values.
    pub fn run_static(
        &self,
        slot: &mut Slot,
        outputs: &[Handle],
    ) -> Result<Option<Flags>, RuntimeError> {
        let inputs = slot.static_inputs();
        self.plan.check_values(&inputs)?;
        if let Runner::Graph(graph) = &mut slot.runner {
            let replayed = graph.replay(
                &[],
                || Ok(()),
                |made, _| {
                    made.copy_to(outputs)?;
                    made.flags(&inputs)
                },
            );
            return replayed.map_err(|error| self.plan.failed("graph", error));
        }
        let (made, flags) = self.run_slot(slot, inputs, Sizes::Exact)?;
        let copied = Handle::copy_all(outputs.iter().zip(made.iter().map(|made| &made.0)));
        copied.map_err(|error| self.plan.tensor(error))?;
        Ok(flags)
    }

    fn replay(
        &self,
        graph: &mut Captured,
        buffers: &Buffers,
        inputs: &Handles,
        sizes: Sizes<'_>,
    ) -> Result<Answer, RuntimeError> {
        let given = buffers.inputs.iter().flatten().zip(inputs);
        let given = given.filter(|(to, from)| !to.tensor.is_like(from));
        let written: SmallVec<[(&Buffer, &Handle); 16]> = given.collect();
        let fill = || {
            let module = &*self.plan.module;
            let padded = matches!(sizes, Sizes::Padded(_));
            let _span = padded.then(|| tracing::trace_span!("pad", module).entered());
            let mut exact = SmallVec::<[_; 16]>::new();
            for (to, from) in &written {
                if to.tensor.meta().sizes() == from.meta().sizes() {
                    exact.push((&to.tensor, *from));
                } else {
                    to.fill(from)?;
                }
            }
            Handle::copy_all(exact.into_iter())
        };
        let tensors: SmallVec<[&Handle; 16]> = written.iter().map(|(to, _)| &to.tensor).collect();
        let replayed = graph.replay(&tensors, fill, |made, held| {
            let outputs = match sizes {
                Sizes::Exact | Sizes::Padded(_) => made.lend(held)?,
                Sizes::Dynamic(_) => made.copied()?,
            };
            Ok((outputs, made.flags(inputs)?))
        });
        let (outputs, flags) = replayed.map_err(|error| self.plan.failed("graph", error))?;
        Ok((self.finish(outputs, sizes, |_, _| false)?, flags))
    }

    fn padded(
        &self,
        buffers: &mut Buffers,
        inputs: Handles,
        stream: RawStream,
    ) -> Result<Handles, RuntimeError> {
        let last = buffers.last.filter(|&last| last != stream);
        if let (Device::Cuda(ordinal), Some(last)) = (self.plan.device, last) {
            // The other stream may still read the buffers.
            cuda()
                .and_then(|cuda| cuda.wait(stream, last, ordinal))
                .map_err(|reason| self.plan.failed("padding", reason))?;
        }
        buffers.last = Some(stream);
        self.fill(&mut buffers.inputs, inputs)
    }

    /// Puts inputs that are smaller than the bucket into buffers of its size.
    fn fill(
        &self,
        buffers: &mut [Option<Buffer>],
        mut inputs: Handles,
    ) -> Result<Handles, RuntimeError> {
        let _span = tracing::trace_span!("pad", module = &*self.plan.module).entered();
        for ((given, input), buffer) in inputs
            .iter_mut()
            .zip(&self.plan.program.inputs)
            .zip(buffers)
        {
            if given.meta().sizes() == input.layout.shape {
                continue;
            }
            let buffer = match buffer {
                Some(buffer) => buffer,
                none => none.insert(
                    Buffer::new(input, self.plan.device)
                        .map_err(|error| self.plan.tensor(error))?,
                ),
            };
            buffer
                .fill(given)
                .map_err(|error| self.plan.tensor(error))?;
            *given = buffer.tensor.share();
        }
        Ok(inputs)
    }

    /// Checks the outputs and cuts them to the request. Those that are `borrowed`, with their storage, are copied.
    fn finish(
        &self,
        outputs: Handles,
        sizes: Sizes<'_>,
        borrowed: impl Fn(&Handle, usize) -> bool,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        let mut finished = SmallVec::new();
        for (i, handle) in outputs.into_iter().enumerate() {
            let meta = handle.meta();
            self.check_output(i, &meta, sizes)?;
            let storage = meta.storage();
            let own = if borrowed(&handle, storage) {
                handle.copied().map_err(|error| self.plan.tensor(error))?
            } else {
                handle
            };
            finished.push(Tensor(match sizes {
                Sizes::Exact | Sizes::Dynamic(_) => own,
                Sizes::Padded(request) => pad::cut(own, &self.cuts[i], request)
                    .map_err(|error| self.plan.tensor(error))?,
            }));
        }
        Ok(finished)
    }

    fn stream(&self, ordinal: usize) -> Result<RawStream, RuntimeError> {
        let stream = cuda().and_then(|cuda| cuda.current_stream(ordinal));
        stream.map_err(|reason| RuntimeError::NoDevice {
            device: self.plan.device,
            reason,
        })
    }

    fn check_output(
        &self,
        output: usize,
        meta: &Meta<'_>,
        sizes: Sizes<'_>,
    ) -> Result<(), RuntimeError> {
        let layout = &self.plan.program.outputs[output].layout;
        let shape = match sizes {
            Sizes::Exact | Sizes::Padded(_) => meta.sizes() == layout.shape.as_slice(),
            // A record has the axes that follow a dynamic dimension; others may depend on it as well.
            Sizes::Dynamic(request) => {
                let follows = |cut: &Cut| {
                    let (axis, size) = cut.size(request);
                    meta.sizes().get(axis) == Some(&size)
                };
                meta.sizes().len() == layout.shape.len() && self.cuts[output].iter().all(follows)
            }
        };
        let matches = meta.defined()
            && meta.dense()
            && meta.dtype() == Some(layout.dtype)
            && shape
            && meta.device() == Some(self.plan.device);
        if matches {
            return Ok(());
        }
        let got = match (meta.defined() && meta.dense(), meta.dtype()) {
            (false, _) => "no dense tensor".to_owned(),
            (true, Some(dtype)) => format!("{dtype} {:?}", meta.sizes()),
            (true, None) => format!("of an unknown dtype, {:?}", meta.sizes()),
        };
        let expected = format!("{} {:?}", layout.dtype, layout.shape);
        let (module, bucket) = (self.plan.module.clone(), self.plan.bucket());
        Err(RuntimeError::BadOutput {
            module,
            bucket,
            output,
            expected,
            got,
        })
    }
}
