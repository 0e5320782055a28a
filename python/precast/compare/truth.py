"""The judgement of rounding: by the module itself with more digits.

Two right programs differ by rounding. In half precision that is as much as many a fault makes: a BERT in bfloat16 is
1.2 % of its output's norm from the same weights in float32, and so is every other program, in another direction. Some
steps amplify rounding in float32 too: a batch norm over few values divides by a small deviation. So a value is right if
it is about as far from the truth as eager is. Truth is the module with float32 in place of half precision, else with
float64.

| values of | are right if |
|---|---|
| a call without gradients | norm of the difference from the truth, and worst element, are at most `TIMES` eager's |
| a training call | norm of the difference is at most `TIMES_OF_TRAINING` eager's, and `SHARE` of the value |

A value that is the truth, rounded once, is right in any case. In half precision each value is judged so; in float32
those that a plain tolerance refuses.

By autocast, eager's own gradients of a deep net of batch norms are further from the truth than zeros would be: of such
noise nothing but the size can be compared, and it has to be eager's within `SIZES`.

Eager's distance comes from several runs, because one number, as a loss or a score, may be right by chance: from the run
of the plain comparison, and from others with moved values. Of a call without gradients the largest counts. Each further
run has parameters, buffers and inputs that are moved by one unit in the last place, by autocast by as much as a cast
rounds. Without gradients it has a truth of its own, and is made where a value is refused. In training the root of the
mean square counts.

Distances are kept with a release, as shares of the values (`Shares`). A later process accepts a value that is as near
to eager's own as two values can be that are both right; for any other value it measures again. A build asks the same
question of its programs (`src/gate/truth.rs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_private import modules as of_torch
from ..torch_private.widening import Widening, precise, without_draws
from . import batches
from .undisturbed import restore_generators

TIMES = 2.0
TIMES_OF_TRAINING = 3.0
SHARE = 0.9
SIZES = 2.0
_RUNS = (1, 4, 12)
"""Runs of eager for a call without gradients: as many as the value takes, until it is accepted."""
_MOVED = 4
"""Runs of eager with moved values in training, beside the one that the plain comparison made."""
HALF = (torch.float16, torch.bfloat16)

Values = Mapping[str, "Tensor | None"]
Shares = dict[str, tuple[float, float]]
"""Eager's distance from the truth by the name of a value: of the norm, and of the worst element, as shares."""


class Distance(NamedTuple):
    """The distance of two values."""

    norm: float
    worst: float


class Truth:
    """The values of one call with more digits, and how far eager is from them."""

    def __init__(
        self,
        module: nn.Module,
        step: Callable[..., Values],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generators: tuple[Any, ...],
        eager: Values,
        *,
        prepared: Callable[[], AbstractContextManager[None]] = nullcontext,
        shares: Shares | None = None,
        training: bool = False,
    ) -> None:
        """`step(*args, **kwargs)` returns eager's values. It returned `eager` with these states of the generators.

        `prepared` puts the module into the state of that call while eager runs again. `shares` has what is known of
        eager's distances, and takes what is measured.
        """
        self._module, self._step, self._given, self._generators = module, step, (args, kwargs), generators
        self._eager, self._prepared, self._training = eager, prepared, training
        self.shares: Shares = {} if shares is None else shares
        self._exact: Values | None = None
        self._dtype = torch.float32 if in_half(module, (args, kwargs), eager) else torch.float64
        self._distances: dict[str, list[Distance]] = {}
        self._count = 0

    def judge(self, name: str, mine: Tensor) -> str | None:
        """Returns why a value is refused; `None` if it is right."""
        try:
            return self._judged(name, mine)
        except Exception as error:
            return f"; {self._name} can't run it: {type(error).__name__}: {error}"

    def measure(self, runs: int = 1) -> None:
        """Runs the module with more digits, and eager with moved values, until there are so many runs of eager."""
        with self._prepared():
            if self._exact is None:
                self._exact = self._wide(lambda one: one)
                self._add(self._eager, self._exact)
            while self._count < runs:
                salt = self._count
                exact = self._exact if self._training else self._wide(_moved(salt))
                self._add(self._run(_moved(salt)), exact)
        for name in self._distances:
            own, unit = self._distance(name), self._unit(name)
            self.shares[name] = (own.norm / unit.norm, own.worst / unit.worst)

    def _wide(self, made: Callable[[Tensor], Tensor]) -> Values:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), precise():
            with Widening(self._dtype):
                return self._run(lambda one: made(one).to(self._dtype) if one.is_floating_point() else one)

    @property
    def _name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def _judged(self, name: str, mine: Tensor) -> str | None:
        eager = self._eager[name]
        assert eager is not None
        share = self.shares.get(name) if self._exact is None else None
        if share is not None and self._accepted(mine, eager, eager, _known(share, eager, self._training)):
            return None
        for runs in (1 + _MOVED,) if self._training else _RUNS:
            if self._count < runs:
                self.measure(runs)
            if self._accepted(mine, self._truth(name), eager, self._distance(name)):
                return None
        exact, distance, unit = self._truth(name), self._distance(name), self._unit(name)
        own = between(mine, exact)
        if self._training:
            reason = f"; it is {own.norm / unit.norm:.1e} of its norm from {self._name}"
            reason += f", eager {distance.norm / unit.norm:.1e}"
            if own.norm <= TIMES_OF_TRAINING * distance.norm:
                sizes = f"{_norm(exact):.1e} there, {_norm(mine):.1e} here and {_norm(eager):.1e} in eager"
                reason += f", and the norm is {sizes}"
            return reason
        return (
            f"; from {self._name} it is {own.norm / unit.norm:.1e} of the norm and {own.worst / unit.worst:.1e} in the "
            f"worst element, eager {distance.norm / unit.norm:.1e} and {distance.worst / unit.worst:.1e}"
        )

    def _accepted(self, mine: Tensor, truth: Tensor, eager: Tensor, distance: Distance) -> bool:
        """Returns whether a value is near enough to the truth, from which eager is at that distance."""
        own = between(mine, truth)
        if self._training:
            size, limit = _norm(truth), TIMES_OF_TRAINING * distance.norm
            if not (own.norm <= limit and math.isfinite(limit)):
                return False
            sizes = _norm(mine), _norm(eager)
            return own.norm <= SHARE * size or (limit > SHARE * size and max(sizes) <= SIZES * min(sizes))
        rounded = torch.finfo(mine.dtype).eps / 2 if mine.is_floating_point() else 0.0
        norm = max(TIMES * distance.norm, rounded * _norm(truth))
        worst = max(TIMES * distance.worst, rounded * _largest(truth))
        return own.norm <= norm and own.worst <= worst and math.isfinite(norm)

    def _truth(self, name: str) -> Tensor:
        exact = self._exact[name] if self._exact is not None else None
        assert exact is not None
        return exact

    def _unit(self, name: str) -> Distance:
        exact = self._truth(name)
        return Distance(max(_norm(exact), 1e-30), max(_largest(exact), 1e-30))

    def _distance(self, name: str) -> Distance:
        found = self._distances[name]
        norms = [one.norm for one in found]
        norm = math.hypot(*norms) / math.sqrt(len(norms)) if self._training else max(norms)
        return Distance(norm, max(one.worst for one in found))

    def _add(self, run: Values, exact: Values) -> None:
        """Adds the distances of a run. Its values are as large as the model: one run is held at a time."""
        self._count += 1
        for name, one in run.items():
            other = exact[name]
            if one is not None and other is not None and other.is_floating_point():
                self._distances.setdefault(name, []).append(between(one, other))

    def _run(self, made: Callable[[Tensor], Tensor]) -> Values:
        moved = batches.mapped(
            self._given, batches.once(lambda one: made(one.detach().clone()).requires_grad_(one.requires_grad))
        )

        def run() -> Values:
            args, kwargs = batches.mapped(
                moved, batches.once(lambda one: one.detach().clone().requires_grad_(one.requires_grad))
            )
            found = self._step(*args, **kwargs)
            return {name: one if one is None else one.detach() for name, one in found.items()}

        restore_generators(self._generators)
        with _in_place_of(self._module, made):
            return run() if self._training else without_draws(run)


def in_half(module: nn.Module, *given: Any) -> bool:
    """Returns whether a call computes in half precision: by its tensors, or by autocast."""
    own = [*module.parameters(), *module.buffers(), *batches.tensors(list(given))]
    return any(one.dtype in HALF or torch.is_autocast_enabled(one.device.type) for one in own)


def between(one: Tensor, other: Tensor) -> Distance:
    """Returns the distance of two values."""
    difference = one.detach().double() - other.detach().double()
    return Distance(float(difference.norm()), float(difference.abs().max()) if difference.numel() else 0.0)


def _known(share: tuple[float, float], eager: Tensor, training: bool) -> Distance:
    """Returns a distance from eager's own value by a known share.

    Two values that are as far from the truth are, on the average, further from each other by the root of 2; the worst
    elements of both may be one element.
    """
    norm, worst = share[0] * _norm(eager), share[1] * _largest(eager)
    if training:
        return Distance(math.sqrt(2) * norm, worst)
    return Distance(math.sqrt(1 + 1 / TIMES**2) * norm, (1 + 1 / TIMES) * worst)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


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
        tables: tuple[dict[str, Any], ...] = (of_torch.parameters(each), of_torch.buffers(each))
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
