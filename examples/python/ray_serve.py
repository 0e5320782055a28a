"""Replicas of an encoder with Ray Serve. All of them map one copy of the weights.

```console
$ python ray_serve.py --store artifacts     # two replicas; compares with eager, and prints their memory
```
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray import serve
from sentence import SentenceEncoder, check, eager, sentences, store

REPLICAS = 2


@serve.deployment(num_replicas=REPLICAS, ray_actor_options={"num_cpus": 0.5})
class Encoder:
    """One process for each replica, with the same store."""

    def __init__(self, store: str) -> None:
        self.encoder = SentenceEncoder(store)

    async def __call__(self, sentences: list[str]) -> tuple[int, np.ndarray]:
        """Returns the process that answers, and the vectors."""
        return os.getpid(), await self.encoder.aencode(sentences)


def mapped(pid: int, store: Path) -> dict[str, int]:
    """Returns the bytes of the store's files that a process has mapped: `Rss` in all, `Pss` its share of them."""
    sizes: dict[str, int] = defaultdict(int)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(store) in line
        elif inside and (field := re.match(r"(Rss|Pss|Private_Dirty): +(\d+) kB", line)):
            sizes[field[1]] += int(field[2]) * 1024
    return sizes


def main() -> None:
    folder = store().resolve()
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel("ERROR")
    handle: Any = serve.run(Encoder.bind(str(folder)))
    texts = sentences()
    answers = [handle.remote([text]) for text in texts * 4]
    found = [answer.result(timeout_s=60) for answer in answers]
    pids = sorted({pid for pid, _ in found})
    print(f"{len(found)} requests, answered by processes {pids}")
    assert len(pids) == REPLICAS
    sizes = {pid: mapped(pid, folder) for pid in pids}
    for pid, of in sizes.items():
        print(
            f"  {pid}: {of['Rss'] / 1e6:.0f} MB of the store's files in memory, its share is {of['Pss'] / 1e6:.0f} MB"
        )
    one, all_of_them = max(of["Rss"] for of in sizes.values()), sum(of["Pss"] for of in sizes.values())
    print(f"all replicas together: {all_of_them / 1e6:.0f} MB, one alone: {one / 1e6:.0f} MB")
    assert all_of_them < 1.2 * one
    serve.shutdown()
    ray.shutdown()
    vectors = np.concatenate([vectors for _, vectors in found[: len(texts)]])
    check(vectors, eager(SentenceEncoder(folder), texts))


if __name__ == "__main__":
    main()
