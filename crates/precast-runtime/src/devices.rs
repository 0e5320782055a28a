//! The devices that a runtime works on.

use precast_store::Device;

use super::{RuntimeError, TorchError, ffi::cuda_for};

/// One or more devices.
pub struct Devices(Vec<Device>);

impl Devices {
    /// Returns the devices. Fails for a missing device, for an empty list, and for a CUDA device that is named twice.
    pub(super) fn checked(self) -> Result<Vec<Device>, RuntimeError> {
        let Self(devices) = self;
        let twice = devices
            .iter()
            .enumerate()
            .any(|(i, device)| *device != Device::Cpu && devices[..i].contains(device));
        if devices.is_empty() || twice {
            return Err(RuntimeError::Devices);
        }
        let ordinals = devices.iter().filter_map(|device| match device {
            Device::Cpu => None,
            Device::Cuda(ordinal) => Some(*ordinal),
        });
        let ordinals: Vec<_> = ordinals.collect();
        for &device in &devices {
            check(device, &ordinals)?;
        }
        Ok(devices)
    }
}

impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        Self(vec![device])
    }
}

impl<const N: usize> From<[Device; N]> for Devices {
    fn from(devices: [Device; N]) -> Self {
        Self(devices.to_vec())
    }
}

impl From<Vec<Device>> for Devices {
    fn from(devices: Vec<Device>) -> Self {
        Self(devices)
    }
}

/// Fails if the device is missing. `ordinals` are the ordinals of all requested CUDA devices.
fn check(device: Device, ordinals: &[usize]) -> Result<(), RuntimeError> {
    let Device::Cuda(ordinal) = device else {
        return Ok(());
    };
    let no = |reason: TorchError| RuntimeError::NoDevice { device, reason };
    let cuda = cuda_for(ordinals).map_err(no)?;
    let devices = cuda.devices();
    if ordinal < devices {
        return cuda.context(ordinal).map_err(no);
    }
    if devices == 1 {
        return Err(no("this process sees one CUDA device, `cuda:0`".into()));
    }
    let last = devices - 1;
    Err(no(format!(
        "this process sees {devices} CUDA devices, the last is `cuda:{last}`"
    )
    .into()))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Counts the lines of code that name the error, by file.
    fn named(folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                named(&path, found);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let code = text.lines().filter(|line| !line.trim().starts_with("//"));
            let uses = code.filter(|line| line.contains(concat!("RuntimeError::", "Devices")));
            found.extend(uses.map(|_| path.file_name().unwrap().to_string_lossy().into_owned()));
        }
    }

    #[test]
    fn the_error_of_devices_stands_for_nothing_else() {
        let mut found = Vec::new();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        named(Path::new(source), &mut found);
        assert_eq!(found, ["devices.rs"]);
    }
}
