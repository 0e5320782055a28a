"""Sample inputs for captures and checks: seeded, and with values that the module could get in use.

The spec's `range` decides. Without one, an integer that indexes a table is within the table; other integers, and
booleans of rank 2 and more, are taken for masks: each row starts with ones and ends with zeros. Floats are normally
distributed. Positions in a state follow each other from call to call.

An operator may be right for these values and wrong for others: a maximum over zeros as padding, where all valid values
are negative. So padding is tried with values of several kinds (`KINDS`). A mask has a valid position in each row
for every kind: the answer of a row without any depends on its padded size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import torch

from ..graph import operators
from ..torch_private import overloads, symbols
from . import checks

# Operators whose result has values of their first argument.
_PASSING = operators.PASSING | operators.CASTS | {"clamp"}

# As they come; below the padding and zero, or above both (integers: the bounds of their range); large or small; all
# equal; zero but for a few; the padding itself but for the first position.
KINDS = ("usual", "negative", "positive", "large", "small", "constant", "sparse", "pad")


# Calls that fill the states of a sample.
FILLING = 3


def kinds(device: str, noted: list[Any]) -> tuple[str, ...]:
    """Returns the kinds of values that a graph with these checks may be given.

    A check that fails on a GPU ends the GPU's context in this process, so there it gets values as they come only.
    """
    return KINDS if device == "cpu" or not noted else KINDS[:1]


def seed(*parts: Any) -> int:
    """Returns a seed that depends on these parts only."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")


def at_sizes(specs: list[dict[str, Any]], sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Returns inputs at other sizes of their dimensions."""

    def shape(spec: dict[str, Any]) -> list[int]:
        return [sizes.get(dim, size) for dim, size in zip(spec["dims"], spec["shape"], strict=True)]

    return [{**spec, "shape": shape(spec)} for spec in specs]


def draw(
    specs: list[dict[str, Any]],
    tables: list[int | None],
    device: str,
    salt: Any = 0,
    kind: str = "usual",
    *,
    states: Collection[int] = (),
) -> list[Any]:
    """Returns tensors for inputs, with values of a kind; `tables` are the sizes of the tables that they index.

    Those at the places `states` are zeros: the caller has values for them, and a training many of them.
    """

    def one(at: int, spec: dict[str, Any], table: int | None) -> Any:
        if at in states:
            return torch.zeros(spec["shape"], dtype=getattr(torch, spec["dtype"]), device=device)
        return make(spec, spec["shape"], table, device, salt, kind)

    return [one(at, *pair) for at, pair in enumerate(zip(specs, tables, strict=True))]


def make(
    spec: dict[str, Any], shape: list[int], bound: int | None, device: str, salt: Any = 0, kind: str = "usual"
) -> Any:
    """Returns a tensor for one input. `bound` is the exclusive upper bound of an index, None for other inputs."""
    dtype = getattr(torch, spec["dtype"])
    if spec.get("sample"):
        compared, filling = spec["sample"]
        return torch.full(shape, compared if salt == 0 else filling, dtype=dtype, device=device)
    if spec.get("within"):
        return _positions(spec, shape, salt).to(dtype).to(device)
    generator = torch.Generator().manual_seed(seed(spec["name"], spec["dtype"], shape, salt))
    low, high = spec.get("range") or (0, 0)
    if dtype.is_floating_point:
        value = _float(torch.randn(shape, generator=generator), spec["pad"], kind).to(dtype)
    elif (high > low and (low, high) != (0, 2)) or bound is not None:
        low, high = (low, high) if high > low else (0, max(bound or 1, 1))
        value = _integer(torch.randint(low, high, shape, generator=generator), low, high, spec["pad"], kind).to(dtype)
    else:
        value = _mask(shape, generator, kind)
        value = (~value if spec["pad"] else value).to(dtype)
    if kind != "usual" and (dtype.is_floating_point or high - low > 1):
        _no_row_of_padding(spec, value, 1 if dtype.is_floating_point else high - 1 - (spec["pad"] == high - 1))
    return value.to(device)


def _positions(spec: dict[str, Any], shape: list[int], salt: Any) -> Any:
    """Returns consecutive positions: of the call with this number, and of the sample after `FILLING` calls."""
    low, high = spec["range"]
    count = shape[-1] if shape else 1
    before = FILLING if salt == 0 else salt - 1 if isinstance(salt, int) else 0
    start = max(low, min(low + before * count, high - count))
    return torch.arange(start, start + count).clamp(max=high - 1).expand(shape).contiguous()


def _float(drawn: Any, pad: float, kind: str) -> Any:
    of_kind = {
        "usual": lambda: drawn,
        "negative": lambda: min(pad, 0) - 0.1 - drawn.abs(),
        "positive": lambda: max(pad, 0) + 0.1 + drawn.abs(),
        "large": lambda: drawn * 10,
        "small": lambda: drawn * 1e-3,
        "constant": lambda: torch.full_like(drawn, 0.75 if pad == 0.5 else 0.5),
        "sparse": lambda: torch.where(drawn.abs() > 1.6, drawn, 0.0),
        "pad": lambda: torch.where(drawn.abs() > 1.6, drawn, pad),
    }
    return of_kind[kind]()


def _integer(drawn: Any, low: int, high: int, pad: int, kind: str) -> Any:
    few, middle = (drawn - low) % 10 == 9, (low + high) // 2
    of_kind = {
        "negative": torch.full_like(drawn, low),
        "positive": torch.full_like(drawn, high - 1),
        "large": drawn.clamp(min=middle),
        "small": drawn.clamp(max=max(middle, low)),
        "constant": torch.full_like(drawn, middle),
        "sparse": torch.where(few, drawn, low),
        "pad": torch.where(few, drawn, pad if low <= pad < high else low),
    }
    return of_kind.get(kind, drawn)


def _mask(shape: list[int], generator: Any, kind: str) -> Any:
    """Returns which positions are valid: the first ones of each row."""
    last = shape[-1] if len(shape) >= 2 else 1
    if last <= 1 or kind in ("positive", "constant"):
        return torch.ones(shape, dtype=torch.bool)
    length = torch.randint((last + 1) // 2, last, [*shape[:-1], 1], generator=generator)
    length = torch.ones_like(length) if kind in ("negative", "sparse", "pad") else length
    return torch.arange(last).expand(shape) < length


def _no_row_of_padding(spec: dict[str, Any], value: Any, other: Any) -> None:
    """Fills in another value where the first position along the last bucketed axis holds the padding."""
    axes = [axis for axis, dim in enumerate(spec["dims"]) if dim is not None]
    if axes:
        first = value.select(axes[-1], 0)
        first.masked_fill_(first == spec["pad"], other)


def lowest(specs: list[dict[str, Any]], device: str) -> list[Any]:
    """Returns inputs before the graph is known: integers may be indices, so they have the lowest value."""

    def one(spec: dict[str, Any]) -> Any:
        dtype = getattr(torch, spec["dtype"])
        if dtype.is_floating_point or dtype == torch.bool:
            return make(spec, spec["shape"], None, device)
        return torch.full(spec["shape"], (spec.get("range") or (0, 0))[0], dtype=dtype, device=device)

    return [one(spec) for spec in specs]


def table_of(node: Any) -> int | None:
    """Returns the size of the smallest table that an integer input indexes; None for other inputs."""
    found: list[int] = []
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        for user in value.users:
            found += [symbols.example(site.size) for site in checks.sites(user) if site.index is value]
            if overloads.name_of(user.target) in _PASSING and user.args[:1] == (value,) and user not in seen:
                seen.add(user)
                pending.append(user)
    return min(found, default=None)
