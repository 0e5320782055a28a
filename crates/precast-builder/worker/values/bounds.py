"""Bounds of integer inputs: with values inside them, every index into a table is within the table.

An artifact does not raise as eager does when an index is out of bounds, so the runtime checks the inputs of a call
before it starts anything. The bounds are found here: from every operation that takes an index, back through operations
that keep all values, to an input. A constant added on the way (positions that start after a padding row) moves the
bounds.

An index that is computed, or chosen among the values of an input, has no bounds here: compiled code checks it where it
is used, a program for CUDA clamps it (`checks`). The same holds for tables whose size is symbolic.

Negative indices mean the same as in eager: `x[ids]` counts from the end; an embedding, `gather` and the like raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import failures
from ..graph import operators
from ..graph.flat import Flat
from ..torch_private import fake, overloads, symbols
from ..wire import Failure
from . import checks


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
    """The values that an input may have, `low..end`, and the use that allows the fewest."""

    low: int
    end: int
    use: Use


def uses(graph: Any) -> Iterator[Use]:
    """Yields every use of a tensor of integers as an index."""
    for node in graph.nodes:
        yield from uses_of(node)


def uses_of(node: Any) -> Iterator[Use]:
    """Yields every use of a tensor of integers as an index by one operation."""
    if node.op == "call_function":
        for site in checks.sites(node):
            # A use that ignores one value has no interval of allowed values.
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
                tightest = before if before.end - before.low <= bounds.end - bounds.low else bounds
                bounds = Bounds(max(before.low, bounds.low), min(before.end, bounds.end), tightest.use)
            found[root] = bounds
    return [found.get(node) for node in inputs]


def check_range(spec: dict[str, Any], bounds: Bounds | None, what: str, root: Path) -> list[int] | None:
    """Returns the bounds of an input for its record: those of the graph, and the `range` of the spec within them."""
    given = spec.get("range")
    if bounds is None:
        return given
    low, end = bounds.low, bounds.end
    if given is None:
        return [low, end] if low < end else None
    if given[0] < low or given[1] > end:
        raise Failure(
            "bad_input",
            f"`range` of input `{spec['name']}` of {what} is {list(given)}, and `{bounds.use.name}` takes values of "
            f"[{low}, {end}]",
            location=failures.line_of(bounds.use.node, root),
            hint=f"write `range = [{max(low, given[0])}, {min(end, given[1])}]`, or leave it out",
        )
    return list(given)


def refuse_negative(flat: Flat, ranges: dict[Any, checks.Range]) -> int:
    """Lets compiled code find negative indices where eager raises; returns the number of such uses.

    Compilers count negative indices from the end for every operator. So an index that must not be negative is replaced
    by one out of bounds of any table, and compiled code checks it. `ranges` are the inputs' ranges, both ends included.
    """
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
            for new in (below, index):
                new.meta = dict(node.meta)
                fake.propagate_node(new)
            node.replace_input_with(use.index, index)
            count += 1
    return count


def _roots(node: Any, shift: int) -> list[tuple[Any, int]] | None:
    """Returns the placeholders whose values, each with a constant added, are the values of a node.

    Returns None if some of the node's values are computed in another way.
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
    if name not in operators.KEEPING | operators.CASTS and not _whole_slice(name, node):
        return None
    before, after = args[0].meta["val"].dtype, node.meta["val"].dtype
    if before.is_floating_point or after.is_floating_point or after.itemsize < before.itemsize:
        return None
    return _roots(args[0], shift)


def _whole_slice(name: str, node: Any) -> bool:
    """Returns whether a slice has all values of its argument."""
    return name == "slice" and tuple(node.meta["val"].shape) == tuple(node.args[0].meta["val"].shape)


def _name(node: Any) -> str:
    return overloads.name_of(node.target)
