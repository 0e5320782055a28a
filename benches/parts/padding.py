"""The waste of padding on real lengths, with the smallest bucket and with the measured cheapest one.

The requests are the recorded lengths of `benches/lengths.json`, one at a time and in groups that arrive together. The
cost of a bucket is measured by `precast bench` in this run; the work of a request is its bucket's cost.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from ..cases import Case, Sizes, label
from ..contenders import Precast
from ..run import Run, spread
from .memory import variants

LENGTHS = Path(__file__).resolve().parent.parent / "lengths.json"
LARGEST = 8


def requests(lengths: list[int], grouped: bool) -> Iterator[tuple[Sizes, int]]:
    """Returns the sizes of each request, and its tokens. Groups are of 1 to 8, in turn."""
    if not grouped:
        for length in lengths:
            yield {"batch": 1, "seq": length}, length
        return
    at, size = 0, 0
    while at < len(lengths):
        size = size % LARGEST + 1
        group = lengths[at : at + size]
        at += size
        yield {"batch": len(group), "seq": max(group)}, sum(group)


def measure(run: Run) -> None:
    if "minilm" not in run.cases:
        return run.skip("padding", "it is measured on minilm, which is not in this run")
    with run.skipping("padding"):
        compare(run, variants(run)[8])


def compare(run: Run, case: Case) -> None:
    buckets = case.measured(run.host.device)
    contender = Precast(run.host, case)
    rounds = [contender.bench(run.seconds, buckets) for _ in range(run.rounds)]
    spreads = {name: spread([rows[name]["median"] for rows in rounds]) for name in rounds[0]}
    cost = {name: found["median"] for name, found in spreads.items()}
    record = json.loads(LENGTHS.read_text())
    choices: dict[str, Callable[[Sizes], float]] = {
        "one bucket": lambda sizes: -volume(sizes),
        "smallest": volume,
        "cheapest": lambda sizes: cost[label(sizes)],
    }
    for grouped in (False, True):
        found = {}
        for name, key in choices.items():
            tokens = computed = 0
            seconds = 0.0
            for sizes, real in requests(record["lengths"], grouped):
                fits = [bucket for bucket in buckets if all(bucket[dim] >= size for dim, size in sizes.items())]
                bucket = min(fits, key=key)
                tokens, computed, seconds = tokens + real, computed + volume(bucket), seconds + cost[label(bucket)]
            found[name] = {"padding": 1 - tokens / computed, "seconds": seconds}
        best = found["cheapest"]["seconds"]
        row = {"case": "minilm", "requests": "groups of 1 to 8" if grouped else "one at a time"}
        row["lengths"] = {"from": record["from"], "count": len(record["lengths"])}
        times = {name: made["seconds"] / best for name, made in found.items()}
        run.add("padding", {**row, "bucket_seconds": spreads, "choices": found, "times_cheapest": times})
        run.say(f"padding: { ({name: round(made['padding'], 3) for name, made in found.items()}) }")


def volume(sizes: Sizes) -> int:
    return sizes["batch"] * sizes["seq"]
