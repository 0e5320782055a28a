"""The time that a call from Python adds to the one from Rust: python_overhead.py STORE [DEVICE] > results.json.

STORE has the release `tiny` of python/tests/model. The medians of `precast bench` and of Python, in turns; the least of
each is compared, because other programs and a lower clock only add. Each case has the call of its own module from Rust
beside it. On the CPU with one thread: OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import precast
import torch

TURNS = 8
BUCKETS = {"encode": {"batch": 4, "seq": 8}, "nested": {"batch": 4}}


def median(call: Callable[[], Any], seconds: float = 0.5) -> float:
    """Returns the median time of a call, in microseconds."""
    times = []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def rust(command: str, store: str, device: str, module: str) -> float:
    """Returns the median time of a call in `precast bench`, in microseconds."""
    at = ",".join(f"{dim}={size}" for dim, size in BUCKETS[module].items())
    options = ["--model", "tiny", "--device", device, "--at", at, "--seconds", "0.5", "--format", "json"]
    environment = {**os.environ, "PRECAST_PYTHON": sys.executable, "LIBTORCH": str(Path(torch.__file__).parent)}
    done = subprocess.run(
        [command, "bench", module, "--store", store, *options], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)["buckets"][0]["median"] * 1e6


def main(store: str, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    command = os.environ.get("PRECAST_COMMAND") or str(Path(sys.executable).parent / "precast")
    model = precast.load(store, "tiny", device=device)
    ids = torch.ones(4, 8, dtype=torch.int64, device=device)
    encode, array = model.encode, ids.cpu().numpy()
    nested, x, scale = model.nested, torch.ones(4, 3, device=device), torch.ones(1, device=device)

    def wait(out: Any) -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    calls: dict[str, Callable[[], Any]] = {
        "tensors": lambda: wait(encode(ids, ids)),
        "tensors by name": lambda: wait(encode(ids=ids, mask=ids)),
        "arrays of numpy": lambda: wait(encode(array, array)),
        "arrays by name": lambda: wait(encode(ids=array, mask=array)),
        "four nested in, four out": lambda: wait(nested(x, (x, x), scale)),
    }
    modules = {name: "nested" if "nested" in name else "encode" for name in calls}
    turns: dict[str, list[float]] = {f"rust, {module}": [] for module in BUCKETS} | {name: [] for name in calls}
    for _ in range(TURNS):
        for module in BUCKETS:
            turns[f"rust, {module}"].append(rust(command, store, device, module))
        for name, call in calls.items():
            turns[name].append(median(call))
    figures = {name: statistics.median(each) for name, each in turns.items()}
    least = {name: min(each) for name, each in turns.items()}
    json.dump(
        {
            "schema": 1,
            "date": date.today().isoformat(),
            "command": f"python benches/python_overhead.py STORE {device}",
            "device": torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "median_us": figures,
            "least_us": least,
            "over_rust_us": {name: least[name] - least[f"rust, {modules[name]}"] for name in calls},
            "turns_us": turns,
        },
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
