"""What a call returned: its tensors in order, their names, and how they nest."""

from __future__ import annotations

import math
from typing import Any

from . import torch_private as private


def tensors_of(returned: Any) -> list[Any]:
    """Returns the tensors of a nested result, in order."""
    import torch

    return [leaf for leaf in private.leaves(returned) if isinstance(leaf, torch.Tensor)]


def names_of(returned: Any) -> list[str]:
    """Returns a name for each tensor: the path to it, `output` for one that is the whole result."""
    import torch

    found = []
    for path, leaf in private.leaves_with_path(returned):
        if isinstance(leaf, torch.Tensor):
            found.append(".".join(path) or "output")
    return found


def describe(returned: Any) -> Any:
    """Returns the nesting as JSON: tensors by number, everything else by value."""
    import torch

    count = 0

    def walk(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.Tensor):
            count += 1
            return {"tensor": count - 1}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": str(value) if isinstance(value, float) and not math.isfinite(value) else value}
        children = private.children(value)
        if children is None:
            return {"value": repr(value)}
        kind, keys, items = children
        walked = [walk(item) for item in items]
        if keys is None:
            return {kind: walked}
        return {kind: dict(zip((str(key) for key in keys), walked, strict=True))}

    return walk(returned)
