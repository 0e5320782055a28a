"""Kernels that start early: on a GPU of compute capability 9.0 or newer, while the kernel before them ends.

A build launches them so with the option `triton.enable_pdl`. Such a kernel has a wait, which is inline assembly: torch
does not know what a kernel with it writes, so the outputs are named here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

_NAMES: dict[Callable[..., Any], list[str]] = {}


def starts(x: torch.Tensor) -> bool:
    """Returns whether the compiler's own kernels on the device of `x` start early.

    Private: `torch._inductor.config.triton.enable_pdl`. Without it: these kernels start late.
    """
    from torch._inductor import config

    return x.device.type == "cuda" and config.triton.enable_pdl and torch.cuda.get_device_capability()[0] >= 9


def name_outputs(names: Mapping[Callable[..., Any], list[str]]) -> None:
    """Names the outputs of kernels, by their functions.

    A launch with a number of warps wraps a kernel in an autotuner, whose function is the kernel.

    Private: `torch._higher_order_ops.triton_kernel_wrap.identify_mutated_tensors`; where that is gone (2.12)
    `identify_accessed_tensors`, whose result has `read_writes.writes`. Without them: torch assumes that these kernels
    write into all their arguments, and copies each weight in each call.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    first, known = not _NAMES, "identify_mutated_tensors"
    _NAMES.update(names)
    if not first:
        return
    name = known if hasattr(triton_kernel_wrap, known) else "identify_accessed_tensors"
    found = getattr(triton_kernel_wrap, name)

    def named(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        function = kernel
        while hasattr(function, "fn"):
            function = function.fn
        outputs = _NAMES.get(function)
        if outputs is None:
            return found(kernel, *args, **kwargs)
        if name == known:
            return list(outputs)
        accessed = found(kernel, *args, **kwargs)
        writes = type(accessed.read_writes.writes)(dep for dep in accessed.read_writes.writes if dep.name in outputs)
        return dataclasses.replace(accessed, read_writes=dataclasses.replace(accessed.read_writes, writes=writes))

    setattr(triton_kernel_wrap, name, named)
