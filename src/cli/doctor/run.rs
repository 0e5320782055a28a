//! What running needs: libtorch, memory that may be executed, and for a GPU its driver. And the store.

use std::{fs, path::Path};

use super::{
    super::{Context, libtorch::LibtorchArgs, text::count},
    Check,
    Need::{Run, Store},
};
use crate::store::StoreError;

/// Looks at all of it but the store; `gpus` are the compute capabilities of the host's GPUs.
pub(super) fn checks(libtorch_args: &LibtorchArgs, gpus: &[String]) -> Vec<Check> {
    vec![libtorch(libtorch_args), memory(), gpu(gpus), huge_pages()]
}

/// Opens libtorch as `run` does.
fn libtorch(args: &LibtorchArgs) -> Check {
    match args.open() {
        Ok(open) => {
            let found = format!("{}, {}", open.version, open.folder.display());
            Check::ok(Run, "libtorch", found)
        }
        Err(error) => Check::missing(
            Run,
            "libtorch",
            error.to_string(),
            "name the folder of the package `torch`: `--libtorch DIR`, or LIBTORCH",
        ),
    }
}

/// Looks whether the kernel lets a process execute a file in memory: verified objects are loaded from one.
fn memory() -> Check {
    let name = "executable memory";
    match fs::read_to_string("/proc/sys/vm/memfd_noexec") {
        Ok(text) if text.trim() == "2" => Check::missing(
            Run,
            name,
            "the kernel refuses to execute files in memory (vm.memfd_noexec=2)",
            "`sysctl vm.memfd_noexec=1`, or 0, in this PID namespace",
        ),
        _ => Check::ok(Run, name, "files in memory may be executed"),
    }
}

pub(super) fn gpu(gpus: &[String]) -> Check {
    let name = "GPU";
    let driver = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let driver = driver.as_deref().and_then(|text| text.lines().next());
    let driver = driver.and_then(driver_version);
    if gpus.is_empty() {
        return match driver {
            Some(version) => Check::note(
                Run,
                name,
                format!("driver {version}, but it shows no GPU"),
                "`nvidia-smi` says more; a container needs `--gpus all`",
            ),
            None => Check::ok(
                Run,
                name,
                "none, and no NVIDIA driver: programs for the CPU run",
            ),
        };
    }
    let kinds = gpus
        .iter()
        .map(|sm| match sm.len() {
            0 => sm.clone(),
            n => format!("{}.{}", &sm[..n - 1], &sm[n - 1..]),
        })
        .collect::<Vec<_>>()
        .join(", ");
    let driver = driver.map_or(String::new(), |version| format!(", driver {version}"));
    Check::ok(
        Run,
        name,
        format!(
            "{}, compute capability {kinds}{driver}",
            count(gpus.len() as u64, "GPU")
        ),
    )
}

/// Returns the version in the first line that the driver says of itself.
fn driver_version(line: &str) -> Option<String> {
    let number =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(number).map(str::to_owned)
}

/// Huge pages make starts and calls that read all weights faster.
fn huge_pages() -> Check {
    let name = "huge pages";
    let file = "/sys/kernel/mm/transparent_hugepage/enabled";
    let Ok(text) = fs::read_to_string(file) else {
        return Check::note(
            Run,
            name,
            "the kernel has none",
            "starts and large models are slower without",
        );
    };
    // The one that is chosen stands in brackets.
    let chosen = text.split(['[', ']']).nth(1).unwrap_or_default();
    match chosen {
        "never" => Check::note(
            Run,
            name,
            "never",
            format!("`echo madvise > {file}` makes starts faster"),
        ),
        _ => Check::ok(Run, name, chosen),
    }
}

/// Opens the store, changing nothing.
pub(super) fn store(context: &Context) -> Vec<Check> {
    let path = &context.store;
    let shown = path.display();
    let name = "store";
    if !path.exists() {
        let found = format!("`{shown}` is not there");
        let hint = "the first build makes it; `--store DIR` or PRECAST_STORE names another";
        return vec![Check::note(Store, name, found, hint)];
    }
    let opened = crate::inspect::open(path, context.options());
    let (opened, damage) = match opened {
        Ok(opened) => opened,
        Err(error @ StoreError::NotAStore { .. }) => {
            let hint = "the first build makes it, where nothing else is in the folder";
            return vec![Check::note(Store, name, error.to_string(), hint)];
        }
        Err(error) => {
            let hint = error.hint();
            return vec![Check::missing(Store, name, error.to_string(), hint)];
        }
    };
    let mut checks = Vec::new();
    match damage {
        Some(damage) => checks.push(Check::missing(
            Store,
            "index",
            damage.to_string(),
            "`precast verify --repair` makes it anew from the records",
        )),
        None => {
            let models = opened.releases().models().map_or(0, |models| models.len());
            let found = format!("`{shown}`, {}", count(models as u64, "model"));
            checks.push(Check::ok(Store, name, found));
        }
    }
    checks.push(permission(path));
    checks
}

fn permission(path: &Path) -> Check {
    let name = "permission";
    match rustix::fs::access(path, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Check::ok(Store, name, "read and write"),
        Err(_) => Check::note(
            Store,
            name,
            "read only",
            "programs run; `build`, `gc` and `verify --repair` need to write",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::driver_version;

    #[test]
    fn the_version_of_a_driver_is_found_in_its_first_line() {
        let line =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build";
        assert_eq!(driver_version(line).as_deref(), Some("580.95.05"));
        assert_eq!(driver_version("NVRM version: none"), None);
    }
}
