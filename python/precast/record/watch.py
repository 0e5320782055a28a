"""The native check of a call: that nothing which a record depends on was changed since it was evaluated.

A record is evaluated once. On the way each read is noted: which dictionary, class, list or tensor had which object.
`_native.Watch` compares these by identity, in a flat list, without Python. If one differs, the record is evaluated
again: an equal value, as another object, is no change.

| read | is still so if |
|---|---|
| `item` | the dictionary has this object under the key; none, if it had none |
| `keys` | the dictionary has these keys, in this order |
| `length` | the container has as many items |
| `place` | the list has this object in this place |
| `class` | the object has this class |
| `own` | the object has this dictionary of attributes |
| `attribute` | the attribute gives this object, or an equal number or text: of objects without a dictionary |
| `absent` | the object has no such attribute |
| `equal` | the object, which can be changed, is equal to a copy |
| `tensor` | memory, sizes, strides, dtype and device are these |
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from . import code, facts, places
from .record import Difference, Fact, Live, Record

Read = tuple[str, Any, Any, Any]
"""The kind of a read, the object that was read, where, and what was there."""

_TABLES = ("_parameters", "_buffers", "_modules")


def reads(record: Record, live: Live) -> list[Read]:
    """Returns the reads of a record that holds. Tensors of weights come last, with their facts."""
    found = _Reads(record, live)
    for fact in record.facts:
        if not record.is_of_input(fact.node):
            found.add(fact)
    for node in record.weights.values():
        found.place(node)
        found.note("tensor", live.value(node), None, facts.tensor(live.value(node)))
    return list(found.found.values())


def reads_of(record: Record, live: Live, difference: Difference) -> list[Read]:
    """Returns the reads of one fact that does not hold."""
    found = _Reads(record, live)
    found.add(difference.fact)
    return list(found.found.values())


class _Reads:
    """The reads, each once."""

    def __init__(self, record: Record, live: Live) -> None:
        self.found: dict[Any, Read] = {}
        self.record, self.live = record, live
        self._seen: set[int] = set()

    def add(self, fact: Fact) -> None:
        """Adds the reads of a fact."""
        self.place(fact.node)
        if fact.kind == "same":
            self.place(fact.arg)
        value = self.live.values[fact.node]
        if not isinstance(value, places.Gone):
            self._fact(fact.kind, value, fact.arg)

    def note(self, kind: str, held: Any, where: Any, value: Any) -> None:
        """Adds a read."""
        if kind == "class" and places.is_fixed(type(held)):  # it can't become another one
            return
        key = (kind, id(held), where if isinstance(where, (str, int, tuple)) else id(where))
        self.found.setdefault(key, (kind, held, where, value))

    def place(self, node: int) -> None:
        """Adds the reads on the way to a node."""
        if node in self._seen:
            return
        self._seen.add(node)
        parent, kind, arg = self.record.nodes[node]
        value = self.live.values[node]
        if parent < 0:
            return
        self.place(parent)
        held = self.live.values[parent]
        if isinstance(held, places.Gone):
            return
        if isinstance(value, places.Gone):
            self._gone(held, kind, arg)
            return
        match kind:
            case "attr":
                self._attribute(held, arg, value)
            case "item" if isinstance(held, dict):
                self.note("item", held, arg, value)
            case "item" if isinstance(held, list):
                self.note("place", held, arg, value)
            case "key" | "at":
                self._keys(held)
                self.note("item", held, list(dict.keys(held))[arg], list(dict.values(held))[arg])
            case "type":
                self.note("class", held, None, value)

    def _gone(self, held: Any, kind: str, arg: Any) -> None:
        """Adds the reads of a place that leads to nothing."""
        if kind == "attr":
            self._has(held, arg)
        elif isinstance(held, dict):
            self._keys(held)
        elif hasattr(held, "__len__"):
            self.note("length", held, None, len(held))

    def _attribute(self, held: Any, name: str, value: Any) -> None:
        if isinstance(held, types.ModuleType):
            self.note("item", vars(held), name, value)
            return
        if isinstance(held, type):
            if not self._of_class(held, name):
                self.note("attribute", held, name, value)
            return
        own, static = self._own(held), facts.static(type(held), name)
        if own is None or (static is not facts.MISSING and not places.bound(static)):
            self.note("attribute", held, name, value)
            if static is not facts.MISSING:
                self._of_class(type(held), name)
            return
        self.note("item", own, name, own.get(name, facts.MISSING))
        if name in own or self._of_class(type(held), name):
            return
        if not self._of_table(held, own, name):
            self.note("attribute", held, name, value)

    def _own(self, held: Any) -> dict[str, Any] | None:
        """Adds the reads of the class and of the dictionary of an object; returns the dictionary."""
        own = places.own(held)
        self.note("class", held, None, type(held))
        if own is not None:
            self.note("own", held, None, own)
        return own

    def _of_table(self, held: Any, own: dict[str, Any], name: str) -> bool:
        """Adds the reads of an attribute that `nn.Module` looks up in its tables; returns whether it does."""
        if facts.static(type(held), "__getattr__") is not nn.Module.__getattr__:
            return False
        for table in _TABLES:
            inside = own.get(table)
            if not isinstance(inside, dict):
                return False
            self.note("item", own, table, inside)
            self.note("item", inside, name, inside.get(name, facts.MISSING))
        return True

    def _of_class(self, kind: type, name: str) -> bool:
        """Adds the reads of a lookup in a class and its bases; returns whether one of them has the name."""
        for each in kind.__mro__:
            if places.is_fixed(each):
                if name in vars(each):
                    return True
                continue
            own = places.members(each)
            self.note("item", own, name, own.get(name, facts.MISSING))
            if name in own:
                self._functions(own[name])
                return True
        return False

    def _functions(self, value: Any) -> None:
        for one in code.functions(value):
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                self.note("attribute", one, name, getattr(one, name))
            if one.__kwdefaults__:
                self.note("equal", one.__kwdefaults__, None, dict(one.__kwdefaults__))

    def _keys(self, value: Any) -> None:
        if isinstance(value, dict) and type(value) is not OrderedDict:
            self.note("keys", value, None, tuple(value))
        else:  # the dictionary of an ordered one has the keys in another order
            self.note("length", value, None, len(value))
            for key in value:
                self.note("item", value, key, value[key])

    def _fact(self, kind: str, value: Any, arg: Any) -> None:
        match kind:
            case "type":
                self.note("class", value, None, type(value))
            case "length" if not isinstance(value, tuple):
                self.note("class", value, None, type(value))
                self.note("length", value, None, len(value))
            case "keys" if isinstance(value, dict):
                self._keys(value)
            case "value" if isinstance(value, (list, set, dict, bytearray)):
                self.note("equal", value, None, copy.deepcopy(value))
            case "function" | "identity":
                self._functions(value)
            case "has":
                self._has(value, arg)
            case "own":
                own = self._own(value) or {}
                self.note("item", own, arg, own.get(arg, facts.MISSING))
            case "contains" if isinstance(value, dict):
                self.note("item", value, arg, value.get(arg, facts.MISSING))
            case "contains":
                self.note("equal", value, None, copy.copy(value))
            case "tensor" if isinstance(value, Tensor):
                self.note("tensor", value, None, facts.tensor(value))
            case "method":
                self._of_class(value, arg)

    def _has(self, value: Any, name: str) -> None:
        if hasattr(value, name):
            self._attribute(value, name, getattr(value, name))
            return
        own = None if isinstance(value, type) else self._own(value)
        if own is None:
            self.note("absent", value, name, None)
            return
        self.note("item", own, name, facts.MISSING)
        self._of_class(type(value), name)
        if facts.static(type(value), "__getattr__") is not facts.MISSING and not self._of_table(value, own, name):
            self.note("absent", value, name, None)
