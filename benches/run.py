"""One run of the harness: its options, the result so far, and the skipped parts."""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import CASES, Case
from .contenders import Failed, Host


@dataclass
class Run:
    host: Host
    out: Path
    result: dict[str, Any]
    cases: list[str]
    ways: list[str]
    rounds: int
    seconds: float
    """How long one contender is measured at one bucket in one round."""
    prepare: float
    """How long the contenders of a case may take to get ready."""
    tune: bool
    """Whether the cases are built with `--tune`; a store of an earlier run may have tuned programs."""
    kernels: bool
    """Whether the cases are built with the graph passes of kernels/."""
    together: bool
    """Whether the contenders of all cases get ready at once."""
    page_caches: list[str]
    """Whether starts find their files in the page cache: `warm`, `cold` or both."""
    deadline: float
    began: float = field(default_factory=time.time)

    @property
    def left(self) -> float:
        return self.deadline - time.time()

    def say(self, what: str) -> None:
        print(f"[{time.time() - self.began:6.1f} s] {what}", file=sys.stderr, flush=True)

    def skip(self, what: str, why: object) -> None:
        self.say(f"SKIPPED {what}: {why}")
        self.result["skipped"].append({"what": what, "why": str(why)})
        self.write()

    @contextlib.contextmanager
    def skipping(self, what: str) -> Iterator[None]:
        """Lists what it could not measure under `skipped`."""
        try:
            yield
        except Failed as error:
            self.skip(what, error)

    def in_turns(self, what: str, contenders: list[Any], take: Callable[[Any], Any]) -> dict[str, list[Any]]:
        """Returns what was taken of each contender in each round. One that fails is skipped, and leaves the list."""
        taken: dict[str, list[Any]] = {each.name: [] for each in contenders}
        for _ in range(self.rounds):
            for each in list(contenders):
                try:
                    taken[each.name].append(take(each))
                except Failed as error:
                    self.skip(f"{what} {each.name}", error)
                    del taken[each.name]
                    contenders.remove(each)
                    each.end()
        return taken

    def chosen(self, part: str) -> Iterable[Case]:
        """Returns the cases of this run that there is time for."""
        for name in self.cases:
            case, device = CASES[name], self.host.device
            if not case.spec(device).exists():
                self.skip(f"{part} {name}", f"no {case.spec(device).name} in {case.folder}")
            elif self.left <= 0:
                self.skip(f"{part} {name}", "no time was left")
            else:
                yield case

    def ready(self, case: Case) -> bool:
        """Returns whether the case's programs are in the store."""
        try:
            document, _ = self.host.precast("ls")
        except Failed:
            return False
        model = case.read(self.host.device).model
        return any(program.get("model") == model for program in document.get("programs", []))

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.result.setdefault(part, []).append(row)
        self.write()

    def write(self) -> None:
        self.result["seconds"] = round(time.time() - self.began, 1)
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.replace(self.out)


def main_kind(device: str) -> str:
    """Returns the figure of a call that counts on a device. On the CPU nothing is queued, so that a pipelined call is
    the mean of single ones, and their median is disturbed least by what else runs."""
    return "pipelined" if device == "cuda" else "synchronous"


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median of some rounds and their range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "rounds": len(values)}


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Returns theirs over ours, round by round."""
    return spread([a / b for a, b in zip(theirs, ours, strict=True)])


IDENTITY = ("case", "bucket", "requests", "callers", "contender", "page_cache", "what")
"""The fields that identify a row."""


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one result with the rows of several, which must be of one machine and one commit. Of rows about the same
    the last one counts, so that disturbed rows can be measured again."""
    first = results[0]
    for other in results[1:]:
        for key in ("schema", "commit", "device"):
            if other[key] != first[key]:
                raise SystemExit(f"error: these are no results of one run: {key} is {first[key]} and {other[key]}")
    whole = {**first, "command": [result["command"] for result in results]}
    for other in results[1:]:
        for key, value in other.items():
            if isinstance(value, list) and key in whole and key != "command":
                rows = {tuple(row.get(field) for field in IDENTITY): row for row in [*whole[key], *value]}
                whole[key] = list(rows.values())
            else:
                whole.setdefault(key, value)
    return whole
