"""Contenders as processes: Python peers that are spoken to, and `precast`."""

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import ROOT, Case, Sizes, label

WAYS = ("eager", "compile", "reduce-overhead", "max-autotune", "aoti", "onnxruntime")
"""The names of `ways.py`, which can't be imported without torch."""


def ways(device: str) -> list[str]:
    """Returns the ways that differ on a device: without CUDA graphs, reduce-overhead is the default."""
    return [way for way in WAYS if not (way == "reduce-overhead" and device == "cpu")]


class Failed(Exception):
    """A contender failed; the message has the reason."""


class Host:
    """The shared settings of a run's contenders: the device, threads, binaries, and a folder for stores and caches."""

    def __init__(self, device: str, threads: int, work: Path, binaries: Path) -> None:
        self.device, self.threads, self.work, self.binaries = device, threads, work, binaries
        self.store = work / "store"
        self.logs = work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def saved(self, case: Case) -> Path:
        """Returns the folder of files that later starts of contenders use."""
        return self.work / "saved" / case.name

    def environment(self, threads: int | None = None, caches: str = "caches") -> dict[str, str]:
        """Returns the environment of every contender: the same threads, and compilers' caches of this run alone."""
        private = self.work / caches
        for name in ("inductor", "triton", "tmp"):
            (private / name).mkdir(parents=True, exist_ok=True)
        return {
            **os.environ,
            "OMP_NUM_THREADS": str(threads or self.threads),
            "TORCHINDUCTOR_CACHE_DIR": str(private / "inductor"),
            "TRITON_CACHE_DIR": str(private / "triton"),
            "TMPDIR": str(private / "tmp"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "PRECAST_PYTHON": sys.executable,
            "LIBTORCH": str(libtorch()),
            "LD_LIBRARY_PATH": f"{libtorch()}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        }

    def python(self, threads: int | None = None, caches: str = "caches") -> dict[str, str]:
        """Returns the environment of a contender in Python: from its second start on it finds the bytecode of what it
        imports, also where torch was installed without."""
        made = {**self.environment(threads, caches), "PYTHONPYCACHEPREFIX": str(self.work / "bytecode")}
        made.pop("PYTHONDONTWRITEBYTECODE", None)
        return made

    def run(
        self, name: str, command: list[Any], limit: float, environment: dict[str, str] | None = None
    ) -> tuple[Any, "Ran"]:
        """Runs a command with a log of this name; returns its JSON (a list, where it prints one document a line)."""
        log = self.logs / f"{name}.log"
        ran = once([str(part) for part in command], environment or self.environment(), log, max(1.0, limit))
        if ran.code != 0:
            raise Failed(f"{name} ended with {ran.code}: {tail(log)}")
        try:
            return json.loads(ran.output or "null"), ran
        except ValueError:
            return [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")], ran

    def precast(self, *arguments: Any, threads: int | None = None, limit: float = 600) -> tuple[Any, "Ran"]:
        """Runs `precast` on the run's store."""
        command = [self.binaries / "precast", *arguments, "--store", self.store, "--format", "json"]
        return self.run(f"precast-{arguments[0]}", command, limit, self.environment(threads))


def libtorch() -> str:
    found = importlib.util.find_spec("torch")
    return str(Path(found.origin).parent / "lib") if found and found.origin else ""


@dataclass
class Ran:
    """One process from start to end. Times are in seconds of the same clock as `time.time()`."""

    code: int
    output: str
    began: float
    answered: float
    seconds: float
    peak_bytes: int
    bytes_read: int


def once(command: list[str], environment: dict[str, str], log: Path, limit: float) -> Ran:
    """Runs a command to its end; `answered` is when the first of its output came."""
    began = time.time()
    pipe = subprocess.PIPE
    with log.open("w") as messages:
        process = subprocess.Popen(command, stdout=pipe, stderr=messages, env=environment, start_new_session=True)
    assert process.stdout
    answered, output = None, b""
    try:
        while ready := select.select([process.stdout], [], [], max(0.0, began + limit - time.time()))[0]:
            part = os.read(ready[0].fileno(), 1 << 16)
            answered = answered or time.time()
            if not part:
                break
            output += part
        else:
            os.killpg(process.pid, signal.SIGKILL)
    except BaseException:  # whoever ends the harness ends what it started
        os.killpg(process.pid, signal.SIGKILL)
        raise
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if time.time() >= began + limit:
        raise Failed(f"`{' '.join(command[:4])} …` was not done in {limit:.0f} s")
    times = (began, answered or time.time(), time.time() - began)
    return Ran(process.returncode, output.decode(), *times, usage.ru_maxrss * 1024, usage.ru_inblock * 512)


def tail(log: Path, lines: int = 3) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


class Peer:
    """A Python contender that stays alive between measurements."""

    def __init__(self, host: Host, case: Case, way: str, threads: int | None = None) -> None:
        self.name, self.host, self.caches = way, host, f"caches/{case.name}-{way}"
        self.log = host.logs / f"{case.name}-{way}.log"
        command = [sys.executable, "-m", "benches.peer", *case.peer(way, host.device)]
        command += [] if threads else ["--saved", str(host.saved(case))]
        environment, pipe = host.python(threads, self.caches), subprocess.PIPE
        with self.log.open("w") as messages:
            self.process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=messages, env=environment, start_new_session=True
            )
        self.received = b""

    def send(self, do: str, **arguments: Any) -> None:
        try:
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except OSError as error:
            raise Failed(f"{self.name} ended: {tail(self.log)}") from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """Returns the next answer; a peer without one by the deadline (of `time.time()`) is ended."""
        assert self.process.stdout
        while b"\n" not in self.received:
            if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.time()))[0]:
                self.end()
                # It may have left half a file.
                shutil.rmtree(self.host.work / self.caches, ignore_errors=True)
                raise Failed("not ready in the time it had")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                code = self.process.wait()
                raise Failed(f"ended with exit code {code}: {tail(self.log)}")
            self.received += part
        line, _, self.received = self.received.partition(b"\n")
        answer = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def prepare(self, buckets: list[Sizes]) -> None:
        """Lets it begin to get ready. If it ended already, that shows where it is waited for."""
        with contextlib.suppress(Failed):
            for sizes in buckets:
                self.send("prepare", sizes=sizes)

    def ready(self, buckets: list[Sizes], deadline: float) -> dict[str, list[float]]:
        """Waits until it has answered at each bucket; returns a sample of each answer."""
        self.receive(deadline)
        return {label(sizes): self.receive(deadline)["sample"] for sizes in buckets}

    def ask(self, do: str, limit: float, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.receive(time.time() + limit)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            pipe.close()

    def time(self, buckets: list[Sizes], seconds: float) -> dict[str, dict[str, float]]:
        limit = 60 + 10 * seconds
        return {label(sizes): self.ask("time", limit, sizes=sizes, seconds=seconds) for sizes in buckets}

    def throughput(self, sizes: Sizes, threads: int, seconds: float) -> float:
        return self.ask("threads", 60 + 10 * seconds, sizes=sizes, threads=threads, seconds=seconds)["throughput"]


class Precast:
    """`precast bench` on the case's model in the run's store. A process per measurement: it starts in milliseconds."""

    def __init__(self, host: Host, case: Case, graphs: str = "", threads: int | None = None) -> None:
        self.host, self.case, self.intra = host, case, threads
        self.graphs = graphs or ("always" if host.device == "cuda" else "as-built")
        self.name = "precast, no graphs" if graphs == "never" else "precast"
        self.memory: dict[str, Any] = {}
        self.rungs: dict[str, str] = {}
        """The rung of each bucket: a build may have found eager to be faster."""

    def bench(self, seconds: float, buckets: list[Sizes], *arguments: Any) -> dict[str, dict[str, Any]]:
        """Returns a row for each bucket."""
        spec = self.case.read(self.host.device)
        chosen = [part for sizes in buckets for part in ("--at", label(sizes).replace(" ", ","))]
        document, ran = self.host.precast(
            *("bench", self.case.module, "--model", spec.model, "--seconds", seconds, "--graphs", self.graphs),
            *(*chosen, *arguments),
            threads=self.intra,
        )
        device = document.get("device_memory") or {}
        self.memory = {"host": ran.peak_bytes, "device": device.get("reserved")}
        rows = {label(row["request"]): row for row in document["buckets"]}
        self.rungs |= {bucket: row["rung"] for bucket, row in rows.items()}
        return rows

    def time(self, buckets: list[Sizes], seconds: float) -> dict[str, dict[str, float]]:
        kinds = {"synchronous": "median", "p99": "p99", "pipelined": "pipelined", "replay": "replay"}
        rows = self.bench(seconds, buckets)
        return {
            bucket: {kind: row[name] for kind, name in kinds.items() if name in row} for bucket, row in rows.items()
        }

    def throughput(self, sizes: Sizes, threads: int, seconds: float) -> float:
        return self.bench(seconds, [sizes], "--threads", threads)[label(sizes)]["throughput"]

    def end(self) -> None:
        pass
