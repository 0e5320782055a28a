//! What this host is, to the runtime: the libtorch it runs, the CPU, and a device.

use super::{
    RuntimeError,
    ffi::{DeviceMemory, cuda, libtorch_folder},
};
use crate::{Device, Target, target::Torch};

/// Returns the target of this process on `device`: the torch whose `libtorch_cpu` it runs, and this machine.
///
/// The version is read from `version.py` of the torch package libtorch was loaded from. Fails when there is none, or
/// when the device is not there.
pub fn host(device: Device) -> Result<Target, RuntimeError> {
    let unknown = |reason: String| RuntimeError::UnknownHost { reason };
    let folder = libtorch_folder()
        .ok_or_else(|| unknown("the loader does not say where libtorch is".to_owned()))?;
    let folder = folder
        .canonicalize()
        .map_err(|error| unknown(format!("`{}`: {error}", folder.display())))?;
    // <site-packages>/torch/lib
    let site: Vec<_> = folder.ancestors().nth(2).into_iter().collect();
    let torch = Torch::find(&site).ok_or_else(|| {
        unknown(format!(
            "there is no `torch/version.py` beside `{}`",
            folder.display()
        ))
    })?;
    let sm = match device {
        Device::Cpu => Vec::new(),
        Device::Cuda(ordinal) => {
            let capability = cuda().and_then(|cuda| cuda.capability(ordinal));
            vec![capability.map_err(|reason| RuntimeError::NoDevice { device, reason })?]
        }
    };
    Ok(Target::on_host(device.kind(), "native", &torch, &sm))
}

/// Returns how the memory of a CUDA device is used. Fails on the CPU and when the device is not there.
pub fn device_memory(device: Device) -> Result<DeviceMemory, RuntimeError> {
    let memory = match device {
        Device::Cpu => Err("the CPU has no memory of its own".to_owned()),
        Device::Cuda(ordinal) => cuda().and_then(|cuda| cuda.memory(ordinal)),
    };
    memory.map_err(|reason| RuntimeError::NoDevice { device, reason })
}
