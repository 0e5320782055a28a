"""Which values integer inputs may have: those with which the model finds a row wherever it uses one as an index.

An artifact does not raise as eager does when an index lies beyond a table, so the runtime looks at the values of a call
before it starts anything. What it looks for is found here: from every operation that takes an index, back through
operations that hand on all values as they are, to an input. A constant that is added on the way (positions that start
behind a padding row) moves the bounds.

An index that is computed, or chosen among an input's values, has no bounds here: compiled code checks it where it is
used, a program for CUDA clamps it (`checks`). So does a table whose size is not a number.

What a negative index means is as in eager: `x[ids]` counts from the end, an embedding, `gather` and the like raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checks, failures
from .flat import Flat
from .torch_private import fake, overloads, symbols
from .wire import Failure

# Operators that hand on every value of their first argument: some in another shape, some more than once.
_KEEP = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "contiguous"}
_KEEP |= {"clone", "alias", "detach", "flatten", "unflatten", "transpose", "t", "permute", "movedim", "repeat", "tile"}
_KEEP |= {"broadcast_to", "flip", "roll", "lift_fresh_copy", "swapaxes", "reshape_as", "to", "_to_copy", "type_as"}


@dataclass
class Use:
    """One operation that takes an index."""

    node: Any
    index: Any
    # Rows of the table: a number, or a symbol.
    rows: Any
    # Whether a negative index counts from the end.
    wraps: bool

    @property
    def name(self) -> str:
        """The operator's name, as `aten.embedding`."""
        return f"aten.{_name(self.node)}"


@dataclass
class Bounds:
    """The values that an input may have, `low..past`, and the use that allows the fewest."""

    low: int
    past: int
    use: Use


def uses(graph: Any) -> Iterator[Use]:
    """Yields every use of a tensor of integers as an index."""
    for node in graph.nodes:
        yield from uses_of(node)


def uses_of(node: Any) -> Iterator[Use]:
    """Yields every use of a tensor of integers as an index by one operation."""
    if node.op == "call_function":
        for site in checks.sites(node):
            # Where one value stands for none, no bounds say which values there may be.
            if site.ignored is None:
                yield Use(node, site.index, site.size, site.wraps)


def operators_of(node: Any) -> set[str]:
    """Returns the operators of a graph node that take an index, as `aten.embedding`."""
    return {use.name for use in uses_of(node)}


def of_inputs(graph: Any, inputs: list[Any]) -> list[Bounds | None]:
    """Returns the bounds of each input."""
    found: dict[Any, Bounds] = {}
    for use in uses(graph):
        rows = symbols.fixed(use.rows)
        roots = _roots(use.index, 0)
        if rows is None or roots is None or any(root not in inputs for root, _ in roots):
            continue
        for root, shift in roots:
            bounds = Bounds((-rows if use.wraps else 0) - shift, rows - shift, use)
            before = found.get(root)
            if before is not None:
                tightest = before if before.past - before.low <= bounds.past - bounds.low else bounds
                bounds = Bounds(max(before.low, bounds.low), min(before.past, bounds.past), tightest.use)
            found[root] = bounds
    return [found.get(node) for node in inputs]


def check_range(spec: dict[str, Any], bounds: Bounds | None, what: str, root: Path) -> list[int] | None:
    """Returns the bounds of an input for its record: those of the graph, and the `range` of the spec within them."""
    given = spec.get("range")
    if bounds is None:
        return given
    low, past = bounds.low, bounds.past
    if given is None:
        return [low, past] if low < past else None
    if given[0] < low or given[1] > past:
        raise Failure(
            "bad_input",
            f"`range` of input `{spec['name']}` of {what} is {list(given)}, and `{bounds.use.name}` takes values of "
            f"[{low}, {past}]",
            location=failures.from_stack_trace(bounds.use.node.meta.get("stack_trace"), root),
            hint=f"write `range = [{max(low, given[0])}, {min(past, given[1])}]`, or leave it out",
        )
    return list(given)


def refuse_negative(flat: Flat, ranges: dict[Any, checks.Range]) -> int:
    """Has computed indices that are negative found where eager raises; returns how many uses there were.

    Compilers count negative indices from the end for every operator. So one that must not be negative is replaced by
    one beyond any table, which compiled code checks. `ranges` are those of inputs, both ends included.
    """
    import torch

    aten = torch.ops.aten
    graph = flat.graph
    known = checks.Known(flat, ranges)
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        known.learn(node)
        for use in list(uses_of(node)):
            lowest = known.ranges.get(use.index, (-1, 0))[0]
            if use.wraps or use.index not in known.varying or lowest >= 0:
                continue
            beyond = torch.iinfo(use.index.meta["val"].dtype).max
            with graph.inserting_before(node):
                below = graph.call_function(aten.lt.Scalar, (use.index, 0))
                index = graph.call_function(aten.masked_fill.Scalar, (use.index, below, beyond))
            for made in (below, index):
                made.meta = dict(node.meta)
                fake.propagate_node(made)
            node.replace_input_with(use.index, index)
            count += 1
    return count


def _roots(node: Any, shift: int) -> list[tuple[Any, int]] | None:
    """Returns the placeholders whose every value, plus what is added to it, is among those of a node, and nothing else.

    None where some are computed otherwise.
    """
    if node.op == "placeholder":
        return [(node, shift)]
    if node.op != "call_function":
        return None
    name, args = _name(node), node.args
    if name in ("add", "sub") and len(args) == 2 and isinstance(args[1], int) and not node.kwargs:
        return _roots(args[0], shift + (args[1] if name == "add" else -args[1]))
    if name in ("cat", "stack"):
        found: list[tuple[Any, int]] = []
        for part in args[0]:
            roots = _roots(part, shift)
            if roots is None or part.meta["val"].dtype != node.meta["val"].dtype:
                return None
            found += roots
        return found
    if name not in _KEEP and not _whole_slice(name, node):
        return None
    before, after = args[0].meta["val"].dtype, node.meta["val"].dtype
    if before.is_floating_point or after.is_floating_point or after.itemsize < before.itemsize:
        return None
    return _roots(args[0], shift)


def _whole_slice(name: str, node: Any) -> bool:
    """Returns whether a slice leaves nothing out."""
    return name == "slice" and tuple(node.meta["val"].shape) == tuple(node.args[0].meta["val"].shape)


def _name(node: Any) -> str:
    return overloads.name_of(node.target)
