"""Checks of values on a device: inputs and indices are clamped, and the program returns whether one was out of bounds.

On CUDA an index out of bounds stops the kernel that uses it, and with it the context of the whole process. So an input
with bounds, and an index that may be out of bounds, are clamped. Whether clamping changed one becomes a further output
of the program, which the runtime reads some time after the call. An assertion about values becomes such an output too.

Nobody is to compute on the answer of such a call meanwhile. What a float table gives for a bad index is NaN, and so is
all that follows from it: the compiler fuses that into the lookup. Where there is no such lookup, as for a target of a
loss, the float outputs are NaN. A training step is left without: its outputs are parameters.

An index needs no check if it does not depend on the values of an input (a buffer of positions), if the bounds of the
inputs imply it, or if its operation does (the index of a maximum). Not checked are indices inside a branch of
`torch.cond`, the offsets of `embedding_bag`, and indices inside of custom operators.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import failures, tensors
from ..graph.flat import Check, Flat
from ..graph.operators import CASTS, KEEPING, OF_SHAPES, PASSING
from ..torch_private import fake, overloads, symbols

# On other devices compiled code checks indices, and a failed check ends only the call.
DEVICES = ("cuda",)

# The lowest and the highest value, both included.
Range = tuple[int, int]

# Operation -> the name of its index argument; the axis is the argument `dim`.
_ALONG = dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), "index")
_ALONG |= dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), "index")
_ALONG |= {"take_along_dim": "indices"}
_ROWS = {"embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"}
_FLAT = {"take", "put"}
_LISTS = {"index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"}
_PLANES = {"max_unpool2d", "max_unpool3d"}
_CLASSES = {"nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss"}

# Operation -> the number of last axes that its second result, a flat index, indexes.
_POOLED = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
}

# Operations whose result depends on the shape of an argument, not on its values.
_SHAPES = OF_SHAPES | {"sym_size", "sym_stride", "sym_numel", "rand_like", "randn_like"}
# Operations whose result, or second result, is an index into the axis `dim`.
_POSITION = {"argmax", "argmin", "argsort"}
_WITH_POSITION = {"max", "min", "topk", "sort", "kthvalue", "median", "mode", "cummax", "cummin"}


@dataclass
class _Site:
    """One use of an index by a node, and its bounds."""

    index: Any
    # The name of the argument, and the position in it if it is a list.
    argument: str
    item: int | None
    # The indexed tensor and axis; no axis for a flat index, no tensor for a class.
    table: Any
    axis: int | None
    # The size of that axis, or the number of elements or classes.
    size: Any
    # Whether a negative index counts from the end.
    wraps: bool = False
    ignored: int | None = None


def add(flat: Flat, bounds: dict[Any, Range], specs: list[dict[str, Any]], root: Path, *, marks: bool = True) -> int:
    """Clamps inputs and indices that may be out of bounds; returns their number.

    `bounds` are those of inputs, both ends included. The outcomes are added to `flat.checks`, and become outputs. With
    `marks`, floats that follow from a bad value are NaN.
    """
    known = Known(flat, bounds)
    before = len(flat.checks)
    guarded = _Guarded(marks)
    for node, spec in zip(flat.inputs, specs, strict=True):
        if node in bounds:
            _guard_input(flat, node, spec, known, guarded, root)
    for node in list(flat.graph.nodes):
        if node.op != "call_function":
            continue
        known.learn(node)
        for site in sites(node):
            if site.index in known.varying and not known.within(site):
                _guard(flat, node, site, known, guarded, root)
            elif (raw := guarded.raw(flat, site.index)) is not None:
                guarded.mark(flat, node, site, raw)
        if _name(node) == "_assert_async" and node.args[0] in known.varying:
            guarded.unmarked.append(_assertion(flat, node, root))
    guarded.mark_outputs(flat)
    for check in flat.checks[before:]:
        _as_number(flat, check)
    flat.graph.lint()
    return len(flat.checks) - before


def _name(node: Any) -> str:
    return overloads.name_of(node.target)


def _held(node: Any) -> Any:
    return getattr(node, "meta", {}).get("val")


def _is_index(node: Any) -> bool:
    held = _held(node)
    return isinstance(held, torch.Tensor) and tensors.dtype_name(held.dtype) in ("int64", "int32", "int16", "int8")


def sites(node: Any) -> list[_Site]:
    """Returns the indices that an operation reads or writes by."""
    found: list[_Site] = []
    if not overloads.is_overload(node.target) or node.target.namespace != "aten":
        return found
    name, table = _name(node), node.args[0] if node.args else None

    def site(argument: str, axis: int | None, wraps: bool = False, ignored: int | None = None) -> None:
        index, held = overloads.argument(node, argument), _held(table)
        if not _is_index(index):
            return
        if axis is None:
            size: Any = held.numel()
        elif held.dim():
            axis %= held.dim()
            size = held.shape[axis]
        else:
            axis, size = None, 1
        found.append(_Site(index, argument, None, table, axis, size, wraps, ignored))

    if name in _ROWS:
        site("indices", 0)
    elif name in _ALONG:
        site(_ALONG[name], overloads.argument(node, "dim"), wraps=name == "index_fill")
    elif name in _FLAT:
        site("index", None, wraps=True)
    elif name in _LISTS:
        axis = 0
        for item, index in enumerate(overloads.argument(node, "indices")):
            if index is not None and _is_index(index):
                found.append(_Site(index, "indices", item, table, axis, _held(table).shape[axis], wraps=True))
            masked = index is not None and _held(index).dtype in (torch.bool, torch.uint8)
            axis += _held(index).dim() if masked else 1
    elif name == "one_hot":
        classes = overloads.argument(node, "num_classes")
        if _is_index(table) and isinstance(classes, int) and classes > 0:
            found.append(_Site(table, "self", None, None, None, classes))
    elif name in _PLANES:
        sizes = overloads.argument(node, "output_size")
        if all(isinstance(size, int) for size in sizes):
            found.append(_Site(node.args[1], "indices", None, None, None, math.prod(sizes)))
    elif name in _CLASSES:
        site("target", 1 if _held(table).dim() > 1 else 0, ignored=overloads.argument(node, "ignore_index"))
    return found


class Known:
    """Ranges of the integers in a graph."""

    def __init__(self, flat: Flat, bounds: dict[Any, Range]) -> None:
        self.flat = flat
        # Nodes that depend on the values of an input.
        self.varying: set[Any] = set(flat.inputs)
        self.ranges: dict[Any, Range] = dict(bounds)
        for node in flat.weights:
            held = flat.tensors.get(node)
            if held is not None and not held.dtype.is_floating_point and not held.dtype.is_complex and held.numel():
                self.ranges[node] = (int(held.min()), int(held.max()))

    def learn(self, node: Any) -> None:
        """Adds a node, after its arguments."""
        if _name(node) not in _SHAPES and any(given in self.varying for given in node.all_input_nodes):
            self.varying.add(node)
        found = self._range(node)
        if found is not None and self._fits(node, found):
            self.ranges[node] = found

    def within(self, site: _Site) -> bool:
        """Returns whether an index is in bounds for all inputs."""
        lowest, _ = self.size(site.size)
        low = -lowest if site.wraps else 0
        found = self.ranges.get(site.index)
        return found is not None and low <= found[0] and found[1] < lowest

    def size(self, size: Any) -> Range:
        """Returns the range of a size."""
        return symbols.bounds(size, self.flat.ranges)

    @staticmethod
    def _fits(node: Any, found: Range) -> bool:
        held = _held(node)
        if not isinstance(held, torch.Tensor) or held.dtype.is_floating_point or held.dtype.is_complex:
            return isinstance(held, (list, tuple))
        if held.dtype == torch.bool:
            return True
        limits = torch.iinfo(held.dtype)
        return limits.min <= found[0] and found[1] <= limits.max

    def _of(self, value: Any) -> Range | None:
        """Returns the range of an argument: a number, a size, a tensor."""
        if isinstance(value, bool | int):
            return int(value), int(value)
        held = _held(value)
        if isinstance(held, int | torch.SymInt):
            return self.size(held)
        return self.ranges.get(value) if isinstance(value, torch.fx.Node) else None

    def _range(self, node: Any) -> Range | None:
        """Returns the range of a node's values; None if it is not known."""
        held, name = _held(node), _name(node)
        if isinstance(held, torch.Tensor) and held.dtype == torch.bool:
            return 0, 1
        if node.target is operator.getitem:
            return self._item(node)
        given = [self._of(value) for value in node.args]
        first = given[0] if given else None
        if name in _POSITION:
            return self._position(node)
        if name in PASSING:
            return first
        if name in CASTS:
            source = _held(node.args[0]).dtype
            return None if source.is_floating_point or source.is_complex else first
        if name in ("cat", "stack") and node.args:
            return _union([self._of(value) for value in node.args[0]])
        if name == "where" and len(given) == 3:
            return _union(given[1:])
        if name == "masked_fill" and len(given) == 3:
            return _union([given[0], given[2]])
        if name in ("zeros", "zeros_like", "new_zeros"):
            return 0, 0
        if name in ("ones", "ones_like", "new_ones"):
            return 1, 1
        if name in ("full", "full_like") and len(given) > 1:
            return given[1]
        if name in ("new_full", "scalar_tensor"):
            return given[-1] if given else None
        if name in ("tril", "triu"):
            return _union([first, (0, 0)])
        if name == "arange":
            return _arange(given)
        if name in ("cumsum", "sum") and first is not None:
            return self._sum(node, name, first)
        if name in ("bucketize", "searchsorted") and len(node.args) > 1:
            table = _held(node.args[1 if name == "bucketize" else 0])
            return 0, self.size(table.shape[-1])[1]
        if name in ("clamp", "clamp_min", "clamp_max"):
            return _clamped(first, self._of(overloads.argument(node, "min")), self._of(overloads.argument(node, "max")))
        if name in ("minimum", "maximum") and len(given) == 2:
            return _clamped(first, given[1] if name == "maximum" else None, given[1] if name == "minimum" else None)
        return _arithmetic(name, node, given)

    def _item(self, node: Any) -> Range | None:
        source, at = node.args[0], node.args[1]
        if _name(source) in _POOLED:
            sizes = _held(source.args[0]).shape[-_POOLED[_name(source)] :]
            return (0, math.prod(self.size(size)[1] for size in sizes) - 1) if at == 1 else None
        if _name(source) not in _WITH_POSITION:
            return self.ranges.get(source)
        return self._position(source) if at == 1 else None

    def _position(self, node: Any) -> Range:
        """Returns the range of an index into the axis that a node searches; into all elements if it names none."""
        held, axis = _held(node.args[0]), overloads.argument(node, "dim")
        sizes = held.shape if axis is None or not held.dim() else [held.shape[axis]]
        return 0, max(math.prod(self.size(size)[1] for size in sizes) - 1, 0)

    def _sum(self, node: Any, name: str, one: Range) -> Range:
        held, axes = _held(node.args[0]), overloads.argument(node, "dim")
        axes = [axes] if isinstance(axes, int) else axes
        sizes = [held.shape[axis] for axis in axes] if axes else held.shape
        highest = math.prod(self.size(size)[1] for size in sizes) if held.dim() else 1
        ends = [end * count for end in one for count in ((1, highest) if name == "cumsum" else (0, highest))]
        return min(ends), max(ends)


def _union(ranges: list[Range | None]) -> Range | None:
    if not ranges or any(one is None for one in ranges):
        return None
    return min(one[0] for one in ranges if one), max(one[1] for one in ranges if one)


def _arange(given: list[Range | None]) -> Range | None:
    ends = given[:2] if len(given) > 1 else [(0, 0), *given]
    if len(given) > 2 and given[2] is not None and given[2][0] <= 0:
        return None
    start, end = ends
    return None if start is None or end is None else (start[0], max(end[1] - 1, start[1]))


def _arithmetic(name: str, node: Any, given: list[Range | None]) -> Range | None:
    """Returns the range of an arithmetic operation on ranges."""
    if name == "remainder" and len(given) > 1 and given[1] is not None and given[1][0] > 0:
        low, high = given[0] or (-1, 0)
        return (low, high) if 0 <= low and high < given[1][0] else (0, given[1][1] - 1)
    if not given or given[0] is None:
        return None
    first = given[0]
    if name == "neg":
        return -first[1], -first[0]
    if name == "abs":
        ends = [abs(first[0]), abs(first[1])]
        return (0 if first[0] <= 0 <= first[1] else min(ends)), max(ends)
    if len(given) < 2 or given[1] is None:
        return None
    second, scale = given[1], node.kwargs.get("alpha", 1)
    if name in ("add", "sub", "rsub") and isinstance(scale, int):
        if name == "rsub":
            first, second = second, first
        step = scale if name == "add" else -scale
        ends = [step * end for end in second]
        return first[0] + min(ends), first[1] + max(ends)
    if name == "mul":
        ends = [a * b for a in first for b in second]
        return min(ends), max(ends)
    floors = name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") == "floor")
    if floors and second[0] > 0:
        ends = [a // b for a in first for b in second]
        return min(ends), max(ends)
    return None


def _clamped(given: Range | None, lower: Range | None, upper: Range | None) -> Range | None:
    """Returns the range of values after clamping; an unknown range counts as the widest."""
    low, high = given or (-(2**63), 2**63 - 1)
    if given is None and lower is None and upper is None:
        return None
    if lower is not None:
        low, high = max(low, lower[0]), max(high, lower[1])
    if upper is not None:
        low, high = min(low, upper[0]), min(high, upper[1])
    return low, high


class _Guarded:
    """Inputs and indices that were clamped, and what becomes NaN by them."""

    def __init__(self, marks: bool) -> None:
        self._marks = marks
        # Clamped input, and what has its values in another shape -> the same of what was given, and the outcome.
        self.given: dict[Any, tuple[Any, Any] | None] = {}
        # Outcomes after which no float is NaN yet.
        self.unmarked: list[Any] = []

    def raw(self, flat: Flat, index: Any) -> tuple[Any, Any] | None:
        """Returns an index without the clamp of its input, and the outcome; None if it has no such input."""
        if index not in self.given:
            self.given[index] = None
            single = index.op == "call_function" and index.all_input_nodes == [index.args[0]]
            if single and _name(index) in KEEPING | CASTS and (found := self.raw(flat, index.args[0])) is not None:
                with flat.graph.inserting_after(index):
                    made = flat.graph.node_copy(index, lambda _: found[0])
                fake.propagate_node(made)
                self.given[index] = (made, found[1])
        return self.given[index]

    def mark(self, flat: Flat, node: Any, site: _Site, raw: tuple[Any, Any], bad: Any = None) -> None:
        """Has a lookup give NaN for a bad index, if it reads floats by one index."""
        given, outcome = raw
        aten, held = torch.ops.aten, _held(node)
        if not self._marks or not isinstance(held, torch.Tensor) or not held.dtype.is_floating_point:
            return
        name = _name(node)
        if name in ("index", "_unsafe_index"):
            others = [one for one in overloads.argument(node, "indices") if one is not None]
            after = _held(site.table).dim() - 1 - (site.axis or 0)
            fits = len(others) == 1
        else:
            after, fits = (1 if name == "embedding" else 0), name in ("embedding", "gather", "take_along_dim", "take")
        if not fits:
            return
        new = _inserter(flat, node, after=True)
        mask = new(aten.ne.Tensor, site.index, given) if bad is None else bad
        for _ in range(after):
            mask = new(aten.unsqueeze.default, mask, -1)
        users = list(node.users)
        marked = new(aten.masked_fill.Scalar, node, mask, math.nan)
        node.replace_all_uses_with(marked, delete_user_cb=lambda user: user in users)
        flat.outputs[:] = [marked if one is node else one for one in flat.outputs]
        if outcome in self.unmarked:
            self.unmarked.remove(outcome)

    def mark_outputs(self, flat: Flat) -> None:
        """Has float outputs be NaN after the outcomes that mark no lookup."""
        aten = torch.ops.aten
        if not self._marks or not self.unmarked:
            return
        end = flat.graph.output_node()
        new = _inserter(flat, end)
        bad, *others = (new(aten.any.default, one) if _held(one).dim() else one for one in self.unmarked)
        for other in others:
            bad = new(aten.logical_or.default, bad, other)
        outputs = list(end.args[0])
        for at, output in enumerate(outputs[: len(outputs) - len(flat.written)]):  # without the new values of states
            held = _held(output)
            if isinstance(held, torch.Tensor) and held.dtype.is_floating_point:
                outputs[at] = new(aten.masked_fill.Scalar, output, bad, math.nan)
        end.args = (tuple(outputs),)
        flat.outputs[:] = outputs


def _as_number(flat: Flat, check: Check) -> None:
    """Makes the outcome of a check one number, as the runtime reads it."""
    new = _inserter(flat, check.outcome, after=True)
    outcome = new(torch.ops.aten.any.default, check.outcome) if _held(check.outcome).dim() else check.outcome
    check.outcome = new(torch.ops.aten.to.dtype, outcome, torch.int64)


def _inserter(flat: Flat, at: Any, *, after: bool = False, known: Known | None = None) -> Any:
    """Returns a function that adds calls to the graph, before a node or in order after it."""
    place = [at]

    def new(target: Any, *args: Any) -> Any:
        with flat.graph.inserting_after(place[0]) if after else flat.graph.inserting_before(at):
            created = flat.graph.call_function(target, args)
        created.meta = {key: at.meta[key] for key in ("nn_module_stack", "stack_trace") if key in at.meta}
        fake.propagate_node(created)
        if known is not None:
            known.learn(created)
        place[0] = created
        return created

    return new


def _guard_input(flat: Flat, node: Any, spec: dict[str, Any], known: Known, guarded: _Guarded, root: Path) -> None:
    """Clamps an input with bounds, and adds a check of whether that changed it. What pads it is within them too."""
    aten, limits = torch.ops.aten, torch.iinfo(_held(node).dtype)
    low, high = known.ranges[node]
    pad = spec.get("pad")
    if isinstance(pad, int):
        low, high = min(low, pad), max(high, pad)
    low, high = max(low, limits.min), min(high, limits.max)
    if low > high or (low == limits.min and high == limits.max):
        return
    users = list(node.users)
    new = _inserter(flat, next(one for one in flat.graph.nodes if one.op != "placeholder"), known=known)
    safe = new(aten.clamp.default, node, low, high)
    bad = new(aten.ne.Tensor, safe, node)
    outcome = new(aten.any.default, bad)
    node.replace_all_uses_with(safe, delete_user_cb=lambda user: user in users)
    known.ranges[safe] = known.ranges[node]
    guarded.given[safe] = (node, outcome)
    guarded.unmarked.append(outcome)
    text = f"input `{spec['name']}` in {low}..{high + 1}"
    flat.checks.append(Check(outcome, text, None, spec["name"]))


def _guard(flat: Flat, node: Any, site: _Site, known: Known, guarded: _Guarded, root: Path) -> None:
    """Gives a node a clamped index, and adds a check of whether clamping changed it."""
    aten = torch.ops.aten
    new = _inserter(flat, node, known=known)
    size = symbols.fixed(site.size)
    limits = torch.iinfo(_held(site.index).dtype)
    if size is not None:
        if size == 0:
            return
        low: Any = max(-size, limits.min) if site.wraps else 0
        high: Any = min(size - 1, limits.max)
    else:
        at = (aten.sym_numel.default, site.table)
        number = new(*at) if site.axis is None else new(aten.sym_size.int, site.table, site.axis)
        low = new(operator.neg, number) if site.wraps else 0
        high = new(operator.sub, number, 1)
    safe = new(aten.clamp.default, site.index, low, high)
    differs = new(aten.ne.Tensor, safe, site.index)
    if site.ignored is not None:
        differs = new(aten.logical_and.default, differs, new(aten.ne.Scalar, site.index, site.ignored))
        safe = new(aten.where.self, differs, safe, site.index)
    outcome = new(aten.any.default, differs)
    _replace(node, site, safe)
    guarded.unmarked.append(outcome)
    guarded.mark(flat, node, site, (site.index, outcome), differs)
    text = f"index in {'-n' if site.wraps and size is None else low}..{'n' if size is None else size}"
    text = f"{text} of {node.target.namespace}.{_name(node)}"
    flat.checks.append(Check(outcome, text, failures.line_of(node, root)))


def _replace(node: Any, site: _Site, safe: Any) -> None:
    """Replaces an index of a node."""
    place = [argument.name for argument in overloads.arguments(node.target)].index(site.argument)
    value = safe
    if site.item is not None:
        value = [safe if at == site.item else one for at, one in enumerate(overloads.argument(node, site.argument))]
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(site.argument, value)


def _assertion(flat: Flat, node: Any, root: Path) -> Any:
    """Replaces an assertion about a value, which would stop the kernel, by a check. Returns its outcome."""
    aten = torch.ops.aten
    with flat.graph.inserting_before(node):
        failed = flat.graph.call_function(aten.logical_not.default, (node.args[0],))
        failed.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        fake.propagate_node(failed)
    message = node.args[1] if len(node.args) > 1 and node.args[1] else "an assertion of the model"
    flat.checks.append(Check(failed, str(message).splitlines()[0], failures.line_of(node, root)))
    flat.graph.erase_node(node)
    return failed
