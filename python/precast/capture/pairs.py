"""Builds a release of autograd pairs: the forward and backward programs of one module, a pair for each bucket.

A release has the modules `forward` and `backward`, or `forward_0`, `backward_0` and so on, one pair for each bucket in
the order of the request. `precast.partition` has the names of their inputs and outputs. In a release of a spec the name
of the entry is before these: `train.forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..compare.batches import TOLERANCES
from ..errors import LoadError
from ..spec import Gate, Input, Module
from ..torch_private import modules as of_torch
from . import captured

if TYPE_CHECKING:
    from .._native import Model
    from .joint import Function, Pair

# Registers the operators that Inductor's decompositions call.
IMPORTS = (of_torch.PRIMITIVES,)


def names(number: int, count: int, under: str = "") -> tuple[str, str]:
    """Returns the names of the modules of a bucket, of `count` buckets; of a part, its name comes first."""
    prefix, suffix = f"{under}_" if under else "", f"_{number}" if count > 1 else ""
    return f"{prefix}forward{suffix}", f"{prefix}backward{suffix}"


def found(model: Model) -> list[tuple[str, str]]:
    """Returns the names of the modules of each pair, in a release that `precast build` made of a spec.

    Raises `LoadError` for a release without pairs, and for one with pairs of several entries.
    """
    entries: dict[str, list[tuple[str, str]]] = {}
    for forward in model.modules:
        entry, _, part = forward.rpartition(".")
        backward = f"{entry}.{part.replace('forward', 'backward', 1)}"
        if entry and part.startswith("forward") and backward in model.modules:
            entries.setdefault(entry, []).append((forward, backward))
    if len(entries) == 1:
        return next(iter(entries.values()))
    if entries:
        message = f"release `{model.name}` has several modules of kind `autograd`: {', '.join(entries)}"
        raise LoadError(message, hint="give each a spec of its own, with another model name")
    message = f"release `{model.name}` has no module of kind `autograd`, only {', '.join(model.modules)}"
    raise LoadError(message, hint='write `kind = "autograd"` into a [[module]] of its spec, and build it')


def functions_of(
    weights: Mapping[str, torch.Tensor], pairs: Sequence[Pair], gate: Gate | None, under: str = ""
) -> tuple[dict[str, captured.Function], list[Module]]:
    """Returns the functions of pairs, and their modules in a spec. `under` is what the names of tensors begin with."""
    functions: dict[str, captured.Function] = {}
    modules = []
    for number, pair in enumerate(pairs):
        for module, one in zip(names(number, len(pairs), under), (pair.forward, pair.backward), strict=True):
            functions[module], made = function_of(module, one, weights, gate)
            modules.append(made)
    return functions, modules


def function_of(
    name: str, one: Function, weights: Mapping[str, torch.Tensor], gate: Gate | None
) -> tuple[captured.Function, Module]:
    """Returns a program as a function, and its module in a spec."""
    inputs = {name: _input(tensor) for name, tensor in one.inputs.items()}
    return _function(one), Module(name, method=name, inputs=inputs, gate=gate or _gate(weights, one))


def _gate(weights: Mapping[str, torch.Tensor], half: Function) -> Gate:
    """Returns the tolerance of a half: a share of its largest value.

    A gradient may be zero but for rounding, as that of a bias before a normalization, so that its own size says
    nothing. A value of a deep network's middle has the rounding of all layers before it. The smoke test compares
    results, and real gradients, each by its norm.
    """
    given = list(half.inputs.values())
    with torch.no_grad():
        results = half.program.run(weights.__getitem__, given)
    sizes = (one.detach().double().nan_to_num(0, 0, 0).abs().max() for one in results if one.numel())
    largest = max(map(float, sizes), default=0.0)
    coarsest = max((TOLERANCES.get(one.dtype, (0.0, 0.0))[0] for one in (*given, *results)), default=0.0)
    return Gate(atol=coarsest * largest)


def _function(one: Function) -> captured.Function:
    dims: list[list[str | None]] = [[None] * tensor.dim() for tensor in one.inputs.values()]
    nesting = {"dict": {name: {"tensor": at} for at, name in enumerate(one.outputs)}}
    return captured.Function(one.inputs, dims, nesting, [one.program], real=True)


def _input(tensor: torch.Tensor) -> Input:
    fill = False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0
    return Input(captured.dtype(tensor), list(tensor.shape), fill)
