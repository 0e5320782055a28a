"""Which values integer inputs may have: those with which the model finds a row wherever it uses one as an index.

An artifact does not raise as eager does when an index lies beyond a table, so the runtime looks at the values of a call
before it starts anything. What it looks for is found here: from every operation that takes an index, back through
operations that hand on all values as they are, to an input. A constant that is added on the way (positions that start
behind a padding row) moves the bounds.

An index that is computed, or chosen among an input's values, has no bounds here: compiled code checks it where it is
used (`checks.py`). So does a table whose size is not a number.

What a negative index means is as in eager: `x[ids]` counts from the end, an embedding, `gather` and the like raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import failures
from . import torch_private as private
from .wire import Failure

# Operators that hand on every value of their first argument: some in another shape, some more than once.
_KEEP = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "contiguous"}
_KEEP |= {"clone", "alias", "detach", "flatten", "unflatten", "transpose", "t", "permute", "movedim", "repeat", "tile"}
_KEEP |= {"broadcast_to", "flip", "roll", "lift_fresh_copy", "swapaxes", "reshape_as", "to", "_to_copy", "type_as"}
# Operators that choose rows by an index: the places of table, axis and index among their arguments, and whether a
# negative index counts from the end.
_ROWS: dict[str, tuple[int, int | None, int, bool]] = {
    "embedding": (0, None, 1, False),
    "embedding_bag": (0, None, 1, False),
    "_embedding_bag": (0, None, 1, False),
    "_embedding_bag_forward_only": (0, None, 1, False),
    "index_select": (0, 1, 2, False),
    "gather": (0, 1, 2, False),
    "take_along_dim": (0, 2, 1, False),
    "scatter": (0, 1, 2, False),
    "scatter_add": (0, 1, 2, False),
    "scatter_reduce": (0, 1, 2, False),
    "index_add": (0, 1, 2, False),
    "index_copy": (0, 1, 2, False),
    "index_reduce": (0, 1, 2, False),
    "index_fill": (0, 1, 2, True),
}
# Operators that return positions.
_POSITIONS = {"argmax", "argmin", "topk", "sort", "argsort", "max", "min", "bucketize", "searchsorted", "multinomial"}
_POSITIONS |= {"kthvalue", "median", "mode", "cummax", "cummin", "max_pool2d_with_indices", "one_hot", "abs", "relu"}
# Those that take a list with an index for each axis, and count negative ones from the end.
_LISTS = {"index", "_unsafe_index", "index_put", "_unsafe_index_put", "_unsafe_masked_index", "_index_put_impl"}


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
        for index, rows, wraps in _uses(node):
            # A mask is no index, and one of uint8 is a mask.
            if _is_tensor(index) and str(index.meta["val"].dtype) in ("torch.int64", "torch.int32"):
                yield Use(node, index, rows, wraps)


def of_inputs(graph: Any, inputs: list[Any]) -> tuple[list[Bounds | None], list[Use]]:
    """Returns the bounds of each input, and the uses that are within bounds whenever the inputs are."""
    found: dict[Any, Bounds] = {}
    covered = []
    for use in uses(graph):
        rows = private.fixed(use.rows)
        roots = _roots(use.index, 0)
        if rows is None or roots is None or any(root not in inputs for root, _ in roots):
            continue
        covered.append(use)
        for root, shift in roots:
            bounds = Bounds((-rows if use.wraps else 0) - shift, rows - shift, use)
            before = found.get(root)
            if before is not None:
                tightest = before if before.past - before.low <= bounds.past - bounds.low else bounds
                bounds = Bounds(max(before.low, bounds.low), min(before.past, bounds.past), tightest.use)
            found[root] = bounds
    return [found.get(node) for node in inputs], covered


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


def refuse_negative(graph: Any, covered: list[Use]) -> int:
    """Has computed indices that are negative found where eager raises; returns how many uses there were.

    Compilers count negative indices from the end for every operator. So one that must not be negative is replaced by
    one beyond any table, which compiled code checks.
    """
    import torch

    aten = torch.ops.aten
    known = {(use.node, use.index) for use in covered}
    count = 0
    for use in list(uses(graph)):
        if use.wraps or (use.node, use.index) in known or _never_negative(use.index):
            continue
        beyond = torch.iinfo(use.index.meta["val"].dtype).max
        with graph.inserting_before(use.node):
            below = graph.call_function(aten.lt.Scalar, (use.index, 0))
            index = graph.call_function(aten.masked_fill.Scalar, (use.index, below, beyond))
        for made in (below, index):
            made.meta = dict(use.node.meta)
            private.propagate_node(made)
        use.node.replace_input_with(use.index, index)
        count += 1
    return count


def _never_negative(node: Any) -> bool:
    """Returns whether a node's values are positions that torch found, or counted up from one that is not negative."""
    while node.op == "call_function" and (_name(node) in _KEEP or _name(node) in ("slice", "select", "getitem")):
        node = node.args[0]
    if node.op == "call_function" and _name(node) == "arange":
        numbers = [value for value in node.args if isinstance(value, int)]
        return len(numbers) == len(node.args) and (len(numbers) < 2 or min(numbers) >= 0)
    return _name(node) in _POSITIONS


def _uses(node: Any) -> Iterator[tuple[Any, Any, bool]]:
    name = _name(node)
    args = node.args
    if name in _ROWS:
        table, axis, index, wraps = _ROWS[name]
        if len(args) > index and _is_tensor(args[table]):
            shape = args[table].meta["val"].shape
            at = 0 if axis is None else args[axis] if len(args) > axis else None
            if at is None:
                rows = args[table].meta["val"].numel()
            else:
                rows = shape[at] if len(shape) else 1
            yield args[index], rows, wraps
    elif name in _LISTS and len(args) > 1:
        # `_unsafe_masked_index` has the mask before.
        indices = next((value for value in args[1:3] if isinstance(value, list | tuple)), ())
        shape = args[0].meta["val"].shape
        for axis, index in enumerate(indices):
            if index is not None and name != "_unsafe_masked_index":
                yield index, shape[axis], True
    elif name in ("take", "put") and len(args) > 1:
        yield args[1], args[0].meta["val"].numel(), True
    elif name == "one_hot" and len(args) > 1 and isinstance(args[1], int) and args[1] > 0:
        yield args[0], args[1], False
    elif name in ("max_unpool2d", "max_unpool3d") and len(args) > 2:
        rows = 1
        for size in args[2]:
            rows = rows * size
        yield args[1], rows, False


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


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _name(node: Any) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
