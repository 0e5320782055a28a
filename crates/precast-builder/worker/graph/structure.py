"""Nested arguments and results: their tensors in order, names for these, and how they nest."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..torch_private import pytrees
from ..wire import Failure


def tensors_of(returned: Any) -> list[Any]:
    """Returns the tensors of a nested result, in order."""
    return [leaf for leaf in pytrees.leaves(returned) if isinstance(leaf, torch.Tensor)]


def named(returned: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a nested result with names: the path to each; `output` for a result without nesting."""
    return [(".".join(path) or "output", leaf) for path, leaf in pytrees.leaves_with_path(returned)]


def describe(returned: Any) -> Any:
    """Returns the nesting as JSON: tensors by number, everything else by value."""
    count = 0

    def walk(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.Tensor):
            count += 1
            return {"tensor": count - 1}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": str(value) if isinstance(value, float) and not math.isfinite(value) else value}
        children = pytrees.children(value)
        if children is None:
            return {"value": repr(value)}
        kind, keys, items = children
        walked = [walk(item) for item in items]
        return {kind: walked if keys is None else dict(zip(map(str, keys), walked, strict=True))}

    return walk(returned)


def flatten(value: Any, name: str, names: list[str], found: list[Any]) -> Any:
    """Appends the tensors of an argument, and names for them, to flat lists; returns how they nest, for `unflatten`."""
    if isinstance(value, torch.Tensor):
        names.append(name)
        found.append(value)
        return {"tensor": len(found) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if type(value) in (list, tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [flatten(item, f"{name}.{index}", names, found) for index, item in enumerate(value)]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: flatten(item, f"{name}.{key}", names, found) for key, item in value.items()}}
    raise Failure(
        "bad_input",
        f"input `{name}` is a {type(value).__name__}, which can't be flattened into tensors",
        hint="inputs are tensors, numbers, text and None, in lists, tuples and dicts",
    )


def unflatten(nesting: Any, tensors: Any) -> Any:
    """Returns an argument that nests as `flatten` returned it, with other tensors."""
    (kind, held), *_ = nesting.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "value":
        return held
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in held.items()}
    items = [unflatten(item, tensors) for item in held]
    return items if kind == "list" else tuple(items)


def moved(arguments: Any, device: str) -> Any:
    """Returns nested arguments with every tensor on a device."""
    return pytrees.mapped(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, arguments)
