"""Engines: the compiled code of regions. Each returns an answer, or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..config import CompileConfig


class CompileFailed(RuntimeError):
    """A region can't be compiled, or its answers differ from eager's."""


class Passed(Exception):
    """An exception of the caller's own code, its cause: a hook for saved tensors. It is raised as it is."""


class Engine(Protocol):
    """The compiled code of a region."""

    guarded: bool
    """Whether `Guard` and `Tensors` must be checked before each call."""

    def learn(self, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes a call of the module and its answer, before the first call."""

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer. Raises `Refused` for a call that it has no code for."""

    def bind(self) -> None:
        """Takes the module's tensors as they are now. Raises `Refused` if they do not fit."""

    def check(self) -> None:
        """Waits for its calls, and raises the error of a value on the device that was out of bounds."""

    def close(self) -> None:
        """Lets the compiled code go."""


class TorchEngine:
    """`torch.compile` with one of its backends. It guards its calls itself."""

    guarded = False

    def __init__(self, function: Callable[..., Any], config: CompileConfig) -> None:
        options = dict(config.options) or None
        self._call: Callable[..., Any] = torch.compile(
            function,
            backend=config.backend,
            mode=None if options or config.mode == "default" else config.mode,
            dynamic=None if config.dynamic is None else bool(config.dynamic),
            fullgraph=config.fullgraph,
            options=options,
        )

    def learn(self, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Does nothing: the compiled code returns the module's own structure."""

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer, and compiles where `torch.compile` does."""
        return self._call(*args, **kwargs)

    def bind(self) -> None:
        """Does nothing: the compiled code reads the module's tensors in each call."""

    def check(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
