"""Builders on a Ray cluster, without Ray: `tests/ray` has them on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from precast.client import on_ray
from precast.client.on_ray import Nodes
from precast.client.progress import Line, Lines


def node(name: str, address: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": True, "Resources": resources}


@pytest.fixture
def nodes() -> Nodes:
    found = [
        node("a" * 8, "10.0.0.1"),
        node("b" * 8, "10.0.0.2", CPU=16, GPU=2, sm90=2),
        node("c" * 8, "10.0.0.3", CPU=8, GPU=1),
        node("d" * 8, "10.0.0.3", CPU=4),
        {**node("e" * 8, "10.0.0.4", CPU=64, GPU=8, sm90=8), "Alive": False},
    ]
    context = SimpleNamespace(get_node_id=lambda: "a" * 8)
    return Nodes(SimpleNamespace(nodes=lambda: found, get_runtime_context=lambda: context))


def test_there_are_as_many_builders_as_the_nodes_have_room_for(nodes: Nodes) -> None:
    assert nodes.room({"CPU": 4, "GPU": 0}) == 4 + 2 + 1
    assert nodes.room({"CPU": 4, "GPU": 1}) == 2 + 1
    assert nodes.room({"CPU": 4, "GPU": 1, "sm90": 1}) == 2
    assert nodes.room({"CPU": 32}) == 0
    # Without `--jobs`: the smallest node that has all else.
    assert nodes.fewest_cpus({"GPU": 0}) == 4
    assert nodes.fewest_cpus({"GPU": 1}) == 8
    assert nodes.fewest_cpus({"GPU": 1, "sm90": 1}) == 16
    assert nodes.fewest_cpus({"sm80": 1}) == 1


def test_a_node_is_named_by_its_address_if_it_alone_has_it(nodes: Nodes) -> None:
    assert nodes.name("b" * 8) == "10.0.0.2"
    assert nodes.name("c" * 8) == "10.0.0.3#cccccc"
    assert nodes.name("f" * 8) == "#ffffff"
    assert nodes.named(f"{'b' * 8}: no spec") == "10.0.0.2: no spec"


def test_a_python_without_ray_says_so(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('there is no ray')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    request = json.dumps({"cluster": "ray", "spec": "precast.toml", "arguments": [], "missing": 1})
    command = [sys.executable, "-P", "-m", "precast.client.on_ray"]
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(command, input=request + "\n", env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    said = json.loads(ran.stdout)
    assert "has no Ray: there is no ray" in said["error"] and "precast[ray]" in said["hint"]


def test_the_store_of_a_killed_builder_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with on_ray._folder() as alive:
        old = tmp_path / "precast-builder-killed"
        (old / "store").mkdir(parents=True)
        (old / "owner").touch()
        for folder in (old, Path(alive)):
            os.utime(folder, (0, 0))
        with on_ray._folder() as new:
            assert sorted(tmp_path.iterdir()) == sorted([Path(alive), Path(new)])
    assert list(tmp_path.iterdir()) == []


BUILDERS: list[dict[str, Any]] = [
    {"event": "planned", "programs": 2, "missing": 2},
    *(
        {"event": "builder", "builder": number, "node": f"10.0.0.{number}", "said": said}
        for number, said in [
            (2, {"event": "planned", "programs": 2, "missing": 2}),
            (2, {"event": "begin", "worker": 0, "job": "compile", "what": "encode batch=8"}),
            (3, {"event": "published", "module": "encode", "bucket": "batch=1"}),
            (3, {"log": "text of a library"}),
        ]
    ),
]


def test_lines_name_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for event in BUILDERS:
        lines.event(event)
    assert capsys.readouterr().err.splitlines() == [
        "plan: 2 of 2 programs are missing",
        "10.0.0.2: plan: 2 of 2 programs are missing",
        "10.0.0.3: published: encode batch=1",
        "10.0.0.3: text of a library",
    ]


def test_one_line_counts_the_programs_of_all_builders() -> None:
    above: list[str] = []
    shown: list[str] = []
    line = Line(SimpleNamespace(above=above.append, show=shown.append))
    for event in BUILDERS:
        line.event(event)
    assert shown[-1] == "Building [==========          ] 1/2 programs · 10.0.0.2: compile encode batch=8"
    assert above == ["10.0.0.3: text of a library"]
