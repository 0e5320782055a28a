//! What a process that has libtorch must find in its environment: its C library and its loader read it before `main`.

use std::{env, process::Command};

use crate::Device;

/// In the environment of `precast-torch`: the CUDA device, as `0`, whose context it makes while libtorch loads.
pub(crate) const CUDA_AHEAD: &str = "PRECAST_CUDA_AHEAD";

/// Options of glibc, from 2.35 on; others pass over it.
const TUNABLES: &str = "GLIBC_TUNABLES";

/// Prepares a process that has libtorch and will run on `device`, if that is known.
pub(crate) fn prepare(command: &mut Command, device: Option<Device>) {
    match device {
        Some(Device::Cuda(ordinal)) => command.env(CUDA_AHEAD, ordinal.to_string()),
        _ => command.env_remove(CUDA_AHEAD),
    };
    if let Some(tunables) = with_huge_pages(env::var(TUNABLES).ok().as_deref()) {
        command.env(TUNABLES, tunables);
    }
}

/// Has the heap ask for huge pages: libtorch's initialisers fill some 50 MiB of it with operators, and each page of the
/// usual size is a fault. None where somebody has chosen what the heap does.
fn with_huge_pages(set: Option<&str>) -> Option<String> {
    const HUGE: &str = "glibc.malloc.hugetlb=1";
    match set.filter(|set| !set.is_empty()) {
        None => Some(HUGE.to_owned()),
        Some(set) if set.contains("glibc.malloc.") => None,
        Some(set) => Some(format!("{set}:{HUGE}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_chose_stays() {
        let chosen = |set| with_huge_pages(Some(set));
        let huge = "glibc.malloc.hugetlb=1";
        assert_eq!(with_huge_pages(None).as_deref(), Some(huge));
        assert_eq!(chosen("").as_deref(), Some(huge));
        assert_eq!(chosen("glibc.malloc.hugetlb=0"), None);
        assert_eq!(chosen("glibc.rtld.nns=4:glibc.malloc.arena_max=1"), None);
        let both = "glibc.rtld.nns=4:glibc.malloc.hugetlb=1";
        assert_eq!(chosen("glibc.rtld.nns=4").as_deref(), Some(both));
    }
}
