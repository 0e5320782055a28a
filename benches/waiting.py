"""How long a small call takes on a host that does other work too, by how many threads OpenMP has and how they wait.

    .venv/bin/python -m benches.waiting [--store artifacts] [--rounds 3] > benches/results/waiting-cpu.json

The call is MiniLM's encoder at batch=1 seq=32, of a store that `make demo` leaves: a few milliseconds, of which an
operator has a part of one, so that threads wait for each other all the time. `precast bench` makes it again and again
in a process of its own for each set of variables, in turns: first with nothing beside it that this program started,
then beside processes that hash, one for every second core. They end with this program, or soon after it is gone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cases import ROOT
from .machine import describe

# Hashes until its parent ends or stops it, or until the deadline of the parent.
BESIDE = """
import hashlib, os, time
parent, end, block = os.getppid(), time.monotonic() + 300, bytes(1 << 20)
while os.getppid() == parent and time.monotonic() < end:
    hashlib.sha256(block).digest()
"""


@contextmanager
def beside(processes: int) -> Iterator[None]:
    """Keeps so many cores busy."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", BESIDE]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def variants(cores: int) -> dict[str, dict[str, str]]:
    """Returns the trials by their spelling in a shell."""
    half = str(max(cores // 2, 1))
    tried = [
        {},
        {"OMP_WAIT_POLICY": "passive"},
        {"OMP_NUM_THREADS": half},
        {"OMP_NUM_THREADS": half, "OMP_WAIT_POLICY": "passive"},
        {"OMP_NUM_THREADS": "1"},
    ]
    return {" ".join(f"{name}={value}" for name, value in one.items()) or "as it is": one for one in tried}


def bench(precast: Path, store: Path, variables: dict[str, str], seconds: float) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    command = [precast, "bench", "encode", "--model", "minilm", "--store", store, "--at", "batch=1,seq=32"]
    command += ["--compiled", "--seconds", str(seconds), "--format", "json"]
    run = subprocess.run(command, env=env | variables, capture_output=True, text=True, check=False, timeout=60)
    if run.returncode != 0:
        raise SystemExit(f"`precast bench` ended with exit code {run.returncode}\n{run.stderr}")
    return json.loads(run.stdout)["buckets"][0]


def spread(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns milliseconds of the rounds' medians: their median, least and most; of the slowest calls too."""
    medians = sorted(round["median"] * 1e3 for round in rounds)
    found = {
        "median_ms": statistics.median(medians),
        "least_ms": medians[0],
        "most_ms": medians[-1],
        "p99_ms": statistics.median(round["p99"] * 1e3 for round in rounds),
    }
    return {name: round(value, 2) for name, value in found.items()} | {"calls": sum(r["calls"] for r in rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precast", type=Path, default=ROOT / "target/release/precast")
    parser.add_argument("--store", type=Path, default=ROOT / "artifacts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    machine = describe(args.precast.parent)
    tried = variants(machine["cores"])
    taken: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, processes in (("alone", 0), ("beside", max(machine["cores"] // 2, 1))):
        taken[name] = {variant: [] for variant in tried}
        with beside(processes):
            for _ in range(args.rounds):
                for variant, variables in tried.items():
                    taken[name][variant].append(bench(args.precast, args.store, variables, args.seconds))
    figures = {name: {variant: spread(found) for variant, found in rows.items()} for name, rows in taken.items()}
    ratios = {
        name: {variant: round(row["median_ms"] / rows["as it is"]["median_ms"], 2) for variant, row in rows.items()}
        for name, rows in figures.items()
    }
    result = {
        "schema": 1,
        "command": " ".join(["python -m benches.waiting", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine | {"load_after": os.getloadavg()[0]},
        "call": "minilm encode batch=1 seq=32",
        "beside": f"{max(machine['cores'] // 2, 1)} processes that hash",
        "figures": figures,
        "to_as_it_is": ratios,
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
