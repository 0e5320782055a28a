"""Paths to values: from the module, from an argument, or from a module of Python, by attributes and items.

A path is a tuple of steps, the first one a root:

| step | the value |
|---|---|
| `net`, `own` | the module; the `forward` that was set on it |
| `args`, `kwargs` | the positional and the named arguments of a call |
| `module NAME`, `builtins` | a module of Python, and the names that all have |
| `attr NAME`, `item KEY` | an attribute; an item of a list, a tuple, or a dictionary |
| `key NUMBER`, `at NUMBER` | a key of a dictionary by its number, and its value |
| `type`, `members` | the class of an object; the dictionary of a class |
"""

from __future__ import annotations

import builtins
import gc
import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

Step = tuple[str, Any]
Path = tuple[Step, ...]


class Gone(Exception):
    """A path that leads to no value."""


def root(step: Step, given: Mapping[str, Any]) -> Any:
    """Returns the value of the first step."""
    kind, name = step
    if kind == "builtins":
        return vars(builtins)
    if kind == "module":
        # A function may import it at its first call.
        return sys.modules[name] if name in sys.modules else importlib.import_module(name)
    return given[kind]


def follow(value: Any, step: Step) -> Any:
    """Returns the value after one more step. Raises `Gone`."""
    kind, arg = step
    try:
        match kind:
            case "attr" if isinstance(value, types.ModuleType) and arg not in vars(value):
                # A function may import it at its first call.
                return importlib.import_module(f"{value.__name__}.{arg}")
            case "attr":
                return getattr(value, arg)
            case "item":
                return dict.__getitem__(value, arg) if isinstance(value, dict) else value[arg]
            case "key":
                return list(dict.keys(value))[arg]
            case "at":
                return list(dict.values(value))[arg]
            case "type":
                return type(value)
            case "members":
                return members(value)
    except Exception as error:
        raise Gone(f"{type(error).__name__}: {error}") from None
    raise AssertionError(kind)


def members(kind: type) -> dict[str, Any]:
    """Returns the dictionary of a class, which a `mappingproxy` stands for."""
    (found,) = gc.get_referents(kind.__dict__)
    assert isinstance(found, dict)
    return found


def own(value: Any) -> dict[str, Any] | None:
    """Returns the attributes that an object has itself, or None if it has no dictionary of them."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def shown(path: Path) -> str:
    """Returns a path as code, for people."""
    kind, name = path[0]
    text = {"net": "", "own": "forward", "args": "args", "kwargs": "kwargs", "builtins": "builtins"}.get(
        kind, str(name)
    )
    for at, (step, arg) in enumerate(path[1:]):
        if step == "attr" and arg in ("_modules", "_parameters", "_buffers") and at + 2 < len(path):
            continue
        table = at > 0 and path[at] in (("attr", "_modules"), ("attr", "_parameters"), ("attr", "_buffers"))
        match step:
            case "attr":
                text = f"{text}.{arg}"
            case "item":
                text = f"{text}.{arg}" if table else f"{text}[{arg!r}]"
            case "type":
                text = f"type({text.lstrip('.') or 'the module'})"
            case "members":
                text = f"{text}.__dict__"
            case _:
                text = f"{text}[{step} {arg}]"
    return text.lstrip(".") or "the module"


def is_fixed(kind: type) -> bool:
    """Returns whether attributes of a class can't be set: it is one of Python's own, or of C."""
    return not kind.__flags__ & (1 << 9) or bool(kind.__flags__ & (1 << 8))


def bound(value: Any) -> bool:
    """Returns whether an attribute of a class gives the same for the same object: a function, or a plain value."""
    kinds = (types.FunctionType, classmethod, staticmethod, types.BuiltinFunctionType)
    return isinstance(value, kinds) or not hasattr(type(value), "__get__")
