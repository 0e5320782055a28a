"""Captures with dynamic dimensions: one graph for every size between two bounds.

torch.export reports that a dimension was specialised, but not where. A second capture, which may specialise every
dimension, keeps the line that did it.

A capture at small sizes can have an upper bound: if a convolution reduces an axis to one element, the graph holds only
for sizes with one element there. Such a capture is repeated at larger sizes that the module accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.export import Dim

from .. import failures
from ..graph import flat
from ..torch_private import errors, exported, symbols
from ..wire import Failure

# torch.export reasons about sizes from 2: tensors of size 0 and 1 broadcast, and are other programs.
MIN_SIZE = 2
# "No upper bound" in the protocol.
UNBOUNDED = 2**63 - 1

# Maximum number of captures at larger sizes.
_WIDER = 6

Bounds = dict[str, dict[str, int]]


def sizes(asked: Bounds, at: dict[str, int]) -> dict[str, int]:
    """Returns the sizes to capture at: `at`, clamped to the bounds."""
    clamped = dict(at)
    for dim, bounds in asked.items():
        low, high = max(bounds["min"], MIN_SIZE), bounds["max"]
        if high <= low:
            raise Failure(
                "capture", f"dimension `{dim}` goes from {bounds['min']} to {high}: too few sizes to be dynamic"
            )
        clamped[dim] = min(max(at.get(dim, low), low), high)
    return clamped


def export(
    wrapped: Any, inputs: list[Any], specs: list[dict[str, Any]], asked: Bounds, root: Path, what: str
) -> tuple[Any, Bounds]:
    """Returns the exported program and the bounds it holds for."""
    dims = {dim: _dim(dim, bounds) for dim, bounds in asked.items()}
    try:
        program = flat.export(wrapped, inputs, root, what, _shapes(specs, dims))
    except Failure as failure:
        cause = failure.__cause__
        if cause is None or not errors.violated_constraints(cause):
            raise
        fixed = _specialised(wrapped, inputs, specs, asked, root, what, cause)
        if fixed.location is not None or not errors.unproven_guard(cause):
            raise fixed from cause
        # torch can't prove a guard for all sizes. Often it always holds, so it becomes a check in the graph.
        try:
            program = flat.export(wrapped, inputs, root, what, _shapes(specs, dims), deferred=True)
        except Failure:
            raise fixed from cause
    ranges = symbols.ranges(program)
    found = {}
    for dim, bounds in asked.items():
        low, high = ranges.get(_symbol(program, specs, dim), (max(bounds["min"], MIN_SIZE), bounds["max"]))
        found[dim] = {"min": max(low, MIN_SIZE, bounds["min"]), "max": min(high, bounds["max"])}
    return program, found


def widest(
    capture: Callable[[dict[str, int]], tuple[Any, Bounds]],
    takes: Callable[[dict[str, int]], bool],
    asked: Bounds,
    at: dict[str, int],
) -> tuple[Any, Bounds, dict[str, int]]:
    """Returns the capture with the largest upper bounds, its bounds, and its sizes.

    `capture` captures at given sizes. `takes` returns whether the module takes such sizes.
    """
    program, held = capture(at)
    for _ in range(_WIDER):
        for larger in _larger(held, asked, at):
            (dim,) = (dim for dim in asked if larger[dim] != at[dim])
            try:
                wider = capture(larger) if takes(larger) else None
            except Failure:
                continue
            if wider is not None and wider[1][dim]["max"] > held[dim]["max"]:
                (program, held), at = wider, larger
                break
        else:
            break
    return program, held, at


def _larger(held: Bounds, asked: Bounds, at: dict[str, int]) -> list[dict[str, int]]:
    """Returns sizes to capture at again: one dimension beyond its upper bound, far first."""
    found = []
    for dim, bounds in held.items():
        high, limit = bounds["max"], asked[dim]["max"]
        if high < limit:
            found += [{**at, dim: size} for size in dict.fromkeys((min(2 * high, limit), high + 1))]
    return found


def _dim(dim: str, bounds: dict[str, int]) -> Any:
    low = max(bounds["min"], MIN_SIZE)
    # Without an upper bound in the spec, the code may have one (a table of positions), which is read afterwards.
    return Dim.DYNAMIC(min=low) if bounds["max"] >= UNBOUNDED else Dim(dim, min=low, max=bounds["max"])


def _shapes(specs: list[dict[str, Any]], dims: dict[str, Any]) -> dict[str, Any]:
    axes = [{axis: dims[dim] for axis, dim in enumerate(spec["dims"]) if dim in dims} for spec in specs]
    return {"inputs": tuple(axes)}


def _symbol(program: Any, specs: list[dict[str, Any]], dim: str) -> str:
    """Returns the symbol of a dimension in the program."""
    for spec, node in zip(specs, exported.user_inputs(program), strict=True):
        for axis, name in enumerate(spec["dims"]):
            if name == dim:
                return str(node.meta["val"].shape[axis])
    return ""


def _specialised(
    wrapped: Any,
    inputs: list[Any],
    specs: list[dict[str, Any]],
    asked: Bounds,
    root: Path,
    what: str,
    cause: BaseException,
) -> Failure:
    free = dict.fromkeys(asked, Dim.AUTO)
    try:
        program = flat.export(wrapped, inputs, root, what, _shapes(specs, free))
    except Failure:
        program = None
    if program is not None:
        places = symbols.specialisations(program)
        for spec, node in zip(specs, exported.user_inputs(program), strict=True):
            for axis, dim in enumerate(spec["dims"]):
                size = symbols.fixed(node.meta["val"].shape[axis])
                if dim in asked and size is not None:
                    return Failure(
                        "capture",
                        f"dimension `{dim}` can't be dynamic: the code of {what} needs it to be {size}",
                        location=_place(places, root),
                        hint=f"compute with the tensor's own size there, or leave `{dim}` out of `dynamic`",
                    )
    reason = errors.constraint(cause, [spec["name"] for spec in specs])
    names = ", ".join(f"`{dim}`" for dim in asked)
    return Failure("capture", f"{what} can't be captured with {names} dynamic: {reason.rstrip('.') or cause}"[:400])


def _place(places: list[tuple[str, int]], root: Path) -> str | None:
    found = [failures.inside(path, line, root) for path, line in places]
    return next((place for place in found if place), None)
