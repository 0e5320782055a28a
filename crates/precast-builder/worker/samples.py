"""Sample inputs for captures and checks: seeded, and with values that the module could get in use.

The spec's `range` decides. Without one, an integer that indexes a table is within the table; other integers, and
booleans of rank 2 and more, are taken for masks: each row starts with ones and ends with zeros. Floats are normally
distributed.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .torch_private import overloads, symbols

# Operations that keep the values of their first argument, or some of them.
_PASSING = (
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "slice",
    "expand",
    "contiguous",
    "clone",
    "alias",
    "detach",
    "to",
)
_PASSING += ("_to_copy", "flatten", "transpose", "permute", "select", "index_select", "clamp", "unflatten")


def seed(*parts: Any) -> int:
    """Returns a seed that depends on these parts only."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")


def make(spec: dict[str, Any], shape: list[int], bound: int | None, device: str, salt: Any = 0) -> Any:
    """Returns a tensor for one input. `bound` is the exclusive upper bound of an index, None for other inputs."""
    import torch

    dtype = getattr(torch, spec["dtype"])
    generator = torch.Generator().manual_seed(seed(spec["name"], spec["dtype"], shape, salt))
    low, high = spec.get("range") or (0, 0)
    if dtype.is_floating_point:
        value = torch.randn(shape, generator=generator).to(dtype)
    elif high > low and (low, high) != (0, 2):
        value = torch.randint(low, high, shape, generator=generator).to(dtype)
    elif bound is not None:
        value = torch.randint(0, max(bound, 1), shape, generator=generator).to(dtype)
    elif len(shape) >= 2 and shape[-1] > 1:
        last = shape[-1]
        length = torch.randint((last + 1) // 2, last, [*shape[:-1], 1], generator=generator)
        value = (torch.arange(last).expand(shape) < length).to(dtype)
    else:
        value = torch.ones(shape, dtype=dtype)
    return value.to(device)


def lowest(spec: dict[str, Any], shape: list[int], device: str) -> Any:
    """Returns an input before the graph is known: integers may be indices, so they have the lowest value."""
    import torch

    dtype = getattr(torch, spec["dtype"])
    if dtype.is_floating_point or dtype == torch.bool:
        return make(spec, shape, None, device)
    return torch.full(shape, (spec.get("range") or (0, 0))[0], dtype=dtype, device=device)


def index_bounds(graph: Any, placeholders: list[Any]) -> list[int | None]:
    """Returns for each integer input the size of the smallest table that it indexes, None for other inputs."""
    return [_bound(node) for node in placeholders]


def _bound(node: Any) -> int | None:
    found: list[int] = []
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        for user in value.users:
            target = user.target
            if not overloads.is_overload(target):
                continue
            found.extend(_limits(target, user, value))
            name = overloads.name_of(target)
            if name in _PASSING and user.args and user.args[0] is value and user not in seen:
                seen.add(user)
                pending.append(user)
    return min(found, default=None)


def _limits(target: Any, user: Any, value: Any) -> list[int]:
    """Returns the sizes of the tables that one use of an index reads."""
    name = overloads.name_of(target)
    args = user.args
    if name in ("embedding", "embedding_bag") and len(args) > 1 and args[1] is value:
        return [_size(args[0], 0)]
    if name in ("index_select", "gather", "take_along_dim") and len(args) > 2 and args[2] is value:
        return [_size(args[0], args[1])]
    if name in ("index", "_unsafe_index") and len(args) > 1:
        return [_size(args[0], axis) for axis, index in enumerate(args[1]) if index is value]
    if name == "one_hot" and args and args[0] is value and len(args) > 1 and isinstance(args[1], int) and args[1] > 0:
        return [args[1]]
    return []


def _size(node: Any, axis: int) -> int:
    shape = node.meta["val"].shape
    return symbols.example(shape[axis]) if len(shape) else 1
