//! Reuse of an earlier gate with the same inputs.
//!
//! A changed source with an unchanged graph (a comment, a docstring, another module's code) gives a program a new key,
//! and its capture finds every artifact. The result of its predecessor's gate then holds for the new program too, if
//! these are equal:
//!
//! | of | must be equal |
//! |---|---|
//! | the program | its record except key, receipt and provenance: steps with their artifacts and bindings, the exported graph, constants, layouts, checks, padding |
//! | the gate | the digest of the samples (inputs, and eager's outputs), the weight set and its aliases, smoke steps, tolerances, the compute dtype of each output |
//! | the host | the machine, its CPU model, the number of cores for the build, and the driver if it has a GPU |
//! | precast | its version |
//!
//! The second to fourth are in the receipt as `gate_given`; `gated_by` names the predecessor. When a program is tuned
//! again, every candidate is gated. A program that lost a file is gated again too.
//!
//! The gate's own code is no input. Within one version of precast, an earlier gate is reused even if the code of the
//! gate has changed. Try a new check in a new store.

use std::{fs, thread};

use precast_store::{
    Digest, Store, StoreError,
    record::{
        Padding, Program,
        receipt::{Gate, Given, Host},
    },
    target::DeviceKind,
};

use super::{GateRequest, Samples, candidates::Candidate};
use crate::{plan::Reason, task::Job};

/// An earlier gate that holds for a program.
pub(crate) struct Earlier {
    /// The program whose gate it is.
    pub by: Digest,
    pub gate: Gate,
    pub padding: Padding,
}

/// Returns the inputs of a gate, in addition to the program. Returns none without readable samples: the gate will then
/// fail.
pub(crate) fn given(request: &GateRequest) -> Option<Given> {
    let Samples::File(samples) = &request.samples else {
        return None;
    };
    let (samples, _) = Digest::of_file(samples).ok()?;
    Some(Given {
        precast: env!("CARGO_PKG_VERSION").to_owned(),
        host: host(request.program.target.device),
        samples,
        weights: request.weights,
        aliases: request.aliases.clone(),
        steps: request.steps,
        rtol: request.rtol,
        atol: request.atol,
        compute_dtypes: request.compute_dtypes.clone(),
        padding: request.program.padding.clone(),
    })
}

/// Returns the gate of the previous program, to be used for this one, if both have the same inputs.
pub(crate) fn earlier(
    store: &Store,
    job: &Job<'_>,
    program: &Program,
    candidates: &[Candidate],
    given: &Given,
) -> Result<Option<Earlier>, StoreError> {
    // A rebuilt artifact has other bytes under the same key.
    let lost = matches!(job.reasons, [Reason::ObjectMissing { .. }]);
    let (Some(before), [Candidate { refused: None, .. }], false) = (&job.before, candidates, lost)
    else {
        return Ok(None);
    };
    let Some(before) = store.records().program(before)? else {
        return Ok(None);
    };
    if before.receipt.gate_given.as_ref() != Some(given) {
        return Ok(None);
    }
    let Some(gate) = before.receipt.gate.clone() else {
        return Ok(None);
    };
    let padding = before.padding.clone();
    let by = before.receipt.gated_by.unwrap_or(before.id);
    let now = Program {
        schema: program.schema,
        id: program.id,
        padding: program.padding.clone(),
        request: program.request.clone(),
        receipt: program.receipt.clone(),
        provenance: program.provenance.clone(),
        ..before
    };
    Ok((now == *program).then_some(Earlier { by, gate, padding }))
}

/// Returns the properties of a host that decide its answers and its speed.
fn host(device: DeviceKind) -> Host {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    // The ID of a machine is private. An image without one has the ID of its boot.
    let machine = match read("/etc/machine-id") {
        id if id.trim().is_empty() => read("/proc/sys/kernel/random/boot_id"),
        id => id,
    };
    let cpu = read("/proc/cpuinfo");
    let cpu = cpu.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim().to_owned())
    });
    let driver = (device == DeviceKind::Cuda).then(|| {
        let version = read("/proc/driver/nvidia/version");
        version.lines().next().unwrap_or_default().to_owned()
    });
    Host {
        machine: Digest::of(format!("precast gate {}", machine.trim()).as_bytes()).short(),
        cpu,
        cores: thread::available_parallelism().map_or(0, usize::from),
        driver,
    }
}
