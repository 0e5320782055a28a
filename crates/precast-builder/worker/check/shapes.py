"""Bucketed dimensions that the code fixes to one size: found by captures with free sizes, and by a run at size one.

A capture with every bucketed dimension free shows which of them the code fixes. The code's own comparisons of sizes are
recorded while it is captured, with their lines: each bucket has its own result, a dynamic artifact only that of the
sample.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim

from .. import failures
from ..graph import structure
from ..sizes import dynamic
from ..torch_private import drafts, exported, symbols
from . import fixes
from .finding import HIGH, LOW, MEDIUM, Finding, Fix
from .observe import Seen
from .sources import Place, Sources, finding_at
from .subject import Subject


@dataclass
class Decision:
    """A comparison of sizes whose value the project's code reads."""

    text: str
    place: Place
    # Whether a size itself was read, which fixes it.
    fixes: bool


@dataclass
class Shapes:
    """Bounds and findings of a module's bucketed dimensions."""

    subject: Subject
    findings: list[Finding] = field(default_factory=list)
    # Dimension -> its bounds in a dynamic artifact; none if it can't be dynamic.
    dynamic: dict[str, Any] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def vary(self, seen: Seen) -> None:
        """Varies every bucketed dimension."""
        dims = self.subject.dims
        self.dynamic = dict.fromkeys(dims)
        failed = self._capture(dims)
        if failed is not None and len(dims) > 1:
            # One at a time: which of them is it?
            for dim in dims:
                one = self._capture([dim])
                if one is not None:
                    self._blame(one, [dim])
            if all(bounds is not None for bounds in self.dynamic.values()):
                self._blame(failed, dims)
        elif failed is not None:
            self._blame(failed, dims)
        known = set()
        for one in self.decisions:
            if not one.fixes and one.place.location not in known:
                known.add(one.place.location)
                self.findings.append(_decided(one))
        for dim in dims:
            self._at_one(dim, seen)

    def draft(self) -> None:
        """Finds flags that depend on sizes in a module that can't be captured: draft mode continues after a break."""
        specs, inputs = self.subject.specs, self.subject.inputs
        large = [
            {axis: dim for axis, dim in enumerate(spec["dims"]) if dim is not None and value.shape[axis] > 1}
            for spec, value in zip(specs, inputs, strict=True)
        ]
        dims = sorted({dim for axes in large for dim in axes.values()})
        if not dims:
            return
        try:
            free = tuple(dict.fromkeys(axes, Dim.AUTO) for axes in large)
            drafts.breaks(self.subject.call, inputs, {"inputs": free})
        except Exception as error:
            if _symbolic(error):
                self._blame(error, dims)

    def _capture(self, dims: list[str]) -> BaseException | None:
        """Captures with some dimensions free; returns the error of the capture, if it fails."""
        subject = self.subject
        axes = tuple({axis: Dim.AUTO for axis, dim in enumerate(spec["dims"]) if dim in dims} for spec in subject.specs)

        def note(expression: Any, answer: Any, named: dict[str, str]) -> None:
            place = _asked_by(subject.sources)
            if place is not None and str(expression) not in ("True", "False"):
                text = _named(expression, named, subject.specs)
                self.decisions.append(Decision(text, place, fixes=str(answer) not in ("True", "False")))

        inputs = tuple(subject.inputs_at(subject.distinct()))
        try:
            with torch.no_grad(), exported.without_suggestions(), drafts.size_decisions(note):
                program = torch.export.export(subject.call, inputs, dynamic_shapes={"inputs": axes}, strict=False)
        except Exception as error:
            return error
        ranges = symbols.ranges(program)
        for spec, node in zip(subject.specs, exported.user_inputs(program), strict=True):
            for axis, dim in enumerate(spec["dims"]):
                if dim not in dims:
                    continue
                size = node.meta["val"].shape[axis]
                number = symbols.fixed(size)
                if number is None:
                    low, high = ranges.get(str(size), (dynamic.MIN_SIZE, dynamic.UNBOUNDED))
                    bounds = {"min": max(low, dynamic.MIN_SIZE), "max": high if high < dynamic.UNBOUNDED else None}
                    self.dynamic[dim] = bounds
                else:
                    self._fixed(dim, number, symbols.specialisations(program))
        return None

    def _fixed(self, dim: str, number: int, lines: list[tuple[str, int]]) -> None:
        """Adds a finding at the line that fixes a dimension to a number."""
        sources = self.subject.sources
        self.dynamic[dim] = None
        places = [failures.inside(path, line, sources.root) for path, line in lines]
        places += [one.place.location for one in self.decisions if one.fixes]
        severity = HIGH if dim in self.subject.asked else LOW
        why = (
            f"the code needs `{dim}` to be {number} where it was captured at {number}: each bucket has a graph of its "
            "own"
        )
        fix = Fix(f"take the size from the tensor itself; buckets work as it is, `dynamic` needs `{dim}` free")
        place = sources.at(next(filter(None, places), None))
        self.findings.append(finding_at(place, "fixed-size", severity, why, fix))

    def _blame(self, error: BaseException, dims: list[str]) -> None:
        """Adds a finding for dimensions that can't be free."""
        self.dynamic |= dict.fromkeys(dims)
        names = ", ".join(f"`{dim}`" for dim in dims)
        sources = self.subject.sources
        place = sources.at(failures.location(error, sources.root))
        asked = any(dim in self.subject.asked for dim in dims)
        if _symbolic(error):
            why = f"with {names} free this flag is no Python value: {failures.one_line(error)}"
            fix = fixes.flag(place.statement if place else None)
            self.findings.append(finding_at(place, "symbolic-flag", HIGH if asked else MEDIUM, why, fix))
            return
        why = f"with {names} free it can't be captured: {failures.named(error)}"
        fix = Fix("compute with the tensor's own sizes; buckets work as it is, `dynamic` does not")
        self.findings.append(finding_at(place, "fixed-size", HIGH if asked else LOW, why, fix))

    def _at_one(self, dim: str, seen: Seen) -> None:
        """Runs a module at sizes one and two of a dimension; adds a finding if the results differ in form."""
        subject = self.subject
        answers = []
        fix = Fix("name the dimension of `squeeze`, and keep it with `keepdim=True`")
        for size in (2, 1):
            inputs = subject.inputs_at({**subject.sizes, dim: size})
            try:
                with torch.no_grad():
                    answers.append([tensor.dim() for tensor in structure.tensors_of(subject.call(*inputs))])
            except Exception as error:
                if size == 1 and answers:
                    wanted = any(bucket.get(dim) == size for bucket in subject.buckets)
                    place = subject.sources.at(failures.location(error, subject.sources.root))
                    why = f"it fails at `{dim}` = 1: {failures.named(error)}"
                    self.findings.append(finding_at(place, "size-one", HIGH if wanted else MEDIUM, why, fix))
                else:
                    why = f"it fails there, with `{failures.one_line(error)}`"
                    subject.unknown.append(f"how it answers at `{dim}` = {size}: {why}")
                return
        if answers[0] != answers[1]:
            why = f"an output has {answers[1]} dimensions at `{dim}` = 1, {answers[0]} at 2: no request can be padded"
            squeezes = [one.place for one in seen.calls if one.name == "squeeze" and one.facts["arguments"] == 1]
            self.findings.append(finding_at(next(iter(squeezes), None), "size-one", MEDIUM, why, fix))
        elif (bounds := self.dynamic.get(dim)) is not None and bounds["min"] == dynamic.MIN_SIZE:
            # Captures begin at two; a separate program answers size one.
            bounds["min"] = 1


def _symbolic(error: BaseException) -> bool:
    return any(word in str(error) for word in ("SymBool", "SymInt", "SymFloat"))


def _named(expression: Any, sources: dict[str, str], specs: list[dict[str, Any]]) -> str:
    """Returns an expression with the names of the dimensions in place of symbols."""
    text = str(expression)
    for symbol, source in sources.items():
        place = re.search(r"\['inputs'\]\[(\d+)\]\.size\(\)\[(\d+)\]", source)
        dim = specs[int(place.group(1))]["dims"][int(place.group(2))] if place else None
        if dim is not None:
            text = re.sub(rf"\b{re.escape(symbol)}\b", dim, text)
    return text


def _decided(one: Decision) -> Finding:
    text = one.place.source
    category = "size-one" if "== 1" in text or "!= 1" in text or "> 1" in text else "python-branch"
    why = f"`{one.text}` is decided at capture: each bucket has its own answer, a dynamic artifact only one"
    return finding_at(one.place, category, LOW, why, Fix("one module for each case, or code that holds for every size"))


def _asked_by(sources: Sources) -> Place | None:
    """Returns the project's line that reads the value of a comparison directly, and not through an operation."""
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
