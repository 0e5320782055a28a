"""Captures with dynamic dimensions: one graph for every size between two bounds.

torch.export says that a dimension was specialised, and not where. A second capture that may specialise what it likes
keeps the line that did it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import failures, flat
from .torch_private import errors, exported, symbols
from .wire import Failure

# torch.export reasons about sizes from 2: those of 0 and 1 broadcast and are other programs.
LEAST = 2
# What the protocol says for "no upper bound".
UNBOUNDED = 2**63 - 1

Bounds = dict[str, dict[str, int]]


def sizes(asked: Bounds, at: dict[str, int]) -> dict[str, int]:
    """Returns sizes to capture at: those given, moved into the bounds."""
    moved = dict(at)
    for dim, bounds in asked.items():
        low, high = max(bounds["min"], LEAST), bounds["max"]
        if high <= low:
            raise Failure(
                "capture", f"dimension `{dim}` goes from {bounds['min']} to {high}: too few sizes to be dynamic"
            )
        moved[dim] = min(max(at.get(dim, low), low), high)
    return moved


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
        # A guard that torch can't prove for all sizes, often one that always holds: it becomes a check in the graph.
        try:
            program = flat.export(wrapped, inputs, root, what, _shapes(specs, dims), deferred=True)
        except Failure:
            raise fixed from cause
    ranges = symbols.ranges(program)
    found = {}
    for dim, bounds in asked.items():
        low, high = ranges.get(_symbol(program, specs, dim), (max(bounds["min"], LEAST), bounds["max"]))
        found[dim] = {"min": max(low, LEAST, bounds["min"]), "max": min(high, bounds["max"])}
    return program, found


def _dim(dim: str, bounds: dict[str, int]) -> Any:
    from torch.export import Dim

    least = max(bounds["min"], LEAST)
    # Without an upper bound the code may bring one of its own (a table of positions); it is read back afterwards.
    return Dim.DYNAMIC(min=least) if bounds["max"] >= UNBOUNDED else Dim(dim, min=least, max=bounds["max"])


def _shapes(specs: list[dict[str, Any]], dims: dict[str, Any]) -> dict[str, Any]:
    axes = [{axis: dims[dim] for axis, dim in enumerate(spec["dims"]) if dim in dims} for spec in specs]
    return {"inputs": tuple(axes)}


def _symbol(program: Any, specs: list[dict[str, Any]], dim: str) -> str:
    """The symbol that stands for a dimension in the program."""
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
    from torch.export import Dim

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
