"""From the start of a process to its first answer, split by phase; page cache warm, and cold as far as it goes."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..cases import Case, label
from ..contenders import Failed, Ran, libtorch
from ..run import Run, spread

CASES = {"cpu": ("minilm",), "cuda": ("minilm", "blocks")}


Start = dict[str, Any]


def measure(run: Run) -> None:
    for case in run.built("start"):
        if case.name in CASES[run.host.device]:
            with run.skipping(f"start {case.name}"):
                starts(run, case)


def starts(run: Run, case: Case) -> None:
    host, ways, sizes = run.host, run.options.ways, case.measured(run.host.device)[0]
    inputs = host.work / f"{case.name}-inputs.safetensors"
    command = [sys.executable, "-c", INPUTS, case.spec(host.device), case.module, json.dumps(sizes), inputs]
    host.run("inputs", command, 120)

    def precast() -> Start:
        model = case.read(host.device).model
        document, ran = host.precast("run", case.module, "--model", model, "--inputs", inputs)
        load, call, parts = document["load_seconds"], document["run_seconds"], document["phase_seconds"]
        total = ran.answered - ran.began
        return start(ran, total, {"process": total - load - call, **parts, "rest": load + call - sum(parts.values())})

    def call(*command: Any, caches: str = "caches") -> Start:
        if run.left <= 0:
            raise Failed("no time was left")
        # As `precast run` has for itself.
        environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **host.python(caches=caches)}
        document, ran = host.run("start", [sys.executable, *command], min(300.0, run.left), environment)
        if "failed" in document:
            raise Failed(document["failed"])
        phases, before = {}, ran.began
        for name, at in document["marks"].items():
            phases[name], before = at - before, at
        return start(ran, before - ran.began, phases)

    def peer(way: str, caches: str = "caches") -> Start:
        return call("-m", "benches.peer", *case.peer(way, host.device), "--once", json.dumps(sizes), caches=caches)

    def saved(way: str) -> Start:
        folder = host.saved(case) / label(sizes)
        if not any(folder.glob("model.*")):
            raise Failed("nothing was saved: part `latency` of this run does that")
        return call("-m", "benches.saved", way, folder, inputs, *case.read(host.device).inputs)

    contenders = {"precast": precast, "eager": partial(peer, "eager")}
    if host.device == "cpu":
        contenders |= {f"{way}, saved": partial(saved, way) for way in ("aoti", "onnxruntime") if way in ways}

    def cold(begin: Callable[[], Start]) -> Start:
        evict([host.store, host.binaries, host.saved(case), Path(libtorch()).parent, Path(sys.prefix)])
        return begin()

    ours: list[Start] = []
    for cache in run.options.page_cache:
        if cache == "cold":
            takes = {name: partial(cold, begin) for name, begin in contenders.items()}
            found = run.in_turns(f"start {case.name}", takes, min(3, run.options.rounds))
        else:
            found = run.in_turns(f"start {case.name}", contenders, run.options.rounds + 1)
            found = {name: starts[1:] for name, starts in found.items()}  # the first warms the caches
        if "precast" not in found:
            return run.skip(f"start {case.name}", "nothing to compare with")
        ours = ours or found["precast"]
        for name, starts in found.items():
            report(run, case, cache, name, starts, found["precast"])
    # Once each: they are long. A failed one leaves a cache that is neither cold nor warm.
    for way in (way for way in ways if way in ("compile", "reduce-overhead")):
        folder = f"start-{case.name}-{way}"
        shutil.rmtree(host.work / folder, ignore_errors=True)
        with run.skipping(f"start {case.name} {way}"):
            for state in ("cold", "warm"):
                report(run, case, "warm", f"{way}, {state} cache", [peer(way, folder)], ours)


def start(ran: Ran, seconds: float, phases: dict[str, float]) -> Start:
    return {"seconds": seconds, "phases": phases, "peak_bytes": ran.peak_bytes, "bytes_read": ran.bytes_read}


def report(run: Run, case: Case, cache: str, name: str, starts: list[Start], precast: list[Start]) -> None:
    seconds = [made["seconds"] for made in starts]
    middle = sorted(starts, key=lambda made: made["seconds"])[len(starts) // 2]
    row = {"case": case.name, "page_cache": cache, "contender": name, **middle, "seconds": spread(seconds)}
    if name != "precast":
        pairs = zip(seconds, (made["seconds"] for made in precast), strict=False)
        row["times_precast"] = spread([theirs / own for theirs, own in pairs])
    run.add("start", row)
    run.say(f"start {case.name} {cache} {name}: {row['seconds']['median']:.2f} s")


def evict(folders: list[Path]) -> None:
    """Asks the kernel to forget the files below some folders; pages that a process maps stay."""
    os.sync()
    for folder in folders:
        for file in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if file.is_file() and file.stat().st_size >= 4096:
                    with file.open("rb") as opened:
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


INPUTS = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from benches.cases import Spec
spec = Spec(Path(sys.argv[1]), sys.argv[2])
tensors = spec.tensors(json.loads(sys.argv[3]), "cpu")
save_file(dict(zip(spec.inputs, tensors, strict=True)), sys.argv[4])
"""
