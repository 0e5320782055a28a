"""Eager with more digits, where the plain comparison of a training call failed: float64, or float32 for autocast.

Some steps amplify rounding. A batch norm over few values divides by a small deviation: with one image, the gradients of
a ResNet-50 in eager are 3 % of their norm away from those in float64, and those of any other right program as far, in
another direction. The question is then whether the compiled module is further from the truth than eager is. A build
asks it of its programs by the same rule (`src/gate/float64.rs`). Nothing here runs while the plain comparison passes.

Each number below is the norm of a difference. A value beyond its plain tolerance is accepted if its distance from
that is at most `TIMES` eager's: eager is as far from the truth. It has to be at most `SHARE` of the value too, so
that zeros, and the other sign, are refused. By autocast, eager's own gradients of a deep net of batch norms are further
than that: of such noise nothing but the size can be compared, and it has to be eager's within `SIZES`.

For a call by autocast, float32 without autocast has digits enough, and takes half the memory.

Eager's distance comes from several runs, because one number, as a loss, may be right by chance: from the run of the
plain comparison, and from others whose parameters, buffers and inputs are moved by one unit in the last place, or by
autocast by as much as a cast rounds. Once measured it is known (`noise`): a value is then accepted by the same rule
with eager's value in place of the one with more digits, and nothing runs for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import batches
from .noise import Noise
from .smoke import restore_generators

TIMES = 3.0
SHARE = 0.9
SIZES = 2.0
_MOVED = 4
"""Runs of eager with moved values, beside the one that the plain comparison made."""

Values = Mapping[str, "Tensor | None"]


class Reference:
    """Eager's values of one training call with more digits, and how far eager is from them."""

    def __init__(
        self,
        module: nn.Module,
        step: Callable[..., Values],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generators: tuple[Any, ...],
        eager: Values,
        prepared: Callable[[], AbstractContextManager[None]] = nullcontext,
        noise: Noise | None = None,
    ) -> None:
        """`step(*args, **kwargs)` returns eager's values. It returned `eager` with these states of the generators.

        `prepared` puts the module into the state of that call while eager runs again. `noise` has what is known of
        eager's distances, and takes what is measured.
        """
        self._noise = noise or Noise()
        self._module, self._step, self._given, self._generators = module, step, (args, kwargs), generators
        self._eager, self._prepared = eager, prepared
        self._exact: Values | None = None
        cast = any(torch.is_autocast_enabled(one.device.type) for one in module.parameters())
        self._dtype = torch.float32 if cast else torch.float64
        # The sum over the runs of the squares of eager's distance.
        self._squares: dict[str, float] = {}

    def judge(self, name: str, mine: Tensor) -> str | None:
        """Returns why a value beyond its plain tolerance is refused; `None` if it is accepted."""
        try:
            return self._judged(name, mine)
        except Exception as error:
            return f"; {self._name} can't run it: {type(error).__name__}: {error}"

    @property
    def _name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def _judged(self, name: str, mine: Tensor) -> str | None:
        eager = self._eager[name]
        assert eager is not None
        share = self._noise.share(name) if self._exact is None else None
        # Two values that are as far from the truth are, on the average, further from each other by the root of 2.
        if share is not None and _accepted(mine, eager, eager, math.sqrt(2) * share * _norm(eager)):
            return None
        if self._exact is None:
            self._measure()
        assert self._exact is not None
        exact = self._exact[name]
        assert exact is not None
        distance = self._distance(name)
        if _accepted(mine, exact, eager, distance):
            return None
        unit = max(_norm(exact), 1e-30)
        reason = f"; it is {_norm(mine, exact) / unit:.1e} of its norm from {self._name}, eager {distance / unit:.1e}"
        if _norm(mine, exact) <= TIMES * distance:
            sizes = f"{_norm(exact):.1e} there, {_norm(mine):.1e} here and {_norm(eager):.1e} in eager"
            reason += f", and the norm is {sizes}"
        return reason

    def _measure(self) -> None:
        with self._prepared():
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                self._exact = self._run(lambda one: one.to(self._dtype) if one.is_floating_point() else one)
            self._add(self._eager)
            for salt in range(_MOVED):
                self._add(self._run(_moved(salt)))
        norms = {name: _norm(one) for name, one in self._exact.items() if one is not None and name in self._squares}
        self._noise.measured({name: self._distance(name) / max(norm, 1e-30) for name, norm in norms.items()})

    def _distance(self, name: str) -> float:
        return float((self._squares[name] / (1 + _MOVED)) ** 0.5)

    def _add(self, run: Values) -> None:
        """Adds the distances of a run. Its values are as large as the model: one run is held at a time."""
        assert self._exact is not None
        for name, one in run.items():
            exact = self._exact[name]
            if one is not None and exact is not None and exact.is_floating_point():
                square = float((one.double() - exact.double()).square().sum())
                self._squares[name] = self._squares.get(name, 0.0) + square

    def _run(self, made: Callable[[Tensor], Tensor]) -> Values:
        restore_generators(self._generators)
        args, kwargs = batches.mapped(
            self._given, lambda _, one: made(one.detach().clone()).requires_grad_(one.requires_grad)
        )
        with _in_place_of(self._module, made):
            found = self._step(*args, **kwargs)
        return {name: one if one is None else one.detach() for name, one in found.items()}


def _accepted(mine: Tensor, truth: Tensor, eager: Tensor, distance: float) -> bool:
    """Returns whether a value is near enough to the truth, from which eager is at that distance."""
    size, own, limit = _norm(truth), _norm(mine, truth), TIMES * distance
    if not (own <= limit and math.isfinite(limit)):
        return False
    sizes = _norm(mine), _norm(eager)
    return own <= SHARE * size or (limit > SHARE * size and max(sizes) <= SIZES * min(sizes))


def _norm(tensor: Tensor, other: Tensor | None = None) -> float:
    """Returns the norm of a value, or of its difference from another one."""
    return float((tensor.double() - other.double()).norm() if other is not None else tensor.double().norm())


def _moved(salt: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that moves floats up or down by as much as rounding moves them."""
    generator = torch.Generator().manual_seed(salt)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        device, by = tensor.device.type, torch.finfo(tensor.dtype).eps
        if torch.is_autocast_enabled(device):
            # Most casts to few digits would be the same after a move by a float's last digit.
            by = max(by, torch.finfo(torch.get_autocast_dtype(device)).eps / 4)
        signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
        return tensor * (1 + signs.to(tensor) * by)

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
                own = isinstance(one, nn.Parameter)
                other = made(one.detach() if own else one.detach().clone())  # a call may write a buffer
                others[id(one)] = nn.Parameter(other, requires_grad=one.requires_grad) if own else other
            table[name] = others[id(one)]
        yield
    finally:
        for table, name, one in places:
            table[name] = one
