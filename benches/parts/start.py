"""From the start of a process to its first answer, split by phase; page cache warm, and cold as far as it goes."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ..cases import Case, label
from ..contenders import Failed, Ran, frozen, libtorch, once, tail
from ..run import Run, spread

CASES = {"cpu": ("minilm",), "cuda": ("minilm", "blocks")}


def measure(run: Run) -> None:
    for case in run.chosen("start"):
        if case.name in CASES[run.host.device] and run.ready(case):
            starts(run, case)


def starts(run: Run, case: Case) -> None:
    host, sizes = run.host, case.measured(run.host.device)[0]
    inputs = host.work / f"{case.name}-inputs.safetensors"
    command = [sys.executable, "-c", INPUTS, str(case.spec(host.device)), case.module, json.dumps(sizes), str(inputs)]
    log = host.logs / "inputs.log"
    if once(command, host.environment(), log, 120).code != 0:
        return run.skip(f"start {case.name}", tail(log))

    def precast() -> dict[str, Any]:
        model = case.read(host.device).model
        document, ran = host.precast("run", case.module, "--model", model, "--inputs", inputs)
        load, call, parts = document["load_seconds"], document["run_seconds"], document["phase_seconds"]
        total = ran.answered - ran.began
        rest = load + call - sum(parts.values())
        return start_row(ran, total, {"process": total - load - call, **parts, "rest": rest})

    weights = weights_bytes(run, case) if host.device == "cuda" else 0

    def bare() -> dict[str, Any]:
        return call([sys.executable, "-S", "-E", "-c", BARE, libtorch(), str(weights)])

    def call(command: list[str], caches: str = "caches") -> dict[str, Any]:
        log = host.logs / "start.log"
        # As `precast run` has for itself.
        environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **host.python(caches=caches)}
        ran = once(command, environment, log, min(300.0, max(1.0, run.left)))
        if ran.code != 0:
            raise Failed(tail(log))
        document = json.loads(ran.output)
        if "failed" in document:
            raise Failed(document["failed"])
        marks = list(document["marks"].items())
        phases, before = {}, ran.began
        for name, at in marks:
            phases[name], before = at - before, at
        return start_row(ran, before - ran.began, phases)

    def peer(way: str, caches: str = "caches") -> dict[str, Any]:
        command = [sys.executable, "-m", "benches.peer", way, str(case.spec(host.device)), case.module]
        command += ["--device", host.device, *(["--freezing"] if frozen(case, host.device, way) else [])]
        return call([*command, "--once", json.dumps(sizes)], caches)

    def kept(way: str) -> dict[str, Any]:
        folder = host.saved(case) / label(sizes)
        if not any(folder.glob("model.*")):
            raise Failed("nothing was saved: part `latency` of this run does that")
        names = list(case.read(host.device).inputs)
        return call([sys.executable, "-m", "benches.saved", way, str(folder), str(inputs), *names])

    contenders = {"precast": precast, "eager": lambda: peer("eager")}
    if host.device == "cuda":
        contenders["bare minimum"] = bare
    else:
        contenders |= {f"{way}, saved": partial(kept, way) for way in ("aoti", "onnxruntime") if way in run.ways}
    compiled = [way for way in run.ways if way in ("compile", "reduce-overhead")]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for cache in run.page_caches:
        seen = found if cache == run.page_caches[0] else {name: [] for name in contenders}
        for round_ in range(run.rounds + 1 if cache == "warm" else min(3, run.rounds)):
            for name, start in list(contenders.items()):
                if run.left <= 0:
                    continue
                if cache == "cold":
                    evict([host.store, host.binaries, host.saved(case), Path(libtorch()).parent, Path(sys.prefix)])
                try:
                    made = start()
                    if round_ or cache == "cold":  # the first warms the caches
                        seen[name].append(made)
                except Failed as error:
                    run.skip(f"start {case.name} {name}", error)
                    contenders.pop(name)
        if not seen["precast"]:
            return run.skip(f"start {case.name}", "nothing to compare with")
        report(run, case, cache, seen, seen["precast"])
    # Once each: they are long. The compiles of part `latency` fill a cache; else the cold start does.
    filled = {way: folder for way in compiled if (host.work / (folder := f"caches/{case.name}-{way}")).exists()}
    first = {way: f"start-{case.name}-{way}" for way in compiled}
    order = [(way, "warm", folder) for way, folder in filled.items()]
    order += [(way, "cold", folder) for way, folder in first.items()]
    order += [(way, "warm", folder) for way, folder in first.items() if way not in filled]
    for way, cache, folder in order:
        what = f"{way}, {cache} cache"
        if cache == "cold":
            shutil.rmtree(host.work / folder, ignore_errors=True)
        if run.left <= 0:
            run.skip(f"start {case.name} {what}", "no time was left")
            continue
        if cache == "warm" and not (host.work / folder).exists():
            run.skip(f"start {case.name} {what}", "the start that would fill it failed")
            continue
        try:
            report(run, case, "warm", {what: [peer(way, folder)]}, found["precast"])
        except Failed as error:
            run.skip(f"start {case.name} {what}", error)
            if cache == "cold":  # it may have left half of it
                shutil.rmtree(host.work / folder, ignore_errors=True)


def start_row(ran: Ran, seconds: float, phases: dict[str, float]) -> dict[str, Any]:
    return {"seconds": seconds, "phases": phases, "peak_bytes": ran.peak_bytes, "bytes_read": ran.bytes_read}


Starts = list[dict[str, Any]]


def report(run: Run, case: Case, cache: str, found: dict[str, Starts], precast: Starts) -> None:
    ours = [made["seconds"] for made in precast]
    for name, starts in found.items():
        if not starts:
            continue
        seconds = [made["seconds"] for made in starts]
        middle = sorted(starts, key=lambda made: made["seconds"])[len(starts) // 2]
        row = {"case": case.name, "page_cache": cache, "contender": name, "seconds": spread(seconds), **middle}
        row["seconds"] = spread(seconds)
        if name != "precast" and ours:
            pairs = zip(seconds, ours, strict=False)
            row["times_precast"] = spread([theirs / own for theirs, own in pairs])
        run.add("start", row)
        run.say(f"start {case.name} {cache} {name}: {row['seconds']['median']:.2f} s")


def weights_bytes(run: Run, case: Case) -> int:
    """Returns how many bytes of weights the model has."""
    code = (
        "import sys; from pathlib import Path; from benches.cases import Spec; m = Spec(Path(sys.argv[1]), sys.argv[2])"
    )
    code += ".load(); print(sum(t.nbytes for t in [*m.parameters(), *m.buffers()]))"
    command = [sys.executable, "-c", code, str(case.spec(run.host.device)), case.module]
    return int(once(command, run.host.environment(), run.host.logs / "weights.log", 120).output.split()[-1])


def evict(folders: list[Path]) -> None:
    """Asks the kernel to forget the files below some folders; pages that a process maps stay."""
    os.sync()
    for folder in folders:
        for file in folder.rglob("*"):
            if not file.is_file() or file.stat().st_size < 4096:
                continue
            try:
                handle = os.open(file, os.O_RDONLY)
            except OSError:
                continue
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


INPUTS = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from benches.cases import Spec
spec = Spec(Path(sys.argv[1]), sys.argv[2])
tensors = spec.tensors(json.loads(sys.argv[3]), "cpu")
save_file(dict(zip(spec.inputs, tensors, strict=True)), sys.argv[4])
"""

# The least that any process with libtorch on a GPU has to do: load the library, make a context, copy the weights.
BARE = """
import time
marks = {"python": time.time()}
import ctypes, glob, json, os, sys
lib, size = sys.argv[1], int(sys.argv[2])
ctypes.CDLL(os.path.join(lib, "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)
marks["libtorch_cuda"] = time.time()
cudart = ctypes.CDLL("libcudart.so.13")
assert cudart.cudaFree(None) == 0
marks["context"] = time.time()
here, there = ctypes.c_void_p(), ctypes.c_void_p()
chunk = min(size, 64 << 20)
assert cudart.cudaHostAlloc(ctypes.byref(here), ctypes.c_size_t(chunk), 0) == 0
assert cudart.cudaMalloc(ctypes.byref(there), ctypes.c_size_t(size)) == 0
for at in range(0, size, chunk):
    part = min(chunk, size - at)
    assert cudart.cudaMemcpy(ctypes.c_void_p(there.value + at), here, ctypes.c_size_t(part), 1) == 0
marks["weights"] = time.time()
print(json.dumps({"marks": marks}), flush=True)
os._exit(0)
"""
