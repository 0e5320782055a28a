//! Options of a load: copies of inputs, CUDA graphs, and the time of loading.

use precast_store::record::Program;

/// Whether the runtime may copy an input that differs only in strides, alignment or device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inputs {
    /// Such an input is an error.
    #[default]
    AsGiven,
    /// Such an input is copied.
    MayCopy,
}

/// The programs that run as CUDA graphs, on a device that supports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    /// Programs built with `mode = "reduce-overhead"` or `"max-autotune"`.
    #[default]
    AsBuilt,
    /// Every program that can be captured.
    Always,
    /// No program.
    Never,
}

impl Graphs {
    pub(super) fn wanted(self, program: &Program) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::AsBuilt => program.has_graph_mode(),
        }
    }
}

/// The time at which programs are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loading {
    /// All of them before the model is handed out.
    #[default]
    Before,
    /// One program of each module before, the others by a separate thread in the order of their priority. A request for
    /// a program that is not loaded loads it.
    Background,
    /// Each program at its first request, so that no unused program is loaded. The memory that CUDA graphs share grows
    /// with each larger one; the other modes begin with the largest.
    OnDemand,
}
