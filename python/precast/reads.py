"""The integer attributes of a module that a call reads.

A layer often has its number as an attribute, as `layer_idx`. Two layers that differ in numbers that no call reads are
equal. A read is seen by a descriptor on the class, while a block runs: it passes the value of the instance on.

Not seen: a read of the module's `__dict__`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Place = tuple[str, str]
"""The name of a submodule, and of an attribute of it."""

TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of tensors, submodules and hooks."""


def integers(net: nn.Module) -> set[Place]:
    """Returns the integer attributes of all submodules. Booleans are none."""
    return {
        (name, key)
        for name, module in net.named_modules(remove_duplicate=False)
        for key, value in vars(module).items()
        if type(value) is int and key not in TABLES
    }


@contextmanager
def recorded(net: nn.Module) -> Iterator[set[Place]]:
    """Runs a block. The set that it yields gets the integer attributes that the block reads."""
    found: set[Place] = set()
    modules = dict(net.named_modules(remove_duplicate=False))
    owners: dict[tuple[type, str], dict[int, list[str]]] = {}
    for name, key in integers(net):
        module = modules[name]
        owners.setdefault((type(module), key), {}).setdefault(id(module), []).append(name)
    watched: list[tuple[type, str]] = []
    try:
        for (kind, key), names in owners.items():
            # Of a class that has the attribute too, every read counts as one.
            if any(key in vars(each) for each in kind.__mro__):
                found.update((name, key) for each in names.values() for name in each)
                continue
            setattr(kind, key, _Watch(key, names, found))
            watched.append((kind, key))
        yield found
    finally:
        for kind, key in watched:
            delattr(kind, key)


class _Watch:
    """A descriptor that notes reads of an attribute, and reads and writes the instance's own."""

    def __init__(self, key: str, names: dict[int, list[str]], found: set[Place]) -> None:
        self._key, self._names, self._found = key, names, found

    def __get__(self, module: Any, _: type | None = None) -> Any:
        if module is None or self._key not in vars(module):
            raise AttributeError(self._key)
        # Another instance may be a copy of any of them.
        names = self._names.get(id(module)) or [name for each in self._names.values() for name in each]
        self._found.update((name, self._key) for name in names)
        return vars(module)[self._key]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._key] = value

    def __delete__(self, module: Any) -> None:
        if self._key not in vars(module):
            raise AttributeError(self._key)
        del vars(module)[self._key]
