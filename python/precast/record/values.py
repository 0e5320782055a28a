"""Values as JSON that is equal in every process."""

from __future__ import annotations

import enum
import json
import types
from typing import Any

import torch

from . import code


class Unknown(Exception):
    """A value without such a form."""


def text(value: Any) -> str:
    """Returns a value as canonical JSON. Raises `Unknown`."""
    return json.dumps(encoded(value), sort_keys=True)


def encoded(value: Any) -> Any:
    """Returns a value as JSON. Raises `Unknown` for an object of a class of the user's."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return ["float", value.hex()]
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        return [kind.__name__, [encoded(item) for item in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted(map(text, value))]
    if isinstance(value, dict):
        return [kind.__name__, [[encoded(key), encoded(item)] for key, item in dict.items(value)]]
    if kind in (complex, bytes, slice, range, type(Ellipsis), type(NotImplemented)):
        return [kind.__name__, repr(value)]
    if isinstance(value, enum.Enum):
        return ["enum", named(kind), value.name]
    if kind is torch.device:
        return ["device", value.type]  # a release is for every device of a kind
    if kind in (torch.dtype, torch.layout, torch.memory_format, torch.qscheme):
        return ["torch", str(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [named(kind), [encoded(item) for item in value]]
    if isinstance(value, types.CodeType):
        return ["code", code.of_code(value)]
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return ["function", named(value), of_callable(value)]
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return ["name", named(value)]
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.ndim == 0:
        return ["numpy", str(value.dtype), value.tobytes().hex()]
    if isinstance(value, (int, float, str)):
        return [named(kind), encoded(kind.__mro__[-2](value))]
    raise Unknown(f"a value of the class `{named(kind)}`")


def of_callable(value: Any) -> list[Any]:
    """Returns the digests of the functions in a value: a function, a method, a property, a partial."""
    return [[code.of_code(one.__code__), _defaults(one)] for one in code.functions(value)]


def _defaults(function: types.FunctionType) -> list[str]:
    found = []
    for one in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
        try:
            found.append(text(one))
        except Unknown:
            found.append(named(type(one)))
    return found


def named(value: Any) -> str:
    """Returns the name of a class, a function, a module of Python, or the class of another object."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", None)
    if not isinstance(name, str):
        return f"{named(type(value))} object"
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else name
