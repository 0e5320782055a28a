"""Captures the training step of a module in hand as two programs: `precast.partition` has their inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Flat, failure, resized, tidied, undisturbed
from .draws import Unsupported
from .errors import BuildError
from .nesting import Call
from .partition import Half, partition
from .replay import Program, quiet
from .smoke import restored_buffers


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


def capture(net: nn.Module, call: Call, grads: Sequence[bool], under: str = "") -> Pair:
    """Returns the programs for the sizes of a call, in the module's present modes and under the present autocast.

    `grads` says for each tensor of the call whether it requires a gradient. `under` is what the names of tensors begin
    with. Raises `BuildError` for a module that has no such programs.
    """
    flat = Flat(net, "forward", call, under)
    inputs = [
        resized(tensor, {}).requires_grad_(grad and tensor.is_floating_point())
        for tensor, grad in zip(call.tensors, grads, strict=True)
    ]
    with restored_buffers(net), quiet():
        try:
            halves = partition(flat, call.names, inputs)
        except Unsupported as error:
            raise BuildError(str(error), hint=error.hint) from error
        except BuildError:
            raise
        except Exception as error:
            raise failure(net, "forward", error) from error
    given = {name: one.detach() for name, one in zip(call.names, inputs, strict=True)}
    masks = {name: draw.sample(inputs[0].device) for name, draw in halves.masks.items()}
    with undisturbed(net), quiet(), _without_autocast():
        halves.fill(given, masks)
        return Pair(_exported(halves.forward), _exported(halves.backward))


def _exported(half: Half) -> Function:
    program = torch.export.export(half.module, tuple(half.inputs.values()), strict=False)
    return Function(half.inputs, half.outputs, Program(tidied(program), {}, []))


@contextlib.contextmanager
def _without_autocast() -> Any:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
