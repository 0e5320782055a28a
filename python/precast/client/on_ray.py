"""Builders of one build on the nodes of a Ray cluster: what `precast build --on ray` starts.

Ray places whole builders, each `precast build --remote … --push` in a store of its own on its node, with the CPUs,
GPUs and other resources that it needs. One whose node or process died is started again. The builders share the
programs by leases in the remote, and artifacts go there: Ray carries what builders say and nothing else. The first
builder that ends has found all programs in the remote or made them, so the others are ended.

The caller is `src/cli/build/on_ray.rs`. It writes the request as one line of JSON to standard input, and reads lines:

| line | says |
|---|---|
| `{"builder": 0, "node": NAME, "said": {…}}` | a line of a builder: an event, an error, a warning, a note, or a `log` |
| `{"note": TEXT}` | something about the builders |
| `{"error": TEXT, "hint": TEXT}` | that no builder can be started |

The end of standard input, after Ctrl-C or when the caller was killed, ends the builders and their process groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import command

Json = dict[str, Any]

# How often Ray starts a builder again.
RETRIES = 3
# Seconds that a builder has to end its workers and to give its leases back.
GRACE = 15.0
# Seconds between two looks at what builders said.
LOOK = 0.2


class Killed(Exception):
    """The process of a builder was killed: Ray starts the builder again."""


class Failed(Exception):
    """A builder ended with an error."""


class Said:
    """What builders said, until it is taken: an actor."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str, Json]] = []

    def add(self, builder: int, node: str, said: Json) -> None:
        self._lines.append((builder, node, said))

    def take(self) -> list[tuple[int, str, Json]]:
        taken, self._lines = self._lines, []
        return taken


def build(builder: int, arguments: list[str], version: str, said: Any) -> None:
    """Runs one builder, on its node: a task."""
    import ray  # type: ignore[import-not-found]

    import precast

    node = ray.get_runtime_context().get_node_id()
    if precast.__version__ != version:
        hint = "install one version on all nodes: keys of programs depend on it"
        raise Failed(f"{node}: it has precast {precast.__version__}, the caller has {version}; {hint}")
    # Ray's limit is not the builder's, which has `--jobs`.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with _folder() as folder:
        store = ["--until-stdin-ends", "--format=json", f"--store={folder}/store"]
        process = subprocess.Popen(
            [command.find(), "build", *arguments, *store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={"PRECAST_PYTHON": sys.executable, **environment},
            process_group=0,
        )
        try:
            error = _heard(process, lambda line: said.add.remote(builder, node, line))
            code = process.wait()
        finally:
            _end(process)
    if code < 0:
        raise Killed(f"{node}: it was ended by {signal.Signals(-code).name}")
    if code:
        raise Failed(f"{node}: {error}")


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Makes a folder for a store and removes it at the end. Before that it removes those whose owner was killed."""
    for old in Path(tempfile.gettempdir()).glob("precast-builder-*"):
        with contextlib.suppress(OSError), (old / "owner").open() as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A new one may have no owner yet.
            if time.time() - old.stat().st_mtime > 60:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="precast-builder-", ignore_cleanup_errors=True) as folder:
        with Path(folder, "owner").open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            yield folder


def _heard(process: subprocess.Popen[str], tell: Any) -> str:
    """Tells each line of a process; returns its error. Ray's cancel interrupts a thread only while it runs Python."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    error = "it ended without a word"
    while True:
        try:
            line = lines.get(timeout=LOOK)
        except queue.Empty:
            continue
        if line is None:
            return error
        document = command.document_of(line) or {"log": line.rstrip()}
        if "error" in document:
            error = str(command.error_of(document))
        tell(document)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a builder as Ctrl-C does, then all that is left of its process group."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE - 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def say(**line: Any) -> None:
    print(json.dumps(line), file=_output, flush=True)


_output = sys.stdout


def main() -> int:
    global _output
    # Ray prints to the other one.
    _output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        say(error=f"`{sys.executable}` has no Ray: {error}", hint="`pip install 'precast[ray]'` there")
        return 1
    stop, connected = threading.Event(), threading.Event()

    def end() -> None:
        sys.stdin.read()
        stop.set()
        # Also when Ray does not answer.
        time.sleep(2 * GRACE if connected.is_set() else 0)
        os._exit(130)

    threading.Thread(target=end, daemon=True).start()
    cluster, spec = request["cluster"], Path(request["spec"])
    try:
        if cluster == "ray":
            # The cluster of this machine, or a new one.
            ray.init(log_to_driver=False, logging_level="ERROR")
        else:
            # Its nodes do not see this folder: Ray copies it to them.
            there = {"working_dir": str(spec.parent)}
            ray.init(cluster, runtime_env=there, log_to_driver=False, logging_level="ERROR")
            spec = Path(spec.name)
    except Exception as error:
        hint = "`ray status` shows a cluster that runs; its Ray and Python must be of the same versions as here"
        say(error=f"can't reach the Ray cluster `{cluster}`: {error}", hint=hint)
        return 1
    connected.set()
    try:
        builders(ray, request, [f"--file={spec}", *request["arguments"]], stop)
    finally:
        ray.shutdown()
    return 0


def builders(ray: Any, request: Json, arguments: list[str], stop: threading.Event) -> None:
    """Starts builders; returns when one has ended well, when all have failed, or after a stop."""
    import precast

    nodes = Nodes(ray)
    needs = {"GPU": request["gpus"], **request["resources"]}
    needs["CPU"] = request["cpus"] or nodes.fewest_cpus(needs)
    room = nodes.room(needs)
    if not room:
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in needs.items() if amount)
        say(note=f"no node of the cluster has {wanted}: one builder waits for such a node")
    # On the caller's node, or on the head of its cluster: it should live as long as the build.
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes.own, soft=True)
    said = ray.remote(Said).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
    task = ray.remote(build).options(
        num_cpus=needs.pop("CPU"),
        num_gpus=needs.pop("GPU"),
        resources=needs,
        max_retries=RETRIES,
        retry_exceptions=[Killed],
        scheduling_strategy="SPREAD",
    )
    count = max(1, min(room, request["missing"]))
    say(note=f"{count} builder{'s' * (count > 1)} on Ray")
    left = [task.remote(number, arguments, precast.__version__, said) for number in range(count)]

    def tell() -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            for builder, node, line in ray.get(said.take.remote(), timeout=GRACE):
                say(builder=builder, node=nodes.name(node), said=line)

    done = False
    while left and not done and not stop.is_set():
        ended, left = ray.wait(left, timeout=LOOK)
        tell()
        for one in ended:
            try:
                ray.get(one)
                done = True
            except ray.exceptions.RayError as error:
                say(note=f"a builder failed: {nodes.named(_short(error))}")
    if not left and not done:
        say(note="no builder is left: this machine makes what is missing")
    for one in left:
        ray.cancel(one)
    if left:
        _, left = ray.wait(left, num_returns=len(left), timeout=GRACE)
    for one in left:
        ray.cancel(one, force=True)
    tell()


def _short(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return str(cause).strip().splitlines()[0] if not isinstance(cause, Failed | Killed) else str(cause)


class Nodes:
    """The nodes of the cluster, and their names for people."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._read = 0.0
        self._all: dict[str, Json] = {}
        self._look()
        self.own: str = ray.get_runtime_context().get_node_id()

    def _look(self) -> None:
        self._all = {node["NodeID"]: node for node in self._ray.nodes()}
        self._read = time.monotonic()

    def _resources(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._all.values() if node["Alive"]]

    def fewest_cpus(self, needs: dict[str, float]) -> int:
        """Returns the CPUs of the smallest node that has all else that a builder needs."""
        able = [of for of in self._resources() if all(of.get(name, 0) >= amount for name, amount in needs.items())]
        return int(min((of["CPU"] for of in able if of.get("CPU", 0) >= 1), default=1))

    def room(self, needs: dict[str, float]) -> int:
        """Returns how many builders the nodes have room for."""
        asked = [(name, amount) for name, amount in needs.items() if amount]
        return sum(min(int(of.get(name, 0) // amount) for name, amount in asked) for of in self._resources())

    def name(self, node: str) -> str:
        """Returns the address of a node; with the first digits of its ID where several nodes have one address."""
        if node not in self._all and time.monotonic() - self._read > 1:
            self._look()
        address = self._all.get(node, {}).get("NodeManagerAddress", "")
        alone = sum(other["NodeManagerAddress"] == address for other in self._all.values()) == 1
        return address if address and alone else f"{address}#{node[:6]}"

    def named(self, text: str) -> str:
        """Returns a text with the names of nodes in place of their IDs."""
        for node in self._all:
            text = text.replace(node, self.name(node))
        return text


if __name__ == "__main__":
    # By its name: the nodes import it, and get none of this process's code.
    from precast.client import on_ray

    sys.exit(on_ray.main())
