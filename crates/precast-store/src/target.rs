//! The target of an artifact (device, ISA, torch, …), and whether a host can run it.
//!
//! A target is part of every key. Before an artifact is loaded, its target is compared with the host: a wrong machine
//! is an error that names the differences, never a crash inside a kernel.

mod driver;
mod host;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use driver::{Driver, DriverError, compute_capabilities};
pub use host::{TRIED, Torch, Unfit};

/// Where tensors live and kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The host's CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

/// One device of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host's CPU.
    Cpu,
    /// The CUDA device with this ordinal.
    Cuda(usize),
}

impl Device {
    /// Returns the kind of this device.
    pub fn kind(self) -> DeviceKind {
        match self {
            Self::Cpu => DeviceKind::Cpu,
            Self::Cuda(_) => DeviceKind::Cuda,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The properties of a host that a binary depends on.
///
/// `isa` is a level's name (`native`, `x86-64-v3`); `features` are the CPU features the host code may use, sorted. A
/// host runs the artifact if it has all of them, whatever the name of its level.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Target {
    /// Operating system, as Rust names it: `linux`.
    pub os: String,
    /// Architecture, as Rust names it: `x86_64`.
    pub arch: String,
    /// Name of the instruction set's level: `native`, `x86-64-v3`.
    pub isa: String,
    /// CPU features that the host code may use, sorted, as Rust names them.
    pub features: Vec<String>,
    /// Where its kernels run.
    pub device: DeviceKind,
    /// Compute capability as `90` for 9.0; none on the CPU.
    pub sm: Option<String>,
    /// Full torch version, as `2.11.0+cu130`.
    pub torch: String,
    /// Commit that torch was built from.
    pub torch_git: String,
    /// CUDA version torch was built with, as `13.0`.
    pub cuda: Option<String>,
    /// Whether libtorch uses the `std::string` of C++11.
    pub cxx11_abi: bool,
}

/// One field of a target that this host does not meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Mismatch {
    /// Name of the field of [`Target`].
    pub field: &'static str,
    /// The value of the artifact, as text.
    pub artifact: String,
    /// The value of the host, as text; `none` if it has none.
    pub host: String,
}

impl Mismatch {
    /// Returns whether it concerns only torch: the same machine may have another torch.
    pub fn is_of_torch(&self) -> bool {
        ["torch", "torch_git", "cuda"].contains(&self.field)
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: artifact has `{}`, host has `{}`",
            self.field, self.artifact, self.host
        )
    }
}

impl Target {
    /// Returns the human name, as `torch211-cxx11-cu130-x86_64-linux-sm90`.
    pub fn name(&self) -> String {
        let plain = self.torch.split('+').next().unwrap_or_default();
        let mut parts = plain.split('.');
        let major = parts.next().unwrap_or_default();
        let minor = parts.next().unwrap_or_default();
        let abi = if self.cxx11_abi { "cxx11" } else { "cxx98" };
        let backend = match (self.device, &self.cuda) {
            (DeviceKind::Cuda, Some(cuda)) => format!("cu{}", cuda.replace('.', "")),
            (kind, _) => kind.to_string(),
        };
        let chip = match &self.sm {
            Some(sm) => format!("sm{sm}"),
            None => self.isa.clone(),
        };
        format!(
            "torch{major}{minor}-{abi}-{backend}-{}-{}-{chip}",
            self.arch, self.os
        )
    }

    /// Returns every reason why `host` can't run binaries for this target; empty if it can.
    pub fn mismatches(&self, host: &Target) -> Vec<Mismatch> {
        let mut found = Vec::new();
        let mut differ = |field, artifact: &str, host: &str| {
            if artifact != host {
                found.push(Mismatch {
                    field,
                    artifact: artifact.to_owned(),
                    host: host.to_owned(),
                });
            }
        };
        differ("os", &self.os, &host.os);
        differ("arch", &self.arch, &host.arch);
        differ("device", &self.device.to_string(), &host.device.to_string());
        differ("torch", &self.torch, &host.torch);
        differ("torch_git", &self.torch_git, &host.torch_git);
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
        if self.device == DeviceKind::Cuda {
            differ("cuda", &text(&self.cuda), &text(&host.cuda));
            differ("sm", &text(&self.sm), &text(&host.sm));
        }
        differ(
            "cxx11_abi",
            &self.cxx11_abi.to_string(),
            &host.cxx11_abi.to_string(),
        );
        let missing: Vec<_> = self
            .features
            .iter()
            .filter(|f| !host.features.contains(f))
            .cloned()
            .collect();
        if !missing.is_empty() && self.arch == host.arch {
            found.push(Mismatch {
                field: "isa",
                artifact: format!("{} (needs {})", self.isa, missing.join(" ")),
                host: host.isa.clone(),
            });
        }
        found
    }
}

/// Returns the CPU features of this host that a compiler may use, sorted. The names are those of rustc (`avx2`,
/// `avx512f`, …).
pub fn host_features() -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! probe {
            ($($name:tt),* $(,)?) => {$(
                if std::arch::is_x86_feature_detected!($name) { found.push($name.to_owned()); }
            )*};
        }
        probe!(
            "sse3",
            "ssse3",
            "sse4.1",
            "sse4.2",
            "sse4a",
            "popcnt",
            "cmpxchg16b",
            "avx",
            "avx2",
            "f16c",
            "fma",
            "bmi1",
            "bmi2",
            "lzcnt",
            "movbe",
            "aes",
            "pclmulqdq",
            "sha",
            "xsave",
            "avx512f",
            "avx512bw",
            "avx512cd",
            "avx512dq",
            "avx512vl",
            "avx512ifma",
            "avx512vbmi",
            "avx512vbmi2",
            "avx512vnni",
            "avx512bitalg",
            "avx512vpopcntdq",
            "avx512bf16",
            "avx512fp16",
            "gfni",
            "vaes",
            "vpclmulqdq",
        );
    }
    found.sort();
    found
}

/// The baseline levels for `[target] isa` of a spec, each with its allowed features.
pub const ISA_LEVELS: [(&str, &[&str]); 3] = [
    (
        "x86-64-v2",
        &["cmpxchg16b", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"],
    ),
    (
        "x86-64-v3",
        &[
            "avx",
            "avx2",
            "bmi1",
            "bmi2",
            "cmpxchg16b",
            "f16c",
            "fma",
            "lzcnt",
            "movbe",
            "popcnt",
            "sse3",
            "sse4.1",
            "sse4.2",
            "ssse3",
            "xsave",
        ],
    ),
    (
        "x86-64-v4",
        &[
            "avx",
            "avx2",
            "avx512bw",
            "avx512cd",
            "avx512dq",
            "avx512f",
            "avx512vl",
            "bmi1",
            "bmi2",
            "cmpxchg16b",
            "f16c",
            "fma",
            "lzcnt",
            "movbe",
            "popcnt",
            "sse3",
            "sse4.1",
            "sse4.2",
            "ssse3",
            "xsave",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn cuda() -> Target {
        Target {
            os: "linux".into(),
            arch: "x86_64".into(),
            isa: "native".into(),
            features: vec!["avx2".into()],
            device: DeviceKind::Cuda,
            sm: Some("90".into()),
            torch: "2.11.0+cu130".into(),
            torch_git: "70d99e9".into(),
            cuda: Some("13.0".into()),
            cxx11_abi: true,
        }
    }

    #[test]
    fn names_follow_the_fields() {
        assert_eq!(cuda().name(), "torch211-cxx11-cu130-x86_64-linux-sm90");
        let cpu = Target {
            device: DeviceKind::Cpu,
            sm: None,
            ..cuda()
        };
        assert_eq!(cpu.name(), "torch211-cxx11-cpu-x86_64-linux-native");
    }

    #[test]
    fn a_host_with_more_features_runs_it_and_one_with_less_is_named() {
        let mut host = cuda();
        host.features.push("avx512f".into());
        assert_eq!(cuda().mismatches(&host), []);
        host.features.clear();
        host.sm = Some("100".into());
        let mismatches = cuda().mismatches(&host);
        let told: Vec<String> = mismatches.iter().map(ToString::to_string).collect();
        let isa = "isa: artifact has `native (needs avx2)`, host has `native`";
        assert_eq!(told, ["sm: artifact has `90`, host has `100`", isa]);
    }
}
