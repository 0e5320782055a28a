//! The target of this host, found without starting Python.
//!
//! The worker imports torch, which takes seconds. A build with nothing to do needs the same facts in milliseconds:
//! torch's version, commit and CUDA are text in `torch/version.py`, and the CPU's features come from the CPU. The
//! compute capability comes from the driver in both cases. Both paths end in [`Target::on_host`], so that they agree.

use std::{fmt, fs, path::Path};

use super::{DeviceKind, ISA_LEVELS, Target, compute_capabilities, host_features};

/// The oldest and the newest tested version of torch: major and minor number.
pub const TRIED: [(u32, u32); 2] = [(2, 11), (2, 15)];

/// The reason why a version of torch is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is older than the oldest tested version.
    TooOld,
    /// It is newer than the newest tested version. A user may allow it.
    Untried,
    /// The text is no version.
    NoVersion,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [(a, b), (c, d)] = TRIED;
        match self {
            Self::TooOld => write!(f, "is too old: {a}.{b} is the least"),
            Self::Untried => write!(f, "is newer than what was tried: {a}.{b} to {c}.{d}"),
            Self::NoVersion => f.write_str("is no version"),
        }
    }
}

/// A torch installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torch {
    /// Full version, as `2.11.0+cu130`.
    pub version: String,
    /// Commit that it was built from.
    pub git: String,
    /// CUDA version it was built with.
    pub cuda: Option<String>,
    /// True for every wheel since torch 2.7.
    pub cxx11_abi: bool,
}

impl Torch {
    /// Fails for a version, such as `2.11.0+cu130`, outside [`TRIED`]; `untried` allows newer ones.
    pub fn fit(version: &str, untried: bool) -> Result<(), Unfit> {
        let mut numbers = version.split(['.', '+']).map(str::parse::<u32>);
        let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
            return Err(Unfit::NoVersion);
        };
        let [oldest, newest] = TRIED;
        match (major, minor) {
            version if version < oldest => Err(Unfit::TooOld),
            version if version > newest && !untried => Err(Unfit::Untried),
            _ => Ok(()),
        }
    }

    /// Returns whether a version is older than another one. False if one of the texts is not a version.
    pub fn is_older(version: &str, than: &str) -> bool {
        let numbers = |version: &str| -> Option<Vec<u32>> {
            let plain = version.split('+').next()?;
            plain.split('.').map(|number| number.parse().ok()).collect()
        };
        numbers(version)
            .zip(numbers(than))
            .is_some_and(|(version, than)| version < than)
    }

    /// Reads `torch/version.py` in the first of these folders that has one.
    pub fn find(site_packages: &[impl AsRef<Path>]) -> Option<Self> {
        let text = site_packages.iter().find_map(|folder| {
            let file = folder.as_ref().join("torch").join("version.py");
            fs::read_to_string(file).ok()
        })?;
        Self::parse(&text)
    }

    /// Reads the assignments of `version.py`; none when one is missing.
    fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            text.lines().find_map(|line| {
                let rest = line.strip_prefix(name)?;
                let (annotation, value) = rest.split_once('=')?;
                let annotation = annotation.trim();
                (annotation.is_empty() || annotation.starts_with(':')).then(|| value.trim())
            })
        };
        let quoted = |value: &str| {
            let inner = value
                .strip_prefix('\'')
                .and_then(|rest| rest.strip_suffix('\''));
            let inner = inner.or_else(|| {
                value
                    .strip_prefix('"')
                    .and_then(|rest| rest.strip_suffix('"'))
            });
            inner.map(str::to_owned)
        };
        let cuda = match value("cuda")? {
            "None" => None,
            text => Some(quoted(text)?),
        };
        Some(Self {
            version: quoted(value("__version__")?)?,
            git: quoted(value("git_version")?)?,
            cuda,
            cxx11_abi: true,
        })
    }
}

impl Target {
    /// Returns the target for this host. `sms` are the compute capabilities of its GPUs, as `90`; a target for the CPU
    /// has none, a target for CUDA that of the first one.
    pub fn on_host(device: DeviceKind, isa: &str, torch: &Torch, sms: &[String]) -> Self {
        let features = match ISA_LEVELS.iter().find(|(name, _)| *name == isa) {
            Some((_, features)) => features
                .iter()
                .map(|feature| (*feature).to_owned())
                .collect(),
            None => host_features(),
        };
        Self {
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            isa: isa.to_owned(),
            features,
            device,
            sm: match device {
                DeviceKind::Cpu => None,
                DeviceKind::Cuda => sms.first().cloned(),
            },
            torch: torch.version.clone(),
            torch_git: torch.git.clone(),
            cuda: torch.cuda.clone(),
            cxx11_abi: torch.cxx11_abi,
        }
    }

    /// Returns the target for this host without starting Python. None when torch is in none of these folders, or when
    /// `device` is CUDA and the host has no GPU.
    pub fn of_host(
        device: DeviceKind,
        isa: &str,
        site_packages: &[impl AsRef<Path>],
    ) -> Option<Self> {
        let torch = Torch::find(site_packages)?;
        let target = Self::with_torch(device, isa, &torch);
        (device == DeviceKind::Cpu || target.sm.is_some()).then_some(target)
    }

    /// Returns the target for this host with the compute capability from the driver. A CPU target does not use the
    /// driver.
    pub fn with_torch(device: DeviceKind, isa: &str, torch: &Torch) -> Self {
        let sms = match device {
            DeviceKind::Cpu => Vec::new(),
            DeviceKind::Cuda => compute_capabilities(),
        };
        Self::on_host(device, isa, torch, &sms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_are_used_are_those_that_were_tried() {
        for version in ["2.11.0+cu130", "2.11.0", "2.13.1+cpu", "2.15.0a0+git123"] {
            assert_eq!(Torch::fit(version, false), Ok(()));
        }
        assert_eq!(Torch::fit("2.10.1", true), Err(Unfit::TooOld));
        assert_eq!(Torch::fit("1.13.0", true), Err(Unfit::TooOld));
        assert_eq!(Torch::fit("2.16.0+cu132", false), Err(Unfit::Untried));
        assert_eq!(Torch::fit("3.0.0", true), Ok(()));
        assert_eq!(Torch::fit("", true), Err(Unfit::NoVersion));
        assert_eq!(Torch::fit("two.11", true), Err(Unfit::NoVersion));
    }

    const VERSION: &str = "from typing import Optional\n\n__all__ = ['__version__', 'cuda']\n__version__ = '2.11.0+cu130'\n\
        debug = False\ncuda: Optional[str] = '13.0'\ngit_version = '70d99e9'\nhip: Optional[str] = None\n";

    #[test]
    fn a_version_file_is_read_as_text() {
        let torch = Torch::parse(VERSION).unwrap();
        let read = (&*torch.version, &*torch.git, torch.cuda.as_deref());
        assert_eq!(read, ("2.11.0+cu130", "70d99e9", Some("13.0")));
        let cpu = Torch::parse(&VERSION.replace("'13.0'", "None")).unwrap();
        assert_eq!(cpu.cuda, None);
        for (from, to) in [("git_version", "commit"), ("'70d99e9'", "compute()")] {
            assert_eq!(Torch::parse(&VERSION.replace(from, to)), None);
        }
    }

    #[test]
    fn the_first_folder_with_a_torch_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        fs::create_dir_all(b.join("torch")).unwrap();
        fs::write(b.join("torch/version.py"), VERSION).unwrap();
        assert_eq!(Target::of_host(DeviceKind::Cpu, "native", &[&a]), None);
        let target = Target::of_host(DeviceKind::Cpu, "native", &[&a, &b]).unwrap();
        assert_eq!((&*target.torch, target.sm), ("2.11.0+cu130", None));
        assert_eq!(target.features, host_features());
        let level = Target::of_host(DeviceKind::Cpu, "x86-64-v3", &[&b]).unwrap();
        assert!(level.features.contains(&"avx2".to_owned()) && level.isa == "x86-64-v3");
    }

    #[test]
    fn only_a_target_for_cuda_has_a_chip() {
        let torch = Torch::parse(VERSION).unwrap();
        let sms = ["90".to_owned(), "100".to_owned()];
        let of = |device| Target::on_host(device, "native", &torch, &sms).sm;
        assert_eq!(of(DeviceKind::Cuda).as_deref(), Some("90"));
        assert_eq!(of(DeviceKind::Cpu), None);
    }
}
