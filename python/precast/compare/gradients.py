"""The comparison of gradients with eager's, by the name of the parameter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config import CompileConfig
from . import batches
from .result import SmokeResult
from .rounding import Kept
from .truth import Shares, Truth
from .undisturbed import generators, restore_generators, restored_buffers, restored_generators

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""The largest error of a gradient of each dtype, as a share of its norm."""
_FLOOR = 1e-3
# Below this share of the largest norm of all gradients an error is noise: the gradient of a bias before a
# normalization is zero but for rounding.
_PIECE = 1 << 20
# Elements that are compared at once, in double precision: as a whole an embedding would take several times its memory.


def difference(
    got: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    rtol: float | None = None,
    autocast: str | None = None,
    judge: Callable[[str, Tensor], str | None] | None = None,
) -> tuple[str | None, float]:
    """Returns the first wrong gradient, if any, and the largest error as a share of the gradient's norm.

    `judge` says why a gradient beyond its tolerance is refused, or accepts it by `None`.
    """
    norms = {name: _norm(one) for name, one in expected.items() if one is not None}
    finite = [norm for norm in norms.values() if norm < float("inf")]
    floor, worst = _FLOOR * max(finite, default=0.0), 0.0
    for name, eager in expected.items():
        mine = got.get(name)
        if eager is None or mine is None:
            if (eager is None) != (mine is None):
                which, whose = ("missing", "eager has one") if mine is None else ("there", "eager has none")
                return f"the gradient of `{name}` is {which}, and {whose}", float("inf")
            continue
        if (mine.shape, mine.dtype) != (eager.shape, eager.dtype):
            return (
                f"the gradient of `{name}` is {mine.dtype} {list(mine.shape)}, eager's is {eager.dtype} "
                f"{list(eager.shape)}"
            ), float("inf")
        distance = _distance(_local(mine), _local(eager))
        if distance is None:
            return f"the gradient of `{name}` differs from eager in NaN or infinity", float("inf")
        error = distance / max(norms[name], floor, 1e-30)
        worst = max(worst, error)
        limit = TOLERANCES.get(getattr(torch, autocast.removeprefix("torch.")) if autocast else eager.dtype, 5e-2)
        if error > (limit if rtol is None else rtol):
            refused = judge(f"gradient {name}", _local(mine)) if judge is not None else ""
            if refused is not None:
                return f"the gradient of `{name}` differs from eager by {error:.1e} of its norm{refused}", worst
    return None, worst


def _norm(tensor: Tensor) -> float:
    """Returns the norm of a gradient; of a distributed one, that of all shards."""
    if hasattr(tensor, "to_local"):
        return float(tensor.detach().double().norm())
    return math.hypot(*(float(piece.double().norm()) for piece in _pieces(tensor.detach())))


def _distance(got: Tensor, expected: Tensor) -> float | None:
    """Returns the norm of the difference; `None` if one is finite where the other is not."""
    parts = []
    for mine, eager in zip(_pieces(got), _pieces(expected), strict=True):
        if not torch.equal(mine.isfinite(), eager.isfinite()):
            return None
        parts.append(float((mine.double() - eager.double()).nan_to_num(0, 0, 0).norm()))
    return math.hypot(*parts)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).split(_PIECE)  # type: ignore[no-any-return, no-untyped-call]


def _local(tensor: Tensor) -> Tensor:
    """Returns the shard of this process of a distributed tensor."""
    local = getattr(tensor, "to_local", None)
    return (local() if local is not None else tensor).detach()


def compare(
    module: nn.Module,
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: CompileConfig,
    autocast: str | None = None,
    kept: Kept | None = None,
) -> SmokeResult:
    """Compares results, gradients and written buffers of a compiled module with eager's.

    No `.grad` is written. Buffers and generators are afterwards as they were. `kept` has what is known of eager's
    distance from the truth, and keeps what is measured if all agree.
    """
    shares = kept.read() if kept is not None else {}
    known = dict(shares)
    began, steps, worst = time.perf_counter(), 0, 0.0
    rtol, atol = config.rtol, config.atol
    if autocast is not None and rtol is None:
        rtol, atol = batches.TOLERANCES[getattr(torch, autocast.removeprefix("torch."))]
    reason, exception = None, None

    def compared() -> tuple[str | None, float]:
        """Makes one step of each. Two sets of gradients are held, and none after it."""
        state = generators()
        try:
            expected = _step(module, eager, args, kwargs)
        except Exception as error:
            raise _EagerFails(f"eager fails: {type(error).__name__}: {error}") from error
        restore_generators(state)
        _release(module)
        got = _step(module, compiled, args, kwargs)
        judge = _truth(module, eager, args, kwargs, state, expected, shares).judge
        problem, error_ = batches.difference(got[0], expected[0], rtol, atol, judge=judge)
        if problem is None:
            problem, _ = batches.difference(got[2], expected[2], rtol, atol, "buffer, after the call,", judge)
        if problem is None:
            problem, other = difference(got[1], expected[1], config.rtol, autocast, judge)
            error_ = max(error_, other)
        return problem, error_

    with restored_generators(), _without_hooks(module):
        try:
            while steps < config.smoketest_steps and reason is None:
                reason, error_ = compared()
                worst, steps = max(worst, error_), steps + (reason is None)
        except _EagerFails as failed:
            reason, exception = str(failed), failed.__cause__
        except Exception as failed:
            reason, exception = f"{type(failed).__name__}: {failed}", failed
    if reason is None and kept is not None and shares != known:
        kept.write(shares)
    _release(module)
    return SmokeResult(reason is None, steps, worst, time.perf_counter() - began, reason, exception)


ROUNDS = 7
_SECONDS = 2.0
# The time for all rounds; the first one is made in any case.
_MARGIN = 1.1


def slower(
    module: nn.Module,
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: Kept,
) -> float:
    """Returns how many times eager's time a step of a compiled module takes, if it is slower in nearly every round.

    Otherwise returns 1. The result is kept, so that a later start measures nothing.
    """
    shares = kept.read()
    if (known := shares.get("time of a step")) is not None:
        return known[0]
    began = time.perf_counter()
    times: list[tuple[float, ...]] = []
    with restored_generators(), _without_hooks(module):
        while len(times) < ROUNDS and (not times or time.perf_counter() - began < _SECONDS):
            times.append(tuple(_seconds(module, one, args, kwargs) for one in (eager, compiled)))
    _release(module)
    ratio = min(mine for _, mine in times) / min(own for own, _ in times)
    wins = sum(mine < own for own, mine in times)
    found = ratio if ratio > _MARGIN and wins <= len(times) // ROUNDS else 1.0
    kept.write({**shares, "time of a step": (found, found)})
    return found


def _seconds(module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    wait = torch.cuda.synchronize if any(one.is_cuda for one in module.parameters()) else lambda: None
    wait()
    began = time.perf_counter()
    _step(module, function, args, kwargs)
    wait()
    return time.perf_counter() - began


def _release(module: nn.Module) -> None:
    """Gives free memory back to the device: blocks of eager's sizes serve neither a CUDA graph nor an optimizer."""
    if any(parameter.is_cuda for parameter in module.parameters()):
        torch.cuda.empty_cache()


def _truth(
    module: nn.Module,
    eager: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: tuple[Any, ...],
    expected: tuple[Any, ...],
    shares: Shares,
) -> Truth:
    """Returns the judge of the values of a call. `expected` is eager's step."""

    def values(step: tuple[Any, ...]) -> dict[str, Tensor | None]:
        answer, found, buffers = step
        return named(found, {"output": answer, "buffer, after the call,": buffers})

    def step(*args: Any, **kwargs: Any) -> dict[str, Tensor | None]:
        return values(_step(module, eager, args, kwargs))

    return Truth(module, step, args, kwargs, state, values(expected), shares=shares, training=True)


def named(found: Mapping[str, Tensor | None], others: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Returns gradients, and the tensors of other values by their nouns, by the names that comparisons give a judge."""
    return {f"gradient {name}": one for name, one in found.items()} | batches.named(others)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Runs a block without the hooks of parameters: they are the caller's, for calls of the caller."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    held = [(one, kind, found) for one in module.parameters() for kind in kinds if (found := getattr(one, kind))]
    try:
        for one, kind, _ in held:
            setattr(one, kind, None)
        yield
    finally:
        for one, kind, found in held:
            setattr(one, kind, found)


class _EagerFails(Exception):
    """The module itself raised."""


def _step(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Tensor | None], dict[str, Tensor]]:
    """Returns the results of a call, the gradients of parameters and inputs, and the buffers after it."""
    inputs: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        inputs.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        return inputs[-1]

    args, kwargs = batches.mapped((args, kwargs), batches.once(leaf))
    with restored_buffers(module):
        answer = function(*args, **kwargs)
        found = [one for one in batches.tensors(answer) if one.requires_grad]
        generator = torch.Generator().manual_seed(0)
        tangents = [torch.randn(one.shape, generator=generator).to(one) for one in found]
        wanted = {f"input {at}": one for at, one in enumerate(inputs) if one.requires_grad}
        wanted |= {name: one for name, one in module.named_parameters() if one.requires_grad}
        # In this thread: cuBLAS keeps a workspace of 33 MiB for each one that multiplies.
        with torch.autograd.set_multithreading_enabled(False):
            got = torch.autograd.grad(found, list(wanted.values()), tangents, allow_unused=True)
        buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
    return batches.mapped(answer, lambda _, one: one.detach()), dict(zip(wanted, got, strict=True)), buffers
