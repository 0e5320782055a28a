"""The minimum cost of a call: FLOPs and bytes of each bucket, and the time that this machine needs for them.

FLOPs are those of matrix products, convolutions and attention, as torch counts them; the other operations read and
write memory, and their FLOPs are few. Bytes are the weights once, the inputs and the outputs, which no fusion saves.
Tables of embeddings do not count, since a call reads few of their rows.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from .. import failures
from ..graph import structure
from ..torch_private import fake, modules
from .subject import Subject

# Rows and columns of the multiplied matrices, copied bytes, and the minimum time of a measurement.
_SIDE = {"cpu": 1024, "cuda": 8192}
_COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}
_SECONDS = 0.1
_RUNS = 5


def costs(subject: Subject) -> dict[str, Any]:
    """Returns the protocol's `Cost`: each bucket, and how fast this machine is."""
    dtype = _dtype(subject.call)
    flops, copied, how = _rates(subject.opened.device, dtype)
    weights = _weights(subject.call)
    buckets = []
    for sizes in subject.buckets:
        try:
            counted, inputs, outputs = _count(subject, sizes)
        except Exception as error:
            at = ", ".join(f"`{dim}` = {size}" for dim, size in sizes.items())
            why = f"it fails with {failures.named(error)}"
            subject.unknown.append(f"what a call costs at {at or 'its one size'}: {why}")
            continue
        moved = weights + inputs + outputs
        floor = max(counted / flops, moved / copied)
        buckets.append({"sizes": sizes, "flops": counted, "bytes": moved, "seconds": floor})
    return {
        "buckets": buckets,
        "weights": weights,
        "flops_per_second": flops,
        "bytes_per_second": copied,
        "measured": f"{how}; {torch.get_num_threads()} threads" if subject.opened.device == "cpu" else how,
    }


def _count(subject: Subject, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Returns FLOPs, bytes of the inputs and bytes of the outputs of a call. Values are computed only if need be."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    # Torch counts the kernels of GPUs only.
    further = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}

    def count(inputs: list[Any]) -> tuple[int, int, int]:
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=further) as counter:
            outputs = structure.tensors_of(subject.call(*inputs))
        return counter.get_total_flops(), _bytes(inputs), _bytes(outputs)

    inputs = subject.inputs_at(sizes)
    try:
        with fake.mode_with_real_parameters() as mode:
            return count([mode.from_tensor(value) for value in inputs])
    except Exception:  # a module that needs real values
        return count(inputs)


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _weights(module: Any) -> int:
    """Returns the bytes of parameters and buffers, tied ones once, without tables of embeddings."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    held = [one for part in module.modules() if not isinstance(part, tables) for one in modules.own_tensors(part)]
    return sum({fake.storage(one): one.numel() * one.element_size() for one in held}.values())


def _dtype(module: Any) -> Any:
    """Returns the floating dtype that most bytes of the weights have."""
    held: dict[Any, int] = {}
    for one in module.parameters():
        if one.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            held[one.dtype] = held.get(one.dtype, 0) + one.numel() * one.element_size()
    return max(held, key=lambda dtype: held[dtype], default=torch.float32)


@functools.cache
def _rates(device: str, dtype: Any) -> tuple[float, float, str]:
    """Returns FLOPs and bytes a second, measured by a product of two matrices and by a copy, and how that was done."""
    side, copied = _SIDE[device], _COPIED[device]
    first = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(first)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def best(function: Any) -> float:
        took = []
        begun = time.perf_counter()
        while len(took) < _RUNS or time.perf_counter() - begun < _SECONDS:
            started = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - started)
        return min(took)

    flops = 2 * side**3 / best(lambda: torch.mm(first, first, out=product))
    # A copy reads and writes.
    moved = 2 * copied / best(lambda: target.copy_(source))
    name = str(dtype).removeprefix("torch.")
    return flops, moved, f"a product of {side} by {side} in {name}, a copy of {copied >> 20} MiB"
