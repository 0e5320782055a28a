"""Finds the inputs of a submodule that the spec leaves out: the model runs on sample inputs, and the call is recorded.

Sample inputs of the model come from a callable of the project. It may take bucketed dimensions as parameters
(`def samples(batch=1, seq=32)`), and returns the arguments of the model: a tensor, a tuple, a dict of keywords, or a
tuple and a dict. Without such a callable, the inputs that the spec gives for the model itself are used. Runs at other
sizes show which axes are bucketed dimensions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import failures, tensors
from ..graph import call, structure
from ..values import samples
from ..wire import Failure
from . import entry


@dataclass
class Recorded:
    """One call of the submodule: its tensors by name, and how they nest."""

    names: list[str]
    values: list[Any]
    structure: dict[str, Any]


def find(opened: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs of `path.method`, with dimensions, and how they nest: the protocol's `Sampled`."""
    path, method = request["path"], request["method"]
    target = call.find(opened.model, path)
    call.method_of(target, path, method)
    sizes: dict[str, int] = request.get("sizes") or {}
    source = _source(opened, request)
    recorded = _record(opened, target, path, method, source(sizes))
    inputs = []
    for name, value in zip(recorded.names, recorded.values, strict=True):
        if not tensors.supported(value.dtype):
            raise Failure("bad_input", f"input `{name}` is {tensors.dtype_name(value.dtype)}, which is not supported")
        layout = tensors.layout(value.contiguous())
        inputs.append({"name": name, **layout, "dims": [None] * value.dim(), "pad": 0})
    for dim, size in sizes.items():
        other = size + 1
        again = _record(opened, target, path, method, source({**sizes, dim: other}))
        if again.names != recorded.names:
            raise Failure("bad_input", f"at `{dim}` = {other} the submodule is called with other inputs than at {size}")
        _mark(inputs, again, dim, size, other)
    return {"inputs": inputs, "structure": recorded.structure}


def values(opened: Any, request: dict[str, Any]) -> list[Any]:
    """Returns the tensors that `path.method` is called with when the model runs on its sample inputs."""
    path, method = request["path"], request["method"]
    target = call.find(opened.model, path)
    return _record(opened, target, path, method, _source(opened, request)(request.get("sizes") or {})).values


def called_with(function: Any, sample: Any, device: str) -> Recorded:
    """Returns the call of a function with one sample, a tuple or a dict of arguments."""
    args, kwargs = _arguments(sample)
    return _recorded(function, *structure.moved((args, kwargs), device))


def _mark(inputs: list[dict[str, Any]], again: Recorded, dim: str, size: int, other: int) -> None:
    for entry_, value in zip(inputs, again.values, strict=True):
        if len(value.shape) != len(entry_["shape"]):
            raise Failure("bad_input", f"the rank of input `{entry_['name']}` depends on `{dim}`")
        for axis, (before, after) in enumerate(zip(entry_["shape"], value.shape, strict=True)):
            if before == after:
                continue
            if (before, after) != (size, other) or entry_["dims"][axis] is not None:
                raise Failure(
                    "bad_input",
                    f"axis {axis} of input `{entry_['name']}` is {before} at `{dim}` = {size} and {after} at {other}",
                    hint="a bucketed axis has the size of one dimension: give the inputs of this module in the spec",
                )
            entry_["dims"][axis] = dim


def _source(opened: Any, request: dict[str, Any]) -> Callable[[dict[str, int]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns a function that creates arguments of the whole model for given sizes."""
    if request.get("samples"):
        function = entry.load(opened.root, request["samples"])
        return lambda sizes: _from_callable(function, request["samples"], sizes, opened.root)
    specs = request.get("inputs") or []
    if not specs:
        raise Failure(
            "bad_input",
            f"the model has no sample inputs, so the inputs of `{request['path']}` can't be found",
            hint="give `samples` in [model], or a module for the model itself, or the inputs of this module",
        )

    def from_specs(sizes: dict[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names, values = [spec["name"] for spec in specs], samples.lowest(samples.at_sizes(specs, sizes), opened.device)
        call.check_inputs(opened.model.forward, names, "the model")
        args, kwargs = call.arguments(opened.model.forward, dict(zip(names, values, strict=True)))
        return tuple(args), kwargs

    return from_specs


def _from_callable(
    function: Any, name: str, sizes: dict[str, int], root: Path
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        known = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in known)
        wanted = {parameter.name for parameter in known}
        returned = function(**{dim: size for dim, size in sizes.items() if takes_all or dim in wanted})
    except Exception as error:
        raise failures.raised("entry_call", f"`{name}`", error, root) from error
    if not isinstance(returned, torch.Tensor | dict | tuple | list):
        raise Failure("entry_call", f"`{name}` returned {type(returned).__name__}, not tensors in a tuple or a dict")
    return _arguments(returned)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a sample as positional and keyword arguments."""
    if isinstance(sample, dict):
        return (), sample
    if isinstance(sample, tuple) and len(sample) == 2:
        args, kwargs = sample
        if isinstance(args, tuple) and isinstance(kwargs, dict):
            return args, kwargs
    return (tuple(sample), {}) if isinstance(sample, tuple | list) else ((sample,), {})


def _record(
    opened: Any, target: Any, path: str, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> Recorded:
    """Runs the model; returns the first call of the target's method."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    original = getattr(target, method)

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    args, kwargs = structure.moved(arguments, opened.device)
    if target is opened.model and method == "forward":
        calls.append((args, kwargs))
    else:
        before = vars(target).get(method)
        object.__setattr__(target, method, spy)
        try:
            with torch.inference_mode():
                opened.model(*args, **kwargs)
        except Exception as error:
            raise Failure(
                "bad_input",
                f"the model fails on its sample inputs: {failures.named(error)}",
                location=failures.location(error, opened.root),
            ) from error
        finally:
            if before is None:
                object.__delattr__(target, method)
            else:
                object.__setattr__(target, method, before)
    if not calls:
        raise Failure(
            "bad_input",
            f"the model does not call `{path}.{method}` on its sample inputs",
            hint="give the inputs of this module in the spec, or sample inputs that reach it",
        )
    return _recorded(original, *calls[0])


def _recorded(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
    """Names the tensors of a call by the parameters they go to."""
    positions = [p.name for p in inspect.signature(function).parameters.values() if p.kind in _POSITIONAL]
    recorded = Recorded([], [], {})

    def walk(value: Any, name: str) -> Any:
        return structure.flatten(value, name, recorded.names, recorded.values)

    named = [positions[index] if index < len(positions) else f"args.{index}" for index in range(len(args))]
    recorded.structure = {
        "args": [walk(value, name) for value, name in zip(args, named, strict=True)],
        "kwargs": {key: walk(value, key) for key, value in kwargs.items()},
    }
    return recorded


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
