"""A record: the facts that a program depends on, as JSON, and their evaluation.

The paths are kept as a tree, because most begin alike: a node is its parent, a kind of step, and its argument. A weight
is a node with a name: the tensor that is there is bound to the program.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import code, facts, places, values
from .facts import Guarded
from .places import Path

FORMAT = 1
INPUTS = ("args", "kwargs")
"""Roots of the arguments of a call."""
Roots = Mapping[str, Any]
"""The values of `net`, `args` and `kwargs`."""


@dataclass
class Fact:
    """A fact about the value of a node."""

    node: int
    kind: str
    arg: Any
    """As JSON: of `same` the other node."""
    said: str
    """What it was at the trace, as canonical JSON."""


class Difference(Exception):
    """A fact that does not hold."""

    def __init__(self, place: str, reason: str, fact: Fact, of_tensor: bool = False) -> None:
        super().__init__(f"`{place}` {reason}")
        self.place, self.fact, self.of_tensor = place, fact, of_tensor


class Record:
    """Places and facts. `nodes` are (parent, kind, argument); the parent of a root is -1."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, str, Any]] = []
        self.facts: list[Fact] = []
        self.weights: dict[str, int] = {}
        self._known: dict[tuple[int, str, str], int] = {}
        self._facts: set[tuple[int, str, str]] = set()

    def add(self, guarded: Iterable[Guarded], codes: Sequence[types.CodeType], roots: Roots) -> None:
        """Adds what a trace has read, with the facts as they are now. Raises `Untold`.

        Tensors among the arguments have no facts here: a call checks them.
        """
        guarded = [one for one in guarded if one.kind != "tensor" or one.path[0][0] not in INPUTS]
        nodes = [self.node(one.path) for one in guarded]
        others = {at: self.node(one.arg) for at, one in enumerate(guarded) if one.kind == "same"}
        live = self.live(roots)
        for at, one in enumerate(guarded):
            self._add(live, nodes[at], one.kind, others.get(at, one.arg))
        self._add_methods(live, codes)
        self._add_others(live, codes)

    def live(self, roots: Roots) -> Live:
        """Returns the values of its places for these roots."""
        return Live(self, roots)

    def node(self, path: Path) -> int:
        """Returns the node of a path; adds it if it is new."""
        at = -1
        for kind, arg in path:
            key = (at, kind, repr(arg))
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = len(self.nodes)
                self.nodes.append((at, kind, arg))
            at = found
        return at

    def path(self, node: int) -> Path:
        """Returns the path of a node."""
        steps = []
        while node >= 0:
            node, kind, arg = self.nodes[node]
            steps.append((kind, arg))
        return tuple(reversed(steps))

    def _add(self, live: Live, node: int, kind: str, arg: Any) -> None:
        key = (node, kind, repr(arg))
        if key in self._facts:
            return
        self._facts.add(key)
        try:
            said = live.fact(node, kind, arg)
        except values.Unknown as error:
            raise Untold(f"`{places.shown(self.path(node))}` is {error}, which a later process can't compare") from None
        self.facts.append(Fact(node, kind, arg, said))

    def _add_methods(self, live: Live, codes: Sequence[types.CodeType]) -> None:
        """Adds the functions of classes that the trace has followed: a guard says only which class it was."""
        followed = {id(one) for one in codes}
        seen: set[type] = set()
        for fact in list(self.facts):
            value = live.value(fact.node)
            of_class = isinstance(value, type)
            kind = value if of_class else type(value)
            if kind in seen or fact.kind not in ("type", "identity"):
                continue
            seen.add(kind)
            node = fact.node if of_class else self.node((*self.path(fact.node), ("type", None)))
            live.grow()
            names = {name for each in kind.__mro__ if not places.is_fixed(each) for name in vars(each)}
            for name in sorted(names):
                own = code.functions(facts.static(kind, name))
                if any(id(one.__code__) in followed for one in own):
                    self._add(live, node, "method", name)

    def _add_others(self, live: Live, codes: Sequence[types.CodeType]) -> None:
        """Adds the functions that the trace has followed and that no fact is about: by their names in their modules."""
        known = {digest for fact in self.facts for digest in _digests(json.loads(fact.said))}
        known |= {code.of_code(one) for outer in codes for one in code.inside(outer)}
        for one in codes:
            if code.of_code(one) in known or code.is_of_python(one):
                continue
            node = next((self.node(path) for path in _paths_of(one)), None)
            if node is None:
                raise Untold(f"the function `{one.co_qualname}` ({one.co_filename}:{one.co_firstlineno}) has no name")
            live.grow()
            self._add(live, node, "function", None)

    def differs(self, live: Live, of_inputs: bool | None = None) -> Difference | None:
        """Returns the first fact that does not hold: of those about arguments, of the others, or of all."""
        for fact in self.facts:
            if of_inputs is not None and self.is_of_input(fact.node) != of_inputs:
                continue
            try:
                now = live.fact(fact.node, fact.kind, fact.arg)
            except (places.Gone, values.Unknown) as error:
                return Difference(self._shown(fact), f"can't be read: {error}", fact)
            if now != fact.said:
                of_tensor = isinstance(live.values[fact.node], Tensor)
                return Difference(self._shown(fact), _reason(fact, now), fact, of_tensor)
        return None

    def is_of_input(self, node: int) -> bool:
        """Returns whether a place is in the arguments of a call."""
        while self.nodes[node][0] >= 0:
            node = self.nodes[node][0]
        return self.nodes[node][1] in INPUTS

    def _shown(self, fact: Fact) -> str:
        shown = places.shown(self.path(fact.node))
        return f"{shown}.{fact.arg}" if fact.kind in ("has", "own", "method") else shown

    def document(self) -> dict[str, Any]:
        """Returns the record as JSON."""
        nodes = [[parent, kind, values.encoded(arg)] for parent, kind, arg in self.nodes]
        rows = [
            [one.node, one.kind, one.arg if one.kind == "same" else values.encoded(one.arg), one.said]
            for one in self.facts
        ]
        return {"format": FORMAT, "nodes": nodes, "facts": rows, "weights": self.weights}

    @classmethod
    def read(cls, held: Any) -> Record:
        """Reads a record. Raises `ValueError` for another format."""
        if held.get("format") != FORMAT:
            raise ValueError(f"a record of format {held.get('format')!r}, this is {FORMAT}")
        record = cls()
        record.nodes = [(parent, kind, decoded(arg)) for parent, kind, arg in held["nodes"]]
        record.facts = [Fact(node, kind, decoded(arg), said) for node, kind, arg, said in held["facts"]]
        record.weights = held["weights"]
        return record


class Untold(Exception):
    """A module that reads what a later process can't compare."""


class Live:
    """The values of the nodes of a record, for these roots."""

    def __init__(self, record: Record, roots: Roots) -> None:
        self.record, self.roots = record, roots
        self.values: list[Any] = []
        self.grow()

    def grow(self) -> Live:
        """Evaluates the nodes that were added."""
        for parent, kind, arg in self.record.nodes[len(self.values) :]:
            try:
                if parent < 0:
                    value = places.root((kind, arg), self.roots)
                else:
                    before = self.values[parent]
                    value = before if isinstance(before, places.Gone) else places.follow(before, (kind, arg))
            except places.Gone as gone:
                value = gone
            except (ImportError, KeyError) as error:
                value = places.Gone(f"{type(error).__name__}: {error}")
            self.values.append(value)
        return self

    def value(self, node: int) -> Any:
        """Returns the value of a node. Raises `places.Gone`."""
        value = self.values[node]
        if isinstance(value, places.Gone):
            raise value
        return value

    def fact(self, node: int, kind: str, arg: Any) -> str:
        """Returns a fact as canonical JSON. Raises `places.Gone` and `values.Unknown`."""
        other = self.value(arg) if kind == "same" else arg
        try:
            return json.dumps(facts.fact(kind, self.value(node), other), sort_keys=True)
        except (TypeError, AttributeError) as error:  # a value of another kind than at the trace
            raise places.Gone(f"{type(error).__name__}: {error}") from None


def decoded(held: Any) -> Any:
    """Returns the argument of a step or a fact from its JSON: a name, a number, a tuple of these."""
    if isinstance(held, list):
        kind, inside = held
        if kind == "float":
            return float.fromhex(inside)
        if kind == "tuple":
            return tuple(map(decoded, inside))
        raise ValueError(f"a key of the kind `{kind}`")
    return held


def _paths_of(one: types.CodeType) -> Iterable[Path]:
    """Yields the path to a function by the name of its code, if it is there."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) != one.co_filename:
            continue
        path: Path = (("module", name), *(("attr", part) for part in one.co_qualname.split(".")))
        value: Any = module
        for step in path[1:]:
            value = getattr(value, step[1], None)
        if any(each.__code__ is one for each in code.functions(value)):
            yield path


def _digests(held: Any) -> Iterable[str]:
    if isinstance(held, str):
        yield held
    elif isinstance(held, list):
        for one in held:
            yield from _digests(one)


def _reason(fact: Fact, now: str) -> str:
    if fact.kind == "identity" and now != fact.said:
        return f"is {_short(now)}, and was {_short(fact.said)} in the build"
    if fact.kind in ("function", "method") or '["code"' in now:
        return "has other code than in the build"
    if fact.kind in ("has", "own", "contains"):
        there = "is there now" if now == "true" else "is gone"
        return f"{there}: {fact.arg!r}" if fact.kind == "contains" else there
    if fact.kind == "same":
        return "is another object than in the build"
    return f"is {_short(now)}, and was {_short(fact.said)} in the build"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
