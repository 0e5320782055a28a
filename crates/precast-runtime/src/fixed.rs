//! A fixed program: one caller's hold of a slot, from run to run.

use precast_store::{Device, record::Dtype};

use super::{
    Element, RuntimeError, Tensor, TorchError,
    arrays::{self, Argument},
    ffi::Handle,
    flags::Flags,
    loaded::Loaded,
    pool::Place,
    replica::Replica,
    slot::Slot,
    threads,
};

/// One program of a bucket with static inputs and outputs, from [`Model::fixed`](super::Model::fixed).
///
/// The fastest way to run one program repeatedly from one thread: write the inputs, run, read the outputs. On CUDA,
/// where the program runs as a graph, a run is a launch of the graph and a copy of the outputs, on the thread's current
/// stream. Other callers run at the same time, and do not see its tensors. It keeps the weights of its creation.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
/// # use precast_runtime::{Device, Runtime, Store, Tensor};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = example();
/// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
/// let sizes = [("batch".to_owned(), 1), ("seq".to_owned(), 4)].into();
/// let mut fixed = model.fixed("double", &sizes)?;
/// let features = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[1, 4])?;
/// fixed.inputs()[0].write(&features)?;
/// fixed.run()?;
/// fixed.check()?; // waits; needed only where a value may be out of bounds
/// assert_eq!(fixed.outputs()[0].to_vec::<f32>()?, [2.0, 4.0, 6.0, 8.0]);
/// # Ok(()) }
/// ```
pub struct Fixed<'a> {
    replica: &'a Replica,
    program: &'a Loaded,
    slot: Place<'a, Slot>,
    outputs: Vec<Handle>,
    /// The device's notes of the last run.
    flags: Option<Flags>,
}

/// A tensor of a [`Fixed`] program, at the same address from run to run. It can't be resized or given away, so that the
/// memory that a graph reads is never freed.
pub struct Static<'s>(&'s Handle);

impl<'a> Fixed<'a> {
    pub(super) fn open(replica: &'a Replica, program: &'a Loaded) -> Result<Self, RuntimeError> {
        let slot = replica.admit(|| program.hold())?;
        let plan = &program.plan;
        let outputs = plan.program.outputs.iter().map(|output| {
            let layout = &output.layout;
            let made = Handle::empty(&layout.shape, &layout.stride, layout.dtype, plan.device)?;
            made.zero().map(|()| made)
        });
        let outputs = outputs.collect::<Result<_, _>>();
        Ok(Self {
            replica,
            program,
            slot,
            outputs: outputs.map_err(|error| plan.tensor(error))?,
            flags: None,
        })
    }

    /// Returns the static inputs in the module's order, to write to. Their sizes are the bucket's. They hold the pad
    /// value until they are written, and keep their elements from run to run.
    pub fn inputs(&mut self) -> Vec<Static<'_>> {
        let slot = self.slot.item.iter();
        let buffers = slot.flat_map(|slot| slot.buffers.inputs.iter().flatten());
        buffers.map(|buffer| Static(&buffer.tensor)).collect()
    }

    /// Runs the program on the static inputs. On CUDA it returns when the work is in the thread's current stream.
    ///
    /// Values of inputs are checked as [`Model::run`](super::Model::run) does.
    pub fn run(&mut self) -> Result<(), RuntimeError> {
        self.flags = None;
        let Some(slot) = &mut self.slot.item else {
            return Ok(());
        };
        self.flags = self.replica.admit(|| {
            threads::find(self.replica.device)?;
            self.program.run_static(slot, &self.outputs)
        })?;
        Ok(())
    }

    /// Waits for the last run, and fails with the value that was out of bounds in it, as
    /// [`Outputs::check`](super::Outputs::check) does: then discard the outputs.
    pub fn check(&self) -> Result<(), RuntimeError> {
        self.flags.as_ref().map_or(Ok(()), Flags::check)
    }

    /// Returns the static outputs in the module's order, to read. The next run overwrites them.
    pub fn outputs(&self) -> Vec<Static<'_>> {
        self.outputs.iter().map(Static).collect()
    }

    /// Returns whether it runs as a CUDA graph.
    pub fn is_graph(&self) -> bool {
        self.program.is_graph()
    }
}

impl Drop for Fixed<'_> {
    fn drop(&mut self) {
        // An idle slot would keep the old weights.
        let outdated = |slot: &mut Slot| self.program.is_outdated(slot);
        drop(self.slot.item.take_if(outdated));
    }
}

impl Static<'_> {
    /// Returns the sizes of its axes.
    pub fn shape(&self) -> Vec<i64> {
        self.0.meta().sizes().to_vec()
    }

    /// Returns the dtype; none for a dtype that no module accepts.
    pub fn dtype(&self) -> Option<Dtype> {
        self.0.meta().dtype()
    }

    /// Returns the device.
    pub fn device(&self) -> Option<Device> {
        self.0.meta().device()
    }

    /// Returns the address of element 0.
    pub fn address(&self) -> usize {
        self.0.meta().address()
    }

    /// Copies an input of the same sizes and dtype into it, from any device. On CUDA it returns when the copy is in the
    /// thread's current stream.
    pub fn write(&mut self, from: &impl Argument) -> Result<(), TorchError> {
        let given = arrays::tensor(from).own();
        let (meta, own) = (given.meta(), self.0.meta());
        if !meta.dense() || meta.dtype() != own.dtype() || meta.sizes() != own.sizes() {
            return Err(format!(
                "it is {} {:?}, not {} {:?}",
                meta.dtype_name(),
                meta.sizes(),
                own.dtype_name(),
                own.sizes()
            )
            .into());
        }
        self.0.copy_from(&given)
    }

    /// Returns a copy on the same device.
    pub fn copied(&self) -> Result<Tensor, TorchError> {
        Ok(Tensor(self.0.copied()?))
    }

    /// Copies its elements to the host, the last axis moving fastest. Waits for the thread's current stream.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, TorchError> {
        Tensor(self.0.share()).to_vec()
    }
}
