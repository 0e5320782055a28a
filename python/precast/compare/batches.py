"""Batches and answers as trees of tensors: arguments of a call, tensors with their paths, copies and comparisons."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TOLERANCES = {
    torch.float64: (1e-7, 1e-8),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 4e-3),
    torch.bfloat16: (4e-2, 2e-2),
}
"""The relative tolerance of each dtype, and the absolute one for values up to 1. Other dtypes must be equal."""


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call: a mapping has keywords, a tuple or a list positions; else there is one."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def flat(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and the other values of a call, by the names of a captured module: `past.0` in a container.

    `names` are those of positional arguments.
    """
    found: dict[str, Tensor] = {}
    others: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[name] = value
        elif (inside := parts(value)) is not None:
            for key, _, inner in inside:
                walk(f"{name}.{key}", inner)
        else:
            others[name] = value

    for at, value in enumerate(args):
        walk(names[at] if at < len(names) else f"args.{at}", value)
    for name, value in kwargs.items():
        walk(name, value)
    return found, others


def parts(value: Any) -> list[tuple[Any, tuple[str, Any], Any]] | None:
    """Returns the parts of a container of arguments: the name of each, the step of a path to it, and itself.

    Containers are lists, tuples, dictionaries, named tuples and dataclasses; None for any other value.
    """
    kind = type(value)
    if kind in (list, tuple):
        return [(at, ("item", at), inner) for at, inner in enumerate(value)]
    if kind is dict:
        return [(key, ("item", key), inner) for key, inner in value.items()]
    if (fields := object_fields(value)) is not None:
        return [(name, ("attr", name), getattr(value, name)) for name in fields]
    return None


def object_fields(value: Any) -> Sequence[str] | None:
    """Returns the names of the fields of a named tuple or of a dataclass; None for any other value."""
    if isinstance(value, tuple):
        return getattr(value, "_fields", None)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        return [each.name for each in dataclasses.fields(value)]
    return None


def replaced(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], tensors: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with other tensors, by the names that `flat` gives them."""

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensors.get(name, value)
        if type(value) in (list, tuple):
            return type(value)(walk(f"{name}.{at}", inner) for at, inner in enumerate(value))
        if type(value) is dict:
            return {key: walk(f"{name}.{key}", inner) for key, inner in value.items()}
        if (fields := object_fields(value)) is not None:
            inside = {each: walk(f"{name}.{each}", getattr(value, each)) for each in fields}
            return type(value)(**inside) if isinstance(value, tuple) else dataclasses.replace(value, **inside)
        return value

    positional = tuple(walk(names[at] if at < len(names) else f"args.{at}", value) for at, value in enumerate(args))
    return positional, {name: walk(name, value) for name, value in kwargs.items()}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested containers, each with its path, as `hidden_states[0]`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for at, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{at}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from leaves(getattr(value, each.name), f"{path}.{each.name}" if path else each.name)
    else:
        yield path, value


def tensors(value: Any) -> list[Tensor]:
    """Returns the tensors of nested containers."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def named(values: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Returns the tensors of values by their nouns and paths: the names that comparisons give a judge."""
    found: dict[str, Tensor | None] = {}
    for noun, each in values.items():
        found |= {f"{noun} {path}": one for path, one in leaves(each) if isinstance(one, Tensor)}
    return found


def plain(value: Any) -> bool:
    """Returns whether all leaves are tensors, numbers, text or None, so that copies of the tensors are a copy."""
    return all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for _, leaf in leaves(value))


def mapped(value: Any, function: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Returns nested containers of the same types with `function(path, tensor)` in place of each tensor."""
    if isinstance(value, Tensor):
        return function(path, value)
    if isinstance(value, Mapping):
        inner = {key: mapped(each, function, f"{path}.{key}" if path else str(key)) for key, each in value.items()}
        if type(value) is dict:
            return inner
        if dataclasses.is_dataclass(value):  # an output of transformers
            return type(value)(**inner)
        made = copy.copy(value)
        for key, each in inner.items():
            made[key] = each  # type: ignore[index]
        return made
    if isinstance(value, (tuple, list)):
        parts = [mapped(each, function, f"{path}[{at}]") for at, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {each.name: f"{path}.{each.name}" if path else each.name for each in dataclasses.fields(value)}
        made = {key: mapped(getattr(value, key), function, at) for key, at in named.items()}
        return dataclasses.replace(value, **made)
    return value


def copied(value: Any) -> Any:
    """Returns nested containers of the same types with copies of their tensors; other values stay the same objects.

    A tensor that is in two places stays one.
    """
    return mapped(value, once(lambda tensor: tensor.detach().clone()))


def once(function: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Returns a function for `mapped` that makes one tensor of one in two places, as in `net(ids, labels=ids)`."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the first of a pair lives on, so that no other gets its `id`

    def one(_: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (tensor, function(tensor))
        return made[id(tensor)][1]

    return one


def difference(
    got: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    noun: str = "output",
    judge: Callable[[str, Tensor], str | None] | None = None,
    judged: Callable[[Tensor], bool] = lambda _: False,
) -> tuple[str | None, float]:
    """Compares an answer with eager's.

    Returns the first difference beyond the tolerance, if any, and the largest error, relative to the largest value of
    its tensor. Types of containers, dtypes, shapes, and the places of NaN and infinity must be equal. `judge` says why
    a tensor beyond its tolerance is refused, or accepts it by `None`; of a tensor that `judged` names it decides alone.
    """
    if kinds(got) != kinds(expected):
        return f"the structure is {kinds(got)}, eager's is {kinds(expected)}", float("inf")
    worst = 0.0
    for (path, mine), (_, eager) in zip(leaves(got), leaves(expected), strict=True):
        where = f"{noun} `{path}`" if path else f"the {noun}"
        if not isinstance(eager, Tensor):
            if isinstance(mine, Tensor) or not (mine is eager or mine == eager or (mine != mine and eager != eager)):
                return f"{where} is {_short(mine)}, eager's is {_short(eager)}", float("inf")
            continue
        problem, error = _difference(mine, eager, rtol, atol)
        worst = max(worst, error)
        compared = judge is not None and error < float("inf")
        if problem is not None or (compared and judged(eager)):
            refused = judge(f"{noun} {path}", mine) if compared and judge is not None else ""
            if refused is not None:
                return f"{where} {problem or 'differs from eager'}{refused}", worst
    return None, worst


def kinds(value: Any) -> str:
    """Returns the structure of nested containers as text: types, keys and lengths."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(f'{key}: {kinds(inner)}' for key, inner in value.items())})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(kinds, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{each.name}: {kinds(getattr(value, each.name))}" for each in dataclasses.fields(value))
        return f"{type(value).__name__}({inner})"
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__


def _difference(mine: Any, eager: Tensor, rtol: float | None, atol: float | None) -> tuple[str | None, float]:
    if not isinstance(mine, Tensor):
        return f"is {_short(mine)}, eager's is a tensor", float("inf")
    for what, here, there in (
        ("dtype", mine.dtype, eager.dtype),
        ("shape", list(mine.shape), list(eager.shape)),
        ("device", mine.device, eager.device),
    ):
        if here != there:
            return f"has {what} {here}, eager's has {there}", float("inf")
    if eager.numel() == 0:
        return None, 0.0
    if not (eager.is_floating_point() or eager.is_complex()):
        same = torch.equal(mine, eager)
        return (None, 0.0) if same else ("differs from eager", float("inf"))
    if eager.is_complex():
        mine, eager = torch.view_as_real(mine), torch.view_as_real(eager)
    relative, absolute = TOLERANCES.get(eager.dtype, (4e-2, 2e-2))
    mine, eager = mine.detach().double(), eager.detach().double()
    finite = eager.isfinite()
    if not torch.allclose(mine[~finite], eager[~finite], equal_nan=True) or not bool(mine[finite].isfinite().all()):
        return "differs from eager in NaN or infinity", float("inf")
    mine, eager = mine[finite], eager[finite]
    if eager.numel() == 0:
        return None, 0.0
    error, largest = (mine - eager).abs(), float(eager.abs().max())
    limit = eager.abs() * (relative if rtol is None else rtol) + (absolute * largest if atol is None else atol)
    worst = float(error.max()) / max(largest, 1e-30)
    beyond = int((error > limit + 1e-30).sum())
    if beyond:
        return f"differs from eager in {beyond} of {error.numel()} elements (largest error {worst:.1e})", worst
    return None, worst


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sizes(batch: Any, shapes: Mapping[str, Sequence[str | int]], names: Sequence[str] = ()) -> dict[str, int]:
    """Returns the size of each bucketed dimension in a batch; `names` are those of positional inputs.

    Raises `ValueError` if an input has another rank, or two inputs disagree.
    """
    positional, named = arguments(batch)
    given = {**dict(zip(names, positional, strict=False)), **named}
    found: dict[str, tuple[int, str]] = {}
    for name, axes in shapes.items():
        value = given.get(name)
        if value is None:
            continue
        if len(value.shape) != len(axes):
            raise ValueError(f"input `{name}` has {len(value.shape)} axes, and `shapes` has {len(axes)}")
        for axis, size in zip(axes, value.shape, strict=True):
            if isinstance(axis, int):
                if axis != size:
                    raise ValueError(f"input `{name}` has shape {list(value.shape)}, and `shapes` has {list(axes)}")
                continue
            known, other = found.setdefault(axis, (int(size), name))
            if known != size:
                raise ValueError(f"`{axis}` is {known} in input `{other}` and {size} in input `{name}`")
    return {dim: size for dim, (size, _) in found.items()}
