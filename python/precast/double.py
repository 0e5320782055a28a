"""Eager in float64, where the plain comparison of a training call failed.

Some steps amplify rounding. A batch norm over few values divides by a small deviation: with one image, the gradients of
a ResNet-50 in eager are 3 % of their norm away from those in float64, and those of any other right program as far, in
another direction. The question is then whether the compiled module is further from the truth than eager is. A build
asks it of its programs by the same rule (`src/gate/float64.rs`). Nothing here runs while the plain comparison passes.

Each number below is the norm of a difference. A value beyond its plain tolerance is accepted if both hold:

| condition | why |
|---|---|
| its distance from float64 is at most `TIMES` eager's | eager is as far from the truth |
| that limit is at most `SHARE` of the value itself | zeros, and the other sign, are refused however far eager is |

Eager's distance comes from several runs, because one number, as a loss, may be right by chance: from the run of the
plain comparison, and from others whose parameters, buffers and inputs are moved by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import batches
from .smoke import restore_generators

TIMES = 3.0
SHARE = 0.9
_MOVED = 4
"""Runs of eager with moved values, beside the one that the plain comparison made."""

Values = Mapping[str, "Tensor | None"]


class Reference:
    """Eager's values of one training call in float64, and how far eager is from them."""

    def __init__(
        self,
        module: nn.Module,
        step: Callable[..., Values],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generators: tuple[Any, ...],
        eager: Values,
    ) -> None:
        """`step(*args, **kwargs)` returns eager's values. It returned `eager` with these states of the generators."""
        self._module, self._step, self._given, self._generators = module, step, (args, kwargs), generators
        self._eager = eager
        self._exact: Values | None = None
        # The sum over the runs of the squares of eager's distance.
        self._squares: dict[str, float] = {}

    def judge(self, name: str, mine: Tensor) -> str | None:
        """Returns why a value beyond its plain tolerance is refused; `None` if it is accepted."""
        try:
            return self._judged(name, mine)
        except Exception as error:
            return f"; float64 can't run it: {type(error).__name__}: {error}"

    def _judged(self, name: str, mine: Tensor) -> str | None:
        if self._exact is None:
            self._exact = self._run(_wide)
            self._add(self._eager)
            for salt in range(_MOVED):
                self._add(self._run(_moved(salt)))
        exact = self._exact[name]
        assert exact is not None
        size, own = float(exact.norm()), float((mine.double() - exact).norm())
        distance = (self._squares[name] / (1 + _MOVED)) ** 0.5
        limit, unit = TIMES * distance, max(size, 1e-30)
        if not limit <= SHARE * size:
            return f"; eager is {distance / unit:.1e} of it from float64, too far to decide"
        if not own <= limit:
            return f"; it is {own / unit:.1e} of its norm from float64, eager {distance / unit:.1e}"
        return None

    def _add(self, run: Values) -> None:
        """Adds the distances of a run. Its values are as large as the model: one run is held at a time."""
        assert self._exact is not None
        for name, one in run.items():
            exact = self._exact[name]
            if one is not None and exact is not None and exact.is_floating_point():
                square = float((one.double() - exact).square().sum())
                self._squares[name] = self._squares.get(name, 0.0) + square

    def _run(self, made: Callable[[Tensor], Tensor]) -> Values:
        restore_generators(self._generators)
        args, kwargs = batches.mapped(self._given, lambda _, one: made(one.detach()).requires_grad_(one.requires_grad))
        with _in_place_of(self._module, made):
            found = self._step(*args, **kwargs)
        return {name: one if one is None else one.detach() for name, one in found.items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _moved(salt: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that copies tensors, and moves floats by one unit in the last place, up or down."""
    generator = torch.Generator().manual_seed(salt)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        up = torch.randint(2, tensor.shape, generator=generator).to(tensor.device)
        return torch.nextafter(tensor, torch.where(up == 1, float("inf"), float("-inf")).to(tensor.dtype))

    return moved


@contextmanager
def _in_place_of(module: nn.Module, made: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Runs a block with other tensors in the places of a module's parameters and buffers."""
    others: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for each in module.modules():
        tables: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        places += [(table, name, one) for table in tables for name, one in table.items() if one is not None]
    try:
        for table, name, one in places:
            if id(one) not in others:
                other = made(one.detach())
                own = isinstance(one, nn.Parameter)
                others[id(one)] = nn.Parameter(other, requires_grad=one.requires_grad) if own else other
            table[name] = others[id(one)]
        yield
    finally:
        for table, name, one in places:
            table[name] = one
