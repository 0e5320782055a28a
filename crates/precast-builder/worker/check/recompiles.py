"""Recompilations of `torch.compile` for the sizes of a module, and its graph breaks.

The module is called through torch.compile with a backend that compiles nothing: at one size of each bucketed
dimension, at the same sizes again, at a second and a third size of each dimension, and at size one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .. import failures
from ..graph.call import INNER
from ..torch_private.recompiles import Broken, Compiled, Guard, compiled
from .finding import LOW, MEDIUM, Finding, Fix
from .sources import finding_at
from .subject import Subject

# The sizes of a dimension, in order.
_SECOND, _THIRD, _ONE = range(3)
_MISMATCH = re.compile(r"tensor '(.+)' size mismatch at index (\d+)\. expected (\d+), actual \d+")


@dataclass
class Recompiles:
    """Recompilations and graph breaks of a module."""

    subject: Subject
    findings: list[Finding] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    limit: int = 0
    # Texts of guards that fail at every call, without their numbers.
    _always: set[str] = field(default_factory=set)

    def vary(self) -> None:
        """Calls the module at every size."""
        base = self.subject.distinct()
        try:
            with compiled(self.subject.call) as (call, self.limit):
                first = self._call(call, base, None)
                # Torch reports a break again, without its line, for each function around it.
                lines = {one.why for one in first.breaks if one.stack}
                for one in first.breaks:
                    if one.stack or one.why not in lines:
                        self._broken(one, whole=first.graphs == 0)
                for guards in self._call(call, base, None).guards:
                    self._at_every_call(guards[0])
                for step in (_SECOND, _THIRD, _ONE):
                    for dim in self.subject.dims:
                        size = self._sizes(dim, base)[step]
                        self._guards(self._call(call, {**base, dim: size}, dim), dim, step)
        except Exception as error:
            why = f"it fails with {failures.named(error)}"
            self.subject.unknown.append(f"what else torch.compile would compile again for: {why}")

    def _sizes(self, dim: str, base: dict[str, int]) -> list[int]:
        """Returns a second size, a third, and one."""
        multiples = [base[dim] * factor for factor in (2, 3, 4, 5)]
        known = [*(bucket[dim] for bucket in self.subject.buckets if dim in bucket), *multiples]
        others = [size for size in dict.fromkeys(known) if size > 1 and size not in base.values()]
        return [*others[:2], 1]

    def answer(self) -> dict[str, Any]:
        """Returns the protocol's form."""
        return {"calls": self.calls, "limit": self.limit}

    def _call(self, call: Any, sizes: dict[str, int], dim: str | None) -> Compiled:
        try:
            done = call(*self.subject.inputs_at(sizes))
        except Exception as error:
            if dim is None:
                raise
            why = f"the module fails there: {failures.named(error)}"
            self.subject.unknown.append(f"what torch.compile does at `{dim}` = {sizes[dim]}: {why}")
            return Compiled()
        guards = [self._named(self._about(guards, dim).text) for guards in done.guards]
        self.calls.append({"sizes": sizes, "graphs": done.graphs, "breaks": len(done.breaks), "guards": guards})
        return done

    def _at_every_call(self, guard: Guard) -> None:
        self._always.add(_plain(guard.text))
        why = f"torch.compile compiles again at every call: it relies on `{self._named(guard.text)}`, which changes"
        self._found(guard, MEDIUM, why, Fix("return what changes as an output, and take it as an input"))

    def _about(self, guards: list[Guard], dim: str | None) -> Guard:
        """Returns the guard that is about a dimension; else that of the newest version, the least specialised one."""
        return next((one for one in guards if dim and re.search(rf"\b{dim}\b", self._named(one.text))), guards[0])

    def _guards(self, done: Compiled, dim: str, step: int) -> None:
        """Records why a call at a second size, a third size or size one of a dimension was compiled again."""
        for guard in (self._about(guards, dim) for guards in done.guards):
            text = self._named(guard.text)
            if _plain(guard.text) in self._always:
                continue
            fixed = _MISMATCH.match(guard.text) is not None or "==" in guard.text
            if step == _ONE:
                why = f"torch.compile makes another graph for `{dim}` = 1: `{text}` does not hold"
                fix = Fix("call it with at least two, as by a padded row, or expect one graph more")
                # Torch always specialises sizes of one, so the line of a bound is not the cause.
                guard = Guard(guard.text, [])
            elif fixed and step == _THIRD:
                why = f"torch.compile compiles again for every size of `{dim}`, and after {self.limit} runs eager: "
                why += f"`{text}` does not hold"
                fix = Fix("compute with the tensor's own size; where a value of it is read, the graph is tied to it")
                self._found(guard, MEDIUM, why, fix)
                continue
            elif fixed:
                why = f"torch.compile compiles again at the second size of `{dim}`, and leaves it free from then on"
                fix = Fix("say before the first call that it varies", self._marks(dim))
            else:
                why = f"torch.compile makes another graph where `{text}` does not hold"
                fix = Fix("code that holds for every size, or expect one graph for each side")
            self._found(guard, LOW, why, fix)

    def _marks(self, dim: str) -> list[str]:
        """Returns the calls that declare a dimension dynamic."""
        axes = [
            (spec["name"], axis) for spec in self.subject.specs for axis, own in enumerate(spec["dims"]) if own == dim
        ]
        return [f"torch._dynamo.mark_dynamic({name}, {axis})" for name, axis in axes]

    def _found(self, guard: Guard, severity: str, why: str, fix: Fix) -> None:
        sources = self.subject.sources
        own = (failures.inside(path, line, sources.root) for path, line in guard.places)
        place = sources.at(next(filter(None, own), None))
        found = finding_at(place, "recompile", severity, why, fix)
        if all(one.why != why for one in self.findings):
            self.findings.append(found)

    def _broken(self, broken: Broken, whole: bool) -> None:
        sources = self.subject.sources
        own = [failures.inside(path, line, sources.root) for path, line in broken.stack]
        place = sources.at(next(filter(None, reversed(own)), None))
        why = f"torch.compile ends its graph here: {broken.why}"
        if whole:
            why = f"torch.compile gives up the whole function here, and eager runs it: {broken.why}"
        fix = Fix("do it outside of forward, once, and keep the result")
        self.findings.append(finding_at(place, "graph-break", MEDIUM if place is not None else LOW, why, fix))

    def _named(self, text: str) -> str:
        """Returns a guard with the names of inputs and dimensions."""
        text = text.replace(f"self.{INNER}.", "self.")
        found = _MISMATCH.match(text)
        if found:
            name, axis, before = found.groups()
            text = f"{name}.size()[{axis}] == {before}"
        for index, spec in enumerate(self.subject.specs):
            for name in (f"inputs[{index}]", spec["name"]):
                for axis, dim in enumerate(spec["dims"]):
                    if dim is not None:
                        text = text.replace(f"{name}.size()[{axis}]", dim)
            text = text.replace(f"inputs[{index}]", spec["name"])
        return text


def _plain(text: str) -> str:
    return re.sub(r"\d+", "", text)
