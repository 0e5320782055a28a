"""Milliseconds of a token at a batch size and a context whose cache is full, with a device that always has work.

python peer.py BATCH CONTEXT                 the same step in PyTorch, compiled with reduce-overhead
python peer.py BATCH CONTEXT STORE MODEL     a session of a release, as a CUDA graph
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

STEPS = 200


def compiled(batch: int, context: int) -> Callable[..., Any]:
    from model import load

    return torch.compile(load(batch, context), mode="reduce-overhead", fullgraph=True)


def released(store: str, name: str, ids: torch.Tensor, at: torch.Tensor) -> Callable[..., Any]:
    import precast

    session = precast.load(store, name, device="cuda", graphs="always").session()
    # Positions on the host move the session into the bucket of the context.
    session.run("decode", ids.cpu(), at.cpu())
    return lambda ids, at: session.run("decode", ids, at)


def main(batch: int, context: int, *release: str) -> None:
    ids = torch.ones(batch, 1, dtype=torch.int64, device="cuda")
    at = torch.tensor([context - 1], device="cuda")
    step = released(*release, ids, at) if release else compiled(batch, context)
    with torch.inference_mode():
        for _ in range(20):
            step(ids, at)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            step(ids, at)
        torch.cuda.synchronize()
    taken = (time.perf_counter() - began) / STEPS * 1e3
    way = "precast" if release else "compile"
    print(json.dumps({"way": way, "batch": batch, "context": context, "ms": taken}))


main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
