"""Figures of training steps, beside eager's: the time to the end of the first step, steps a second, peak memory.

`precast report --training FILE` shows them. The peak is that of a step beyond the memory before it, of the process on a
CPU and of torch's allocator on a GPU, as the gate of a build measures it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..torch_private import modules as of_torch

_SCHEMA = 1


@dataclass(frozen=True)
class Figures:
    """The figures of one way to train."""

    first_step_seconds: float | None = None
    """Seconds from the module to the end of the first step, with what `maybe_compile` took."""
    steps_per_second: float | None = None
    """Of the median step after the first; `None` after one step."""
    peak_bytes: int | None = None
    """The most memory of a step, beyond that before it; `None` where the system does not measure it."""


@dataclass(frozen=True)
class Training:
    """The figures of artifacts and of eager, on one batch."""

    model: str
    device: str
    artifact: Figures
    eager: Figures

    def save(self, path: str | Path) -> None:
        """Writes a file for `precast report --training`."""
        document = {"schema": _SCHEMA, "module": "", "kind": "autograd", **asdict(self)}
        Path(path).write_text(json.dumps(document, indent=1) + "\n")


class Meter:
    """Measures the steps of one way to train."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []
        self._peaks: list[int] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures a block, one step."""
        before = self._mark()
        began = time.perf_counter()
        yield
        self._wait()
        self._seconds.append(time.perf_counter() - began)
        most = self._most()
        if before is not None and most is not None:
            self._peaks.append(max(most - before, 0))

    def figures(self, before: float = 0.0) -> Figures:
        """Returns the figures; `before` are the seconds of the first step's preparation."""
        if not self._seconds:
            return Figures()
        first, *more = self._seconds
        median = statistics.median(more) if more else 0.0
        return Figures(before + first, 1 / median if median else None, max(self._peaks, default=None))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _mark(self) -> int | None:
        """Sets the peak to the present memory, and returns that."""
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        try:
            ctypes.CDLL(None).malloc_trim(0)
            # 5: the high-water mark of resident memory (man 5 proc_pid_clear_refs).
            Path("/proc/self/clear_refs").write_text("5")
        except (OSError, AttributeError):
            return None
        return _status("VmRSS:")

    def _most(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM:")


def _status(name: str) -> int | None:
    """Returns a number of kilobytes from this process's status, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(name)), None)
    return int(found.split()[1]) << 10 if found is not None else None


def training(model: Any, device: torch.device, artifact: Meter, eager: Meter, compiled: float) -> Training:
    """Returns the figures of a model; `compiled` are the seconds that `maybe_compile` took before the first step."""
    wrapped = _wrapped(model)
    name = wrapped.precast_report()["name"] if wrapped is not None else None
    name = name or type(of_torch.original(wrapped, model)).__name__
    return Training(name, device.type, artifact.figures(compiled), eager.figures())


def compile_seconds(model: Any) -> float:
    """Returns the seconds of all attempts to compile a wrapped model until now."""
    wrapped = _wrapped(model)
    regions = wrapped.precast_report()["regions"].values() if wrapped is not None else ()
    attempts = [one for region in regions for one in region.get("pairs") or [region["attempt"]]]
    return sum((one["seconds"] for one in attempts if one is not None), 0.0)


def _wrapped(model: Any) -> Any:
    """Returns a module of `maybe_compile`, as it is or in a wrapper such as DDP; else None."""
    found = (one for one in (model, getattr(model, "module", None)) if hasattr(one, "precast_report"))
    return next(found, None)
