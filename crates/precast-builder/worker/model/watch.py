"""Records the project's files that are read during the creation of its model.

Python calls an audit hook for every file that it opens. The safetensors library opens files in Rust, without that hook,
so its function `safe_open` is wrapped.

Files are hashed after the model is created. A file that changed in between would give the key another content than the
model: so the state of each file (size, times) is kept when it is first opened, and compared after it was hashed.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import failures

# The largest lag of a file system's clock, in ns.
_LAG = 10_000_000
_WRITES = os.O_WRONLY | os.O_RDWR


class Watch:
    """Records the files of the project that are opened for reading. A process has one: audit hooks can't be removed."""

    def __init__(self) -> None:
        self.root: Path | None = None
        self.files: set[str] = set()
        # The state of each file when it was first opened.
        self._first: dict[str, tuple[int, ...]] = {}
        # Files that this process wrote.
        self._written: set[str] = set()
        self._begun = 0
        sys.addaudithook(self._hook)
        if "safetensors" in sys.modules:
            self.wrap(sys.modules["safetensors"])
        else:
            sys.meta_path.insert(0, _Finder(self))  # type: ignore[arg-type]

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.root is None or event != "open":
            return
        path, mode, flags = arguments
        if isinstance(path, int):
            return
        if set(mode) & set("wax+") if isinstance(mode, str) else flags & _WRITES:
            self._written.add(os.path.realpath(os.fsdecode(path)))
        else:
            self.note(path)

    def begin(self, root: Path) -> None:
        """Records files that are opened from now on."""
        self.files, self._first, self._written = set(), {}, set()
        self._begun = time.time_ns()
        self.root = root

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing inside."""
        root, self.root = self.root, None
        try:
            yield
        finally:
            self.root = root

    def changed(self, path: str) -> bool:
        """Returns whether another process changed a file after the model read it.

        A module with bytecode is imported without being opened: only the time of its last change shows a change.
        """
        if path in self._written:
            return False
        first = self._first.get(path)
        now = _signature(path)
        return now != first if first is not None else now[-1] >= self._begun - _LAG

    def note(self, path: Any) -> None:
        """Records a path if it is a file of the project."""
        if self.root is None:
            return
        try:
            real = os.path.realpath(os.fsdecode(path))
            if failures.own_file(real, self.root) and os.path.isfile(real):
                self.files.add(real)
                self._first.setdefault(real, _signature(real))
        except (TypeError, ValueError, OSError):
            return

    def wrap(self, library: ModuleType) -> None:
        """Wraps `safe_open` of the safetensors library. Modules that imported the function before keep the original."""
        original = getattr(library, "safe_open", None)
        if original is None:
            return

        def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
            self.note(filename)
            return original(filename, *args, **kwargs)

        library.safe_open = safe_open  # type: ignore[attr-defined]


def _signature(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return (0,)
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _Finder:
    """Finds the safetensors library for the import system."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of `safetensors`, whose loader wraps it before another module can import from it."""
        if name != "safetensors":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._watch.wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_WATCH: Watch | None = None


@contextmanager
def watching(root: Path) -> Iterator[Watch]:
    """Yields the recorder of the files that are read inside."""
    global _WATCH
    if _WATCH is None:
        _WATCH = Watch()
    _WATCH.begin(root)
    try:
        yield _WATCH
    finally:
        _WATCH.root = None
