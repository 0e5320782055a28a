"""What the memory of a training on a GPU is taken for, by stage.

    STEPS_MODEL=encoder python memory.py WAY ROWS STORE

WAY is one of `table.py`, in Python. Prints a JSON line for what `maybe_compile` leaves and one for the end of 30 steps,
in MiB: the tensors that live now and the most so far, what torch's allocator holds of the device now and the most so
far, that by pool, and what the device holds beside it (the CUDA context, code and graphs). The last line has the median
milliseconds of a step. A first run fills caches and store.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import table
import torch


def say(stage: str) -> None:
    """Prints the memory at a stage."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    pools: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot():
        pools[f"{segment['segment_pool_id']} stream {segment['stream']:x}"] += segment["total_size"]
    found = {
        "tensors": torch.cuda.memory_allocated(),
        "most_tensors": torch.cuda.max_memory_allocated(),
        "held": torch.cuda.memory_reserved(),
        "most_held": torch.cuda.max_memory_reserved(),
        "device": total - free,
        "beside": total - free - torch.cuda.memory_reserved(),
    }
    line = {name: size >> 20 for name, size in found.items()}
    print(json.dumps({"stage": stage, **line, "pools": {name: size >> 20 for name, size in pools.items()}}), flush=True)


def main(way: str, rows: int, store: Path) -> None:
    step, _ = table.trainer(way, rows, store)
    say("compiled")
    times = []
    for _ in range(31):
        began = time.perf_counter()
        float(step())
        times.append((time.perf_counter() - began) * 1e3)
    say("trained")
    print(json.dumps({"way": way, "rows": rows, "ms": round(statistics.median(times[1:]), 3)}))


main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
