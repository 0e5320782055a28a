"""Arguments and results of a module, taken apart into tensors and put together again.

A nesting is JSON: `{"tensor": 0}` is the first tensor, `{"value": None}` a constant. `{"list": […]}`, `{"tuple": […]}`
and `{"dict": {…}}` hold nestings. Results also have `{"namedtuple": NAME, "fields": {…}}` and
`{"class": NAME, "fields": {…}}`: a dataclass, or a class derived from dict, as the outputs of transformers.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import BadInput, BuildError

# dtypes of inputs and weights, with their names in safetensors files.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclasses.dataclass
class Call:
    """The arguments of a call: tensors by name, and how they nest among constants."""

    names: list[str]
    tensors: list[torch.Tensor]
    args: list[Any]
    kwargs: dict[str, Any]

    def arguments(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns positional and keyword arguments with other tensors."""
        args = [_unflatten(item, tensors) for item in self.args]
        return args, {key: _unflatten(item, tensors) for key, item in self.kwargs.items()}


def call_of(function: Callable[..., Any], example_inputs: Any) -> Call:
    """Returns the call of a function with example inputs.

    These are a tensor, a tuple of arguments, a dict of keyword arguments, or a tuple and a dict. A tensor has the name
    of its parameter; within a list, a tuple or a dict also its place, as `past.0`. Numbers, text, booleans and None are
    constants.
    """
    args, kwargs = _arguments(example_inputs)
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        own = ", ".join(f"`{name}`" for name in signature.parameters)
        raise BadInput(
            f"the module can't be called with the example inputs: {error}", hint=f"it takes {own}"
        ) from error
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positions = [one.name for one in signature.parameters.values() if one.kind in by_place]
    call = Call([], [], [], {})
    for place, value in enumerate(args):
        name = positions[place] if place < len(positions) else f"args.{place}"
        call.args.append(_flatten(value, name, call))
    for name, value in kwargs.items():
        call.kwargs[name] = _flatten(value, name, call)
    return call


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
        return sample
    return (tuple(sample), {}) if isinstance(sample, tuple | list) else ((sample,), {})


def _flatten(value: Any, name: str, call: Call) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided:
            raise BadInput(f"input `{name}` is {value.dtype} and {value.layout}, which no artifact takes")
        call.names.append(name)
        call.tensors.append(value.detach())
        return {"tensor": len(call.tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if type(value) in (list, tuple):
        items = [_flatten(item, f"{name}.{place}", call) for place, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _flatten(item, f"{name}.{key}", call) for key, item in value.items()}}
    raise BadInput(
        f"input `{name}` is a {type(value).__name__}, which can't be taken apart into tensors",
        hint="inputs are tensors, numbers, text and None, in lists, tuples and dicts",
    )


def _unflatten(nesting: Any, tensors: Sequence[Any]) -> Any:
    (kind, held), *_ = nesting.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "value":
        return held
    if kind == "dict":
        return {key: _unflatten(item, tensors) for key, item in held.items()}
    items = [_unflatten(item, tensors) for item in held]
    return items if kind == "list" else tuple(items)


def nest(result: Any, tensors: list[Any], name: str = "") -> Any:
    """Returns the nesting of a result, and appends its tensors in order."""

    def fields(pairs: Any) -> dict[str, Any]:
        return {str(key): nest(item, tensors, f"{name}.{key}" if name else str(key)) for key, item in pairs}

    kind = type(result).__name__
    if isinstance(result, torch.Tensor):
        tensors.append(result)
        return {"tensor": len(tensors) - 1}
    if result is None or isinstance(result, bool | int | float | str):
        return {"value": result}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return {"namedtuple": kind, "fields": fields(zip(result._fields, result, strict=True))}
    if isinstance(result, list | tuple):
        return {"list" if isinstance(result, list) else "tuple": list(fields(enumerate(result)).values())}
    if isinstance(result, Mapping):
        plain = type(result) in (dict, collections.OrderedDict) or not all(str(key).isidentifier() for key in result)
        return {"dict": fields(result.items())} if plain else {"class": kind, "fields": fields(result.items())}
    if dataclasses.is_dataclass(result):
        own = [field.name for field in dataclasses.fields(result)]
        return {"class": kind, "fields": fields((field, getattr(result, field)) for field in own)}
    where = f"`{name}` of its result" if name else "its result"
    hint = (
        "return tensors, in lists, tuples, dicts and dataclasses; a transformers model with `config.use_cache = False`"
    )
    if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
        kind, hint = "number that follows the sizes of the inputs", "leave it out: the caller knows these sizes"
    raise BuildError(f"{where} is a {kind}, which no artifact returns", hint=hint)
