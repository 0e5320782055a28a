"""Traces a function with its backward pass as one graph, and replaces operators while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def trace(
    function: Callable[..., Any], inputs: list[Any], decompositions: dict[Any, Callable[..., Any]] | None = None
) -> Any:
    """Returns a module with the operations of a function on these inputs; gradients are operations too. Functions take
    the place of operators where they don't return NotImplemented.

    Real tensors that the function reads and that are no inputs become attributes of the module.

    Private: `torch.fx.experimental.proxy_tensor.make_fx`, and its argument `_allow_non_fake_inputs`. Without it: no
    training step can be captured.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(
        function, decompositions, tracing_mode="fake", _allow_non_fake_inputs=True, record_stack_traces=True
    )
    return traced(*inputs)


def replacing(table: dict[Any, Callable[..., Any]]) -> Any:
    """Returns a context in which functions run in the place of operators, below autograd.

    Private: `torch.utils._python_dispatch.TorchDispatchMode`. Without it: a step with dropout can't be captured.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Replacing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return table.get(function, function)(*args, **(kwargs or {}))

    return Replacing()
