"""`precast build --on ray` on a cluster of four nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CLIENT, NODES, Project, keys, processes, published
from ray.cluster_utils import Cluster


def test_the_release_is_that_of_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, 8, seconds=1)
    _, alone = project.build("alone", "--jobs=1")
    events, last = project.on_ray("shared")
    made = published(events)
    assert sorted(bucket for bucket, _ in made) == [f"batch={rows}" for rows in range(1, 9)]
    assert len({node for _, node in made}) == NODES, made
    assert (keys(last), last["compiled"]) == (keys(alone), 0)
    assert project.release("shared") == project.release("alone")
    project.sound()
    # Nothing is missing: no builder starts.
    events, last = project.on_ray("another")
    assert not [event for event in events if event["event"] == "builder"]
    assert last["published"]


@pytest.mark.timeout(1200)
def test_four_nodes_are_almost_four_times_as_fast_as_one(cluster: Cluster, tmp_path: Path) -> None:
    took = []
    for count in (1, NODES):
        while len(cluster.worker_nodes) > count:
            cluster.remove_node(min(cluster.worker_nodes, key=lambda node: node.node_id))
        while len(cluster.worker_nodes) < count:
            cluster.add_node(num_cpus=1)
        project = Project(tmp_path / str(count), 32, seconds=8)
        begun = time.monotonic()
        events, _ = project.on_ray("shared")
        took.append(time.monotonic() - begun)
        assert len({node for _, node in published(events)}) == count
        project.sound()
    efficiency = took[0] / (NODES * took[1])
    print(f"one node {took[0]:.1f} s, {NODES} nodes {took[1]:.1f} s, efficiency {efficiency:.2f}")
    assert efficiency > 0.85


def test_a_cluster_elsewhere_gets_the_folder_of_the_spec(cluster: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, 4)
    events, last = project.build("shared", f"--on=ray://localhost:{CLIENT}", f"--remote={project.url}", "--jobs=1")
    assert len(published(events)) == 4 and last["compiled"] == 0
    project.sound()


def test_ctrl_c_ends_the_builders_and_their_leases(cluster: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, 8, steer="compile waits")
    process = project.start("shared", "--on=ray", f"--remote={project.url}", "--jobs=1")

    def leases() -> int:
        return sum(path.is_file() for path in (tmp_path / "remote/leases").rglob("*"))

    until(lambda: leases() >= NODES)
    assert len(list(processes(f"--remote={project.url}", "--until-stdin-ends"))) == NODES
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    until(lambda: not list(processes(project.url)))
    assert not leases()


def test_a_killed_caller_ends_the_builders(cluster: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, 8, steer="compile waits")
    process = project.start("shared", "--on=ray", f"--remote={project.url}", "--jobs=1")
    until(lambda: len(list(processes(f"--remote={project.url}", "--until-stdin-ends"))) == NODES)
    process.kill()
    process.communicate()
    until(lambda: not list(processes(project.url)))


def test_this_machine_makes_what_builders_can_not(cluster: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, 2)
    # A file of this machine alone: the workers of the builders are others.
    own = os.environ["PRECAST_WORKER"]
    node = cluster.add_node(num_cpus=1, resources={"bad": 1}, env_vars={"PRECAST_WORKER": "/nowhere/worker"})
    try:
        events, last = project.on_ray("shared", "--ray-resource=bad=1")
    finally:
        cluster.remove_node(node)
    assert os.environ["PRECAST_WORKER"] == own
    notes = [event["message"] for event in events if event["event"] == "note"]
    assert any("a builder failed: " in note and "/nowhere/worker" in note for note in notes), notes
    assert "no builder is left: this machine makes what is missing" in notes
    assert last["compiled"] == 2
    project.sound()


def test_a_cluster_that_is_not_there_is_an_error(worker: None, tmp_path: Path) -> None:
    project = Project(tmp_path, 1)
    process = project.start("shared", "--on=ray://localhost:1", f"--remote={project.url}")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    said = json.loads(errors.splitlines()[-1])
    assert "can't reach the Ray cluster `ray://localhost:1`" in said["error"], said
    assert "`ray status`" in said["hint"]


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)
