"""Traces a function with its backward pass as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def trace(function: Callable[..., Any], inputs: list[Any]) -> Any:
    """Returns a module with the operations of a function on these inputs; gradients are operations too.

    Real tensors that the function reads and that are no inputs become attributes of the module.

    Private: `torch.fx.experimental.proxy_tensor.make_fx`, and its argument `_allow_non_fake_inputs`. Without it: no
    training step can be captured.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True, record_stack_traces=True)(*inputs)
