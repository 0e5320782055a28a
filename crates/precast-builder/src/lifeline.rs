//! Child processes of a build end with it, even when it is killed.
//!
//! A killed build (`kill -9`, or the kernel's OOM killer) can't end its children, so the kernel does. Each child holds
//! the read end of a pipe; only the build has the write end. When that end closes, the kernel sends `SIGKILL` to the
//! child's process group (`O_ASYNC`, `F_SETSIG`, `F_SETOWN`: fcntl(2)). These settings belong to the open pipe, so the
//! child's program need not support them.
//! `PR_SET_PDEATHSIG` does not fit: it is bound to the thread that starts the child, and workers outlive that thread.
//! It also does not end the compilers that a worker has started.
//!
//! If the build is killed before these settings are made, the child reads the end of its stdin and exits.
//!
//! Not promised: the end of processes in a separate session. A build that ends normally ends these too (`limits`).
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    io::{self, PipeReader, PipeWriter},
    os::{fd::AsRawFd, unix::process::CommandExt},
    process::{Child, Command},
};

use rustix::io::{FdFlags, fcntl_setfd};

/// The build's end of the pipe. The child's process group ends when this is dropped.
pub(super) struct Lifeline {
    _ours: PipeWriter,
}

/// Starts a child in a new process group that ends with this process.
pub(super) fn spawn(command: &mut Command) -> io::Result<(Child, Lifeline)> {
    let (theirs, ours) = io::pipe()?;
    // Other children that start now inherit it too: a read end more does no harm.
    fcntl_setfd(&theirs, FdFlags::empty())?;
    let child = command.process_group(0).spawn()?;
    // If the kernel refuses this, the child ends later, at the end of its stdin.
    let _ = end_on_close(&theirs, child.id());
    Ok((child, Lifeline { _ours: ours }))
}

/// Has the process group killed when the last write end of the pipe closes.
fn end_on_close(pipe: &PipeReader, group: u32) -> io::Result<()> {
    let group = c_int::try_from(group).map_err(io::Error::other)?;
    let set = |command: c_int, value: c_int| {
        // SAFETY: the descriptor is open as long as `pipe` is, and these commands take one int and no pointer.
        match unsafe { libc::fcntl(pipe.as_raw_fd(), command, value) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    set(libc::F_SETOWN, -group)?;
    set(F_SETSIG, libc::SIGKILL)?;
    set(libc::F_SETFL, libc::O_ASYNC)
}

/// Of `linux/fcntl.h`; the `libc` crate lacks it.
const F_SETSIG: c_int = 10;

#[cfg(test)]
mod tests {
    use std::{os::unix::process::ExitStatusExt, process::Stdio, thread};

    use super::*;

    #[test]
    fn a_child_ends_with_its_lifeline_and_not_with_the_thread_that_started_it() {
        let start = || spawn(Command::new("sleep").arg("600").stdin(Stdio::null())).unwrap();
        let (mut first, ours) = thread::spawn(start).join().unwrap();
        let (mut second, other) = start();
        drop(ours);
        assert_eq!(first.wait().unwrap().signal(), Some(libc::SIGKILL));
        assert_eq!(second.try_wait().unwrap(), None);
        drop(other);
        assert_eq!(second.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn what_a_child_started_ends_too() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "sleep 600 & echo $!; wait"])
            .stdout(Stdio::piped());
        let (mut child, ours) = spawn(&mut command).unwrap();
        let mut out = io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        io::BufRead::read_line(&mut out, &mut line).unwrap();
        assert!(!line.trim().is_empty());
        drop(ours);
        // The end of its stdout, which the grandchild holds too.
        assert_eq!(io::Read::read_to_string(&mut out, &mut line).unwrap(), 0);
        child.wait().unwrap();
    }
}
