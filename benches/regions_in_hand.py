"""Cold starts of `maybe_compile` on a stack of equal blocks: whole, and with a region for each block.

    .venv-python/bin/python -m benches.regions_in_hand | python -m benches.results build-cpu.json regions_in_hand

The model is the stack of `examples/blocks`, with random weights. Each way runs in a fresh process with a store and
caches of its own, in turns, round after round; only precompiled headers are there before, from a build of a small
stack. A process imports torch and makes the model; the time is from there to the end of the first call, in training
with its backward call. CPU seconds are those of the process and of all processes that it started. `compile` is
`torch.compile` of the whole model, `compile, regions` of each block by itself.

A ratio is taken in each round, of `whole` to `regions` and of the two of `torch.compile`; the median is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .training import made

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("whole", "regions", "compile", "compile, regions")
KINDS = ("autograd", "inference")


def cpu() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def child(way: str, kind: str, blocks: int, width: int, folder: Path) -> dict[str, Any]:
    """Starts in one way; returns seconds, and what answered."""
    import torch

    sys.path.insert(0, str(ROOT / "examples/blocks"))
    from model import make

    net = make(blocks, width, width // 64, torch.float32)
    net.train(kind == "autograd")
    x = torch.randn(2, 64, width)
    spent, began = cpu(), time.perf_counter()
    model: Any = net
    if way in ("whole", "regions"):
        from precast import CompileConfig, maybe_compile

        allowed = ["blocks.*"] if way == "regions" else ["*"]
        model = maybe_compile(net, CompileConfig(kind=kind, store=folder / "store", allowlist=allowed), None, x)
    elif way == "compile":
        model = torch.compile(net, dynamic=False)
    else:
        for block in net.blocks:
            block.compile(dynamic=False)
    if kind == "autograd":
        model(x).sin().mean().backward()
    else:
        with torch.no_grad():
            model(x)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 2)}
    if way in ("whole", "regions"):
        report = model.precast_report()
        assert report["artifact"] == (blocks if way == "regions" else 1), report
    else:  # workers that compile end with the process
        from torch._inductor.async_compile import shutdown_compile_workers

        shutdown_compile_workers()
    return found | {"cpu_seconds": round(cpu() - spent, 2)}


def run(way: str, kind: str, blocks: int, width: int, headers: Path) -> dict[str, Any]:
    """Starts in a fresh process; returns its document."""
    with tempfile.TemporaryDirectory(prefix="precast-regions-") as name:
        own = {
            "TORCHINDUCTOR_CACHE_DIR": f"{name}/caches",
            "XDG_CACHE_HOME": str(headers),
            "OMP_WAIT_POLICY": "passive",
        }
        command = [sys.executable, "-m", "benches.regions_in_hand", "--child", way, "--kind", kind, "--folder", name]
        command += ["--blocks", str(blocks), "--width", str(width)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{way} {kind}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind} {way}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def measure(kind: str, ways: list[str], rounds: int, blocks: int, width: int, headers: Path) -> dict[str, Any]:
    """Returns the figures of one kind."""
    seen: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seen[way].append(run(way, kind, blocks, width, headers))
    table: dict[str, Any] = {way: {key: [one[key] for one in rows] for key in rows[0]} for way, rows in seen.items()}
    for first, second in (("whole", "regions"), ("compile", "compile, regions"), ("compile, regions", "regions")):
        if first in seen and second in seen:
            table[f"{first} to {second}"] = {
                key: round(
                    statistics.median(a / b for a, b in zip(table[first][key], table[second][key], strict=True)), 2
                )
                for key in table[first]
            }
    return table


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given.kind, given.blocks, given.width, given.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="precast-headers-") as name:
        run("whole", "inference", 1, 64, Path(name))
        kinds = [given.kind] if given.kind else KINDS
        sizes = (given.rounds, given.blocks, given.width)
        tables = {kind: measure(kind, list(given.ways), *sizes, Path(name)) for kind in kinds}
    asked = {"blocks": given.blocks, "width": given.width, "rounds": given.rounds}
    print(json.dumps({**made(" ".join(["benches.regions_in_hand", *sys.argv[1:]])), **asked, "kinds": tables}))


if __name__ == "__main__":
    main()
