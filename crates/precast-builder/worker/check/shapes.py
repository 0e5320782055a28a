"""What ties a bucketed dimension to one size: captures with free sizes, and a run at size one.

A capture with every bucketed dimension free says which of them the code fixes. Comparisons of sizes that the code
itself makes are told while it is captured, with their line: each bucket has its own answer of them, and a dynamic
artifact only the answer of the sample.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

from .. import capture as capturing
from .. import dynamic, failures, samples, structure
from ..torch_private import drafts, exported, symbols
from . import mends
from .finding import HIGH, LOW, MEDIUM, Finding, Mend
from .observe import Seen
from .sources import Place, Sources, made


@dataclass
class Shapes:
    """What is known of a module's bucketed dimensions."""

    findings: list[Finding] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    # Dimension -> its bounds in a dynamic artifact, none where it can't be dynamic.
    dynamic: dict[str, Any] | None = None


@dataclass
class Decision:
    """A comparison of sizes that the project's code asked the value of."""

    text: str
    place: Place
    # Whether a size itself was asked for, which fixes it.
    fixes: bool


def check(
    opened: Any,
    module: dict[str, Any],
    sizes: dict[str, int],
    buckets: list[dict[str, int]],
    wrapped: Any,
    sources: Sources,
    seen: Seen,
) -> Shapes:
    """Varies every bucketed dimension of a module."""
    result = Shapes()
    specs = module["inputs"]
    dims = sorted({dim for spec in specs for dim in spec["dims"] if dim is not None})
    if not dims:
        return result
    asked = module.get("dynamic") or {}
    free = {dim: {"min": dynamic.MIN_SIZE, "max": dynamic.UNBOUNDED} for dim in dims}
    result.dynamic = dict.fromkeys(dims)
    at = _base(dims, sizes)
    decisions: list[Decision] = []
    failed = _capture(opened, module, specs, wrapped, at, free, sources, decisions, result)
    if failed is not None and len(dims) > 1:
        # One at a time: which of them is it?
        for dim in dims:
            one = _capture(opened, module, specs, wrapped, at, {dim: free[dim]}, sources, decisions, result)
            if one is not None:
                _blame(one, [dim], asked, sources, result)
        if all(bounds is not None for bounds in result.dynamic.values()):
            _blame(failed, dims, asked, sources, result)
    elif failed is not None:
        _blame(failed, dims, asked, sources, result)
    known = set()
    for one in decisions:
        if not one.fixes and one.place.location not in known:
            known.add(one.place.location)
            result.findings.append(_decided(one))
    for dim in dims:
        _at_one(opened, specs, wrapped, sizes, dim, buckets, sources, seen, result)
    return result


def draft(module: dict[str, Any], inputs: list[Any], wrapped: Any, sources: Sources) -> list[Finding]:
    """Looks for flags that follow from sizes where a module can't be captured: draft mode goes past the rest."""
    specs = module["inputs"]
    pairs = list(zip(specs, inputs, strict=True))
    dims = sorted({dim for spec, value in pairs for dim in _large(spec, value)})
    if not dims:
        return []
    result = Shapes(dynamic={})
    try:
        drafts.breaks(wrapped, inputs, {"inputs": tuple(_large(spec, value, axes=True) for spec, value in pairs)})
    except Exception as error:
        if _symbolic(error):
            _blame(error, dims, module.get("dynamic") or {}, sources, result)
    return result.findings


def _large(spec: dict[str, Any], value: Any, axes: bool = False) -> Any:
    """Returns the bucketed dimensions of an input that are larger than one, or its axes that are."""
    from torch.export import Dim

    found = {axis: dim for axis, dim in enumerate(spec["dims"]) if dim is not None and value.shape[axis] > 1}
    return dict.fromkeys(found, Dim.AUTO) if axes else set(found.values())


def _free(opened: Any, specs: list[dict[str, Any]], at: dict[str, int], free: Any) -> tuple[list[Any], Any]:
    """Returns inputs at some sizes, and which of their axes are free."""
    from torch.export import Dim

    axes = ({axis: Dim.AUTO for axis, dim in enumerate(spec["dims"]) if dim in free} for spec in specs)
    return _inputs(opened, specs, at), tuple(axes)


def _inputs(opened: Any, specs: list[dict[str, Any]], at: dict[str, int]) -> list[Any]:
    """Returns inputs at some sizes."""
    moved = [capturing.at_sizes(spec, at) for spec in specs]
    return [samples.lowest(spec, spec["shape"], opened.device) for spec in moved]


def _symbolic(error: BaseException) -> bool:
    return any(word in str(error) for word in ("SymBool", "SymInt", "SymFloat"))


def _base(dims: list[str], sizes: dict[str, int]) -> dict[str, int]:
    """Returns sizes of which none is 0 or 1, and no two are equal."""
    at: dict[str, int] = {}
    for dim in dims:
        size = max(sizes.get(dim, 2), 2)
        while size in at.values():
            size += 1
        at[dim] = size
    return at


def _capture(
    opened: Any,
    module: dict[str, Any],
    specs: list[dict[str, Any]],
    wrapped: Any,
    at: dict[str, int],
    free: dynamic.Bounds,
    sources: Sources,
    decisions: list[Decision],
    result: Shapes,
) -> BaseException | None:
    """Captures with some dimensions free; returns what stopped it."""
    import torch

    inputs, axes = _free(opened, specs, at, free)

    def note(expression: Any, answer: Any, named: dict[str, str]) -> None:
        place = _asked_by(sources)
        if place is not None and str(expression) not in ("True", "False"):
            decisions.append(
                Decision(_named(expression, named, specs), place, fixes=str(answer) not in ("True", "False"))
            )

    try:
        with torch.no_grad(), exported.quiet(), drafts.size_decisions(note):
            program = torch.export.export(wrapped, tuple(inputs), dynamic_shapes={"inputs": axes}, strict=False)
    except Exception as error:
        return error
    ranges = symbols.ranges(program)
    fixed: dict[str, int] = {}
    for spec, node in zip(specs, exported.user_inputs(program), strict=True):
        for axis, dim in enumerate(spec["dims"]):
            if dim in free:
                size = node.meta["val"].shape[axis]
                number = symbols.fixed(size)
                if number is not None:
                    fixed[dim] = number
                else:
                    low, high = ranges.get(str(size), (dynamic.MIN_SIZE, dynamic.UNBOUNDED))
                    bounds = {"min": max(low, dynamic.MIN_SIZE), "max": high if high < dynamic.UNBOUNDED else None}
                    assert result.dynamic is not None
                    result.dynamic[dim] = bounds
    for dim, number in fixed.items():
        places = [failures.inside(path, line, sources.root) for path, line in symbols.specialisations(program)]
        fixing = [one.place.location for one in decisions if one.fixes]
        _fixed(dim, number, next((place for place in [*places, *fixing] if place), None), module, sources, result)
    return None


def _named(expression: Any, sources: dict[str, str], specs: list[dict[str, Any]]) -> str:
    """Returns an expression with the names of the dimensions in place of symbols."""
    text = str(expression)
    for symbol, source in sources.items():
        place = re.search(r"\['inputs'\]\[(\d+)\]\.size\(\)\[(\d+)\]", source)
        dim = specs[int(place.group(1))]["dims"][int(place.group(2))] if place else None
        if dim is not None:
            text = re.sub(rf"\b{re.escape(symbol)}\b", dim, text)
    return text


def _fixed(dim: str, number: int, location: str | None, module: dict[str, Any], sources: Sources, to: Shapes) -> None:
    assert to.dynamic is not None
    to.dynamic[dim] = None
    asked = module.get("dynamic") or {}
    severity = HIGH if dim in asked else LOW
    why = f"the code needs `{dim}` to be {number} where it was captured at {number}: each bucket has a graph of its own"
    mend = Mend(f"take the size from the tensor itself; buckets work as it is, `dynamic` needs `{dim}` free")
    to.findings.append(made(sources.at(location), "fixed-size", severity, why, mend))


def _blame(error: BaseException, dims: list[str], asked: dict[str, Any], sources: Sources, to: Shapes) -> None:
    """Says why dimensions can't be free."""
    assert to.dynamic is not None
    for dim in dims:
        to.dynamic[dim] = None
    names = ", ".join(f"`{dim}`" for dim in dims)
    place = sources.at(failures.location(error, sources.root))
    severity = HIGH if any(dim in asked for dim in dims) else MEDIUM
    if _symbolic(error):
        why = f"with {names} free this flag is no Python value: {failures.one_line(error)}"
        mend = mends.flag(place.statement if place else None)
        to.findings.append(made(place, "symbolic-flag", severity, why, mend))
        return
    why = f"with {names} free it can't be captured: {type(error).__name__}: {failures.one_line(error)}"
    mend = Mend("compute with the tensor's own sizes; buckets work as it is, `dynamic` does not")
    to.findings.append(made(place, "fixed-size", severity if severity == HIGH else LOW, why, mend))


def _decided(one: Decision) -> Finding:
    text = one.place.source
    category = "size-one" if "== 1" in text or "!= 1" in text or "> 1" in text else "python-branch"
    why = f"`{one.text}` is decided at capture: each bucket has its own answer, a dynamic artifact only one"
    return made(one.place, category, LOW, why, Mend("one module for each case, or code that holds for every size"))


def _asked_by(sources: Sources) -> Place | None:
    """Returns the project's line that asks for the value of a comparison itself, and not through an operation."""
    frame = inspect.currentframe()
    while frame is not None:
        place = sources.place(frame.f_code.co_filename, frame.f_lineno)
        if place is not None:
            return place
        path = frame.f_code.co_filename
        name = frame.f_code.co_name
        if "torch" in path and name == "__torch_function__":
            return None
        frame = frame.f_back
    return None


def _at_one(
    opened: Any,
    specs: list[dict[str, Any]],
    wrapped: Any,
    sizes: dict[str, int],
    dim: str,
    buckets: list[dict[str, int]],
    sources: Sources,
    seen: Seen,
    to: Shapes,
) -> None:
    """Runs a module at size one and at size two of a dimension: do the answers have the same form?"""
    import torch

    answers = []
    for size in (2, 1):
        inputs = _inputs(opened, specs, {**sizes, dim: size})
        try:
            with torch.no_grad():
                answers.append([tensor.dim() for tensor in structure.tensors_of(wrapped(*inputs))])
        except Exception as error:
            wanted = any(bucket.get(dim) == size for bucket in buckets)
            place = sources.at(failures.location(error, sources.root))
            if size == 1 and answers:
                why = f"it fails at `{dim}` = 1: {type(error).__name__}: {failures.one_line(error)}"
                mend = Mend("name the dimension of `squeeze`, and keep it with `keepdim=True`")
                to.findings.append(made(place, "size-one", HIGH if wanted else MEDIUM, why, mend))
            else:
                to.unknown.append(
                    f"how it answers at `{dim}` = {size}: it fails there, with `{failures.one_line(error)}`"
                )
            return
    if answers[0] != answers[1]:
        why = f"an output has {answers[1]} dimensions at `{dim}` = 1 and {answers[0]} at 2: no request can be padded"
        mend = Mend("name the dimension of `squeeze`, and keep it with `keepdim=True`")
        squeezes = [one.place for one in seen.calls if one.name == "squeeze" and one.facts["arguments"] == 1]
        to.findings.append(made(next(iter(squeezes), None), "size-one", MEDIUM, why, mend))
