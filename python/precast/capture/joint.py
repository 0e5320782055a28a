"""Captures the training step of a module in hand as two programs: `precast.partition` has their inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compare.undisturbed import without_autocast
from ..errors import BuildError
from ..torch_private.draws import Unsupported
from ..torch_private.partition import Half, partition
from .programs import Flat, tidied, undisturbed
from .replay import Program, quiet


@dataclass
class Function:
    """One program of a pair: its inputs in order with their values in one call, and the names of its outputs."""

    inputs: dict[str, Tensor]
    outputs: list[str]
    program: Program


@dataclass
class Pair:
    """The programs of a training step."""

    forward: Function
    backward: Function


def capture(flat: Flat, names: Sequence[str], inputs: Sequence[Tensor]) -> Pair:
    """Returns the programs of a function for these inputs, in the present modes and under the present autocast.

    Inputs that require gradients get some. Raises `BuildError` for a function that has no such programs; other errors
    are torch's.
    """
    with quiet():
        try:
            halves = partition(flat, names, inputs)
        except Unsupported as error:
            raise BuildError(str(error), hint=error.hint) from error
    given = {name: one.detach() for name, one in zip(names, inputs, strict=True)}
    masks = {name: draw.sample(inputs[0].device) for name, draw in halves.masks.items()}
    net: Any = flat.m
    with undisturbed(net), quiet(), without_autocast():
        halves.fill(given, masks)
        return Pair(_exported(halves.forward), _exported(halves.backward))


def _exported(half: Half) -> Function:
    program = torch.export.export(half.module, tuple(half.inputs.values()), strict=False)
    return Function(half.inputs, half.outputs, Program(tidied(program), {}, []))
