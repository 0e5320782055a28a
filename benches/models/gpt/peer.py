"""Training steps of the same GPT in PyTorch on a GPU, with fused AdamW and bfloat16 by autocast.

    python peer.py {eager,compile}     prints the milliseconds of a step, the seconds to the first one, the peak in MiB
    python peer.py batch FILE          writes 64 rows for `precast train`

`compile` is torch.compile with reduce-overhead for the model, and torch.compile for the optimizer.
"""

import json
import sys
import time

import torch
from model import LENGTH, TOKENS, load


def main(way: str) -> None:
    if way == "batch":
        from safetensors.torch import save_file

        ids = torch.randint(0, TOKENS, (64, LENGTH), generator=torch.Generator().manual_seed(0))
        save_file({"ids": ids, "targets": ids.roll(-1, 1).contiguous()}, sys.argv[2])
        return
    model = load().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=way == "eager", capturable=way != "eager")
    ids = torch.randint(0, TOKENS, (1, LENGTH), device="cuda")

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model.loss(ids, ids.roll(-1, 1))

    update = optimizer.step
    if way == "compile":
        loss_of = torch.compile(loss_of, mode="reduce-overhead")
        update = torch.compile(optimizer.step)

    def step() -> None:
        # The gradients of a compiled backward pass are in its graph's memory until the next run.
        torch.compiler.cudagraph_mark_step_begin()
        loss_of(ids).backward()
        update()
        optimizer.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    began, steps = time.perf_counter(), 100
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / steps * 1e3
    print(json.dumps({"way": way, "ms": took, "first_s": first, "peak_mib": torch.cuda.max_memory_allocated() >> 20}))


main(sys.argv[1])
