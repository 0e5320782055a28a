"""What eager costs: latency and peak device memory of the module itself, in Python, on the sample inputs.

Other work on the machine moves these numbers; they are a hint beside what the gate measures, and say how often they
were taken. The module has run on these inputs before.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

_RUNS = 20
_LEAST = 3
_SECONDS = 0.2


def eager(wrapped: Any, inputs: list[Any], device: str) -> dict[str, Any]:
    """Returns the median microseconds of a call, how many calls it is of, and peak memory where it can be known."""
    import torch

    def sync() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    taken: list[float] = []
    with torch.inference_mode():
        sync()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        begun = time.perf_counter()
        while len(taken) < _RUNS and (len(taken) < _LEAST or time.perf_counter() - begun < _SECONDS):
            started = time.perf_counter()
            wrapped(*inputs)
            sync()
            taken.append(time.perf_counter() - started)
    answer: dict[str, Any] = {
        "eager_us": round(statistics.median(taken) * 1e6, 1),
        "eager_runs": len(taken),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        answer["eager_peak_bytes"] = torch.cuda.max_memory_allocated() - held
    return answer
