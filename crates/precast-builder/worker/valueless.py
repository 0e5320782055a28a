"""Calls an entry so that the parameters of its model have no values: a file will give them.

A model of gigabytes would take its memory twice: once for values that the entry draws or reads, and once for those of
the file. Here each parameter is on the meta device from its registration on, and later `give` puts a tensor over the
mapped file in its place. Both happen to the tensor object itself, so everything that refers to it sees the change.
Buffers have values: most of them are in no file.

An entry may need values, to compute a buffer or to decide something, and it may keep a view of a parameter's memory.
Torch then raises, or memory outlives its parameter ([`Memory`]). Such an entry is called again, with values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .torch_private.patches import replaced
from .torch_private.storages import Memory


@contextmanager
def parameters(before: list[Memory]) -> Iterator[None]:
    """Takes the values of every parameter that a module registers meanwhile; `before` gets their memory."""
    register = torch.nn.Module.register_parameter

    def register_parameter(module: Any, name: str, parameter: Any) -> None:
        if type(parameter) is torch.nn.Parameter and parameter.layout == torch.strided and not parameter.is_meta:
            before.append(Memory(parameter))
            data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            give(parameter, data)
        register(module, name, parameter)

    with replaced((torch.nn.Module, "register_parameter", register_parameter)):
        yield


def call(entry: Callable[[], Any]) -> Any:
    """Returns the result of an entry, with parameters that have no values; None if it needs values."""
    before: list[Memory] = []
    try:
        with parameters(before):
            model = entry()
    except Exception:  # any error: the next call shows the entry's own
        return None
    return None if any(memory.is_used() for memory in before) else model


def give(own: Any, value: Any) -> None:
    """Puts a value in the place of a parameter's, for everything that refers to the parameter."""
    torch.utils.swap_tensors(own, torch.nn.Parameter(value, requires_grad=own.requires_grad))


def lacks_values(model: Any) -> bool:
    """Returns whether a tensor of a model has no values."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for module in model.modules() for value in vars(module).values()]
    return any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors)
