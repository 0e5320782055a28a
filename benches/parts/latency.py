"""The latency of a call, per bucket and contender, in turns."""

import contextlib
import time
from functools import partial
from typing import Any

from ..cases import Case, label
from ..contenders import Failed, Peer, Precast
from ..run import Run, main_kind, ratio, spread

MEASURING = ("max-autotune",)
"""Ways that choose between kernels by measuring them: what else runs would mislead them."""

KINDS = ("synchronous", "pipelined")
Made = dict[str, tuple[list[Any], dict[str, Any]]]
"""Case -> its ready contenders, and their properties."""


def measure(run: Run) -> None:
    cases = list(run.built("latency"))
    for group in [cases] if run.options.together else [[case] for case in cases]:
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
    takes = {peer.name: partial(peer.time, buckets, run.options.seconds) for peer in peers}
    taken = run.in_turns(f"latency {case.name}", takes)
    memory: dict[str, Any] = dict.fromkeys(peer.name for peer in peers)
    for peer in peers:
        with contextlib.suppress(Failed, ValueError):  # one that failed has no pipe
            memory[peer.name] = peer.ask("memory", 30) if isinstance(peer, Peer) else peer.memory
        peer.end()
        if peer.name == "precast":
            facts["rungs"] = peer.rungs
    for bucket in map(label, buckets):
        rows = {name: [one[bucket] for one in rounds] for name, rounds in taken.items()}
        if "precast" in rows:
            run.add("latency", row(run, case, bucket, rows, facts))
    run.add("process-memory", {"case": case.name, "buckets": len(buckets), "peak_bytes": memory})


def prepare(run: Run, cases: list[Case], made: Made) -> None:
    """Prepares all contenders of some cases side by side, then the autotuning ones, one at a time.

    A contender that fails is skipped, and the run says why."""
    host, ways, began = run.host, run.options.ways, time.time()
    together = [(case, way) for case in cases for way in ways if way not in MEASURING]
    for group in [together, *([(case, way)] for way in ways if way in MEASURING for case in cases)]:
        limit = patience(run, cases)
        run.say(
            f"latency: {', '.join(f'{case.name} {way}' for case, way in group)}: at most {limit:.0f} s to get ready"
        )
        deadline = time.time() + limit
        started = [(case, Peer(host, case, way)) for case, way in group]
        for case, peer in started:
            peer.prepare(case.measured(host.device))
        for case, peer in started:
            finish(run, case, peer, deadline, *made[case.name])
    for case in cases:
        peers, _ = made[case.name]
        peers += [Precast(host, case, graphs) for graphs in (["", "never"] if host.device == "cuda" else [""])]
        run.say(f"latency {case.name}: {len(peers)} contenders ready after {time.time() - began:.0f} s")


def patience(run: Run, cases: list[Case]) -> float:
    """Returns for how many seconds contenders may still get ready, so that time for the measurements is left."""
    contenders = len(run.options.ways) + 2
    buckets = sum(len(case.measured(run.host.device)) for case in cases)
    # Pipelined and synchronous, and a second of overhead.
    rounds = run.options.rounds * contenders * buckets * (2 * run.options.seconds + 1)
    return max(1.0, min(run.options.prepare, run.left - rounds))


def finish(run: Run, case: Case, peer: Peer, deadline: float, peers: list[Any], facts: dict[str, Any]) -> None:
    """Waits for a contender, compares its answers with those of the first that is ready, which is eager where there is
    one, and adds it to those of its case."""
    buckets = case.measured(run.host.device)
    try:
        for bucket, sample in peer.ready(buckets, deadline).items():
            if error := difference(sample, facts["wanted"].setdefault(bucket, sample)):
                facts["disagree"].setdefault(bucket, {})[peer.name] = error
        if peer.name == "eager":
            for sizes in buckets:
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


def row(run: Run, case: Case, bucket: str, taken: dict[str, list[dict[str, float]]], facts: dict[str, Any]) -> Any:
    """Returns what is known of a bucket: the seconds of its contenders, and the ratios to ours."""
    found = {
        name: {kind: [one[kind] for one in rounds] for kind in (*KINDS, "p99", "replay") if kind in rounds[0]}
        for name, rounds in taken.items()
    }
    ours, by = found["precast"], main_kind(run.host.device)
    peers = {name: theirs for name, theirs in found.items() if name != "precast"}
    ratios = {name: {kind: ratio(theirs[kind], ours[kind]) for kind in KINDS} for name, theirs in peers.items()}
    if ratios:
        best = min(ratios, key=lambda name: ratios[name][by]["median"])
        run.say(f"latency {case.name} {bucket}: best peer {best} takes {ratios[best][by]['median']:.2f} x precast")
    seconds = {name: {kind: spread(each) for kind, each in kinds.items()} for name, kinds in found.items()}
    made = {"case": case.name, "bucket": bucket, "seconds": seconds, "times_precast": ratios}
    known = {"rung": facts["rungs"].get(bucket), "disagree": facts["disagree"].get(bucket, {})}
    return {**made, **known, "work": facts["work"].get(bucket)}
