"""Repeated submodules: groups that share one artifact, and the differences of the others.

Members of a list share an artifact if their parts of the captured graph are equal. The attributes of the other members
are compared with theirs. An attribute that varies inside the group, such as the number of a layer, is no reason.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .. import globs, tensors
from ..graph import cut, segment
from ..graph.call import INNER, joined
from ..graph.flat import Flat
from ..model import repeats
from ..model.repeats import Fact, Repeat
from .finding import LOW, Finding, Fix
from .sources import finding_at
from .subject import Subject

# Maximum number of differences in a finding.
_NAMED = 4


@dataclass
class Regions:
    """The lists of a module, with the number of artifacts that each needs."""

    subject: Subject
    findings: list[Finding] = field(default_factory=list)
    lists: list[dict[str, Any]] = field(default_factory=list)

    def compare(self, graph: Flat | None) -> None:
        """Compares the members of every list. `graph` is none if the module can't be captured."""
        path = self.subject.module["path"]
        for repeat in repeats.find(self.subject.call.get_submodule(INNER)):
            called = self._called(repeat, graph) if graph is not None else {}
            if graph is not None:
                forms = {name: text for name, (text, _) in called.items()}
            else:
                forms = {name: str(sorted(held)) for name, held in _without_numbers(repeat).items()}
            # Members that the module does not call have no part.
            if len(forms) < 2:
                continue
            groups: dict[str, list[str]] = {}
            for name, form in forms.items():
                groups.setdefault(form, []).append(name)
            ordered = sorted(groups.values(), key=len, reverse=True)
            first = joined(path, next(iter(forms)))
            self.lists.append(
                {
                    "glob": joined(path, repeat.glob),
                    "class": repeat.kind.__name__,
                    "count": len(forms),
                    "artifacts": len(ordered),
                    "region": any(globs.matches(one, first) for one in self.subject.module["regions"]),
                }
            )
            if len(ordered) > 1:
                self._differ(repeat, ordered, called)
        if graph is None and self.lists:
            self.subject.unknown.append("whether lists share artifacts: they are compared by attributes alone")

    def _called(self, repeat: Repeat, graph: Flat) -> dict[str, tuple[str, list[Any]]]:
        """Returns text and input layouts of each member's part of the graph, as a region would have them."""
        path = self.subject.module["path"]
        names = {joined(path, name): name for name in repeat.members}
        found = {}
        for part in cut.cut(graph, [joined(path, repeat.glob)], path):
            if part.name in names:
                layouts = [tensors.layout(node.meta["val"]) for node in part.inputs]
                found[names[part.name]] = (segment.build(part, graph).text, layouts)
        return found

    def _differ(self, repeat: Repeat, groups: list[list[str]], called: dict[str, tuple[str, list[Any]]]) -> None:
        """Adds a finding with the differences of each group from the largest, if that has several members."""
        largest, *others = groups
        if len(largest) < 2:
            return
        known = {name: repeats.facts(held) for name, held in repeat.members.items()}
        first = known[largest[0]]
        varied = {fact for name in largest for fact in _different(known[name], first)}
        path = self.subject.module["path"]
        reasons = []
        for group in others:
            own = known[group[0]]
            differ = [fact for fact in _different(own, first) if fact not in varied]
            reasons_ = [_shown(fact, own.get(fact), first.get(fact)) for fact in differ[:_NAMED]]
            if len(differ) > _NAMED:
                reasons_.append(f"{len(differ) - _NAMED} more")
            names = ", ".join(f"`{joined(path, name)}`" for name in group[:_NAMED])
            if len(group) > _NAMED:
                names += f" and {len(group) - _NAMED} more"
            reasons.append(f"{names}: {', '.join(reasons_) or _calls(called, group[0], largest[0])}")
        count = sum(len(group) for group in others)
        total = f"{count} of {count + len(largest)} `{repeat.kind.__name__}`"
        why = f"{total} need artifacts of their own, the others share one; {'; '.join(reasons)}"
        fix = Fix("give all of them one value, or a tensor in its place: then one compile serves them all")
        self.findings.append(finding_at(self._place(repeat.kind), "region", LOW, why, fix))

    def _place(self, kind: type) -> Any:
        try:
            path = inspect.getsourcefile(kind)
            line = inspect.getsourcelines(kind.forward)[1]  # type: ignore[attr-defined]
        except (OSError, TypeError):
            return None
        return self.subject.sources.place(path, line) if path else None


def _shown(name: str, own: Fact | None, other: Fact | None) -> str:
    if own is None or other is None:
        return f"`{name}` is there in {'the others' if own is None else 'it'} only"
    what = f"the {own.kind} of `{name}`" if own.kind in ("class", "dtype") else f"`{name}`"
    return f"{what} is {own.value}, in the others {other.value}"


def _layouts(held: list[Any]) -> str:
    return ", ".join(f"{one['dtype']}{one['shape']}" for one in held) or "no tensor"


def _calls(called: dict[str, tuple[str, list[Any]]], name: str, other: str) -> str:
    """Describes the difference of two members with equal attributes."""
    if name in called and called[name][1] != called[other][1]:
        own, theirs = _layouts(called[name][1]), _layouts(called[other][1])
        return f"it is called with {own}, the others with {theirs}"
    return "no attribute differs: its code decides by something else, as by what it is called with"


def _different(own: dict[str, Fact], other: dict[str, Fact]) -> list[str]:
    """Returns the names of the facts that differ between two members."""
    names = dict.fromkeys([*other, *own])
    return [name for name in names if own.get(name) != other.get(name)]


def _without_numbers(repeat: Repeat) -> dict[str, list[tuple[str, str, str]]]:
    """Returns the facts of each member. Leaves out facts that differ in every member, such as the number of a layer."""
    known = {name: repeats.facts(held) for name, held in repeat.members.items()}
    counts = Counter((fact, one) for held in known.values() for fact, one in held.items())
    shared = {fact for (fact, _), count in counts.items() if count > 1}
    return {
        name: [(fact, one.kind, one.value) for fact, one in held.items() if fact in shared]
        for name, held in known.items()
    }
