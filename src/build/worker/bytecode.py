"""Bytecode of torch, where it has none beside it: made once a machine and on all cores, not by every process again.

Installers may leave bytecode out (`uv pip install`, images that set PYTHONDONTWRITEBYTECODE), and a worker writes none
into folders that are not the build's. Python then compiles two thousand modules in every process that imports torch and
its compiler. It is kept in `PRECAST_BYTECODE_DIR` when that is set to a folder of this user that nobody else can write.
The first worker that finds it lacking starts a process that makes it; all wait for torch's, and import that while the
rest is made. Each file has the hash of its source, which Python compares: times are not to be trusted in images. What
else is imported, the standard library first of all, has its bytecode where it ever was; `sys.pycache_prefix` would hide
that.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib._bootstrap_external as _imports  # what imports ask where bytecode is; `importlib.util` has a copy
import importlib.util
import os
import py_compile
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# What importing torch and its compiler imports, torch first; others are small.
_PACKAGES = ("torch", "sympy", "mpmath", "networkx", "numpy", "triton", "jinja2")
# Waiting longer than that is worse than doing it oneself.
_PATIENCE = 30.0
_BESIDE = _imports.cache_from_source


def use() -> None:
    """Looks for bytecode in the folder that outlives builds, and has it made, if torch lacks its own."""
    try:
        _use()
    except OSError:  # then this process compiles for itself
        _look_in(None, [])


def _use() -> None:
    origins = [spec.origin for name in _PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    folder = _folder()
    if not origins or folder is None or os.path.exists(importlib.util.cache_from_source(origins[0])):
        return
    marks = [_mark(folder, origin) for origin in origins]
    _look_in(folder, origins)
    if all(mark.exists() for mark in marks):
        return
    lock = _lock(folder)
    if lock is not None:
        try:
            _start(lock, folder, origins, marks)
        finally:
            os.close(lock)
    began = time.monotonic()
    while not marks[0].exists() and time.monotonic() - began < _PATIENCE:
        time.sleep(0.02)
        lock = _lock(folder)
        if lock is not None:  # who made it ended before its time
            os.close(lock)
            return


def _look_in(folder: Path | None, origins: list[str]) -> None:
    """Has imports look for the bytecode of these packages, and of no others, in `folder`."""
    roots = tuple(os.path.dirname(origin) + os.sep for origin in origins)

    def cached(path: Any, *args: Any, **more: Any) -> str:
        beside = _BESIDE(path, *args, **more)
        if folder is None or not str(path).startswith(roots):
            return beside
        # As with `sys.pycache_prefix`, by which it is made.
        return os.path.join(folder, os.path.dirname(path).lstrip(os.sep), os.path.basename(beside))

    _imports.cache_from_source = cached if folder else _BESIDE


def _folder() -> Path | None:
    asked = os.environ.get("PRECAST_BYTECODE_DIR")
    if not asked:
        return None
    folder = Path(asked)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    return folder if found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077 else None


def _mark(folder: Path, origin: str) -> Path:
    """Returns the file that says that a package's bytecode is there."""
    found = os.stat(origin)
    text = f"{sys.implementation.cache_tag} {origin} {found.st_size} {found.st_mtime_ns}"
    return folder / f"made-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _lock(folder: Path) -> int | None:
    """Returns a file that is locked as long as this process or one that has it from this one holds it open."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _start(lock: int, folder: Path, origins: list[str], marks: list[Path]) -> None:
    subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-S",
            __file__,
            *(str(path) for pair in zip(origins, marks, strict=True) for path in pair),
        ],
        env={**os.environ, "PYTHONPYCACHEPREFIX": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock,),
        umask=0o077,
    )


def make(origins: list[str], marks: list[str]) -> None:
    """Compiles what packages hold, but for their tests, and leaves the mark of each."""
    import compileall

    workers = min(len(os.sched_getaffinity(0)), 8)
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    for origin, mark in zip(origins, marks, strict=True):
        root = os.path.dirname(origin)
        unused = re.compile(f"^{re.escape(root)}/(.*/)?(tests?|testing|onnx)/")
        if compileall.compile_dir(root, quiet=2, workers=workers, rx=unused, invalidation_mode=checked):
            Path(mark).touch()


if __name__ == "__main__":
    make(sys.argv[1::2], sys.argv[2::2])
