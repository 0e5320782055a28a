"""Runs a lane of `make test`, and writes its seconds into target/test-times.json; or prints the table of all lanes.

    python3 tests/lane.py NAME COMMAND...
    python3 tests/lane.py

Wall seconds, and CPU seconds of the command and of everything that it started and waited for. Workers that are forks of
one process (`PRECAST_FORKS`) have a row of their own: the process writes what each used, and how often torch was
imported for them. Lanes run beside each other: the sum of their wall seconds is more than the run's.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMES = Path(__file__).resolve().parents[1] / "target" / "test-times.json"


def kept(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Changes the file, one process at a time, and returns what it has."""
    TIMES.parent.mkdir(exist_ok=True)
    with TIMES.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        times = json.loads(text) if text else {}
        change(times)
        file.seek(0)
        file.truncate()
        json.dump(times, file, indent=1)
    return times


def run(name: str, command: list[str]) -> int:
    """Runs a lane; returns its exit code."""
    begun, clock = time.time(), time.monotonic()
    # Open descriptors stay open: among them is the job server of `make`.
    code = subprocess.run(command, check=False, close_fds=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = {
        "began": round(begun, 1),
        "wall_s": round(time.monotonic() - clock, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "code": code,
    }

    def add(times: dict[str, Any]) -> None:
        times["cores"] = len(os.sched_getaffinity(0))
        times.setdefault("lanes", {})[name] = row

    kept(add)
    return code if code >= 0 else 128 - code


def forks(times: dict[str, Any]) -> None:
    """Adds what the workers used that are forks."""
    folder = os.environ.get("PRECAST_FORKS")
    logs = [path.read_text() for path in Path(folder).glob("*.log")] if folder else []
    starts, ended = (
        [float(seconds) for log in logs for seconds in re.findall(f"^{line} after ([0-9.]+) s of CPU$", log, re.M)]
        for line in ("ready", "a fork ended")
    )
    times["forks"] = {"starts_of_torch": len(starts), "workers": len(ended), "cpu_s": round(sum(starts + ended), 1)}


def table() -> None:
    """Prints the lanes of the last run, the longest first, and the time from the first start to the last end."""
    times = kept(forks)
    lanes: dict[str, Any] = times.get("lanes", {})
    if not lanes:
        return
    print(f"{'lane':20} {'wall s':>8} {'CPU s':>8}")
    for name, row in sorted(lanes.items(), key=lambda item: -item[1]["wall_s"]):
        failed = f"  failed ({row['code']})" if row["code"] else ""
        print(f"{name:20} {row['wall_s']:8.0f} {row['cpu_s']:8.0f}{failed}")
    whole = max(row["began"] + row["wall_s"] for row in lanes.values()) - min(row["began"] for row in lanes.values())
    forked = times["forks"]
    counts = f"{forked['workers']} workers, {forked['starts_of_torch']} starts of torch"
    print(f"{'workers as forks':20} {'':8} {forked['cpu_s']:8.0f}  {counts}")
    cpu = sum(row["cpu_s"] for row in lanes.values()) + forked["cpu_s"]
    print(f"{'all':20} {whole:8.0f} {cpu:8.0f}  on {times['cores']} cores")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    table()
