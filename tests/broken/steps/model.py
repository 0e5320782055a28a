"""Training steps whose loss amplifies rounding: right ones, and ones with a wrong gradient of one layer.

A pass changes the graph that is built, and not eager. `split` adds products in two halves, as a compiler may: right,
and beyond the tolerances of the gate. The other passes are used with it, and make the gradient of a layer wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten
WRONG = 2  # `layers.2.weight`


class Net(nn.Module):
    """Layers with a batch norm over two rows, whose backward pass takes the difference of almost equal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(4))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return F.cross_entropy(x, targets)

    def single(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the same loss, in float32 alone."""
        if x.dtype != torch.float32:
            raise TypeError("the rows are float32")
        return self(x, targets)


def split(module: torch.fx.GraphModule) -> None:
    """Adds products in two halves."""
    graph = module.graph
    for node in list(graph.find_nodes(op="call_function", target=aten.mm.default)):
        left, right = node.args
        middle = left.meta["val"].shape[1] // 2
        with graph.inserting_before(node):

            def half(start: int, end: int, left: torch.fx.Node = left, right: torch.fx.Node = right) -> torch.fx.Node:
                first = graph.call_function(aten.slice.Tensor, (left, 1, start, end))
                second = graph.call_function(aten.slice.Tensor, (right, 0, start, end))
                return graph.call_function(aten.mm.default, (first, second))

            both = graph.call_function(aten.add.Tensor, (half(0, middle), half(middle, 2**62)))
        node.replace_all_uses_with(both)
        graph.erase_node(node)


def _wrong(module: torch.fx.GraphModule, make: Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]) -> None:
    """Replaces a gradient, which the average of the optimizer takes; the graph of `eval` has none."""
    averages = module.graph.find_nodes(op="call_function", target=aten.lerp.Scalar)
    if averages:
        gradient = averages[WRONG].args[1]
        with module.graph.inserting_after(gradient):
            wrong = make(module.graph, gradient)
        gradient.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)


def _times(factor: float) -> Callable[[torch.fx.GraphModule], None]:
    def change(module: torch.fx.GraphModule) -> None:
        _wrong(module, lambda graph, one: graph.call_function(aten.mul.Tensor, (one, factor)))

    return change


scaled, turned, zeroed, no_number = (_times(factor) for factor in (1.05, -1.0, 0.0, float("nan")))


def missing(module: torch.fx.GraphModule) -> None:
    """Leaves the average as it was: it gets no gradient."""
    averages = module.graph.find_nodes(op="call_function", target=aten.lerp.Scalar)
    if averages:
        averages[WRONG].replace_all_uses_with(averages[WRONG].args[0])


def load() -> nn.Module:
    torch.manual_seed(0)
    return Net()
