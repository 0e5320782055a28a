"""Fake tensors: shapes, strides and shared memory of a graph's values, without data.

Private: `torch._subclasses.fake_tensor`, `FakeTensor.fake_mode`, `untyped_storage()._cdata`. Without them: graphs can't
be checked after they were changed, and views look like copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .exported import attribute, silenced


def propagate(graph: Any) -> None:
    """Runs a graph on fake tensors and keeps every value in `meta["val"]`; shared memory is a shared storage there."""
    values: dict[Any, Any] = {}
    with mode_of(graph), torch.no_grad(), _symbolic(graph):
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = node.meta["val"]
            elif node.op == "get_attr":
                values[node] = attribute(graph, node.target)
            elif node.op == "call_function":
                values[node] = node.meta["val"] = _run(node, values)


def propagate_node(node: Any) -> None:
    """Runs one new node on the fake values of its arguments."""
    values = {value: value.meta["val"] for value in node.all_input_nodes}
    with mode_of(node.graph), torch.no_grad(), _symbolic(node.graph):
        node.meta["val"] = _run(node, values)


def _run(node: Any, values: dict[Any, Any]) -> Any:
    args = torch.fx.map_arg(node.args, lambda value: values[value])
    kwargs = torch.fx.map_arg(node.kwargs, lambda value: values[value])
    return node.target(*args, **kwargs)


def _symbolic(graph: Any) -> AbstractContextManager[Any]:
    """Lets composite operations run on symbolic sizes: in C++ they need numbers, in Python they do not.

    Private: `torch._dispatch.python`. Without it: dynamic shapes can't be captured.
    """
    from torch._dispatch.python import enable_python_dispatcher

    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return nullcontext() if all(isinstance(size, int) for size in sizes) else enable_python_dispatcher()


def mode_of(graph: Any) -> Any:
    """Returns the fake mode of a graph's values, a new one for a graph without fake values."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for node in graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode()


@contextmanager
def mode_with_real_parameters() -> Iterator[Any]:
    """Yields a fake mode in which a module's real parameters may be used: running it at another size costs nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # It logs a trace for every operation that fails, and a size that the module does not take is no failure here.
    with silenced("torch._subclasses.fake_tensor"), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def trace(function: Callable[..., Any], graph: Any, values: list[Any]) -> Any:
    """Returns the graph of a function of fake values of `graph`, in the operations that torch breaks it into.

    Private: `torch.fx.experimental.proxy_tensor.make_fx`. Without it: each attention converts its own mask.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode_of(graph), torch.no_grad():
        return make_fx(function)(*values).graph


def real_values() -> AbstractContextManager[Any]:
    """Switches the fake mode off, so that operators compute values.

    Private: `torch.utils._python_dispatch._disable_current_modes`. Without it: no weight can be prepacked.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def storage(tensor: Any) -> int:
    """Returns an identity of a tensor's memory."""
    return tensor.untyped_storage()._cdata


def is_dense(tensor: Any) -> bool:
    """Returns whether a tensor starts its memory and fills it without gaps or overlap."""
    if tensor.storage_offset() != 0:
        return False
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step != expected:
            return False
        expected *= size
    return True


def is_view(node: Any) -> bool:
    """Returns whether a node's result shares memory with its first argument."""
    base, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(base, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return storage(base) == storage(result)
