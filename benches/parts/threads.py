"""Answers a second of 1 to 16 callers, each operator on one thread: how a service that has many requests runs.

On the CPU there are no more callers than cores: more callers share the same cores.
"""

import time

from ..contenders import Failed, Peer, Precast
from ..run import Run, ratio, spread

CALLERS = (1, 2, 4, 8, 16)
CASES = ("mlp", "minilm")


def measure(run: Run) -> None:
    for case in run.chosen("threads"):
        if case.name not in CASES:
            continue
        sizes = case.measured(run.host.device)[0]
        deadline = time.time() + min(run.prepare, max(1.0, run.left))
        ways = [way for way in run.ways if way != "max-autotune"]
        started = [Peer(run.host, case, way, threads=1) for way in ways]
        for peer in started:
            peer.send("prepare", sizes=sizes)
        peers: list[Peer | Precast] = []
        for peer in started:
            try:
                peer.receive(deadline)
                peer.receive(deadline)
                peers.append(peer)
            except Failed as error:
                peer.end()
                run.skip(f"threads {case.name} {peer.name}", error)
        peers.append(Precast(run.host, case, "always" if run.host.device == "cuda" else "as-built", threads=1))
        try:
            cores = run.result["machine"]["cores"]
            for callers in CALLERS:
                if run.host.device == "cpu" and callers > cores:
                    break
                rates: dict[str, list[float]] = {}
                for _ in range(run.rounds):
                    for peer in list(peers):
                        try:
                            rate = peer.throughput(sizes, callers, run.seconds)
                            rates.setdefault(peer.name, []).append(rate)
                        except Failed as error:
                            run.skip(f"threads {case.name} {peer.name} {callers} callers", error)
                            peers.remove(peer)
                            peer.end()
                            rates.pop(peer.name, None)
                if "precast" not in rates:
                    break
                ours = rates["precast"]
                run.add(
                    "threads",
                    {
                        "case": case.name,
                        "sizes": sizes,
                        "callers": callers,
                        "answers_per_second": {name: spread(found) for name, found in rates.items()},
                        "precast_times": {n: ratio(ours, found) for n, found in rates.items() if n != "precast"},
                    },
                )
        finally:
            for peer in peers:
                peer.end()
