"""The latency of a call, per bucket and contender, in turns."""

import contextlib
import time
from typing import Any

from ..cases import Case, label
from ..contenders import Failed, Peer, Precast
from ..run import Run, main_kind, ratio, spread

MEASURING = ("max-autotune",)
"""Ways that choose between kernels by measuring them: what else runs would mislead them."""

Times = dict[str, dict[str, list[dict[str, float]]]]
"""Contender -> bucket -> one measurement a round."""


def measure(run: Run) -> None:
    cases = []
    for case in run.chosen("latency"):
        if run.ready(case):
            cases.append(case)
        else:
            run.skip(f"latency {case.name}", "it was not built")
    for group in [cases] if run.together else [[case] for case in cases]:
        made: Made = {case.name: ([], {"work": {}, "disagree": {}, "wanted": {}}) for case in group}
        try:
            prepare(run, group, made)
            for case in group:
                compare(run, case, *made[case.name])
        finally:
            for peers, _ in made.values():
                for peer in peers:
                    peer.end()


def compare(run: Run, case: Case, peers: list[Any], facts: dict[str, Any]) -> None:
    """Measures one case's contenders in turns, and ends them."""
    buckets = case.measured(run.host.device)
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


Made = dict[str, tuple[list[Any], dict[str, Any]]]
"""Case -> its ready contenders, and their properties."""


def prepare(run: Run, cases: list[Case], made: Made) -> None:
    """Prepares all contenders of some cases side by side, then the autotuning ones, one at a time.

    A contender that fails is skipped, and the run says why."""
    host, began = run.host, time.time()
    limit = patience(run, cases)
    run.say(f"latency: {', '.join(run.ways)} get ready (at most {limit:.0f} s): {', '.join(c.name for c in cases)}")
    together = [way for way in run.ways if way not in MEASURING]
    started = [(case, Peer(host, case, way)) for case in cases for way in together]
    for case, peer in started:
        ask(run, case, peer)
    for case, peer in started:
        finish(run, case, peer, began + limit, *made[case.name])
    for way in run.ways:
        for case in cases:
            if way in MEASURING:
                until = time.time() + patience(run, cases)
                peer = Peer(host, case, way)
                ask(run, case, peer)
                finish(run, case, peer, until, *made[case.name])
    for case in cases:
        peers, _ = made[case.name]
        peers.append(Precast(host, case, "always" if host.device == "cuda" else "as-built"))
        if host.device == "cuda":
            peers.append(Precast(host, case, "never"))
        run.say(f"latency {case.name}: {len(peers)} contenders ready after {time.time() - began:.0f} s")


def patience(run: Run, cases: list[Case]) -> float:
    """Returns for how many seconds contenders may still get ready, so that time for the measurements is left."""
    contenders = len(run.ways) + 2
    buckets = sum(len(case.measured(run.host.device)) for case in cases)
    # Pipelined and synchronous, and a second of overhead.
    rounds = run.rounds * contenders * buckets * (2 * run.seconds + 1)
    return max(1.0, min(run.prepare, run.left - rounds))


def ask(run: Run, case: Case, peer: Peer) -> None:
    """Lets a contender begin to get ready. A contender that ended already reports it when it is waited for."""
    with contextlib.suppress(Failed):
        for sizes in case.measured(run.host.device):
            peer.send("prepare", sizes=sizes)


def finish(run: Run, case: Case, peer: Peer, deadline: float, peers: list[Any], facts: dict[str, Any]) -> None:
    """Waits for a contender, compares its answers with those of the first that is ready, which is eager where there is
    one, and adds it to those of its case."""
    try:
        peer.receive(deadline)
        for sizes in case.measured(run.host.device):
            sample = peer.receive(deadline)["sample"]
            want = facts["wanted"].setdefault(label(sizes), sample)
            if error := difference(sample, want):
                facts["disagree"][f"{peer.name} {label(sizes)}"] = error
        if peer.name == "eager":
            for sizes in case.measured(run.host.device):
                facts["work"][label(sizes)] = peer.ask("work", 120, sizes=sizes)
        peers.append(peer)
    except Failed as error:
        peer.end()
        run.skip(f"latency {case.name} {peer.name}", error)


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
