"""Measures eager: latency and peak device memory of the module itself, in Python, on the sample inputs.

Other work on the machine changes these numbers, so they are a hint, reported with the number of runs. The gate makes
the measurements that decide. The module has run on these inputs before.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

_MAX_RUNS = 20
_MIN_RUNS = 3
_SECONDS = 0.2


def eager(wrapped: Any, inputs: list[Any], device: str) -> dict[str, Any]:
    """Returns the median microseconds of a call, the number of calls, and on CUDA the peak memory."""

    def sync() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    seconds: list[float] = []
    with torch.inference_mode():
        sync()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        begun = time.perf_counter()
        while len(seconds) < _MAX_RUNS and (len(seconds) < _MIN_RUNS or time.perf_counter() - begun < _SECONDS):
            started = time.perf_counter()
            wrapped(*inputs)
            sync()
            seconds.append(time.perf_counter() - started)
    receipt: dict[str, Any] = {
        "eager_us": round(statistics.median(seconds) * 1e6, 1),
        "eager_runs": len(seconds),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        receipt["eager_peak_bytes"] = torch.cuda.max_memory_allocated() - held
    return receipt
