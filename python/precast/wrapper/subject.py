"""The subject of a capture: a module whose calls become programs, and the arguments that they are captured with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compare import batches
from ..compare.undisturbed import inference, without_autocast
from ..config import CompileConfig
from ..torch_private import hooks, tracing
from .logs import Log
from .regions import resized
from .uses import Uses

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


class State(NamedTuple):
    """The state of a module that a pair was captured for."""

    modes: tuple[bool, ...]
    """Whether each submodule is in training mode."""
    parameters: tuple[bool, ...]
    """Whether each parameter requires a gradient."""
    inputs: tuple[bool, ...]
    """Whether each tensor of a call requires a gradient."""
    autocast: str | None
    """The dtype of autocast, if it is on."""


class Subject:
    """A module whose calls are captured."""

    kind = "inference"
    autocast: str | None = None
    """The dtype of autocast that its programs are captured under, without gradients."""
    state: State | None = None
    """Of a pair: the state of the module that it is for."""
    captured: State | None = None
    """Of a pair: the state that its programs are captured in. One with gradients of more inputs has it too."""
    uses: Uses | None = None
    """The calls by programs; None before, and of an engine that has none."""

    def __init__(self, name: str, module: nn.Module, config: CompileConfig, log: Log, model: str) -> None:
        """`model` is the name of the releases."""
        self.name, self.module, self.config, self.log, self.model = name, module, config, log, model
        self.own = hooks.own_forward(module)
        self.shapes: dict[str, Any] = dict(config.shapes)
        self.points: list[dict[str, int]] = config.points()
        self.names = positional(module)

    @property
    def net(self) -> nn.Module:
        """The module whose calls are captured, without hooks of its own."""
        return self.module

    def roots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the values that the paths of a record begin with."""
        return {"net": self.module, "own": self.own, "args": args, "kwargs": kwargs}

    def answer_itself(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer of the module's `forward`, without hooks of its own."""
        return tracing.forward(self.module, self.own, args, kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's `forward`, without hooks of its own."""
        return self.answer_itself(args, kwargs)

    def sized(self, shapes: dict[str, Any], points: list[dict[str, int]]) -> None:
        """Takes the dimensions of the inputs, and the buckets."""
        self.shapes, self.points = shapes, points

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns copies of the arguments as the programs are captured with them."""
        return self._taken(*self._covered(*batches.copied((args, kwargs))))

    @contextmanager
    def state_of_programs(self) -> Iterator[None]:
        """Runs a block in the modes that the programs are captured in."""
        with torch.inference_mode(False), inference(self.module), without_autocast():
            yield

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments that the programs are captured with."""
        return args, kwargs

    def _covered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments, at the sizes of the last bucket if none covers them."""
        if not self.points:
            return args, kwargs
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        own = batches.sizes(named, {name: axes for name, axes in self.shapes.items() if name in named})
        for point in self.points:
            if point == own or (self.config.pad and all(own[dim] <= size for dim, size in point.items() if dim in own)):
                return args, kwargs
        return resized((args, kwargs), self.shapes, self.names, self.points[-1])

    def unbind(self) -> None:
        """Lets the next call bind the module's tensors again."""


def positional(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters of a module's `forward` that may be given by position."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in by_position)
