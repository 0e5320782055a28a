//! The options of a runtime.
#![allow(unsafe_code, reason = "reads memory of the caller")]

use std::{mem::MaybeUninit, ptr, time::Duration};

use precast_runtime::{Device, Inputs, Loading, Runtime, Store, cuda::Graphs, dlpack::DLDevice};

use crate::{error::Failure, memory::array};

const CPU: i32 = 1;
const CUDA: i32 = 2;

/// Options of a runtime. 0 in a field is its default, so that `{.size = sizeof(precast_options)}` has all defaults.
///
/// Later versions append fields. A program that was compiled with an earlier header sets those to their defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    /// `sizeof(precast_options)`.
    size: usize,
    /// The devices of every model, each a replica: kDLCPU, or kDLCUDA with an ordinal. Default: the CPU.
    devices: *const DLDevice,
    /// The number of devices.
    device_count: usize,
    /// Calls that one program answers at once on one device; others wait. Default: 4.
    instances: usize,
    /// Open sessions of a model on one device. Default: 16.
    sessions: usize,
    /// The bytes of the states of all open sessions of a model on one device. Default: no limit.
    session_limit: u64,
    /// The longest wait of a call for others, in milliseconds. Default: without end.
    wait_ms: u64,
    /// A precast_loading. Default: PRECAST_LOADING_BEFORE.
    loading: i32,
    /// A precast_graphs. Default: PRECAST_GRAPHS_AS_BUILT.
    graphs: i32,
    /// 1 to copy an input that differs only in strides, alignment or device; such an input is an error by default.
    copy_inputs: i32,
    /// 1 to refuse answers of the exported graph in place of an artifact that does not load.
    no_eager: i32,
    /// The limit of uploads of weights to a GPU, in bytes a second. Default: none.
    upload_limit: u64,
}

/// The time at which programs are loaded: the field loading of precast_options.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum LoadingOption {
    /// All of them before the model is returned.
    Before = 0,
    /// One program of each module before, the others by a thread of the model.
    Background = 1,
    /// Each program at its first call.
    OnDemand = 2,
}

/// The programs that run as CUDA graphs: the field graphs of precast_options.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum GraphsOption {
    /// The programs that were built for it.
    AsBuilt = 0,
    /// Every program that can be captured.
    Always = 1,
    /// No program.
    Never = 2,
}

impl Options {
    const DEFAULT: Self = Self {
        size: size_of::<Self>(),
        devices: ptr::null(),
        device_count: 0,
        instances: 0,
        sessions: 0,
        session_limit: 0,
        wait_ms: 0,
        loading: 0,
        graphs: 0,
        copy_inputs: 0,
        no_eager: 0,
        upload_limit: 0,
    };

    /// Reads the options of the caller; all defaults for null.
    ///
    /// # Safety
    /// `raw` is null, or points to a size and to so many bytes, the size among them.
    pub unsafe fn read(raw: *const Self) -> Result<Self, Failure> {
        let own = size_of::<Self>();
        if raw.is_null() {
            return Ok(Self::DEFAULT);
        }
        // SAFETY: as this function requires.
        let size = unsafe { raw.cast::<usize>().read_unaligned() };
        if size < size_of::<usize>() || size > 1 << 16 {
            let problem = "has a `size` that is not `sizeof(precast_options)`";
            return Err(Failure::argument("options", problem));
        }
        // SAFETY: as this function requires.
        let bytes = unsafe { array("options", raw.cast::<u8>(), size) }?;
        if bytes.iter().skip(own).any(|&byte| byte != 0) {
            let problem = "has an option that this version of libprecast does not know";
            return Err(Failure::argument("options", problem));
        }
        let mut options = MaybeUninit::new(Self::DEFAULT);
        // SAFETY: both have so many bytes, and numbers and pointers may have any.
        unsafe {
            let to = options.as_mut_ptr().cast::<u8>();
            ptr::copy_nonoverlapping(bytes.as_ptr(), to, size.min(own));
            Ok(options.assume_init())
        }
    }

    /// Opens a runtime over a store.
    ///
    /// # Safety
    /// `devices` is null or has `device_count` devices.
    pub unsafe fn runtime(self, store: &Store) -> Result<Runtime, Failure> {
        // SAFETY: as this function requires.
        let devices = unsafe { array("options.devices", self.devices, self.device_count) }?;
        let devices: Vec<Device> = match devices {
            [] => vec![Device::Cpu],
            devices => devices.iter().map(device).collect::<Result<_, _>>()?,
        };
        let (graphs, loading) = (self.graphs()?, self.loading()?);
        let inputs = match flag("options.copy_inputs", self.copy_inputs)? {
            true => Inputs::MayCopy,
            false => Inputs::AsGiven,
        };
        let eager = !flag("options.no_eager", self.no_eager)?;
        let mut runtime = Runtime::new(store, devices)?
            .inputs(inputs)
            .graphs(graphs)
            .loading(loading)
            .eager_fallback(eager);
        if self.instances > 0 {
            runtime = runtime.instances(self.instances);
        }
        if self.sessions > 0 {
            runtime = runtime.sessions(self.sessions);
        }
        if self.session_limit > 0 {
            runtime = runtime.session_limit(self.session_limit);
        }
        if self.wait_ms > 0 {
            runtime = runtime.wait_limit(Duration::from_millis(self.wait_ms));
        }
        if self.upload_limit > 0 {
            runtime = runtime.upload_limit(self.upload_limit);
        }
        Ok(runtime)
    }

    fn loading(&self) -> Result<Loading, Failure> {
        use LoadingOption::{Background, Before, OnDemand};
        match self.loading {
            n if n == Before as i32 => Ok(Loading::Before),
            n if n == Background as i32 => Ok(Loading::Background),
            n if n == OnDemand as i32 => Ok(Loading::OnDemand),
            n => Err(unknown("options.loading", n)),
        }
    }

    fn graphs(&self) -> Result<Graphs, Failure> {
        use GraphsOption::{Always, AsBuilt, Never};
        match self.graphs {
            n if n == AsBuilt as i32 => Ok(Graphs::AsBuilt),
            n if n == Always as i32 => Ok(Graphs::Always),
            n if n == Never as i32 => Ok(Graphs::Never),
            n => Err(unknown("options.graphs", n)),
        }
    }
}

/// Returns a flag of the caller, which is 0 or 1.
pub fn flag(name: &str, value: i32) -> Result<bool, Failure> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(unknown(name, value)),
    }
}

fn unknown(name: &str, value: i32) -> Failure {
    Failure::argument(name, &format!("is {value}, which has no meaning"))
}

fn device(given: &DLDevice) -> Result<Device, Failure> {
    match (given.device_type, usize::try_from(given.device_id)) {
        (CPU, _) => Ok(Device::Cpu),
        (CUDA, Ok(ordinal)) => Ok(Device::Cuda(ordinal)),
        _ => {
            let problem = "has a device that is neither kDLCPU nor kDLCUDA with an ordinal";
            Err(Failure::argument("options.devices", problem))
        }
    }
}
