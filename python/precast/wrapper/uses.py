"""The use of a region's programs: the rung that answered each call, and the share of padding in what was run.

The runtime counts requests by their sizes, and the programs that answered them. Calls before the first one of the
caller, as those of the smoke test, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any

from ..errors import Error

BUCKETS = 4
"""Sizes of a dimension in a proposal, at most."""

Sizes = tuple[tuple[str, int], ...]
Row = tuple[Sizes, Sizes | None, bool]
"""The sizes of a request, the bucket that it ran in, and whether eager answered in place of a slower artifact."""


class Uses:
    """The calls that some modules of a loaded release have answered from now on."""

    def __init__(
        self, stats: Callable[[], Mapping[str, Any]], modules: Collection[str], backward: Collection[str] = ()
    ) -> None:
        """`backward` are the modules of backward calls, which are not counted."""
        self._stats, self._modules = stats, modules
        slower = stats()["slower"]
        self._slower = [(row["module"], row["sizes"]) for row in slower if row["module"] in modules]
        place = "module" if backward else "bucket"
        self.slower = {
            row[place]: round(row["times"] or 1.0, 2) for row in slower if row["module"] in (*modules, *backward)
        }
        """The buckets, or modules of pairs, that eager answers, as it was this many times as fast in the build."""
        self._before = self._rows()
        self._last: Counter[Row] | None = None

    @property
    def by_eager(self) -> bool:
        """Whether eager answers every call, because it was faster for each program."""
        programs = [row for one in self._now()["modules"] if one["module"] in self._modules for row in one["buckets"]]
        return bool(self._slower) and all(row["runner"] == "eager" for row in programs)

    def rows(self) -> Counter[Row]:
        """Returns the number of calls for each kind of request."""
        return self._last if self._last is not None else self._rows() - self._before

    def end(self) -> None:
        """Keeps the counts of a model that is closed next."""
        self._last = self.rows()

    def _now(self) -> Mapping[str, Any]:
        try:
            return self._stats()
        except Error:  # in a forked process
            return {"modules": [], "requests": []}

    def _rows(self) -> Counter[Row]:
        found: Counter[Row] = Counter()
        for row in self._now()["requests"]:
            if row["module"] in self._modules and row["rung"] != "refused":
                sizes, bucket = tuple(row["sizes"].items()), row["bucket"]
                eager = row["rung"] == "eager" and (row["module"], bucket) in self._slower
                found[sizes, tuple(bucket.items()) if bucket is not None else None, eager] += row["count"]
        return found


def padding(rows: Mapping[Row, int]) -> dict[str, Any]:
    """Returns the share of padding in the elements that were run, and for each dimension its sizes, summed over calls.

    A share of 0.75 says that four elements were run for each one that was given.
    """
    dims: dict[str, dict[str, float]] = {}
    given = run = 0
    for (sizes, bucket, _), count in rows.items():
        if bucket:
            for (dim, size), (_, of) in zip(sizes, bucket, strict=True):
                each = dims.setdefault(dim, {"given": 0, "run": 0})
                each["given"] += count * size
                each["run"] += count * of
            given += count * prod(size for _, size in sizes)
            run += count * prod(size for _, size in bucket)
    for each in dims.values():
        each["share"] = round(1 - each["given"] / each["run"], 3)
    return {"share": round(1 - given / run, 3), "dims": dims} if run else {}


def proposal(rows: Mapping[Row, int]) -> dict[str, list[int]]:
    """Returns buckets with the least padding for the sizes of these requests, for each dimension alone."""
    seen: dict[str, Counter[int]] = {}
    for (sizes, _, _), count in rows.items():
        for dim, size in sizes:
            seen.setdefault(dim, Counter())[size] += count
    return {dim: _covering(each) for dim, each in seen.items()}


def _covering(seen: Mapping[int, int]) -> list[int]:
    """Returns at most `BUCKETS` sizes that cover all sizes with the least padding."""
    if len(seen) > 64:
        coarse: Counter[int] = Counter()
        for size, count in seen.items():
            coarse[-(-size // 8) * 8] += count
        seen = coarse
    sizes = sorted(seen)
    # For each number of the smallest sizes: what is run for them, and the buckets.
    best: list[tuple[float, list[int]]] = [(0, []), *([(float("inf"), [])] * len(sizes))]
    for _ in range(BUCKETS):
        best = [best[0], *(_best(best, sizes, seen, end) for end in range(1, len(sizes) + 1))]
    return best[-1][1]


def _best(
    best: list[tuple[float, list[int]]], sizes: list[int], seen: Mapping[int, int], end: int
) -> tuple[float, list[int]]:
    calls, top, found = 0, sizes[end - 1], best[end]
    for start in range(end - 1, -1, -1):
        calls += seen[sizes[start]]
        cost, buckets = best[start]
        found = min(found, (cost + calls * top, [*buckets, top]), key=lambda one: one[0])
    return found
