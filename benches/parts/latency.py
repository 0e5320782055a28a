"""What a call takes, per bucket and contender, in turns."""

import time
from typing import Any

from ..cases import Case, label
from ..contenders import Failed, Peer, Precast
from ..run import Run, main_kind, ratio, spread

Times = dict[str, dict[str, list[dict[str, float]]]]
"""Contender -> bucket -> one measurement a round."""


def measure(run: Run) -> None:
    for case in run.chosen("latency"):
        buckets = case.measured(run.host.device)
        if not run.ready(case):
            run.skip(f"latency {case.name}", "it was not built")
            continue
        peers, facts = prepare(run, case)
        try:
            times = rounds(run, case, peers)
        finally:
            memory = {}
            for peer in peers:
                try:
                    memory[peer.name] = peer.ask("memory", 30) if isinstance(peer, Peer) else peer.memory
                except Failed:
                    memory[peer.name] = None
                peer.end()
        facts["rungs"] = {peer.name: peer.rungs for peer in peers if isinstance(peer, Precast)}
        for sizes in buckets:
            rows = {name: taken[label(sizes)] for name, taken in times.items() if taken.get(label(sizes))}
            if "precast" in rows:
                run.add("latency", row(run, case, label(sizes), rows, facts))
        run.add("process-memory", {"case": case.name, "buckets": len(buckets), "peak_bytes": memory})


def prepare(run: Run, case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Starts all contenders and gets them ready at once; those that can't are skipped, and said so."""
    host, buckets = run.host, case.measured(run.host.device)
    limit = min(run.prepare, max(1.0, run.left))
    run.say(f"latency {case.name}: {', '.join(run.ways)} get ready (at most {limit:.0f} s)")
    deadline, began = time.time() + limit, time.time()
    started = [Peer(host, case, way) for way in run.ways]
    for peer in started:
        for sizes in buckets:
            peer.send("prepare", sizes=sizes)
    peers: list[Any] = []
    wanted: dict[str, list[float]] = {}
    facts: dict[str, Any] = {"work": {}, "disagree": {}}
    for peer in started:
        try:
            peer.receive(deadline)
            for sizes in buckets:
                answer = peer.receive(deadline)
                sample = answer["sample"]
                want = wanted.setdefault(label(sizes), sample)
                if error := difference(sample, want):
                    facts["disagree"][f"{peer.name} {label(sizes)}"] = error
            if peer.name == "eager":
                for sizes in buckets:
                    facts["work"][label(sizes)] = peer.ask("work", 120, sizes=sizes)
            peers.append(peer)
        except Failed as error:
            peer.end()
            run.skip(f"latency {case.name} {peer.name}", error)
    peers.append(Precast(host, case, "always" if host.device == "cuda" else "as-built"))
    if host.device == "cuda":
        peers.append(Precast(host, case, "never"))
    run.say(f"latency {case.name}: {len(peers)} contenders ready after {time.time() - began:.0f} s")
    return peers, facts


def difference(sample: list[float], want: list[float]) -> float | None:
    """Returns by how much answers differ, relative to the mean of eager's, where that is too much to be rounding."""
    if not sample or not want:
        return None
    scale = abs(want[-1]) or 1.0
    error = max(abs(a - b) for a, b in zip(sample, want, strict=True)) / scale
    return error if error > 0.1 else None


def rounds(run: Run, case: Case, peers: list[Any]) -> Times:
    buckets = case.measured(run.host.device)
    times: Times = {peer.name: {} for peer in peers}
    for _ in range(run.rounds):
        for peer in list(peers):
            try:
                taken = peer.time(buckets, run.seconds)
            except Failed as error:
                run.skip(f"latency {case.name} {peer.name}", error)
                times.pop(peer.name)
                peer.end()
                peers.remove(peer)
                continue
            for bucket, measured in taken.items():
                times[peer.name].setdefault(bucket, []).append(measured)
    return times


def row(
    run: Run, case: Case, bucket: str, rows: dict[str, list[dict[str, float]]], facts: dict[str, Any]
) -> dict[str, Any]:
    def column(name: str, kind: str) -> list[float]:
        return [measured[kind] for measured in rows[name] if kind in measured]

    kinds = ("synchronous", "pipelined")
    contenders = {
        name: {kind: spread(column(name, kind)) for kind in (*kinds, "p99", "replay") if column(name, kind)}
        for name in rows
    }
    ratios = {
        name: {kind: ratio(column(name, kind), column("precast", kind)) for kind in kinds}
        for name in rows
        if name != "precast" and len(rows[name]) == len(rows["precast"])
    }
    made: dict[str, Any] = {"case": case.name, "bucket": bucket, "seconds": contenders, "times_precast": ratios}
    made["rung"] = facts["rungs"]["precast"].get(bucket)
    made["disagree"] = {k.split(" ")[0]: v for k, v in facts["disagree"].items() if k.endswith(" " + bucket)}
    made["work"] = facts["work"].get(bucket)
    kind = main_kind(run.host.device)
    best = min(ratios, key=lambda name: ratios[name][kind]["median"], default=None)
    if best:
        run.say(f"latency {case.name} {bucket}: best peer {best} takes {ratios[best][kind]['median']:.2f} x precast")
    return made
