"""The start and the overhead of `maybe_compile` beside other ways to run MiniLM from Python.

    .venv-python/bin/python -m benches.startup | python -m benches.results python-cpu.json startup

Each way is prepared once, and then started in fresh processes, in turns, round after round: a process imports torch and
makes the model, and then answers one batch. The time from the model to the first answer is the start; the time of the
whole process is beside it. `precast` is a second process: its release is in the store, it captures and builds nothing,
and it compares the artifact with eager first (`precast, no smoke test`: without). `compile, warm` has the caches of a
process before. `compile, cold` has none, and is started once. A ratio is taken in each round, and its median and range
are kept.

The overhead is the time of a call of many small layers, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
ROWS, TOKENS = 8, 32
WAYS = (
    "eager",
    "precast",
    "precast, no smoke test",
    "compile, warm",
    "compile, cold",
    "aoti_load_package",
    "onnxruntime",
)
OVERHEAD = ("eager", "precast", "compile", "aoti_load_package")


def minilm() -> tuple[Any, dict[str, Any]]:
    """Returns the encoder and a batch."""
    import torch

    sys.path.insert(0, str(ROOT / "examples" / "minilm"))
    import model

    torch.manual_seed(0)
    ids = torch.randint(0, 30000, (ROWS, TOKENS))
    return model.load(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chain() -> tuple[Any, dict[str, Any]]:
    """Returns layers whose work is next to nothing, and a batch."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(24)]
    return torch.nn.Sequential(*layers).eval(), {"input": torch.randn(2, 8)}


def started(way: str, folder: Path, net: Any, batch: dict[str, Any]) -> Callable[[], Any]:
    """Returns the call of a way, ready for its first answer."""
    import torch

    values = tuple(batch.values())
    kind = way.partition(",")[0]
    if kind == "precast":
        from precast.config import CompileConfig
        from precast.wrapper.module import maybe_compile

        config = CompileConfig(
            name=type(net).__name__.lower(),
            store=folder / "store",
            healthcheck="no smoke test" not in way,
            fail_policy="raise",
        )
        module = maybe_compile(net, config, None, batch)
        return lambda: module(**batch)
    if kind == "compile":
        compiled = torch.compile(net, dynamic=False)
        return lambda: compiled(**batch)
    if kind == "aoti_load_package":
        package = folder / f"{type(net).__name__}.pt2"
        if not package.exists():
            program = torch.export.export(net, (), batch)
            torch._inductor.aoti_compile_and_package(program, package_path=str(package))
        loaded = torch._inductor.aoti_load_package(str(package))
        return lambda: loaded(**batch)
    if kind == "onnxruntime":
        import onnxruntime

        file = folder / f"{type(net).__name__}.onnx"
        if not file.exists():
            torch.onnx.export(net, values, file, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        given = {each.name: value.numpy() for each, value in zip(session.get_inputs(), values, strict=True)}
        return lambda: torch.from_numpy(session.run(None, given)[0])
    return lambda: net(**batch)


def child(way: str, folder: Path) -> dict[str, Any]:
    """Starts a way and answers one batch; returns the seconds of each part."""
    import torch

    with torch.no_grad():
        net, batch = minilm()
        ready = time.perf_counter()
        answer = started(way, folder, net, batch)()
        done = time.perf_counter()
        error = float((answer - net(**batch)).abs().max())
    return {"imports_and_model": ready - BEGAN, "start": done - ready, "process": done - BEGAN, "error": error}


def overhead(folder: Path) -> dict[str, Any]:
    """Returns the microseconds of a call of each way, measured in turns."""
    import torch

    torch.set_num_threads(1)
    net, batch = chain()
    taken: dict[str, list[float]] = {way: [] for way in OVERHEAD}
    with torch.inference_mode():
        calls = {way: started(way, folder, net, batch) for way in OVERHEAD}
        for call in calls.values():
            for _ in range(50):
                call()
        for _ in range(40):
            for way, call in calls.items():
                began = time.perf_counter()
                for _ in range(50):
                    call()
                taken[way].append((time.perf_counter() - began) / 50)
    low = {way: sorted(seconds)[len(seconds) // 10] for way, seconds in taken.items()}
    found = {way: round(seconds * 1e6, 1) for way, seconds in low.items()}
    submodules = len(list(net.modules()))
    return {"submodules": submodules, "microseconds": found, "ratios": ratios(found)}


def ratios(found: dict[str, float]) -> dict[str, float]:
    return {way: round(value / found["precast"], 2) for way, value in found.items() if way != "precast"}


def run(arguments: list[str], folder: Path, caches: Path) -> dict[str, Any]:
    """Runs this file in a fresh process; returns its document."""
    from .contenders import has_bytecode

    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches), "HF_HUB_OFFLINE": "1"}
    if not has_bytecode():
        # From its second start on a way finds the bytecode of its imports, as in a usual installation.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    command = [sys.executable, "-m", "benches.startup", *arguments, "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """Returns the starts of all ways."""
    fresh = not any(folder.iterdir())
    seen: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    warm = folder / "warm"
    first: dict[str, float] = {}
    for at in range(rounds + 1):
        for way in WAYS:
            if way == "compile, cold" and at != 1:
                continue
            cold = folder / "cold"
            shutil.rmtree(cold, ignore_errors=True)
            found = run(["--child", way], folder, cold if way == "compile, cold" else warm)
            print(f"{at} {way}: {json.dumps(found)}", file=sys.stderr, flush=True)
            if at == 0:
                first[way] = round(found["start"], 2)
            else:
                seen[way].append(found)
    table = {}
    for way, found in seen.items():
        row: dict[str, Any] = {"first_process_start": first[way]} if fresh and way in first else {}
        for part in ("start", "process"):
            values = [each[part] for each in found]
            beside = [each[part] / mine[part] for each, mine in zip(found, seen["precast"], strict=False)]
            row[part] = {
                "seconds": round(statistics.median(values), 3),
                "times_precast": round(statistics.median(beside), 2),
                "range": [round(min(beside), 2), round(max(beside), 2)],
            }
        row["error"] = max(each["error"] for each in found)
        table[way] = row
    return {"batch": [ROWS, TOKENS], "rounds": rounds, "ways": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--overhead", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="an earlier run's folder, whose files are used again")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.folder)))
        return
    if args.overhead:
        print(json.dumps(overhead(args.folder)))
        return
    from precast.client.command import find

    from .machine import describe

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        document = {
            "schema": 1,
            "command": "python -m benches.startup",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": describe(Path(find()).parent),
            "start": measure(args.rounds, folder),
            "overhead": run(["--overhead"], folder, folder / "warm"),
        }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
