"""Peak host and device memory of 1 and of 8 buckets of one model."""

import time
from typing import Any

from ..cases import CASES, Case, Sizes, variant
from ..contenders import Peer, Precast
from ..run import Run

ONE: list[Sizes] = [{"batch": 1, "seq": 128}]
EIGHT: list[Sizes] = [
    {"batch": batch, "seq": seq}
    for batch, seq in ((1, 16), (1, 32), (1, 64), (1, 128), (4, 32), (2, 128), (8, 64), (8, 128))
]


def variants(run: Run) -> dict[int, Case]:
    """Returns MiniLM with 1 and with 8 buckets, in the run's store."""
    made = {}
    for grid in (ONE, EIGHT):
        name = f"minilm-{len(grid)}"
        folder = run.host.work / name
        file = variant(CASES["minilm"], run.host.device, folder, name, grid)
        run.host.precast("build", "-f", file, limit=run.left)
        made[len(grid)] = Case(name, str(folder), "encode")
    return made


def measure(run: Run) -> None:
    if "minilm" not in run.cases:
        return run.skip("memory", "it is measured on minilm, which is not in this run")
    cases = {}
    with run.skipping("memory"):
        cases = variants(run)
    peaks: dict[str, Any] = {}
    for name in ["precast", *(way for way in run.ways if way in ("eager", "aoti", "reduce-overhead"))]:
        for count, case in cases.items():
            with run.skipping(f"memory {name} {count} buckets"):
                peaks.setdefault(name, {})[count] = peak(run, case, name)
        run.say(f"memory {name}: {peaks.get(name)}")
    run.add("memory", {"case": "minilm", "peak_bytes": peaks})


def peak(run: Run, case: Case, name: str) -> dict[str, float]:
    deadline, buckets = time.time() + min(run.prepare, max(1.0, run.left)), case.measured(run.host.device)
    if name == "precast":
        contender = Precast(run.host, case)
        contender.bench(0.05, buckets)
        return contender.memory
    peer = Peer(run.host, case, name)
    try:
        peer.prepare(buckets)
        peer.ready(buckets, deadline)
        return peer.ask("memory", 30)
    finally:
        peer.end()
