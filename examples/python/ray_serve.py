"""Replicas of an encoder with Ray Serve, from none to as many as requests need. Each loads the release from a remote.

```console
$ python ray_serve.py --store artifacts                 # pushes the release to a folder and serves it from there
$ python ray_serve.py --remote s3://models/precast      # serves what is there
$ python ray_serve.py --torch-compile                   # and a replica with `torch.compile`, for its time to be ready
```

A node pulls a release once, into its cache. Its replicas map one copy of the weights from there.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import precast
import ray
from ray import serve
from sentence import MINILM, SentenceEncoder, check, eager, sentences

REPLICAS = 2
# Quick steps, for an example: see Ray's guide on autoscaling.
SCALING = {
    "min_replicas": 0,
    "max_replicas": REPLICAS,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1,
}


@serve.deployment(autoscaling_config=SCALING, max_ongoing_requests=4, ray_actor_options={"num_cpus": 0.5})
class Encoder:
    """One process for each replica."""

    def __init__(self, remote: str) -> None:
        begun = time.perf_counter()
        self.encoder = SentenceEncoder(remote)
        self.encoder.encode("ready")
        self.seconds = time.perf_counter() - begun

    async def __call__(self, sentences: list[str]) -> tuple[int, float, np.ndarray]:
        """Returns the process that answers, the seconds of its start until it was ready, and the vectors."""
        return os.getpid(), self.seconds, await self.encoder.aencode(sentences)


@serve.deployment(ray_actor_options={"num_cpus": 0.5})
class Compiled:
    """The same model with `torch.compile`, from its Python code and an empty cache."""

    def __init__(self) -> None:
        begun = time.perf_counter()
        sys.path.insert(0, str(MINILM))
        import model
        import torch

        self.bert = torch.compile(model.load())
        with torch.inference_mode():
            self.bert(torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))
        self.seconds = time.perf_counter() - begun

    def ready(self) -> float:
        """Returns the seconds of its start until it was ready."""
        return self.seconds


def mapped(pid: int, cache: Path) -> dict[str, int]:
    """Returns the bytes of the cache's files that a process has mapped: `Rss` in all, `Pss` its share of them."""
    sizes: dict[str, int] = defaultdict(int)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(cache) in line
        elif inside and (field := re.match(r"(Rss|Pss|Private_Dirty): +(\d+) kB", line)):
            sizes[field[1]] += int(field[2]) * 1024
    return sizes


def replicas() -> int:
    """Returns the number of running replicas."""
    states = serve.status().applications["default"].deployments["Encoder"].replica_states
    return sum(states.values())


def burst(handle: Any, texts: list[str]) -> dict[int, float]:
    """Keeps requests in flight until all replicas answer; returns the seconds of their starts by process."""
    found: dict[int, float] = {}
    end = time.monotonic() + 120
    while len(found) < REPLICAS and time.monotonic() < end:
        answers = [handle.remote([text]) for text in texts * 4]
        found |= {pid: seconds for pid, seconds, _ in (answer.result(timeout_s=120) for answer in answers)}
    return found


def serving(remote: str, cache: Path) -> np.ndarray:
    """Serves the release of a remote; returns the vectors of the example's sentences."""
    handle: Any = serve.run(Encoder.bind(remote))
    print(f"{replicas()} replicas before the first request")
    texts = sentences()
    begun = time.perf_counter()
    _, first, _ = handle.remote(texts[:1]).result(timeout_s=120)
    took = time.perf_counter() - begun
    print(f"first answer after {took:.1f} s: the replica was ready {first:.1f} s after its start, with the pull")
    found = burst(handle, texts)
    assert len(found) == REPLICAS, found
    for pid, seconds in found.items():
        print(f"  process {pid}: ready {seconds:.1f} s after its start")
    sizes = {pid: mapped(pid, cache) for pid in found}
    for pid, of in sizes.items():
        rss, pss = of["Rss"] / 1e6, of["Pss"] / 1e6
        print(f"  process {pid}: {rss:.0f} MB of the cache's files in memory, its share is {pss:.0f} MB")
    one, together = max(of["Rss"] for of in sizes.values()), sum(of["Pss"] for of in sizes.values())
    print(f"all replicas together: {together / 1e6:.0f} MB, one alone: {one / 1e6:.0f} MB")
    assert together < 1.2 * one
    vectors = np.concatenate([handle.remote([text]).result(timeout_s=60)[2] for text in texts])
    end = time.monotonic() + 60
    while (left := replicas()) and time.monotonic() < end:
        time.sleep(0.2)
    print(f"{left} replicas when nobody asks")
    assert left == 0
    return vectors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="artifacts", type=Path, help="a store with the release `minilm`")
    parser.add_argument("--remote", help="where the release is already, as `s3://models/precast`")
    parser.add_argument("--torch-compile", action="store_true", help="start a replica with `torch.compile` too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        remote = given.remote or f"file://{folder}/remote"
        if not given.remote:
            precast.push("minilm", remote, store=given.store)
        # Empty, as on a node that was never used. Elsewhere it is `~/.cache`.
        there = {"env_vars": {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}}
        ray.init(
            num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False, runtime_env=there
        )
        logging.getLogger("ray.serve").setLevel("ERROR")
        vectors = serving(remote, Path(folder) / "precast")
        if given.torch_compile:
            compiled: Any = serve.run(Compiled.bind(), name="compiled", route_prefix="/compiled")
            print(f"with torch.compile: ready {compiled.ready.remote().result(timeout_s=600):.1f} s after its start")
        serve.shutdown()
        ray.shutdown()
        os.environ["XDG_CACHE_HOME"] = folder
        check(vectors, eager(SentenceEncoder(remote), sentences()))


if __name__ == "__main__":
    main()
