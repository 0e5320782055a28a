"""Answers a second of 1 to 16 callers, each operator on one thread: how a service that has many requests runs.

On the CPU there are no more callers than cores: more callers share the same cores.
"""

import time
from functools import partial

from ..cases import Case
from ..contenders import Peer, Precast
from ..run import Run, ratio, spread

CALLERS = (1, 2, 4, 8, 16)
CASES = ("mlp", "minilm")


def measure(run: Run) -> None:
    for case in run.chosen("threads"):
        if case.name in CASES:
            started = [Peer(run.host, case, way, threads=1) for way in run.options.ways if way != "max-autotune"]
            try:
                compare(run, case, started)
            finally:
                for peer in started:
                    peer.end()


def compare(run: Run, case: Case, started: list[Peer]) -> None:
    sizes, cuda = case.measured(run.host.device)[0], run.host.device == "cuda"
    deadline = time.time() + min(run.options.prepare, max(1.0, run.left))
    peers: list[Peer | Precast] = [Precast(run.host, case, threads=1)]
    for peer in started:
        peer.prepare([sizes])
    for peer in started:
        with run.skipping(f"threads {case.name} {peer.name}"):
            peer.ready([sizes], deadline)
            peers.append(peer)
    for callers in CALLERS:
        if not cuda and callers > run.result["machine"]["cores"]:
            break
        takes = {peer.name: partial(peer.throughput, sizes, callers, run.options.seconds) for peer in peers}
        rates = run.in_turns(f"threads {case.name} {callers} callers", takes)
        if "precast" not in rates:
            break
        peers = [peer for peer in peers if peer.name in rates]
        row = {"case": case.name, "sizes": sizes, "callers": callers}
        row["answers_per_second"] = {name: spread(found) for name, found in rates.items()}
        ours = rates.pop("precast")
        run.add("threads", {**row, "precast_times": {name: ratio(ours, found) for name, found in rates.items()}})
