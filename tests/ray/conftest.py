"""A Ray cluster of four nodes on this machine, and a fake model whose builds it shares.

The fake worker of `tests/fake` compiles nothing: it sleeps. So two cores are enough for four nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

Json = dict[str, Any]

CHECKOUT = Path(__file__).resolve().parents[2]
NODES = 4
# The port for callers elsewhere.
CLIENT = 10301

MODEL = """
import os
import __main__

SCALE = 2.0
OFFSET = 1.0
SECONDS = 0.5


def load():
    return {"": "Model"}


# A compile takes some seconds. Each that begins is a line with its rows in the file COMPILES.
if hasattr(__main__, "Worker") and (compiles := os.environ.get("COMPILES")):
    plain = __main__.Worker.compile

    def compile(self, request):
        rows = __main__.json.loads(open(request["file"]).read())["inputs"][0]["shape"][0]
        with open(compiles, "a") as file:
            file.write(f"{rows}\\n")
        __main__.time.sleep(SECONDS)
        return plain(self, request)

    __main__.Worker.compile = compile

# fake: compile skips
"""

SPEC = """
schema = 1

[model]
name = "fake"
entry = "model:load"

[target]
device = "cpu"

[compile]
healthcheck = false

[[module]]
name = "affine"
[module.inputs]
x = { dtype = "float32", shape = ["batch", 3], pad = 0 }
[module.buckets]
batch = BATCH
"""


class Project:
    """A fake model with its spec, a remote, and what its builds print."""

    def __init__(self, root: Path, programs: int, seconds: float = 0.5, steer: str = "") -> None:
        self.root, self.programs = root, programs
        self.url = f"file://{root}/remote"
        (root / "model").mkdir(parents=True)
        text = MODEL.replace("SECONDS = 0.5", f"SECONDS = {seconds}")
        (root / "model/model.py").write_text(f"{text}# fake: {steer}\n" if steer else text)
        (root / "model/precast.toml").write_text(SPEC.replace("BATCH", str(list(range(1, programs + 1)))))

    def start(self, store: str, *options: str, **environment: str) -> subprocess.Popen[str]:
        """Starts a build, with lines of JSON on its output."""
        command = [precast(), "build", f"--file={self.root}/model/precast.toml", "--format=json"]
        return subprocess.Popen(
            [*command, f"--store={self.root}/{store}", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def build(self, store: str, *options: str, **environment: str) -> tuple[list[Json], Json]:
        """Builds; returns the events and the last document."""
        output, errors = (process := self.start(store, *options, **environment)).communicate()
        assert process.returncode == 0, output[-3000:] + errors
        events = [json.loads(line) for line in output.splitlines()]
        return events[:-1], events[-1]

    def on_ray(self, store: str, *options: str) -> tuple[list[Json], Json]:
        return self.build(store, "--on=ray", f"--remote={self.url}", "--jobs=1", *options)

    def release(self, store: str) -> Json:
        """Returns what the newest release of a store is, without the time and the place of its build."""
        found = json.loads(run("release", "ls", f"--store={self.root}/{store}", "--format=json"))["releases"][0]
        return {name: found[name] for name in ("model", "programs", "weights")}

    def sound(self) -> None:
        """Checks that the remote is whole: each program once, releases of one content, and a pull without a defect."""
        remote = self.root / "remote"
        assert len([path for path in (remote / "programs").rglob("*") if path.is_file()]) == self.programs
        listed = json.loads(run("ls", self.url, "--format=json"))["releases"]
        # Two pushes of one release at one moment may get two numbers.
        assert {one["programs"] for one in listed} == {self.programs}, listed
        assert len({one["identity"] for one in listed}) == 1, listed
        shutil.rmtree(self.root / "pulled", ignore_errors=True)
        run("pull", self.url, "fake", "--all", f"--store={self.root}/pulled")
        run("verify", f"--store={self.root}/pulled")


def precast() -> str:
    return os.environ.get("PRECAST_COMMAND") or str(Path(sys.executable).parent / "precast")


def run(*arguments: str) -> str:
    done = subprocess.run([precast(), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def keys(last: Json) -> dict[str, str]:
    """Returns the programs of a build, by name."""
    return {one["program"]: one.get("id") for one in last["programs"] if one["state"] != "skipped"}


def published(events: list[Json]) -> list[tuple[str, str]]:
    """Returns the programs that builders made, each with its node."""
    said = [(event["node"], event["said"]) for event in events if event["event"] == "builder"]
    return [(line["bucket"], node) for node, line in said if line.get("event") == "published"]


def processes(*words: str) -> Iterator[int]:
    """Returns the processes whose command lines have all these words."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                yield int(entry.name)


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Has every builder use the fake worker, also those on the nodes, which have the environment of this process."""
    folder = tmp_path_factory.mktemp("worker")
    path = folder / "worker"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "{CHECKOUT}/tests/fake/worker.py"\n')
    path.chmod(0o755)
    os.environ |= {
        "PRECAST_WORKER": str(path),
        "PRECAST_PYTHON": sys.executable,
        "PRECAST_COMMAND": precast(),
        "PRECAST_LEASE_SECONDS": "3",
        "FAKE_SITE": sysconfig.get_path("purelib"),
        "COMPILES": str(folder / "compiles"),
    }


@pytest.fixture(scope="session")
def cluster(worker: None) -> Iterator[Cluster]:
    """A head without CPUs, and four nodes with room for one builder each."""
    head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": CLIENT}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NODES):
        cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    yield cluster
    cluster.shutdown()
