"""Facts about values: what a trace has read of them, as JSON.

| kind | fact |
|---|---|
| `type` | the name of its class |
| `length` | its class and its length |
| `keys` | the keys of a dictionary, in order |
| `value` | the value itself; of code its digest |
| `function` | the digests of its code and of its defaults |
| `identity` | its name: a class, a module of Python, a builtin |
| `has NAME` | whether it has the attribute, by itself or by its class |
| `own NAME` | whether it has the attribute by itself |
| `contains KEY` | whether the dictionary or the set has the key |
| `same PATH` | whether it is the object of another path |
| `tensor` | dtype, shape, strides, kind of device, class |
| `method NAME` | of a class: the digests of the functions under this name |
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_private import sharding
from . import places, values
from .places import Path

MISSING = object()


class Guarded(NamedTuple):
    """What of a value was read."""

    path: Path
    kind: str
    arg: Any = None


def fact(kind: str, value: Any, arg: Any = None) -> Any:
    """Returns the fact of a kind about a value. Raises `values.Unknown` where it can't be said."""
    match kind:
        case "type":
            return values.named(sharding.original(type(value)))
        case "length":
            return [values.named(type(value)), len(value)]
        case "keys":
            return [values.named(type(value)), [values.encoded(key) for key in _keys(value)]]
        case "value":
            return values.encoded(value)
        case "function":
            return [values.named(type(value)), values.of_callable(value)] if code_of(value) else values.named(value)
        case "identity":
            of = sharding.original(value) if isinstance(value, type) else value
            return [values.named(of), values.of_callable(value) if code_of(value) else []]
        case "has":
            return hasattr(value, arg)
        case "own":
            return arg in (places.own(value) or {})
        case "contains":
            return arg in value
        case "same":
            return value is arg
        case "tensor":
            return tensor(value)
        case "method":
            return values.of_callable(static(value, arg))
    raise AssertionError(kind)


def code_of(value: Any) -> bool:
    """Returns whether a value has code of Python."""
    return isinstance(value, (types.FunctionType, types.MethodType))


def static(kind: type, name: str) -> Any:
    """Returns what a class has under a name, as it is in the dictionary of the class that has it."""
    found = (vars(each)[name] for each in kind.__mro__ if name in vars(each))
    return next(found, MISSING)


def tensor(value: Any) -> list[Any]:
    """Returns the fact about a tensor, without its values."""
    if not isinstance(value, Tensor):
        return [values.named(type(value))]
    plain = isinstance(value, (torch.nn.Parameter, torch.nn.Buffer)) or type(value) is Tensor
    layout = [list(value.shape), list(value.stride())] if value.layout == torch.strided else [str(value.layout)]
    flags = [value.is_conj(), value.is_neg()]
    return ["" if plain else values.named(type(value)), str(value.dtype), *layout, value.device.type, *flags]


def _keys(value: Any) -> list[Any]:
    keys: Callable[[Any], Any] = dict.keys if isinstance(value, dict) else lambda one: one.keys()
    return list(keys(value))
