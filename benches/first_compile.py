"""The time of a process's first compile by its parts: plain torch, and Precast's worker.

    .venv/bin/python benches/first_compile.py | python -m benches.results build-cpu.json first_compile

A layer is compiled, and then a larger one, in each of three fresh processes with nothing cached: by
`aoti_compile_and_package`, by the worker's own functions with an empty folder for headers (the first build of a
machine), and by the worker's with the headers that it left there (every other build). The parts of torch's are seen by
counting what its functions cost, of which the outermost gets all; the worker compiles in threads, so that its parts are
seconds of its own clock. CPU seconds are user and system time of the process and of all that it ran: other work on the
machine moves them less than it moves the clock.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (64, 96)


def cpu() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def timed(body: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Runs a function; returns its cost and its result."""
    clock, before = time.perf_counter(), cpu()
    result = body()
    return {"cpu_seconds": round(cpu() - before, 2), "seconds": round(time.perf_counter() - clock, 2)}, result


class Profile:
    """CPU seconds of functions of one thread; a nested call counts for the outermost."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inside = False

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Counts the cost of a function."""
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside, before = True, cpu()
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False
                self.spent[label] = self.spent.get(label, 0.0) + cpu() - before

        setattr(owner, name, counted)

    def take(self) -> dict[str, float]:
        """Returns the cost since the last call."""
        spent, self.spent = self.spent, {}
        return {name: round(seconds, 2) for name, seconds in spent.items()}


def model(width: int) -> Any:
    """Returns one layer, as both ways compile it."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()).eval()


def imports() -> dict[str, Any]:
    """Imports torch and its compiler, as every way must; returns the cost."""

    return timed(lambda: importlib.import_module("torch._inductor.compile_fx"))[0]


def plain(out: Path) -> dict[str, Any]:
    """Compiles as the documentation of AOTInductor shows it."""
    found: dict[str, Any] = {"import": imports()}
    import torch
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa

    profile = Profile()
    profile.watch(cpu_vec_isa.VecISA, "check_build", "probes of instruction sets")
    profile.watch(codecache, "_precompile_header", "precompiled headers")
    profile.watch(cpp_builder, "_run_compile_cmd", "C++ of wrapper and kernels, link")
    for name, width in zip(("first", "later"), WIDTHS, strict=True):

        def compile_one(width: int = width) -> None:
            with torch.no_grad():
                program = torch.export.export(model(width), (torch.randn(4, width),))
                torch._inductor.aoti_compile_and_package(program, package_path=str(out / f"{width}.pt2"))

        cost, _ = timed(compile_one)
        parts = profile.take()
        parts["Python: export, lower, generate"] = round(cost["cpu_seconds"] - sum(parts.values()), 2)
        found[name] = {**cost, "cpu_seconds_by_part": parts}
    return found


def worker(out: Path) -> dict[str, Any]:
    """Captures and compiles as a worker does."""
    found: dict[str, Any] = {"import": imports()}
    sys.path.insert(0, str(ROOT))
    from tests.worker.support import Quiet, part, spec

    for name, width in zip(("first", "later"), WIDTHS, strict=True):
        source = f"import sys\nsys.path.insert(0, {str(ROOT / 'benches')!r})\nfrom first_compile import model\n\n\n"
        (out / f"layer{width}.py").write_text(f"{source}def load():\n    return model({width})\n")
        module = {
            "name": "forward",
            "path": "",
            "method": "forward",
            "inputs": [spec("input", "float32", [4, width])],
            "regions": [],
        }

        def compile_one(width: int = width, module: dict[str, Any] = module) -> dict[str, Any]:
            opened = part("model.entry").open_model(out, f"layer{width}:load", "cpu")
            folder = out / str(width)
            folder.mkdir()
            captured = part("capture").capture(opened, module, {}, folder, Quiet())
            request = {"file": captured["segments"][0]["file"], "device": "cpu", "isa": "native"}
            return part("compiler").compile_segment(request, folder, Quiet())

        cost, compiled = timed(compile_one)
        found[name] = {**cost, "seconds_of_the_compile_by_phase": compiled["seconds"]}
    return found


def fresh(way: str, headers: Path) -> dict[str, Any]:
    """Runs one way in a process of its own, with nothing cached but these headers."""
    with tempfile.TemporaryDirectory(prefix="precast-first-") as name:
        folder = Path(name)
        env = {**os.environ, "PRECAST_HEADER_DIR": str(headers), "OMP_WAIT_POLICY": "passive"}
        for variable in ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            (folder / variable).mkdir()
            env[variable] = str(folder / variable)
        command = [sys.executable, __file__, "--way", way, "--out", name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{way} failed:\n{done.stderr[-4000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("plain", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps((plain if args.way == "plain" else worker)(args.out)))
        return
    sys.path.insert(0, str(ROOT))
    from benches.cold_build import machine

    result: dict[str, Any] = {
        "schema": 1,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": "benches/first_compile.py",
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="precast-headers-") as name:
        for label, way in (("torch", "plain"), ("worker_on_a_new_machine", "worker"), ("worker", "worker")):
            result[label] = fresh(way, Path(name))
    result["worker_to_torch_cpu"] = {
        when: round(result["worker"][when]["cpu_seconds"] / result["torch"][when]["cpu_seconds"], 3)
        for when in ("first", "later")
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
