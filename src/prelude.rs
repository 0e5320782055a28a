//! What a process that has libtorch finds in its environment: its C library and its loader read it before `main`.

use std::{
    env::{self, VarError},
    process::Command,
};

/// In the environment of `precast-torch`: the CUDA device, as `0`, whose context it makes while libtorch loads.
pub(crate) const CUDA_AHEAD: &str = "PRECAST_CUDA_AHEAD";

/// Options of glibc, from 2.35 on; others pass over it.
const TUNABLES: &str = "GLIBC_TUNABLES";

/// Has the heap of a process ask for huge pages, unless somebody chose what it does: libtorch's initialisers fill some
/// 50 MiB of it with operators, and each page of the usual size is a fault.
pub(crate) fn huge_pages(command: &mut Command) {
    let chosen = match env::var(TUNABLES) {
        Ok(chosen) => chosen,
        Err(VarError::NotPresent) => String::new(),
        Err(VarError::NotUnicode(_)) => return,
    };
    if let Some(tunables) = with_huge_pages(&chosen) {
        command.env(TUNABLES, tunables);
    }
}

/// Returns options with that for huge pages; none where there are some for the heap.
fn with_huge_pages(chosen: &str) -> Option<String> {
    const HUGE: &str = "glibc.malloc.hugetlb=1";
    match chosen {
        "" => Some(HUGE.to_owned()),
        chosen if chosen.contains("glibc.malloc.") => None,
        chosen => Some(format!("{chosen}:{HUGE}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_chose_stays() {
        let huge = "glibc.malloc.hugetlb=1";
        assert_eq!(with_huge_pages("").as_deref(), Some(huge));
        assert_eq!(with_huge_pages("glibc.malloc.hugetlb=0"), None);
        let arenas = "glibc.rtld.nns=4:glibc.malloc.arena_max=1";
        assert_eq!(with_huge_pages(arenas), None);
        let both = "glibc.rtld.nns=4:glibc.malloc.hugetlb=1";
        assert_eq!(with_huge_pages("glibc.rtld.nns=4").as_deref(), Some(both));
    }
}
