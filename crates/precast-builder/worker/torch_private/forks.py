"""Starts a worker as a fork of a process that has imported torch and its compiler.

    python -I -S forks.py FOLDER WORKER

A worker needs five seconds of a core to import torch and inductor, and a fork a few milliseconds: MiniLM's build takes
3 seconds of CPU less of 67, with two workers. So the first worker of an interpreter and an environment starts a second
process, the **source**, which imports both and opens a socket in FOLDER. Each worker asks it for a fork, which gets the
worker's descriptors, folder, environment and process group, and runs the program in the folder WORKER. The worker's own
process stays, with the number that the build knows: it passes SIGUSR1 on, and ends as the fork does.

The plain start takes over where the source can't be forked: it has more than one thread after the imports, or has
opened the CUDA driver; it ended; or this process is in another session, whose process groups a fork can't enter.

The source ends with its socket's file, with the process `PRECAST_FORKS_OWNER`, and after a minute without work.

Private: the modules of inductor that the source imports. Without them: each worker is started plainly.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# Each worker has its own; nothing reads them while modules are imported.
OWN = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# What modules read while they are imported. An environment that differs in these has another source.
READ = (
    "AOT",
    "C",
    "GOMP",
    "HF_",
    "KMP",
    "LANG",
    "LC_",
    "LD_",
    "LIBTORCH",
    "MKL",
    "NV",
    "OMP",
    "OPENBLAS",
    "PYTHON",
    "T",
)
UNREAD = ("CARGO", "CI", "COLUMNS", "TERM", "TMP", "TMUX")
IDLE = 60.0
PATIENCE = 300.0


def source_of(folder: str) -> str:
    """Returns the path of the socket for this interpreter and environment."""
    read = {name: value for name, value in os.environ.items() if name.startswith(READ) and not name.startswith(UNREAD)}
    for name in OWN:
        read.pop(name, None)
    given = json.dumps([sys.executable, sys.version, sorted(read.items())])
    return os.path.join(folder, hashlib.sha256(given.encode()).hexdigest()[:16])


def connect(path: str) -> socket.socket | None:
    """Returns a connection to the source, which is started if there is none; None if it can't be forked."""
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        try:
            return _socket(path, socket.socket.connect)
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        if os.path.exists(path + ".unable"):
            return None
        try:
            lock = os.open(path + ".lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            pid = _written(path + ".lock")
            if pid and not _lives(pid):
                if not os.path.exists(path):  # it crashed in its imports
                    return None
                _remove(path + ".lock", path)
            time.sleep(0.02)
            continue
        _start(path, lock)
    return None


def _socket(path: str, use: Callable[[socket.socket, str], None]) -> socket.socket:
    """Returns a socket that `use` has bound or connected. Its path may be longer than the 107 bytes of an address."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    made = socket.socket(socket.AF_UNIX)
    try:
        use(made, f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    except OSError:
        made.close()
        raise
    finally:
        os.close(folder)
    return made


def _start(path: str, lock: int) -> None:
    """Starts the source as nobody's child, in a process group of its own and in this session."""
    if os.fork() == 0:
        try:
            os.setpgid(0, 0)
            # One source after another: the file has what each used.
            with open(path + ".log", "ab") as log:
                environment = {name: value for name, value in os.environ.items() if name not in OWN}
                # NumPy's library starts its threads when it is loaded, and only one thread survives a fork.
                environment["OPENBLAS_NUM_THREADS"] = "1"
                given = [sys.executable, "-P", "-u", __file__, path]
                made = subprocess.Popen(given, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            os.write(lock, str(made.pid).encode())
        except BaseException:
            _remove(path + ".lock")
        os._exit(0)
    os.close(lock)
    os.wait()


def worker(folder: str, program: str) -> int:
    """Is a worker: asks for a fork that runs `program`, and ends as it does."""
    plain = [sys.executable, "-P", "-u", program]
    pid = 0
    try:
        made = connect(source_of(folder))
        if made is not None:
            request = {"program": program, "cwd": os.getcwd(), "environ": dict(os.environ), "group": os.getpgid(0)}
            data = json.dumps(request).encode()
            socket.send_fds(made, [len(data).to_bytes(8, "big")], [0, 1, 2])
            made.sendall(data)
            answers = made.makefile("r")
            pid = int(answers.readline() or 0)
    except OSError as error:
        print(f"no fork: {error}", file=sys.stderr)
    if pid == 0:
        os.execv(sys.executable, plain)
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(pid, signal.SIGUSR1))
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, 0)  # the other side sees the end of the fork's
    os.dup2(empty, 1)
    status = int(answers.readline() or signal.SIGKILL)  # without a word the source was killed
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    return os.waitstatus_to_exitcode(status)


class Source:
    """A process that has imported what workers import, and is forked."""

    def __init__(self, path: str) -> None:
        self.path, self.owner = path, int(os.environ.get("PRECAST_FORKS_OWNER", "0"))
        self.forks: dict[int, socket.socket] = {}

    def serve(self) -> str | None:
        """Answers until it is idle. Returns the program that the fork, in which this returns too, is to run."""
        listener = _socket(self.path, socket.socket.bind)
        listener.listen(64)
        listener.settimeout(0.1)
        used = time.monotonic()
        while os.path.exists(self.path) and (not self.owner or _lives(self.owner)):
            self._reap()
            if self.forks:
                used = time.monotonic()
            elif time.monotonic() - used > IDLE:
                break
            try:
                made, _ = listener.accept()
            except TimeoutError:
                continue
            used = time.monotonic()
            program = self._fork(made, listener)
            if program is not None:
                return program
        _remove(self.path, self.path + ".lock")
        return None

    def _fork(self, made: socket.socket, listener: socket.socket) -> str | None:
        try:
            made.settimeout(10)
            head, descriptors, _, _ = socket.recv_fds(made, 8, 3)
            data = b""
            while len(data) < int.from_bytes(head, "big"):
                part = made.recv(1 << 20)
                if not part:
                    raise EOFError
                data += part
            request: dict[str, Any] = json.loads(data)
        except (OSError, EOFError, ValueError):
            made.close()
            return None
        ready, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            listener.close()
            made.close()
            for other in self.forks.values():
                other.close()
            _become(request, descriptors, done)
            return str(request["program"])
        os.close(done)
        entered = os.read(ready, 1) == b"1"
        for descriptor in (ready, *descriptors):
            os.close(descriptor)
        _say(made, pid if entered else 0)
        if entered:
            self.forks[pid] = made
        else:
            os.waitpid(pid, 0)
            made.close()
        return None

    def _reap(self) -> None:
        """Says of each fork that ended how it did."""
        while self.forks:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            _note(f"a fork ended after {used.ru_utime + used.ru_stime:.2f} s of CPU")
            with self.forks.pop(pid) as made:
                _say(made, status)


def _say(made: socket.socket, number: int) -> None:
    """Answers, unless the asking process has ended: its fork ends with it, by their group."""
    try:
        made.sendall(f"{number}\n".encode())
    except OSError:
        pass


def _note(line: str) -> None:
    """Writes a line into the log, if the disk has room."""
    try:
        print(line)
    except OSError:
        pass


def _become(request: dict[str, Any], descriptors: list[int], done: int) -> None:
    """Makes the process of a fork what the asking process was."""
    import tempfile

    try:
        os.setpgid(0, request["group"])
    except OSError:
        os._exit(1)
    for at, descriptor in enumerate(descriptors):
        os.dup2(descriptor, at)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None
    os.write(done, b"1")
    os.close(done)


def imports() -> str | None:
    """Imports what workers import; returns why this process can't be forked."""
    import importlib

    for name in ("torch", "torch.export", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp_wrapper_cpu"):
        try:
            importlib.import_module(name)
        except Exception as error:  # the worker says it better
            return f"{name}: {error}"
    with open("/proc/self/maps") as maps:
        if "libcuda.so" in maps.read():
            return "it has opened the CUDA driver"
    threads = len(os.listdir("/proc/self/task"))
    return f"it has {threads} threads" if threads > 1 else None


def _written(path: str) -> int:
    try:
        with open(path) as file:
            return int(file.read() or 0)
    except (OSError, ValueError):
        return 0


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove(*paths: str) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def source(path: str) -> None:
    """Is the source, and in each fork a worker."""
    import gc
    import runpy

    gc.set_threshold(100_000, 10, 10)  # as a worker has it, and for the same reason
    try:
        why = imports()
    except BaseException as error:  # a start again would end so too
        why = str(error)
    if why is not None:
        with open(path + ".unable", "w") as file:
            file.write(why)
        return
    gc.freeze()
    _note(f"ready after {time.process_time():.2f} s of CPU")
    program = Source(path).serve()
    if program is not None:
        sys.argv = [program]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        source(sys.argv[1])
    else:
        sys.exit(worker(*sys.argv[1:]))
