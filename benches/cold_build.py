"""The cost of a first build: `precast build` against the plain script, both with nothing cached, in one run.

    .venv/bin/python benches/cold_build.py [--precast PATH] [--spec PATH] [--plain] [-j N] [--trace FILE]
                                           | python -m benches.results build-cpu.json cold_build

Needs Python 3.11 with torch, and a C++ compiler; of this project only the two binaries and the spec with its model.
`precast` gets a new store and a new cache folder. The plain script is the way without it: for each bucket a
fresh process with empty caches that makes the model, exports it and compiles it whole, one after the other. Without
`--plain` only `precast` is measured.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# One bucket: python -c PLAIN SPEC MODULE-INDEX SIZES OUT.pt2
PLAIN = """
import importlib, json, sys, tomllib
from pathlib import Path
import torch
spec_path, index, sizes, out = Path(sys.argv[1]).resolve(), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
spec = tomllib.loads(spec_path.read_text())
device = spec.get("target", {}).get("device", "cpu")
sys.path.insert(0, str(spec_path.parent))
name, _, function = spec["model"]["entry"].partition(":")
with torch.no_grad():
    model = getattr(importlib.import_module(name), function)().eval().to(device)
    asked = spec["module"][index]
    target = model.get_submodule(asked.get("path", ""))
    inputs = {}
    for key, value in asked["inputs"].items():
        shape = [sizes[size] if isinstance(size, str) else size for size in value["shape"]]
        dtype = getattr(torch, value["dtype"])
        if dtype.is_floating_point:
            inputs[key] = torch.randn(shape, dtype=dtype, device=device)
        else:
            low, high = value.get("range", [0, 2])
            inputs[key] = torch.randint(low, high, shape, dtype=dtype, device=device)
    exported = torch.export.export(target, (), inputs)
    torch._inductor.aoti_compile_and_package(exported, package_path=out)
"""


def buckets(module: dict) -> list[dict[str, int]]:
    """Returns the sizes of every bucket of a module."""
    asked = module.get("buckets", {})
    if "points" in asked:
        return asked["points"]
    return [dict(zip(asked, sizes, strict=True)) for sizes in product(*asked.values())]


def cold(folder: Path) -> dict[str, str]:
    """Returns an environment in which nothing is cached."""
    names = ["TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"]
    for name in names:
        (folder / name).mkdir(parents=True)
    return {**os.environ, **{name: str(folder / name) for name in names}}


def run(command: list, env: dict[str, str], log: Path) -> tuple[str, float]:
    """Runs a command; returns its output and its seconds."""
    started = time.perf_counter()
    with log.open("w") as stderr:
        done = subprocess.run(
            [str(part) for part in command], env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{log.read_text()[-4000:]}\n{done.stdout[-2000:]}")
    return done.stdout, time.perf_counter() - started


def precast(args: argparse.Namespace, folder: Path) -> dict:
    """Builds once, with nothing cached."""
    command = [args.precast, "build", "-f", args.spec, "--store", folder / "store", "--format", "json", "-v"]
    command += ["-j", args.jobs] if args.jobs else []
    env = cold(folder / "cold")
    env["PRECAST_PYTHON"] = sys.executable
    traced = [*command, "--trace", args.trace] if args.trace else command
    text, seconds = run(traced, env, folder / "precast.log")
    events = [json.loads(line) for line in text.splitlines()]
    end = events[-1]
    failed = [program for program in end["programs"] if program["state"] == "failed"]
    if failed:
        raise SystemExit(f"{failed[0]['program']} failed: {failed[0]['message']}")
    spent: dict[str, float] = {}
    for event in events:
        if event["event"] == "end":
            spent[event["job"]] = round(spent.get(event["job"], 0.0) + event["seconds"], 2)
        elif event["event"] in ("worker", "opened"):
            key = f"{event['event']} {event.get('worker', 0)}"
            spent[key] = round(event["seconds"], 2)
    again, warm = run(command, env, folder / "again.log")
    assert json.loads(again.splitlines()[-1])["compiled"] == 0
    shown = " ".join(str(part) for part in ["precast", *command[1:]])
    return {
        "command": shown.replace(str(folder), "NEW"),
        "seconds": round(seconds, 2),
        "artifacts": end["compiled"],
        "seconds_by_job_over_all_workers": spent,
        "second_build_seconds": round(warm, 3),
    }


def plain(args: argparse.Namespace, spec: dict, folder: Path) -> dict:
    """Compiles every bucket in a process of its own."""
    taken = {}
    for index, module in enumerate(spec["module"]):
        for sizes in buckets(module):
            name = " ".join(f"{key}={value}" for key, value in sizes.items())
            here = folder / f"plain-{index}-{name.replace(' ', '-')}"
            here.mkdir()
            command = [sys.executable, "-c", PLAIN, args.spec, index, json.dumps(sizes), here / "model.pt2"]
            _, seconds = run(command, cold(here / "cold"), here / "log")
            taken[f"{module['name']} {name}".strip()] = round(seconds, 2)
            print(f"plain {module['name']} {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return {
        "command": "python -c PLAIN: torch.export.export, then torch._inductor.aoti_compile_and_package",
        "seconds": round(sum(taken.values()), 2),
        "seconds_by_bucket": taken,
    }


def machine() -> dict:
    """Returns the machine."""
    import torch

    cpu = next(
        (line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    found = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 1),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precast", type=Path, default=ROOT / "target/release/precast")
    parser.add_argument("--spec", type=Path, default=ROOT / "examples/minilm/precast.toml")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("-j", "--jobs")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    spec = tomllib.loads(args.spec.read_text())
    result: dict = {
        "schema": 1,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["benches/cold_build.py", *sys.argv[1:]]),
        "spec": str(args.spec.resolve().relative_to(ROOT)) if ROOT in args.spec.resolve().parents else str(args.spec),
        "buckets": sum(len(buckets(module)) for module in spec["module"]),
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="precast-cold-") as name:
        result["precast"] = precast(args, Path(name))
        print(f"precast: {result['precast']['seconds']:.2f} s", file=sys.stderr, flush=True)
        if args.plain:
            result["plain"] = plain(args, spec, Path(name))
            result["ratio"] = round(result["precast"]["seconds"] / result["plain"]["seconds"], 3)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
