//! Checks for runs (libtorch, executable memory, a GPU's driver) and of the store.

use std::{fs, path::Path};

use super::{
    super::{Context, libtorch::LibtorchArgs, text::count},
    Check,
    Need::{Run, Store},
    Subject,
};
use crate::store::StoreError;

const LIBTORCH: Subject = Subject(Run, "libtorch");
const MEMORY: Subject = Subject(Run, "executable memory");
const GPU: Subject = Subject(Run, "GPU");
const HUGE_PAGES: Subject = Subject(Run, "huge pages");
const STORE: Subject = Subject(Store, "store");
const INDEX: Subject = Subject(Store, "index");
const PERMISSION: Subject = Subject(Store, "permission");

/// Returns all checks but those of the store; `gpus` are the compute capabilities of the host's GPUs.
pub(super) fn checks(
    libtorch_args: &LibtorchArgs,
    python: Option<&Path>,
    gpus: &[String],
) -> Vec<Check> {
    vec![
        libtorch(libtorch_args, python),
        memory(),
        gpu(gpus),
        huge_pages(),
    ]
}

/// Opens libtorch as `run` does with this Python in use.
fn libtorch(args: &LibtorchArgs, python: Option<&Path>) -> Check {
    match args.open_beside(python) {
        Ok(open) => LIBTORCH.ok(format!("{}, {}", open.version, open.folder.display())),
        Err(error) => {
            let hint = "name the folder of the package `torch`: `--libtorch DIR`, or LIBTORCH";
            LIBTORCH.missing(error.to_string(), hint)
        }
    }
}

/// Checks that the kernel lets a process execute a file in memory: verified objects are loaded from one.
fn memory() -> Check {
    match fs::read_to_string("/proc/sys/vm/memfd_noexec") {
        Ok(text) if text.trim() == "2" => MEMORY.missing(
            "the kernel refuses to execute files in memory (vm.memfd_noexec=2)",
            "`sysctl vm.memfd_noexec=1`, or 0, in this PID namespace",
        ),
        _ => MEMORY.ok("files in memory may be executed"),
    }
}

pub(super) fn gpu(gpus: &[String]) -> Check {
    let driver = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let driver = driver.as_deref().and_then(|text| text.lines().next());
    let driver = driver.and_then(driver_version);
    match (gpus, driver) {
        ([], None) => GPU.ok("none, and no NVIDIA driver: programs for the CPU run"),
        ([], Some(version)) => GPU.note(
            format!("driver {version}, but it shows no GPU"),
            "`nvidia-smi` says more; a container needs `--gpus all`",
        ),
        (gpus, driver) => {
            let kind = |sm: &String| match sm.len().checked_sub(1) {
                Some(minor) => format!("{}.{}", &sm[..minor], &sm[minor..]),
                None => String::new(),
            };
            let kinds = gpus.iter().map(kind).collect::<Vec<_>>().join(", ");
            let driver = driver.map_or(String::new(), |version| format!(", driver {version}"));
            let all = count(gpus.len(), "GPU");
            GPU.ok(format!("{all}, compute capability {kinds}{driver}"))
        }
    }
}

/// Returns the version in the first line of `/proc/driver/nvidia/version`.
fn driver_version(line: &str) -> Option<String> {
    let number =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(number).map(str::to_owned)
}

/// Checks for huge pages, which make starts and calls that read all weights faster.
fn huge_pages() -> Check {
    let file = "/sys/kernel/mm/transparent_hugepage/enabled";
    let Ok(text) = fs::read_to_string(file) else {
        let hint = "starts and large models are slower without";
        return HUGE_PAGES.note("the kernel has none", hint);
    };
    // The chosen mode stands in brackets.
    match text.split(['[', ']']).nth(1).unwrap_or_default() {
        "never" => {
            let hint = format!("`echo madvise > {file}` makes starts faster");
            HUGE_PAGES.note("never", hint)
        }
        chosen => HUGE_PAGES.ok(chosen),
    }
}

/// Opens the store without a change.
pub(super) fn store(context: &Context) -> Vec<Check> {
    let path = &context.store;
    let shown = path.display();
    if !path.exists() {
        let hint = "the first build makes it; `--store DIR` or PRECAST_STORE names another";
        return vec![STORE.note(format!("`{shown}` is not there"), hint)];
    }
    let (opened, damage) = match crate::inspect::open(path, context.options()) {
        Ok(opened) => opened,
        Err(error @ StoreError::NotAStore { .. }) => {
            let hint = "the first build makes it, where nothing else is in the folder";
            return vec![STORE.note(error.to_string(), hint)];
        }
        Err(error) => return vec![STORE.missing(error.to_string(), error.hint())],
    };
    let check = match damage {
        Some(damage) => {
            let hint = "`precast verify --repair` makes it anew from the records";
            INDEX.missing(damage.to_string(), hint)
        }
        None => {
            let models = opened.releases().models().map_or(0, |models| models.len());
            STORE.ok(format!("`{shown}`, {}", count(models, "model")))
        }
    };
    vec![check, permission(path)]
}

fn permission(path: &Path) -> Check {
    match rustix::fs::access(path, rustix::fs::Access::WRITE_OK) {
        Ok(()) => PERMISSION.ok("read and write"),
        Err(_) => {
            let hint = "programs run; `build`, `gc` and `verify --repair` need to write";
            PERMISSION.note("read only", hint)
        }
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
