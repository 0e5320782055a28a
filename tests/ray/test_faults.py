"""Nodes that vanish, builders that are killed, and leases whose holder is paused until they are taken over.

In each round one build is shared, and some of this happens at seeded moments. `PRECAST_RAY_ROUNDS` is the number of
rounds.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import NODES, Project, processes
from ray.cluster_utils import Cluster

ROUNDS = int(os.environ.get("PRECAST_RAY_ROUNDS", "40"))
PROGRAMS = 8
# Longer than the time after which a lease is taken over.
PAUSE = 5.0


def children(of: int) -> Iterator[int]:
    for task in Path(f"/proc/{of}/task").glob("*/children"):
        try:
            yield from map(int, task.read_text().split())
        except OSError:
            continue


class Faults:
    """What happens in one round."""

    def __init__(self, cluster: Cluster, project: Project, chance: random.Random) -> None:
        self.cluster, self.project, self.chance = cluster, project, chance
        self.done: list[str] = []

    def builders(self) -> list[int]:
        return sorted(processes("--until-stdin-ends", f"--remote={self.project.url}"))

    def remove_node(self) -> None:
        nodes = [node for node in self.cluster.worker_nodes]
        self.cluster.remove_node(self.chance.choice(nodes), allow_graceful=False)
        self.done.append("a node was removed")

    def kill_builder(self) -> None:
        self.signal("a builder was killed", self.builders(), signal.SIGKILL)

    def pause_lease(self) -> None:
        """Pauses the processes that hold leases for a builder, and not the builder, which goes on."""
        for builder in self.chance.sample(found := self.builders(), len(found)):
            if holders := [child for child in children(builder) if self.is_holder(child)]:
                self.pause("leases were paused", holders)
                return

    def pause_builder(self) -> None:
        if found := self.builders():
            builder = self.chance.choice(found)
            self.pause("a builder was paused", [builder, *children(builder)])

    def is_holder(self, process: int) -> bool:
        return "precast-remote" in Path(f"/proc/{process}/cmdline").read_text(errors="replace")

    def pause(self, what: str, all_of: list[int]) -> None:
        for one in all_of:
            self.signal("", [one], signal.SIGSTOP)
        self.done.append(what)
        time.sleep(PAUSE)
        for one in all_of:
            self.signal("", [one], signal.SIGCONT)

    def signal(self, what: str, among: list[int], which: signal.Signals) -> None:
        if among:
            try:
                os.kill(self.chance.choice(among), which)
            except ProcessLookupError:
                return
            if what:
                self.done.append(what)

    def run(self, until: threading.Event) -> None:
        kinds = [self.remove_node, self.kill_builder, self.kill_builder, self.pause_lease, self.pause_builder]
        # The first one when builders are at work.
        while not self.builders() and not until.wait(0.05):
            pass
        for _ in range(self.chance.randint(1, 3)):
            if until.wait(self.chance.uniform(0.2, 2.5)):
                return
            self.chance.choice(kinds)()


@pytest.mark.timeout(3600)
def test_every_plan_ends_complete(cluster: Cluster, tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_RAY_SEED", "1"))
    tally: collections.Counter[str] = collections.Counter()
    most = 0
    for number in range(ROUNDS):
        while len(cluster.worker_nodes) < NODES:
            cluster.add_node(num_cpus=1)
        compiles = Path(os.environ["COMPILES"])
        compiles.write_text("")
        project = Project(tmp_path / str(number), PROGRAMS)
        faults = Faults(cluster, project, random.Random(seed * 1000 + number))
        over = threading.Event()
        thread = threading.Thread(target=faults.run, args=(over,))
        thread.start()
        begun = time.monotonic()
        try:
            _, last = project.on_ray("shared")
        finally:
            over.set()
            thread.join()
        took = time.monotonic() - begun
        built = collections.Counter(compiles.read_text().split())
        print(f"round {number}: {took:.1f} s; {', '.join(faults.done) or 'nothing happened'}; compiled {dict(built)}")
        tally.update(faults.done)
        states = [one["state"] for one in last["programs"]]
        assert states.count("hit") + states.count("built") == PROGRAMS and last["published"], last
        assert set(built) == {str(rows) for rows in range(1, PROGRAMS + 1)}
        assert max(built.values()) <= len(faults.done) + 1, (faults.done, built)
        most = max(most, *built.values())
        project.sound()
    print(json.dumps({"rounds": ROUNDS, "seed": seed, **tally, "most compiles of one program": most}))
