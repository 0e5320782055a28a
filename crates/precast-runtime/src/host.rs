//! This host: its libtorch, CPU, device and time.

use std::time::{SystemTime, UNIX_EPOCH};

use super::{
    RuntimeError, TorchError,
    ffi::{DeviceMemory, cuda, libtorch},
};

use precast_store::{Device, Target, target::Torch};

/// Releases the unused memory of torch's allocator, after an out-of-memory error on a CUDA device.
///
/// The allocator does so before it fails itself. The driver does not request it: it finds no memory for the code of an
/// artifact or for a graph if the allocator keeps the whole card.
pub(super) fn make_room(device: Device, error: &RuntimeError) {
    if let Device::Cuda(_) = device
        && error.is_out_of_memory()
    {
        release();
    }
}

/// Runs `work`, which needs memory of the driver. After an out-of-memory error, releases the unused memory of torch's
/// allocator and runs it again.
pub(super) fn with_room<T>(work: impl FnMut() -> Result<T, TorchError>) -> Result<T, TorchError> {
    twice(work, release)
}

fn twice<T>(
    mut work: impl FnMut() -> Result<T, TorchError>,
    make_room: impl FnOnce(),
) -> Result<T, TorchError> {
    match work() {
        Err(reason @ TorchError::Memory(_)) => {
            tracing::debug!(%reason, "once more, with the allocator's unused memory");
            make_room();
            work()
        }
        other => other,
    }
}

/// Gives the unused memory of torch's allocator back to the driver.
pub(super) fn release() {
    if let Err(reason) = cuda().and_then(|cuda| cuda.release_cached()) {
        tracing::warn!(%reason, "the allocator's unused memory can't be given back");
    }
}

/// Returns the target of this process on `device`: the torch whose `libtorch_cpu` it runs, and this machine.
///
/// The version is read from `version.py` of the torch package libtorch was loaded from. Fails when there is none, or
/// when the device is not there.
pub fn host(device: Device) -> Result<Target, RuntimeError> {
    let unknown = |reason: String| RuntimeError::UnknownHost { reason };
    let open = libtorch().map_err(|reason| RuntimeError::Libtorch { reason })?;
    let folder = &open.folder;
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

/// Returns the use of a CUDA device's memory. Fails for the CPU and for a missing device.
pub fn device_memory(device: Device) -> Result<DeviceMemory, RuntimeError> {
    let memory = match device {
        Device::Cpu => Err("the CPU has no memory of its own".into()),
        Device::Cuda(ordinal) => cuda().and_then(|cuda| cuda.memory(ordinal)),
    };
    memory.map_err(|reason| RuntimeError::NoDevice { device, reason })
}

/// Waits until everything that was put on a device is done. On the CPU there is nothing to wait for.
pub fn synchronize(device: Device) -> Result<(), RuntimeError> {
    let Device::Cuda(ordinal) = device else {
        return Ok(());
    };
    let done = cuda().and_then(|cuda| cuda.synchronize(ordinal));
    done.map_err(|reason| RuntimeError::NoDevice { device, reason })
}

/// Returns the time in seconds since 1970.
pub(super) fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::Digest;

    #[test]
    fn what_there_is_no_room_for_is_tried_once_more_with_room() {
        let short = || Err(TorchError::cuda("CUDA error: out of memory"));
        let (mut tried, mut made) = (0, 0);
        let mut work = |until: usize| {
            (tried, made) = (0, 0);
            let done = twice(
                || {
                    tried += 1;
                    if tried < until { short() } else { Ok(tried) }
                },
                || made += 1,
            );
            (done, tried, made)
        };
        assert_eq!(work(1), (Ok(1), 1, 0));
        assert_eq!(work(2), (Ok(2), 2, 1));
        assert_eq!(work(9), (short(), 2, 1));
        let other = || Err::<(), _>(TorchError::cuda("operation not permitted"));
        assert_eq!(twice(other, || panic!("room is not what lacks")), other());
    }

    #[test]
    fn a_lack_of_memory_is_nobodys_fault_but_the_hosts() {
        let artifact = Digest::of(b"artifact");
        let container = |reason: &str| RuntimeError::NoContainer {
            artifact,
            reason: TorchError::cuda(reason),
        };
        let failed = |message: &str| RuntimeError::Failed {
            module: "encode".into(),
            bucket: "batch=8".to_owned(),
            step: "main".to_owned(),
            message: TorchError::libtorch(message),
        };
        for error in [
            container("CUDA driver error: out of memory"),
            failed("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ] {
            assert!(error.is_out_of_memory() && !error.is_artifacts(), "{error}");
            let hint = error.hint();
            assert!(hint.contains("too little memory"), "{hint}");
        }
        let its_own = container("invalid device function");
        assert!(!its_own.is_out_of_memory() && its_own.is_artifacts());
        assert!(!failed("size mismatch").is_out_of_memory());
        assert!(!failed("a.so: cannot allocate memory in static TLS block").is_out_of_memory());
    }
}
