"""Measures a model of 1.1 billion parameters in bfloat16: its build, its store, and the start of a process.

    .venv/bin/python benches/large.py NAME=PRECAST… [--scratch DIR] > benches/results/large-cpu.json

Each PRECAST is a command to measure, all in one run; `.venv/bin/python` has torch and transformers. The weights are
random, and are written once. Memory is the sum of proportional sets (PSS) over all processes of a command, sampled five
times a second: a page that two of them map counts once. It needs 12 GB of disk under `--scratch`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = HERE / "models" / "llama1b"
MIB = 1 << 20

WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
import model
from safetensors.torch import save_model
save_model(model.load(), sys.argv[2] + "/model.safetensors")
"""


class Watch(threading.Thread):
    """The memory of a process and its descendants, at its peak."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.ended = root, threading.Event()
        self.peak: dict[str, float] = {}
        self.most: dict[str, float] = {}

    def run(self) -> None:
        while not self.ended.wait(0.2):
            by_process: dict[str, float] = {}
            for pid in descendants(self.root):
                name, sizes = memory(pid)
                for kind, mib in sizes.items():
                    by_process[f"{name} {kind}"] = by_process.get(f"{name} {kind}", 0) + mib
            total = sum(mib for name, mib in by_process.items() if name.endswith("Pss"))
            if total > sum(mib for name, mib in self.peak.items() if name.endswith("Pss")):
                self.peak = by_process
            for name, mib in by_process.items():
                self.most[name] = max(self.most.get(name, 0), mib)

    def total(self) -> float:
        return sum(mib for name, mib in self.peak.items() if name.endswith("Pss"))


def descendants(root: int) -> list[int]:
    """Returns a process and all processes below it."""
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def memory(pid: int) -> tuple[str, dict[str, float]]:
    """Returns a process's name, and its proportional set in MiB: all of it, and the part without a file."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return "", {}
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return name, {key: int(fields[key]) / 1024 for key in ("Pss", "Pss_Anon") if key in fields}


def measured(command: list, env: dict[str, str], log: Path) -> tuple[float, Watch, str]:
    """Runs a command; returns its seconds, its memory and its output."""
    started = time.perf_counter()
    with log.open("w") as stderr:
        child = subprocess.Popen(
            [str(part) for part in command], env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        watch = Watch(child.pid)
        watch.start()
        out, _ = child.communicate()
    seconds = time.perf_counter() - started
    watch.ended.set()
    watch.join()
    if child.returncode:
        raise SystemExit(f"{command[0]} failed:\n{log.read_text()[-4000:]}\n{out[-2000:]}")
    return seconds, watch, out


def size(folder: Path) -> int:
    """Returns the bytes of a folder's files on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def write_inputs(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"input_ids": torch.arange(16)[None]}, path)


def measure(precast: Path, project: Path, scratch: Path) -> dict:
    """Builds the model in a new store, and starts processes from it."""
    store = scratch / "store"
    shutil.rmtree(store, ignore_errors=True)
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "PRECAST_PYTHON": sys.executable}
    build = [precast, "build", "-f", project / "precast.toml", "--store", store, "--format", "json"]
    seconds, watch, _ = measured(build, env, scratch / "build.log")
    version = subprocess.run([precast, "--version"], capture_output=True, text=True, check=True)
    found = {
        "version": version.stdout.strip(),
        "build_seconds": round(seconds, 1),
        "build_peak_mib": round(watch.total()),
        "build_peak_by_process_mib": {name: round(mib) for name, mib in sorted(watch.peak.items())},
        "store_mib": round(size(store) / MIB),
    }
    run = [precast, "run", "prefill", "--inputs", project / "inputs.safetensors", "--store", store]
    starts = []
    for _ in range(4):
        seconds, watch, _ = measured(run, env, scratch / "run.log")
        anonymous = max((mib for name, mib in watch.most.items() if name.endswith("Pss_Anon")), default=0)
        starts.append(
            {
                "seconds": round(seconds, 2),
                "peak_mib": round(watch.total()),
                "anonymous_mib": round(anonymous),
            }
        )
    found["starts"] = starts
    found["store_mib_after_starts"] = round(size(store) / MIB)
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precast", nargs="+", metavar="NAME=PRECAST")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--weights", type=Path, help="a file of weights that an earlier run wrote")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    from benches import machine

    commands = dict(pair.split("=", 1) for pair in args.precast)
    with tempfile.TemporaryDirectory(prefix="precast-large-", dir=args.scratch) as name:
        project = Path(name) / "project"
        shutil.copytree(MODEL, project)
        if args.weights:
            (project / "model.safetensors").symlink_to(args.weights.resolve())
        else:
            subprocess.run([sys.executable, "-c", WRITE, MODEL, project], check=True)
        write_inputs(project / "inputs.safetensors")
        result = {
            "schema": 1,
            "commit": machine.commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": " ".join(["benches/large.py", *sys.argv[1:]]),
            "machine": machine.describe(Path(next(iter(commands.values()))).parent),
            "weights_mib": round((project / "model.safetensors").stat().st_size / MIB),
        }
        for label, precast in commands.items():
            result[label] = measure(Path(precast).resolve(), project, Path(name))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
