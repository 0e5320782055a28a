//! Limits of a child process, and the termination of it and all its descendants.
//!
//! The memory limit counts anonymous and shared pages of a worker and its descendants. A limit of the address space
//! would stop CUDA, which reserves terabytes without using them. Without a limit per worker, the sum of all workers is
//! limited by the memory of the machine: near that limit the build ends the largest worker, before the kernel chooses a
//! process.

use std::{
    collections::HashMap,
    fs,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// Time between two checks of the memory.
const EVERY: Duration = Duration::from_millis(250);
/// Maximum share of the machine's memory for the sum of all workers, in percent.
const SHARE: u64 = 90;

/// A request to stop: from the caller, at the end of the build, or for a part of it.
#[derive(Clone, Default)]
pub struct Stop {
    /// Flags of the larger parts that it belongs to.
    above: Vec<Arc<AtomicBool>>,
    own: Arc<AtomicBool>,
}

impl Stop {
    pub fn new(outside: &Arc<AtomicBool>) -> Self {
        Self {
            above: vec![outside.clone()],
            own: Arc::default(),
        }
    }

    /// Returns a stop for a part of the build. It is set separately, or with this one.
    pub fn of_part(&self) -> Self {
        Self {
            above: [&self.above[..], std::slice::from_ref(&self.own)].concat(),
            own: Arc::default(),
        }
    }

    pub fn is_set(&self) -> bool {
        let mut flags = self.above.iter().chain([&self.own]);
        flags.any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Ends all processes that are still running, without waiting for them.
    pub fn set(&self) {
        self.own.store(true, Ordering::Relaxed);
    }
}

/// The memory limits of a build's workers.
#[derive(Clone, Default)]
pub struct Limits {
    /// Maximum bytes of each worker. Without it, the memory of the machine limits the sum of all workers.
    pub memory: Option<u64>,
    /// Process -> bytes of it and its descendants at the last check.
    taken: Arc<Mutex<HashMap<u32, u64>>>,
}

impl Limits {
    pub fn new(memory: Option<u64>) -> Self {
        Self {
            memory,
            taken: Arc::default(),
        }
    }

    /// Watches a process.
    pub fn watch(&self, pid: u32) -> Watch {
        Watch {
            pid,
            limits: self.clone(),
            looked: Instant::now(),
            machine: machine_memory().unwrap_or(u64::MAX) / 100 * SHARE,
        }
    }
}

/// Measures the memory of one process.
pub struct Watch {
    pid: u32,
    limits: Limits,
    looked: Instant,
    machine: u64,
}

impl Watch {
    fn own(&self) -> u64 {
        family(self.pid).into_iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns a description of the memory of the process, if it is over the limit.
    pub fn check(&mut self) -> Option<String> {
        if self.looked.elapsed() < EVERY {
            return None;
        }
        self.looked = Instant::now();
        let own = self.own();
        if let Some(limit) = self.limits.memory {
            return (own > limit).then(|| format!("{} of {} allowed", mib(own), mib(limit)));
        }
        let mut taken = self
            .limits
            .taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        taken.insert(self.pid, own);
        let all: u64 = taken.values().sum();
        let largest = taken.values().all(|other| *other <= own);
        (all > self.machine && largest).then(|| {
            format!(
                "{} where all workers may take {}",
                mib(own),
                mib(self.machine)
            )
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut taken = self
            .limits
            .taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        taken.remove(&self.pid);
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Returns the machine's memory in bytes, or the limit of this process's control group if it is lower.
pub fn machine_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    let group = [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ];
    let group = group
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok());
    group.chain([kib << 10]).min()
}

/// Makes a worker write its stack to its log. A process without a handler for the signal ends.
pub fn ask_for_stack(pid: u32) {
    if let Some(worker) = raw(pid) {
        let _ = kill_process(worker, Signal::USR1);
    }
}

/// Ends a process, its group and everything that it started, wherever that went.
pub fn end_family(pid: u32) {
    let all = family(pid);
    if let Some(group) = raw(pid) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    for (other, _) in all {
        if let Some(other) = raw(other) {
            let _ = kill_process(other, Signal::KILL);
        }
    }
}

fn raw(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// Returns a process, its process group and the descendants of all of these, each with its own bytes. A worker may be a
/// fork of another process, and is in the group then.
fn family(pid: u32) -> Vec<(u32, u64)> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut found = vec![pid];
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        if let Some((parent, group)) = parent_and_group(child) {
            children.entry(parent).or_default().push(child);
            if group == pid && child != pid {
                found.push(child);
            }
        }
    }
    let mut at = 0;
    while let Some(next) = found.get(at).copied() {
        at += 1;
        let of_next = children.remove(&next).unwrap_or_default();
        found.extend(
            of_next
                .into_iter()
                .filter(|child| !found.contains(child))
                .collect::<Vec<_>>(),
        );
    }
    found.into_iter().map(|pid| (pid, own_bytes(pid))).collect()
}

fn parent_and_group(pid: u32) -> Option<(u32, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in parentheses, which may hold anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(1);
    let mut next = || fields.next()?.parse().ok();
    Some((next()?, next()?))
}

fn own_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = |line: &str| -> Option<u64> { line.split_whitespace().nth(1)?.parse().ok() };
    let own = status
        .lines()
        .filter(|line| line.starts_with("RssAnon:") || line.starts_with("RssShmem:"));
    own.filter_map(kib).sum::<u64>() << 10
}

#[cfg(test)]
mod tests {
    use std::{
        hint::black_box,
        os::unix::process::{CommandExt, ExitStatusExt},
        process::Command,
        thread,
    };

    use super::*;
    use precast_store::testing::in_own_process;

    #[test]
    fn a_part_ends_with_the_whole_and_not_the_whole_with_a_part() {
        let outside = Arc::default();
        let whole = Stop::new(&outside);
        let (one, other) = (whole.of_part(), whole.of_part());
        one.set();
        assert!(one.is_set() && one.of_part().is_set());
        assert!(!whole.is_set() && !other.is_set());
        whole.set();
        assert!(other.is_set());
        let part = Stop::new(&outside).of_part();
        outside.store(true, Ordering::Relaxed);
        assert!(part.is_set());
    }

    #[test]
    fn a_process_of_the_same_group_is_of_the_family_and_ends_with_it() {
        let start = |group: i32| {
            let mut command = Command::new("sleep");
            command.arg("600").process_group(group).spawn().unwrap()
        };
        let mut leader = start(0);
        let mut member = start(leader.id().try_into().unwrap());
        let all = family(leader.id()).into_iter().map(|(pid, _)| pid);
        assert_eq!(all.collect::<Vec<_>>(), [leader.id(), member.id()]);
        end_family(leader.id());
        for child in [&mut leader, &mut member] {
            assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        }
    }

    #[test]
    fn a_process_that_takes_more_than_its_limit_is_reported() {
        in_own_process(
            "limits::tests::a_process_that_takes_more_than_its_limit_is_reported",
            measure,
        );
    }

    fn measure() {
        const MIB: u64 = 1 << 20;
        let own = Limits::new(None).watch(std::process::id()).own();
        let mut watch = Limits::new(Some(own + 128 * MIB)).watch(std::process::id());
        let mut check = || {
            thread::sleep(EVERY * 2);
            watch.check()
        };
        assert_eq!(check(), None);
        let taken = black_box(vec![1_u8; 512 << 20]);
        assert!(check().is_some_and(|what| what.ends_with("allowed")));
        drop(taken);
    }
}
