//! Options of a load: copies of inputs, CUDA graphs, and the time of loading.

use precast_store::record::Program;

/// Whether the runtime may copy an input that is right but for strides, alignment or device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inputs {
    /// Such an input is an error.
    #[default]
    AsGiven,
    /// Such an input is copied.
    MayCopy,
}

/// Which programs run as CUDA graphs, on a device that has them.
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
            Self::AsBuilt => {
                let mode = program
                    .request
                    .get("mode")
                    .and_then(serde_json::Value::as_str);
                matches!(mode, Some("reduce-overhead" | "max-autotune"))
            }
        }
    }
}

/// When programs are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loading {
    /// All of them before the model is handed out.
    #[default]
    Before,
    /// One of each module before, the rest by a thread of its own in the order of their priority. A request for one
    /// that is not there yet loads it.
    Background,
    /// Each when a request needs it, so that nothing is loaded that nobody asks for. The memory that CUDA graphs share
    /// grows with each larger one, where the other ways begin with the largest.
    OnDemand,
}
