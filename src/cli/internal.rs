//! Subcommands that `precast` starts itself with. Not part of the command line's promises.

use anyhow::Result;

pub(super) const GATE: &str = "__gate";

#[derive(clap::Args)]
pub(super) struct GateArgs {}

/// Judges the candidate on stdin; the verdict goes to stdout.
#[cfg(feature = "torch")]
pub(super) fn gate(_: &GateArgs) -> Result<u8> {
    use crate::build::gate;
    let candidate = serde_json::from_reader(std::io::stdin().lock())?;
    serde_json::to_writer(std::io::stdout().lock(), &gate::check(&candidate))?;
    Ok(0)
}

#[cfg(not(feature = "torch"))]
pub(super) fn gate(_: &GateArgs) -> Result<u8> {
    anyhow::bail!("this binary was built without libtorch and can't check a candidate")
}
