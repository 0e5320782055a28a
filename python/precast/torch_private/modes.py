"""The modes of torch that change a computation, or record it.

| mode | |
|---|---|
| default dtype and device, determinism, precision of products | of the process: part of a release's name |
| a tracer, function and dispatch modes, transforms of `torch.func`, forward-mode derivatives | no artifact answers |
| autocast, gradients | the caller's to compare |

Private: `torch._C._get_tracing_state`, the lengths of the stacks of modes, `peek_interpreter_stack`, the level of
forward-mode derivatives, and `DeviceContext`, the mode that `torch.set_default_device` pushes. Without them: a call
under such a mode is answered as one without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext


def of_process() -> tuple[Any, ...]:
    """Returns the modes of the process, which programs are captured in."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_float32_matmul_precision(),
        torch._C._get_cudnn_allow_tf32(),
        _device(),
    )


def _device() -> str | None:
    """Returns the kind of the default device, if one was set."""
    if torch._C._len_torch_function_stack() == 0:
        return None
    mode = torch._C._get_function_stack_at(0)
    return mode.device.type if type(mode) is DeviceContext else None


def unusable() -> tuple[str, str] | None:
    """Returns the name and the words of a mode in which no artifact answers, if one is active."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "tracing", "a tracer records the call"
    functions = torch._C._len_torch_function_stack()
    if (
        (functions and not (functions == 1 and type(torch._C._get_function_stack_at(0)) is DeviceContext))
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return "mode", "a function or dispatch mode, or a transform of `torch.func`, is active"
    if forward_ad._current_level >= 0:
        return "mode", "derivatives are computed in forward mode, which programs have none of"
    return None
