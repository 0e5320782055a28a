//! Floating-point operations in a second, and their share of the devices' peak: the model's FLOPs utilization (MFU).
//!
//! A build counts the operations of each part of a step: those of matrix products, convolutions and attention, as torch
//! counts them. Operations that the program repeats to save memory count too. A peak is that of dense matrices on tensor
//! cores, in 10^12 a second: half of the figure with sparsity, where a datasheet has only that. float32 has the peak of
//! TF32, the fastest rate for its operands. Another device, and one that is shared (MIG), has none: only the operations
//! are shown.
//!
//! | device | source |
//! |---|---|
//! | H100, H200, L4, L40S, A100 | "Specifications" in NVIDIA's datasheet of the product |
//! | GeForce RTX 4090 | "NVIDIA Ada GPU Architecture", appendix A |

use std::collections::BTreeMap;

use super::largest;
use crate::{
    Device, Model,
    record::{Dtype, TrainPart},
    target::Driver,
};

/// A device by the name that its driver gives, with its peaks: for bfloat16 and float16, and for float32.
const PEAKS: [(&str, f64, f64); 12] = [
    ("NVIDIA H200", 989.5, 494.5),
    ("NVIDIA H200 NVL", 835.5, 417.5),
    ("NVIDIA H100 80GB HBM3", 989.5, 494.5),
    ("NVIDIA H100 PCIe", 756.5, 378.0),
    ("NVIDIA H100 NVL", 835.5, 417.5),
    ("NVIDIA A100-SXM4-40GB", 312.0, 156.0),
    ("NVIDIA A100-SXM4-80GB", 312.0, 156.0),
    ("NVIDIA A100-PCIE-40GB", 312.0, 156.0),
    ("NVIDIA A100 80GB PCIe", 312.0, 156.0),
    ("NVIDIA L40S", 362.0, 183.0),
    ("NVIDIA L4", 121.0, 60.0),
    ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
];

const TERA: f64 = 1e12;

/// The operations of a step, and the devices that share them.
pub(super) struct Speed {
    flops: BTreeMap<Dtype, u64>,
    /// By the driver's name; none if it is unknown.
    device: Option<String>,
    devices: u64,
}

impl Speed {
    /// Returns that of steps with this number of batches for each device. None on a CPU, and for a module whose build
    /// counted nothing.
    pub fn new(model: &Model, module: &str, batches: u64, devices: &[Device]) -> Option<Self> {
        let Some(Device::Cuda(ordinal)) = devices.first() else {
            return None;
        };
        let count = devices.len() as u64;
        let parts = [
            (TrainPart::Step, module.to_owned(), 1),
            (
                TrainPart::Gradients,
                format!("{module}.gradients"),
                batches * count,
            ),
            (TrainPart::Update, format!("{module}.update"), 1),
        ];
        let mut flops = BTreeMap::new();
        for (part, name, times) in parts {
            let program = largest(model, &name);
            let program = program.filter(|program| {
                let train = program.train.as_ref();
                train.is_some_and(|train| train.part == part)
            });
            for (dtype, own) in program.iter().flat_map(|program| &program.receipt.flops) {
                *flops.entry(*dtype).or_default() += own * times;
            }
        }
        let driver = Driver::get();
        let made = Self {
            flops,
            device: driver.and_then(|driver| driver.name(*ordinal).ok()),
            devices: count,
        };
        (!made.flops.is_empty()).then_some(made)
    }

    /// Returns the operations in a second.
    pub fn flops(&self, steps_per_second: f64) -> f64 {
        self.flops.values().sum::<u64>() as f64 * steps_per_second
    }

    /// Returns the share of the devices' peak, which is 1 at most; none for a device without a known peak.
    pub fn mfu(&self, steps_per_second: f64) -> Option<f64> {
        let device = self.device.as_deref()?;
        let (_, halves, singles) = PEAKS.iter().find(|(name, ..)| *name == device)?;
        let seconds = self.flops.iter().map(|(dtype, flops)| {
            let peak = match dtype {
                Dtype::Bfloat16 | Dtype::Float16 => halves,
                Dtype::Float32 => singles,
                _ => return None,
            };
            Some(*flops as f64 / (peak * TERA))
        });
        let least: f64 = seconds.sum::<Option<f64>>()?;
        Some(least * steps_per_second / self.devices as f64)
    }

    /// Returns both as text, as `412.0 TFLOP/s, MFU 41.6 %`.
    pub fn text(&self, steps_per_second: f64) -> String {
        let flops = self.flops(steps_per_second) / TERA;
        match self.mfu(steps_per_second) {
            Some(mfu) => format!("{flops:.1} TFLOP/s, MFU {:.1} %", mfu * 100.0),
            None => format!("{flops:.1} TFLOP/s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(flops: &[(Dtype, u64)], device: &str, devices: u64) -> Speed {
        Speed {
            flops: flops.iter().copied().collect(),
            device: Some(device.to_owned()),
            devices,
        }
    }

    #[test]
    fn the_share_of_the_peak_is_that_of_the_time_which_the_devices_need_at_least() {
        let halves = [(Dtype::Bfloat16, 98_950_000_000_000)];
        let one = speed(&halves, "NVIDIA H100 80GB HBM3", 1);
        assert_eq!(one.text(4.0), "395.8 TFLOP/s, MFU 40.0 %");
        let two = speed(&halves, "NVIDIA H100 80GB HBM3", 2);
        assert_eq!(two.text(4.0), "395.8 TFLOP/s, MFU 20.0 %");
        let mixed = [halves[0], (Dtype::Float32, 49_450_000_000_000)];
        let mixed = speed(&mixed, "NVIDIA H200", 1);
        assert_eq!(mixed.text(2.0), "296.8 TFLOP/s, MFU 40.0 %");
        for device in ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA T4", ""] {
            assert_eq!(speed(&halves, device, 1).text(4.0), "395.8 TFLOP/s");
        }
        let double = speed(&[(Dtype::Float64, 1)], "NVIDIA H200", 1);
        assert_eq!(double.mfu(1.0), None);
    }
}
