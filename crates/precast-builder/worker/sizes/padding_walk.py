"""The walk through a captured graph for one bucketed dimension: where its padding is, and what the padding holds.

`padding_graph` says what these words mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import failures
from ..graph.flat import Flat
from ..torch_private import fake, overloads

# Constants with more elements are not computed.
_LARGEST = 1 << 24
# A constant beyond this hides all other logits of a softmax: `exp` of it is 0.
FAR = 1000.0


@dataclass(frozen=True)
class Content:
    """The values of a padded part."""

    kind: str
    value: float = math.nan

    def is_far(self, sign: int) -> bool:
        """Returns whether it is beyond all usual values, below (-1) or above (1)."""
        return self.kind in ("constant", "far") and self.value * sign >= FAR

    def computed(self) -> Content:
        """Returns the content of values that an operator computes from these."""
        return UNKNOWN if self == UNKNOWN else OTHER

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "constant" else "computed values"


OTHER, UNKNOWN = Content("other"), Content("unknown")


def constant(value: float) -> Content:
    """Returns the content of a part that is filled with one number."""
    return Content("constant", float(value))


@dataclass(frozen=True)
class Mark:
    """An axis that carries the dimension."""

    content: Content
    before: int = 1
    after: int = 1
    # Whether the padded part is the end of the dimension. Otherwise other values follow, as after `cat`.
    at_end: bool = True
    # Whether it is the start, after a `flip`.
    flipped: bool = False

    @property
    def plain(self) -> bool:
        """Returns whether the padded part is the end of the axis."""
        return self.at_end and not self.flipped and self.before == 1

    def of(self, content: Content) -> Mark:
        """Returns the same axis with another content."""
        return replace(self, content=content)

    def computed(self) -> Mark:
        """Returns the same axis after an operator that computes other values."""
        return self.of(self.content.computed())


@dataclass(frozen=True)
class Marked:
    """The axes of a tensor that carry the dimension; `lost`: other axes may carry it too."""

    axes: dict[int, Mark] = field(default_factory=dict)
    lost: bool = False

    def each(self, change: Callable[[Mark], Mark]) -> Marked:
        """Returns the same axes with other marks."""
        return Marked({axis: change(mark) for axis, mark in self.axes.items()}, self.lost)


LOST = Marked(lost=True)


@dataclass(frozen=True)
class Leak:
    """An operator that reads the padding of a dimension."""

    dim: str
    why: str
    # The replacement in the code.
    fix: str
    node: Any

    def location(self, root: Path) -> str | None:
        """Returns the project's line of the operator."""
        return failures.line_of(self.node, root)

    def reason(self, root: Path) -> str:
        """Returns the reason as text, with its place."""
        place = self.location(root)
        return f"{self.why} ({place})" if place else self.why


class Walk:
    """The walk for one dimension."""

    def __init__(self, flat: Flat, specs: list[dict[str, Any]], dim: str, size: int, ranges: list[Any]) -> None:
        self.flat, self.dim, self.size = flat, dim, size
        self.found: list[Leak] = []
        # A tensor, or the list of an operator's results.
        self.marked: dict[Any, Any] = {}
        self.bounds = {node: bounds for node, bounds in zip(flat.inputs, ranges, strict=True) if bounds}
        # Tensors that depend on no input, and the values of some.
        self.static: set[Any] = set(flat.weights)
        self._values: dict[Any, Any] = {}
        for node, spec in zip(flat.inputs, specs, strict=True):
            axes = {axis: Mark(constant(spec["pad"])) for axis, name in enumerate(spec["dims"]) if name == dim}
            self.marked[node] = Marked(axes)

    def run(self, apply: Callable[[Walk, Any], Any]) -> list[Leak]:
        """Visits every operator in order; `apply` has the rules."""
        for node in self.flat.graph.nodes:
            if node.op != "call_function":
                continue
            if all(given in self.static for given in node.all_input_nodes):
                self.static.add(node)
                continue
            given = [self.of(value) for value in node.all_input_nodes]
            if not any(one.axes or one.lost for one in given):
                continue
            try:
                self.marked[node] = apply(self, node)
            except Exception:  # an overload with other arguments than its rule knows
                self.marked[node] = LOST
        return self.found

    def of(self, node: Any, result: int = 0) -> Marked:
        """Returns the marks of a tensor."""
        found = self.marked.get(node, Marked())
        return found[result] if isinstance(found, list) else found

    def leak(self, node: Any, content: Content, needed: str) -> Marked:
        """Notes a leak, after which the result is not followed.

        `needed` is the content that the operator would need, as `0`, empty if none helps.
        """
        name = overloads.name_of(node.target)
        why = f"`{name}` reads the padding of `{self.dim}`, which holds {content}"
        if needed:
            why += f" and not {needed}"
            fix = f"fill it with {needed} before, by a mask that is an input"
        else:
            fix = "compute it with a mask that is an input, as a masked sum divided by the number of valid elements"
        self.found.append(Leak(self.dim, why, fix, node))
        return LOST

    def content(self, value: Any, axis: int, rank: int, others: Iterable[int] = ()) -> Content:
        """Returns the content of an operand at the padded positions of an axis of the result, which has `rank` axes.

        `others` are the other axes of the result that carry the dimension.
        """
        if isinstance(value, bool | int | float):
            return constant(value)
        shape = value.meta["val"].shape
        own = axis - rank + len(shape)
        marked = self.of(value)
        if own in marked.axes:
            return marked.axes[own].content
        if value in self.static:
            beside = [other - rank + len(shape) for other in others]
            return self.beyond(value, own, [other for other in beside if other >= 0 and shape[other] > 1])
        return UNKNOWN if marked.lost and own >= 0 and shape[own] > 1 else OTHER

    def beyond(self, node: Any, axis: int, others: list[int]) -> Content:
        """Returns the content of a constant tensor at the padded positions of an axis, of every smaller size.

        These are the positions beyond each position of `others`, the other axes that carry the dimension: above the
        diagonal of a causal mask.
        """
        value = self.value(node)
        if value is None:
            return UNKNOWN
        if axis >= 0 and value.dim() and value.shape[axis] > 1:
            value = value.movedim(axis, 0)
            if others:
                at = [other + (other < axis) for other in others]
                size, shape = value.shape[0], [1] * value.dim()
                position = torch.arange(size, device=value.device).reshape(-1, *shape[1:])
                valid = torch.ones_like(value, dtype=torch.bool)
                for other in at:
                    beside = torch.arange(value.shape[other], device=value.device)
                    valid = valid & (
                        position > beside.reshape([-1 if one == other else 1 for one in range(len(shape))])
                    )
                value = value[valid]
            else:
                value = value[1:]
        if not value.numel() or value.is_complex():
            return OTHER
        low, high = value.min(), value.max()
        return constant(low.item()) if low == high else OTHER

    def value(self, node: Any) -> Any:
        """Returns a constant's values; None if they are too many, or can't be computed."""
        if node not in self._values:
            held, found = node.meta.get("val"), None
            if isinstance(held, torch.Tensor) and held.numel() <= _LARGEST:
                if node in self.flat.tensors:
                    found = self.flat.tensors[node].detach()
                elif node.op == "call_function" and held.device.type != "meta":
                    given = {one: self.value(one) for one in node.all_input_nodes}
                    if all(one is not None for one in given.values()):
                        found = self.evaluate(node, given)
            self._values[node] = found
        return self._values[node]

    def set(self, node: Any) -> None:
        """Makes a tensor a constant that depends on the shapes of its operands only."""
        given = {}
        for one in node.all_input_nodes:
            held = one.meta["val"]
            given[one] = torch.zeros((), dtype=held.dtype, device=held.device).expand(held.shape)
        self.static.add(node)
        self._values[node] = self.evaluate(node, given)

    def evaluate(self, node: Any, given: dict[Any, Any]) -> Any:
        """Runs an operator on real values; returns None if it fails."""
        args, kwargs = (torch.fx.map_arg(part, lambda one: given[one]) for part in (node.args, node.kwargs))
        try:
            with fake.real_values(), torch.no_grad():
                return node.target(*args, **kwargs)
        except Exception:  # an operator that takes no such tensor: its result is not known
            return None
