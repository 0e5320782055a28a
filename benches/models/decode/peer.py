"""The same step in PyTorch, compiled with reduce-overhead: milliseconds a token at a batch size and a context.

python peer.py BATCH CONTEXT
"""

import json
import sys
import time

import torch
from model import load


def main(batch: int, context: int) -> None:
    model = load(batch, context)
    ids = torch.ones(batch, 1, dtype=torch.int64, device="cuda")
    at = torch.tensor([context - 1], device="cuda")
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode():
        for _ in range(20):
            step(ids, at)
        torch.cuda.synchronize()
        began, steps = time.perf_counter(), 200
        for _ in range(steps):
            step(ids, at)
        torch.cuda.synchronize()
    print(json.dumps({"batch": batch, "context": context, "ms": (time.perf_counter() - began) / steps * 1e3}))


main(int(sys.argv[1]), int(sys.argv[2]))
