"""Milliseconds of a token at a batch size, for a cache that is full at each context; the device always has work.

python peer.py BATCH                 the same step in PyTorch, compiled with reduce-overhead for each context
python peer.py BATCH STORE MODEL     a session of a release, as a CUDA graph, in the smallest bucket of each context

A line of JSON for each context. The first one has the seconds from the start of this script to the first token.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

BEGAN = time.perf_counter()
STEPS = 200
CONTEXTS = (256, 1024, 4096)


def compiled(batch: int, context: int) -> Callable[..., Any]:
    import torch
    from model import load

    return torch.compile(load(batch, context), mode="reduce-overhead", fullgraph=True)


def released(store: str, name: str) -> Callable[..., Any]:
    import precast

    session = precast.load(store, name, device="cuda", graphs="always").session()
    return lambda ids, at: session.run("decode", ids, at)


def main(batch: int, *release: str) -> None:
    import torch

    step = released(*release) if release else None
    for context in CONTEXTS:
        # Positions on the host move a session into the bucket of the context.
        ids, at = torch.ones(batch, 1, dtype=torch.int64), torch.tensor([context - 1])
        call = step or compiled(batch, context)
        with torch.inference_mode():
            if step is not None:
                step(ids, at)
            ids, at = ids.cuda(), at.cuda()
            call(ids, at)
            torch.cuda.synchronize()
            first = {"first_s": round(time.perf_counter() - BEGAN, 3)} if context == CONTEXTS[0] else {}
            for _ in range(20):
                call(ids, at)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                call(ids, at)
            torch.cuda.synchronize()
        taken = (time.perf_counter() - began) / STEPS * 1e3
        row = {"way": "precast" if release else "compile", "release": release[1:], "batch": batch, "context": context}
        print(json.dumps({**row, "ms": round(taken, 4), **first}), flush=True)


main(int(sys.argv[1]), *sys.argv[2:])
