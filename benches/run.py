"""One run of the harness: its options, the result so far, and the skipped parts."""

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import CASES, Case
from .contenders import Failed, Host, ways
from .machine import commit, document


@dataclass
class Run:
    host: Host
    options: argparse.Namespace
    """Those of `python -m benches run`."""
    result: dict[str, Any]
    began: float = field(default_factory=time.time)

    @property
    def left(self) -> float:
        return self.began + 60 * self.options.minutes - time.time()

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

    def in_turns(self, what: str, takes: dict[str, Callable[[], Any]], rounds: int = 0) -> dict[str, list[Any]]:
        """Returns what was taken of each contender in each round. One that fails is skipped, and left out."""
        taken: dict[str, list[Any]] = {name: [] for name in takes}
        for _ in range(rounds or self.options.rounds):
            for name in list(taken):
                with self.skipping(f"{what} {name}"):
                    taken[name].append(takes[name]())
                    continue
                del taken[name]
        return taken

    def chosen(self, part: str) -> Iterable[Case]:
        """Returns the cases of this run that there is time for."""
        for name in self.options.cases:
            case, device = CASES[name], self.host.device
            if not case.spec(device).exists():
                self.skip(f"{part} {name}", f"no {case.spec(device).name} in {case.folder}")
            elif self.left <= 0:
                self.skip(f"{part} {name}", "no time was left")
            else:
                yield case

    def built(self, part: str) -> Iterable[Case]:
        """Returns those whose programs are in the store."""
        for case in self.chosen(part):
            programs: list[Any] = []
            with self.skipping(f"{part} {case.name}"):
                programs = self.host.precast("ls")[0].get("programs", [])
            if any(program.get("model") == case.read(self.host.device).model for program in programs):
                yield case
            else:
                self.skip(f"{part} {case.name}", "it was not built")

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.result.setdefault(part, []).append(row)
        self.write()

    def write(self) -> None:
        self.result["seconds"] = round(time.time() - self.began, 1)
        partial = self.options.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.replace(self.options.out)


def start(args: argparse.Namespace, work: Path) -> Run:
    """Returns a run with the machine described, and nothing measured."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    made = document(portable_command(sys.argv[1:]), args.binaries)
    about = {"commit": commit(), "device": args.device, "intra_op_threads": args.threads, "rounds": args.rounds}
    args.ways = args.ways or ways(args.device)
    host = Host(args.device, args.threads, work, args.binaries.resolve())
    return Run(host, args, {**made, **about, "part_seconds": {}, "load_after": {}, "skipped": []})


def portable_command(arguments: list[str]) -> str:
    """Returns the command without the paths of one machine."""
    text = re.sub(r" --(work|binaries)[ =]\S+", "", " ".join(["python -m benches", *arguments]))
    waits = os.environ.get("OMP_WAIT_POLICY")
    return (f"OMP_WAIT_POLICY={waits} " if waits else "") + re.sub(r"(--out[ =])\S*/", r"\1", text)


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


IDENTITY = ("case", "bucket", "callers", "contender", "page_cache", "what")
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
