//! One call of a program: inputs padded to its bucket, its steps, its graph or eager, and outputs cut and checked.

use precast_store::Device;
use smallvec::SmallVec;

use super::{Ready, Runner};
use crate::{
    RuntimeError, Tensor, TorchError,
    context::ExecutionContexts,
    eager::Eager,
    ffi::{Handle, Handles, Meta, RawStream, cuda},
    flags::Flags,
    pad::{self, Buffer, Buffers, Cut},
    pool::Wait,
};

/// What a call gives to a program.
#[derive(Clone, Copy)]
pub(crate) enum Sizes<'a> {
    /// The bucket's own.
    Exact,
    /// Smaller ones, in the order of the bucket's dimensions.
    Padded(&'a [i64]),
    /// Any within the bounds of a dynamic program, in the order of its dimensions.
    Dynamic(&'a [i64]),
}

impl Ready {
    /// Runs it on inputs that were checked. What a device finds of their values comes back as flags.
    pub fn run(
        &self,
        mut inputs: Handles,
        sizes: Sizes<'_>,
        wait: Wait,
    ) -> Result<(SmallVec<[Tensor; 4]>, Option<Flags>), RuntimeError> {
        if let Some(graph) = &self.graph {
            let padded = matches!(sizes, Sizes::Padded(_));
            let (outputs, flags) = graph.run(&self.plan, &inputs, padded, wait)?;
            return Ok((self.finish(outputs, sizes, |_| false)?, flags));
        }
        let mut flags = self
            .watch
            .clamp(&mut inputs, self.plan.device)
            .map_err(|error| self.tensor(error))?;
        let outputs = match &self.runner {
            Runner::Artifacts(contexts) => {
                self.run_steps(contexts, inputs, sizes, wait, flags.as_mut())?
            }
            Runner::Eager(eager) => self.run_eager(eager, inputs, sizes, wait, flags.as_mut())?,
        };
        match (self.plan.device, flags) {
            // There is nothing to wait for.
            (Device::Cpu, Some(flags)) => flags.check().map(|()| (outputs, None)),
            (_, flags) => Ok((outputs, flags)),
        }
    }

    fn run_steps(
        &self,
        contexts: &ExecutionContexts,
        inputs: Handles,
        sizes: Sizes<'_>,
        wait: Wait,
        flags: Option<&mut Flags>,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        contexts.with(&self.plan, wait, |context| {
            let stream = self.stream()?;
            let inputs = match sizes {
                Sizes::Exact | Sizes::Dynamic(_) => inputs,
                Sizes::Padded(_) => self.padded(&mut context.buffers, inputs, stream)?,
            };
            // Outputs are the caller's: never the memory of an input, a padding buffer or a weight.
            let sources = storages(&inputs);
            let mut outputs = self.plan.execute(context, inputs, stream)?;
            self.watch.outcomes(&mut outputs, flags)?;
            self.finish(outputs, sizes, |storage| {
                self.plan.owns(&context.weights, storage)
                    || context.made(storage)
                    || sources.contains(&storage)
            })
        })
    }

    fn run_eager(
        &self,
        eager: &Eager,
        inputs: Handles,
        sizes: Sizes<'_>,
        wait: Wait,
        flags: Option<&mut Flags>,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        let _span = tracing::trace_span!("eager", module = &*self.plan.module).entered();
        eager.with(wait, |context| {
            let inputs = match sizes {
                Sizes::Exact | Sizes::Dynamic(_) => inputs,
                Sizes::Padded(_) => self.padded(&mut context.buffers, inputs, self.stream()?)?,
            };
            let sources = storages(&inputs);
            let (mut outputs, weights) = eager.run(&mut context.calls, &inputs)?;
            self.watch.outcomes(&mut outputs, flags)?;
            self.finish(outputs, sizes, |storage| {
                self.plan.owns(&weights, storage) || sources.contains(&storage)
            })
        })
    }

    fn padded(
        &self,
        buffers: &mut Buffers,
        inputs: Handles,
        stream: RawStream,
    ) -> Result<Handles, RuntimeError> {
        let last = buffers.last.filter(|&last| last != stream);
        if let (Device::Cuda(ordinal), Some(last)) = (self.plan.device, last) {
            // Another stream may still read the buffers.
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
                    Buffer::new(input, self.plan.device).map_err(|error| self.tensor(error))?,
                ),
            };
            buffer.fill(given).map_err(|error| self.tensor(error))?;
            *given = buffer.tensor.share();
        }
        Ok(inputs)
    }

    fn finish(
        &self,
        outputs: Handles,
        sizes: Sizes<'_>,
        foreign: impl Fn(usize) -> bool,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        let mut finished = SmallVec::new();
        for (i, handle) in outputs.into_iter().enumerate() {
            let meta = handle.meta();
            self.check_output(i, &meta, sizes)?;
            let storage = meta.storage();
            let own: Handle = match foreign(storage) {
                true => handle.copied().map_err(|error| self.tensor(error))?,
                false => handle,
            };
            finished.push(Tensor(match sizes {
                Sizes::Exact | Sizes::Dynamic(_) => own,
                Sizes::Padded(request) => {
                    pad::cut(own, &self.cuts[i], request).map_err(|error| self.tensor(error))?
                }
            }));
        }
        Ok(finished)
    }

    fn stream(&self) -> Result<RawStream, RuntimeError> {
        match self.plan.device {
            Device::Cpu => Ok(RawStream::NONE),
            Device::Cuda(ordinal) => cuda()
                .and_then(|cuda| cuda.current_stream(ordinal))
                .map_err(|reason| RuntimeError::NoDevice {
                    device: self.plan.device,
                    reason,
                }),
        }
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
            // Axes that follow a dynamic dimension are known; others may depend on it in ways no record says.
            Sizes::Dynamic(request) => {
                let follows = |cut: &Cut| {
                    let (axis, size) = cut.size(request);
                    meta.sizes().get(axis) == Some(&size)
                };
                meta.sizes().len() == layout.shape.len() && self.cuts[output].iter().all(follows)
            }
        };
        let right = meta.defined()
            && meta.dense()
            && meta.dtype() == Some(layout.dtype)
            && shape
            && meta.device() == Some(self.plan.device);
        if right {
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

    pub(super) fn tensor(&self, message: TorchError) -> RuntimeError {
        RuntimeError::Tensor {
            module: self.plan.module.clone(),
            message,
        }
    }
}

/// Returns the address of each tensor's storage.
fn storages(tensors: &Handles) -> SmallVec<[usize; 8]> {
    let storage = |handle: &Handle| handle.meta().storage();
    tensors.iter().map(storage).collect()
}
