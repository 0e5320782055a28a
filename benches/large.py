"""Measures a model of 1.1 billion parameters in bfloat16: its build, its store, and the start of a process.

    .venv/bin/python benches/large.py NAME=PRECAST… [--plain] [--scratch DIR] > benches/results/large-cpu.json

Each PRECAST is a command to measure, all in one run; `.venv/bin/python` has torch and transformers. The weights are
random, and are written once. Memory is the sum of proportional sets (PSS) over all processes of a command, sampled five
times a second: a page that two of them map counts once. With `--plain` the last command also builds a store that
prepacks nothing, and starts of both alternate. It needs 12 GB of disk under `--scratch`.
"""

import argparse
import json
import os
import shutil
import statistics
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


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_WAIT_POLICY": "passive", "PRECAST_PYTHON": sys.executable}


def build(precast: Path, project: Path, store: Path, *options: str) -> tuple[float, Watch]:
    """Builds the model in a new store."""
    shutil.rmtree(store, ignore_errors=True)
    command = [precast, "build", "-f", project / "precast.toml", "--store", store, "--format", "json", *options]
    seconds, watch, _ = measured(command, environment(), store.with_suffix(".log"))
    return seconds, watch


def start(precast: Path, project: Path, store: Path) -> tuple[float, Watch]:
    """Starts a process that answers one request."""
    command = [precast, "run", "prefill", "--inputs", project / "inputs.safetensors", "--store", store, "--compiled"]
    seconds, watch, _ = measured(command, environment(), store.with_suffix(".log"))
    return seconds, watch


def against_plain(precast: Path, project: Path, scratch: Path) -> dict:
    """Compares starts from the store with those from one that prepacks nothing."""
    stores = {"prepacked": scratch / "store", "plain": scratch / "plain"}
    build(precast, project, stores["plain"], "--set", "options.freezing=false")
    taken: dict[str, list[float]] = {name: [] for name in stores}
    for number in range(8):
        for name in sorted(stores, reverse=bool(number % 2)):
            seconds, _ = start(precast, project, stores[name])
            if number:  # the first reads the files from the disk
                taken[name].append(seconds)
    ratios = [one / other for one, other in zip(taken["prepacked"], taken["plain"], strict=True)]
    found = {name: round(statistics.median(seconds), 2) for name, seconds in taken.items()}
    return {**found, "ratio": round(statistics.median(ratios), 2)}


def measure(precast: Path, project: Path, scratch: Path) -> dict:
    """Builds the model in a new store, and starts processes from it."""
    store = scratch / "store"
    seconds, watch = build(precast, project, store)
    version = subprocess.run([precast, "--version"], capture_output=True, text=True, check=True)
    found = {
        "version": version.stdout.strip(),
        "build_seconds": round(seconds, 1),
        "build_peak_mib": round(watch.total()),
        "build_peak_by_process_mib": {name: round(mib) for name, mib in sorted(watch.peak.items())},
        "store_mib": round(size(store) / MIB),
    }
    starts = []
    for _ in range(4):
        seconds, watch = start(precast, project, store)
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
    parser.add_argument("--plain", action="store_true")
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
        if args.plain:
            result["starts_by_store"] = against_plain(Path(precast).resolve(), project, Path(name))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
