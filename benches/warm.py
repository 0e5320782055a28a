"""How long a build takes that has nothing to do: the whole process, from the shell's point of view.

    .venv/bin/python benches/warm.py [--precast target/release/precast] [--programs 100 1000 10000] \
        | python -m benches.results build-cpu.json warm

The programs are made once by the fake worker of the tests, from a project of 40 source files; then the same
`precast build` runs again and again. `--precast` is to be the release binary without libtorch:
`cargo build --release --bin precast --no-default-features`. What starting a process takes is measured beside it, with
`precast --version`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = 40


def project(folder: Path, programs: int) -> None:
    """Writes a model of many files and a spec with this many buckets."""
    names = [f"layer_{number}" for number in range(SOURCES)]
    for name in names:
        (folder / f"{name}.py").write_text("WIDTH = 1024\n" * 400)
    imports = "".join(f"import {name}\n" for name in names)
    (folder / "model.py").write_text(
        f"{imports}# fake: compile skips\nSCALE = 2.0\nOFFSET = 1.0\n\n\ndef load():\n    return {{'': 'Model'}}\n"
    )
    sizes = ", ".join(str(size) for size in range(1, programs + 1))
    (folder / "precast.toml").write_text(
        'schema = 1\nmodel = { name = "bench", entry = "model:load" }\n'
        # Nothing is run: a library that skipped its compile can't be.
        'compile = { healthcheck = false, fail_policy = "raise" }\n'
        '[[module]]\nname = "encode"\n'
        '[module.inputs]\nx = { dtype = "float32", shape = ["batch", 3], pad = 0 }\n'
        f"[module.buckets]\nbatch = [{sizes}]\n"
    )
    worker = folder / "worker"
    worker.write_text(f"#!/bin/sh\nexec {sys.executable} -S {ROOT}/tests/fake/worker.py\n")
    worker.chmod(0o755)


def seconds(command: list, folder: Path) -> tuple[float, str]:
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), "PRECAST_WORKER": str(folder / "worker")}
    started = time.perf_counter()
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - started
    if run.returncode != 0:
        raise SystemExit(f"{command}: exit code {run.returncode}\n{run.stdout}{run.stderr}")
    return took, run.stdout


def file_system() -> str:
    """Returns the kind of file system that the stores are on: fsync decides how long the first build takes."""
    command = ["stat", "-f", "-c", "%T", tempfile.gettempdir()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def spread(taken: list[float]) -> dict:
    taken = sorted(taken)
    low, high = taken[len(taken) // 10], taken[-1 - len(taken) // 10]
    found = {"median_ms": statistics.median(taken), "least_ms": taken[0], "p10_ms": low, "p90_ms": high}
    return {**{name: round(value * 1e3, 3) for name, value in found.items()}, "runs": len(taken)}


def measure(precast: Path, programs: int, runs: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="precast-warm-") as name:
        folder = Path(name).resolve()
        project(folder, programs)
        build = [precast, "build", "--format", "json"]
        cold, _ = seconds(build, folder)
        # Fresh files are hashed again; later a file's time stamp is trusted.
        time.sleep(3)
        for _ in range(3):
            _, out = seconds(build, folder)
        last = json.loads(out.splitlines()[-1])
        hits = sum(program["state"] == "hit" for program in last["programs"])
        if (hits, last["compiled"]) != (programs, 0):
            raise SystemExit(f"{hits} of {programs} programs were there, {last['compiled']} were compiled")
        quiet = [precast, "build", "-q"]
        warm = [seconds(quiet, folder)[0] for _ in range(runs)]
        start = [seconds([precast, "--version"], folder)[0] for _ in range(runs)]
        return {
            "programs": programs,
            "cold_seconds": round(cold, 2),
            "warm": spread(warm),
            "process_start": spread(start),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precast", type=Path, default=ROOT / "target/release/precast")
    parser.add_argument("--programs", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    sizes = [measure(args.precast.resolve(), programs, args.runs) for programs in args.programs]
    first, last = sizes[0], sizes[-1]
    result = {
        "schema": 1,
        "command": " ".join(["benches/warm.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "file_system": file_system(),
        },
        "sizes": sizes,
        "ratios": {
            "programs": last["programs"] / first["programs"],
            "warm_median": round(last["warm"]["median_ms"] / first["warm"]["median_ms"], 1),
        },
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
