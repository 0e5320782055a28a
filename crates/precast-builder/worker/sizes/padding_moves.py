"""Rules of elementwise operators, and of operators that move positions: a part of the table of `padding_rules`.

The content of an elementwise result is computed where the contents of all operands are numbers, by the operator itself.
A factor of zero, a mask that fills, and a huge constant in a sum hide the other operand. Views are followed by their
strides: a dimension is a step and an extent in memory, which an axis of the view covers or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..graph.operators import OF_SHAPES
from ..tensors import dense
from ..torch_private import fake, overloads
from .padding_walk import FAR, LOST, OTHER, UNKNOWN, Content, Mark, Marked, Walk, constant

# Elementwise operators that torch does not tag so.
_ELEMENTWISE = {"where", "masked_fill", "to", "_to_copy", "prelu", "leaky_relu", "log_sigmoid", "hardswish", "isfinite"}
_ELEMENTWISE |= {"floor_divide", "isclose", "__and__", "__or__", "__xor__"}
# Operators that return their first operand.
_SAME = {"clone", "contiguous", "detach", "alias", "type_as", "expand_as"}
_SAME |= {"dropout", "feature_dropout", "alpha_dropout"}
_AND, _OR = {"mul", "logical_and", "bitwise_and", "__and__"}, {"logical_or", "bitwise_or", "__or__"}
# Whether each operand of a sum is subtracted.
_SIGNS = {"add": (1, 1), "sub": (1, -1), "subtract": (1, -1), "rsub": (-1, 1)}
MOVES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze"}
MOVES |= {"expand", "broadcast_to", "permute", "transpose", "t", "movedim", "swapaxes", "numpy_T", "mT"}
# Operators that return values of their first operand.
SHIFTS = {"clone", "contiguous", "dropout", "slice", "select"}


def rank_of(node: Any) -> int:
    return node.meta["val"].dim()


def for_each(node: Any, marked: Marked) -> Any:
    """Returns the marks of a result; a list of them for an operator with several."""
    held = node.meta["val"]
    return [marked] * len(held) if isinstance(held, list | tuple) else marked


def axes_of(node: Any, argument: str = "dim") -> list[int]:
    """Returns the axes that an operator names; all where it names none."""
    rank = rank_of(node.args[0])
    given = overloads.argument(node, argument)
    if given is None or given == []:
        return list(range(rank))
    return [axis % max(rank, 1) for axis in (given if isinstance(given, list | tuple) else [given])]


def elementwise(walk: Walk, node: Any) -> Marked:
    """Returns the marks of a result whose elements follow from those at their positions."""
    rank = rank_of(node)
    layouts: dict[int, list[Mark]] = {}
    lost = False
    for value in node.all_input_nodes:
        marked = walk.of(value)
        lost = lost or marked.lost
        for axis, mark in marked.axes.items():
            layouts.setdefault(axis + rank - rank_of(value), []).append(mark)
    axes = {}
    for axis, marks in layouts.items():
        first = marks[0]
        if any(mark.of(first.content) != first for mark in marks):
            axes[axis] = Mark(UNKNOWN, at_end=False)
            continue
        others = [other for other in layouts if other != axis]
        simple = first.plain and first.after == 1

        def content(value: Any, axis: int = axis, others: list[int] = others, simple: bool = simple) -> Content:
            if simple or not hasattr(value, "meta") or value not in walk.static:
                return walk.content(value, axis, rank, others)
            return walk.beyond(value, -1, [])

        def varies(value: Any, axis: int = axis) -> bool:
            own = axis - rank + (rank_of(value) if hasattr(value, "meta") else 0)
            return own in walk.of(value).axes or (value in walk.static and walk.beyond(value, -1, []) == OTHER)

        axes[axis] = first.of(_combined(walk, node, content, varies))
    return Marked(axes, lost)


def _combined(walk: Walk, node: Any, content: Callable[[Any], Content], varies: Callable[[Any], bool]) -> Content:
    """Returns the content of an elementwise result; `varies` returns whether an operand differs along the axis."""
    name = overloads.name_of(node.target)
    args = [one for one in node.args if hasattr(one, "meta") or isinstance(one, bool | int | float)]
    parts = [content(one) for one in args]
    nodes = {one: content(one) for one in node.all_input_nodes}
    if name in _SAME:
        return parts[0]
    if name == "masked_fill" and nodes[node.args[1]].kind == "constant":
        return content(node.args[2]) if nodes[node.args[1]].value else parts[0]
    if name == "where" and len(node.args) == 3 and parts[0].kind == "constant":
        return parts[1] if parts[0].value else parts[2]
    if all(part.kind == "constant" for part in nodes.values()):
        return _evaluated(walk, node, {one: part.value for one, part in nodes.items()})
    if name in _AND and any(part == constant(0) for part in parts):
        return constant(0)
    if name in _OR and any(part.kind == "constant" and part.value for part in parts):
        return constant(1)
    if name in ("div", "true_divide") and parts[0] == constant(0):
        return parts[0]
    if all(part.kind in ("constant", "far") for part in nodes.values()):
        return _of_far(walk, node, nodes)
    for part, arg, sign in zip(parts, args, _SIGNS.get(name, ()), strict=False):
        # A number that all positions get hides none.
        if abs(part.value) >= FAR and varies(arg):
            return Content("far", part.value * sign)
    return UNKNOWN if UNKNOWN in nodes.values() else OTHER


def _evaluated(walk: Walk, node: Any, values: dict[Any, float]) -> Content:
    given = {one: torch.full((1,), value).to(one.meta["val"].dtype) for one, value in values.items()}
    out = walk.evaluate(node, given)
    if not isinstance(out, torch.Tensor) or out.numel() != 1 or out.is_complex():
        return OTHER
    return constant(out.item())


def _of_far(walk: Walk, node: Any, nodes: dict[Any, Content]) -> Content:
    """Returns the content where some operands are huge: they are tried at two values that are."""

    def at(scale: float) -> Content:
        return _evaluated(
            walk, node, {one: part.value * (scale if part.kind == "far" else 1) for one, part in nodes.items()}
        )

    whole, half = at(1.0), at(0.5)
    if whole == half and whole.kind == "constant" and abs(whole.value) < FAR:
        return whole
    for sign in (-1, 1):
        if whole.is_far(sign) and half.is_far(sign):
            return Content("far", whole.value)
    return OTHER


# Axes that move


def _moved(walk: Walk, node: Any) -> Marked:
    """Finds the marked axes of a view, by their strides; of a copy, as if both sides were dense."""
    source = node.args[0]
    before, after = source.meta["val"], node.meta["val"]
    if fake.is_view(node):
        strides, to = before.stride(), after.stride()
    else:
        strides, to = dense(before.shape), dense(after.shape)
    return _follow(walk.of(source), list(before.shape), list(strides), list(after.shape), list(to))


def _follow(marked: Marked, shape: list[int], strides: list[int], onto: list[int], steps: list[int]) -> Marked:
    axes, lost = {}, marked.lost
    for axis, mark in marked.axes.items():
        step = strides[axis] * mark.after
        extent = step * (shape[axis] // (mark.before * mark.after))
        for place, (size, stride) in enumerate(zip(onto, steps, strict=True)):
            whole = size * stride
            if size > 1 and 0 < stride <= step and step % stride == 0 and whole >= extent and whole % extent == 0:
                if not mark.at_end and (stride, whole) != (strides[axis], strides[axis] * shape[axis]):
                    continue
                axes[place] = Mark(mark.content, whole // extent, step // stride, mark.at_end, mark.flipped)
                break
        else:
            lost = True
    return Marked(axes, lost)


def _without(walk: Walk, node: Any, axis: int) -> Marked:
    """Returns the marks of an operand without one of its axes."""
    marked = walk.of(node.args[0])
    kept = {place - (place > axis): mark for place, mark in marked.axes.items() if place != axis}
    return Marked(kept, marked.lost)


def _select(walk: Walk, node: Any) -> Marked:
    axis, index = axes_of(node)[0], overloads.argument(node, "index")
    mark = walk.of(node.args[0]).axes.get(axis)
    if mark is not None and mark.content != UNKNOWN:
        last = index >= 0 if mark.flipped else index < 0
        if last and mark.at_end:
            return walk.leak(node, mark.content, "")
        if index != (-1 if mark.flipped else 0) or not mark.at_end:
            return Marked(_without(walk, node, axis).axes, lost=True)
    return _without(walk, node, axis)


def _slice(walk: Walk, node: Any) -> Marked:
    axis, marked = axes_of(node)[0], walk.of(node.args[0])
    size = node.args[0].meta["val"].shape[axis]
    start, end = overloads.argument(node, "start") or 0, overloads.argument(node, "end")
    if overloads.name_of(node.target) == "narrow":
        end = start + overloads.argument(node, "length")
    mark = marked.axes.get(axis)
    if mark is None or node.meta["val"].shape[axis] == size:
        return marked
    axes = dict(marked.axes)
    whole_end = end is None or end >= size
    if start == -walk.size:
        # The last positions, as many as the dimension has: `x[:, -ids.shape[1]:]` drops a prefix of constant length.
        start += size
    if start < 0 and mark.content != UNKNOWN and mark.plain:
        walk.leak(node, mark.content, "")
    if mark.plain and mark.after == 1 and start >= 0 and whole_end:
        return marked
    # Without the last elements: the end of the valid part is among the padded positions.
    shorter = mark.plain and start >= 0 and end is not None and end < 0
    axes[axis] = Mark(OTHER) if shorter else Mark(UNKNOWN, at_end=False)
    return Marked(axes, marked.lost)


def _pieces(walk: Walk, node: Any) -> Any:
    axis, marked = axes_of(node)[0], walk.of(node.args[0])
    if axis in marked.axes:
        return for_each(node, LOST)
    return for_each(node, _without(walk, node, axis) if overloads.name_of(node.target) == "unbind" else marked)


def _common(contents: set[Content]) -> Content:
    return contents.pop() if len(contents) == 1 else UNKNOWN if UNKNOWN in contents else OTHER


def _cat(walk: Walk, node: Any) -> Marked:
    stacks = overloads.name_of(node.target) == "stack"
    parts, rank = node.args[0], node.meta["val"].dim()
    axis = (overloads.argument(node, "dim") or 0) % rank
    marks: dict[int, list[Mark]] = {}
    for part in parts:
        for place, mark in walk.of(part).axes.items():
            marks.setdefault(place + (stacks and place >= axis), []).append(mark)
    axes = {}
    for place, found in marks.items():
        first = found[0]
        if place == axis:
            last = place in walk.of(parts[-1]).axes
            at_end = len(found) == 1 and last and first.plain and first.after == 1
            axes[place] = Mark(_common({mark.content for mark in found}), at_end=at_end)
            continue
        own = place - (stacks and place > axis)
        content = _common({walk.content(part, own, rank_of(part)) for part in parts})
        axes[place] = first.of(content) if all(mark.of(OTHER) == first.of(OTHER) for mark in found) else Mark(UNKNOWN)
    return Marked(axes, any(walk.of(part).lost for part in parts))


def _pad(walk: Walk, node: Any) -> Marked:
    marked, rank = walk.of(node.args[0]), rank_of(node.args[0])
    amounts, value = overloads.argument(node, "pad"), overloads.argument(node, "value")
    mode = overloads.argument(node, "mode") or "constant"
    fill = constant(value or 0)
    if any(amount < 0 for amount in amounts):
        return LOST
    axes = {}
    wide = [rank - 1 - place // 2 for place, amount in enumerate(amounts) if amount]
    for axis, mark in marked.axes.items():
        place = 2 * (rank - 1 - axis)
        end = amounts[place + 1] if place + 1 < len(amounts) else 0
        content = mark.content
        if end and content not in (UNKNOWN, fill if mode == "constant" else None):
            return walk.leak(node, content, f"{fill}, its own fill value" if mode == "constant" else "")
        if any(other != axis for other in wide) and content not in (fill, UNKNOWN):
            content = OTHER
        axes[axis] = mark.of(content) if axis not in wide or (mark.plain and mark.after == 1) else Mark(UNKNOWN)
    return Marked(axes, marked.lost)


def _broadcast(walk: Walk, node: Any) -> list[Marked]:
    found = []
    for source, result in zip(node.args[0], node.meta["val"], strict=True):
        marked, more = walk.of(source), result.dim() - rank_of(source)
        found.append(Marked({axis + more: mark for axis, mark in marked.axes.items()}, marked.lost))
    return found


def _flip(walk: Walk, node: Any) -> Marked:
    marked, axes = walk.of(node.args[0]), axes_of(node, "dims")
    flipped = {axis: replace(mark, flipped=not mark.flipped) for axis, mark in marked.axes.items() if axis in axes}
    return Marked(marked.axes | flipped, marked.lost)


def _embedding(walk: Walk, node: Any) -> Marked:
    indices = walk.of(node.args[1]).each(lambda mark: mark.of(OTHER))
    return Marked(indices.axes, indices.lost or walk.of(node.args[0]).lost)


def _index_select(walk: Walk, node: Any) -> Marked:
    axis, marked, index = axes_of(node)[0], walk.of(node.args[0]), walk.of(node.args[2])
    if axis in marked.axes or index.lost:
        return LOST
    chosen = {axis: index.axes[0].of(OTHER)} if 0 in index.axes else {}
    return Marked(marked.axes | chosen, marked.lost)


def _triangle(walk: Walk, node: Any) -> Marked:
    marked, rank = walk.of(node.args[0]), rank_of(node.args[0])
    both = rank - 1 in marked.axes and rank - 2 in marked.axes
    lower = overloads.name_of(node.target) == "tril" and (overloads.argument(node, "diagonal") or 0) <= 0
    found = marked.each(lambda mark: mark.of(constant(0) if mark.content == constant(0) else UNKNOWN))
    if both and lower:
        found.axes[rank - 1] = marked.axes[rank - 1].of(constant(0))
    return found


def _constant(walk: Walk, node: Any) -> Marked:
    """The same value everywhere. A size of the bucket that it carries shows in every sample."""
    walk.set(node)
    return Marked()


RULES: dict[str, Callable[[Walk, Any], Any]] = {
    **dict.fromkeys(OF_SHAPES, _constant),
    **dict.fromkeys(_ELEMENTWISE | _SAME, elementwise),
    **dict.fromkeys(MOVES, _moved),
    "select": _select,
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "tensor_split"), _pieces),
    **dict.fromkeys(("cat", "concat", "stack"), _cat),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "broadcast_tensors": _broadcast,
    "flip": _flip,
    "embedding": _embedding,
    "index_select": _index_select,
    **dict.fromkeys(("tril", "triu"), _triangle),
}
