"""The values that a backward graph reads of the forward call, each by its cheapest source.

A view of a parameter, an input, a result or another saved value is computed again in the backward graph. A saved value
is contiguous, with its axes in the order of memory, so that an artifact takes it as it is.

Private: `torch._ops.OpOverload`, the type of operators, and `FakeTensor.fake_mode`, for new values. Without them: no
module can be captured for training in Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from . import draws

_aten = torch.ops.aten
# Views of the first argument: cheap to compute again. Each name is one of an operator of aten.
_VIEWS = {
    *("alias", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view"),
    *("_unsafe_view", "diagonal", "unfold", "as_strided"),
}


class Saved:
    """The saved values of one pair."""

    def __init__(
        self,
        forward: fx.Graph,
        sources: dict[str, tuple[str, str]],
        results: dict[str, fx.Node],
        known: dict[str, fx.Node],
        at: fx.Node,
    ) -> None:
        self.forward, self.sources, self.at = forward, sources, at
        self.known = known
        self.written = {name.removeprefix("buffer.") for name in results if name.startswith("buffer.")}
        self.named = {node: name for name, node in reversed(results.items()) if name.startswith("output.")}
        self.outputs: dict[str, fx.Node] = {}
        self.placeholders: dict[str, fx.Node] = {}
        self.weights: dict[str, fx.Node] = {}
        self._made: dict[fx.Node, fx.Node] = {}
        self._under = {base(node): node for node in self.named}

    def rebuild(self, graph: fx.Graph, node: fx.Node) -> None:
        """Replaces a placeholder of the backward graph by views of a value that has a source."""
        value = self.known[node.name]
        chain: list[fx.Node] = []
        at = value
        while at not in self.named and is_view(at):
            chain.append(at)
            at = at.all_input_nodes[0]
        if chain and at.op != "placeholder" and at not in self.named and not self._whole(at, value):
            chain, at = [], value
        with graph.inserting_before(self.at):
            made = self._source(graph, at, node)
            for step in reversed(chain):
                assert callable(step.target)
                made = graph.call_function(step.target, (made, *step.args[1:]), step.kwargs)
        if made is not node:
            node.replace_all_uses_with(made)
            graph.erase_node(node)

    @staticmethod
    def _whole(base: fx.Node, view: fx.Node) -> bool:
        """Returns whether a base is no larger than its view."""
        held = base.meta.get("val")
        return isinstance(held, Tensor) and held.numel() <= view.meta["val"].numel()

    def _source(self, graph: fx.Graph, value: fx.Node, at: fx.Node) -> fx.Node:
        if value in self._made:
            return self._made[value]
        kind, name = self.sources.get(value.name, ("saved", "")) if value.op == "placeholder" else ("saved", "")
        made = graph.placeholder(f"given_{len(self._made)}")
        made.meta["val"] = value.meta["val"]
        if kind == "weight" and name not in self.written:
            self.weights[name] = made
        elif kind == "input":
            self.placeholders[name if name.startswith("random.") else f"input.{name}"] = made
        elif value in self.named and _order(value) is None and base(value) is value:
            self.placeholders[self.named[value]] = made
        else:
            saved = f"saved.{len(self.outputs)}"
            self.placeholders[saved] = made
            self.outputs[saved] = self._contiguous(value)
            made_back = reorder(graph, made)
            self._made[value] = made_back
            return made_back
        self._made[value] = made
        return made

    def _contiguous(self, value: fx.Node) -> fx.Node:
        """Returns the value as a contiguous tensor with memory of its own."""
        order = _order(value)
        if order is not None:
            value = self._after(value, _aten.permute.default, list(order))
        if base(value) in self._under or base(value).op == "placeholder" or not _dense(value):
            value = self._after(value, _aten.clone.default, memory_format=torch.contiguous_format)
        return value

    def _after(self, value: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds an operation on a value of the forward graph, in the region of the value."""
        before = first(self.forward) if value.op == "placeholder" else value.next
        with self.forward.inserting_before(before):
            node = self.forward.call_function(target, (value, *args), kwargs)
        held = value.meta["val"]
        with held.fake_mode:
            node.meta["val"] = target(held, *args, **kwargs)
        node.meta["custom"] = value.meta.get("custom")
        return node


def _dense(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_contiguous())


def _order(node: fx.Node) -> tuple[int, ...] | None:
    """Returns the axes in the order of memory, for a tensor that is dense and not contiguous."""
    held = node.meta["val"]
    if held.is_contiguous():
        return None
    order = draws.axes_in_memory(held)
    return order if held.permute(order).is_contiguous() else None


def reorder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Gives the users of a contiguous input the strides that they were traced with; returns their tensor."""
    held, order = node.meta["val"], _order(node)
    if order is None:
        with held.fake_mode:
            node.meta["val"] = torch.empty(held.shape, dtype=held.dtype, device=held.device)
        return node
    back = sorted(range(held.dim()), key=order.__getitem__)
    users = list(node.users)
    tangent = "tangents" in node.name
    with graph.inserting_after(node):
        if tangent:
            # Contiguous in its own axes: a copy gives it the strides of the trace.
            turned = graph.call_function(_aten.permute.default, (node, list(order)))
            copy = graph.call_function(_aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
            made = graph.call_function(_aten.permute.default, (copy, back))
            turned.append(copy)
            copy.append(made)
        else:
            made = graph.call_function(_aten.permute.default, (node, back))
    made.meta["val"] = held
    for user in users:
        user.replace_input_with(node, made)
    shape = held.shape if tangent else [held.shape[axis] for axis in order]
    with held.fake_mode:
        node.meta["val"] = torch.empty(shape, dtype=held.dtype, device=held.device)
    return made


def first(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def is_view(node: fx.Node) -> bool:
    """Returns whether an operation gives a view of its only tensor."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    space, _, name = node.target.name().partition("::")
    only = node.args and isinstance(node.args[0], fx.Node) and len(node.all_input_nodes) == 1
    return space == "aten" and name.partition(".")[0] in _VIEWS and bool(only)


def base(node: fx.Node) -> fx.Node:
    """Returns the tensor whose memory a view has."""
    while is_view(node):
        (node,) = node.all_input_nodes
    return node


def separate(graph: fx.Graph, outputs: dict[str, fx.Node]) -> None:
    """Copies outputs that would share memory with an input or with another output."""
    seen: set[fx.Node] = set()
    for name, node in outputs.items():
        origin = base(node)
        if origin.op == "placeholder" or origin in seen:
            with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
                outputs[name] = graph.call_function(_aten.clone.default, (node,))
        seen.add(origin)
