"""Bytecode for a torch that was installed without: compiled once on a machine, on all cores.

Installers may leave bytecode out (`uv pip install`, images that set PYTHONDONTWRITEBYTECODE), and a worker writes none
into folders outside of the build. Python then compiles two thousand modules in every process that imports torch and its
compiler. So bytecode is kept in `PRECAST_BYTECODE_DIR`, if that names a folder of this user that nobody else can write.

The first worker that finds none starts a process that compiles it in three stages: the modules that `import torch`
imports, which all workers wait for; the modules of torch's compiler, while torch is imported; and, at low priority,
modules that are rarely imported. Each file has the hash of its source, which Python compares: times of files in images
are not reliable. Other packages and the standard library keep their bytecode in its usual place, which
`sys.pycache_prefix` would hide.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib._bootstrap_external as _imports  # imports call its `cache_from_source`; `importlib.util` has a copy
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

# The packages that torch and its compiler import, torch first; others are small.
_PACKAGES = ("torch", "numpy", "sympy", "mpmath", "networkx", "triton", "jinja2")
# Modules that are not compiled; modules of the last stage, which no capture and no compile imports; modules of the
# second, which `import torch` does not import. The first stage has the rest. Only speed depends on these patterns.
_UNUSED = re.compile(r"(.*/)?tests?/|torch/(testing/_internal|distributed/elastic|utils/(hipify|tensorboard))/")
_LAST = re.compile(
    r"torch/(testing|nested|sparse|backends/_nnapi|ao/(ns|pruning)|utils/benchmark)/"
    r"|torch/distributed/(_tools|checkpoint|flight_recorder|optim|pipelining)/"
    r"|sympy/(categories|codegen|crypto|diffgeom|holonomic|liealgebras|parsing|physics|stats|testing|vector)/"
    r"|numpy/(distutils|f2py|ma|polynomial|testing|typing)/|triton/(experimental|profiler)/"
)
_SECOND = re.compile(r"torch/(_dynamo|_inductor|_numpy|distributed|onnx)/|(?!torch/|numpy/)")
_STAGES = 3
# Seconds to wait for another process; after that, this one compiles for itself.
_TIMEOUT = 30.0
# The most processes that compile. Their memory counts against the limit of the worker that started them.
_MAX_PROCESSES = 16
_ORIGINAL = _imports.cache_from_source


def use() -> None:
    """Has imports read bytecode from the folder that outlives builds, and starts to compile it, if torch has none."""
    try:
        _use()
    except OSError:  # this process compiles for itself
        _look_in(None, [])


def _use() -> None:
    origins = [spec.origin for name in _PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    folder = _folder()
    if not origins or folder is None or os.path.exists(importlib.util.cache_from_source(origins[0])):
        return
    marks = [_mark(folder, origins, stage) for stage in range(_STAGES)]
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
    while not marks[0].exists() and time.monotonic() - began < _TIMEOUT:
        time.sleep(0.02)
        lock = _lock(folder)
        if lock is not None:  # the process that compiled has ended early
            os.close(lock)
            return


def _look_in(folder: Path | None, origins: list[str]) -> None:
    """Has imports read the bytecode of these packages, and of no others, from `folder`."""
    roots = tuple(os.path.dirname(origin) + os.sep for origin in origins)

    def cached(path: Any, *args: Any, **more: Any) -> str:
        usual = _ORIGINAL(path, *args, **more)
        if folder is None or not str(path).startswith(roots):
            return usual
        # The path that `sys.pycache_prefix` gives, which the compiling process sets.
        return os.path.join(folder, os.path.dirname(path).lstrip(os.sep), os.path.basename(usual))

    _imports.cache_from_source = cached if folder else _ORIGINAL


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


def _mark(folder: Path, origins: list[str], stage: int) -> Path:
    """Returns the file that marks a stage as compiled."""
    found = [(origin, os.stat(origin)) for origin in origins]
    text = "\n".join(f"{origin} {stat.st_size} {stat.st_mtime_ns}" for origin, stat in found)
    text = f"{sys.implementation.cache_tag} {stage}\n{text}"
    return folder / f"made-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _lock(folder: Path) -> int | None:
    """Returns a locked file; None if another process has the lock. It stays locked while a process has it open."""
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
            "-B",
            "-S",
            __file__,
            *map(str, marks),
            *origins,
        ],
        env={**os.environ, "PYTHONPYCACHEPREFIX": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock,),
        umask=0o077,
    )


def make(marks: list[str], origins: list[str]) -> None:
    """Compiles the modules of packages, stage by stage, and writes the mark of each stage."""
    import compileall
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    stages: list[list[tuple[int, str]]] = [[] for _ in marks]
    for root in map(os.path.dirname, origins):
        for folder, _, names in os.walk(root):
            for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
                stage = _stage(os.path.relpath(path, os.path.dirname(root)))
                if stage is not None:
                    stages[stage].append((os.path.getsize(path), path))
    compiled = functools.partial(
        compileall.compile_file, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
    )
    for mark, files in zip(marks, stages, strict=True):
        if mark == marks[-1]:
            os.nice(10)
        # The largest first, so that none of them is the last. This process has no other thread.
        paths = [path for _, path in sorted(files, reverse=True)]
        workers = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            if all(list(pool.map(compiled, paths))):
                Path(mark).touch()


def _stage(name: str) -> int | None:
    """Returns the stage of a file, by its path from the folder of the packages."""
    if _UNUSED.match(name):
        return None
    return 2 if _LAST.match(name) else int(bool(_SECOND.match(name)))


if __name__ == "__main__":
    make(sys.argv[1 : 1 + _STAGES], sys.argv[1 + _STAGES :])
