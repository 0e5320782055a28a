"""The comparison of a compiled module with the module itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..torch_private import modules as of_torch
from . import batches
from .result import SmokeResult
from .steps import Steps
from .truth import HALF, Shares, Truth
from .undisturbed import generators, inference, restore_generators, restored_generators, unchanged_buffers


class CompileSmoketest:
    """Calls a compiled module and the module itself on the same batch, and compares answers or training steps.

    Both get copies of the batch and the same states of the random generators. Generators, training flags and buffers
    are afterwards as they were.
    """

    def __init__(self, steps: int = 3, *, rtol: float | None = None, atol: float | None = None) -> None:
        self.steps, self.rtol, self.atol = steps, rtol, atol

    def run(
        self,
        model: Callable[..., Any],
        batch: Any,
        optimizer: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        eager: Callable[..., Any] | None = None,
    ) -> SmokeResult:
        """Compares `model` with `eager`; without it, with the module that `model` wraps.

        Without an optimizer both run in eval mode and without gradients. With an optimizer and a loss, whole training
        steps are compared, in the modes that the model has: `loss_fn(answer)`, or `loss_fn(answer, batch)`, returns the
        loss. Losses and gradients have to agree; a wrong gradient is named by its parameter. Parameters, gradients,
        buffers, the optimizer's state and the generators are put back.

        Raises `ValueError` if there is no module to compare with, or only one of `optimizer` and `loss_fn`; failures of
        a call are in the result.
        """
        if optimizer is not None or loss_fn is not None:
            return self._steps(model, batch, optimizer, loss_fn, eager)
        original = eager if eager is not None else of_torch.original(model)
        if not isinstance(original, nn.Module):
            raise ValueError("no module to compare with: pass `eager`")
        return self.compare(model, original, original, *batches.arguments(batch))

    def _steps(self, model: Any, batch: Any, optimizer: Any, loss_fn: Any, eager: Any) -> SmokeResult:
        """Compares training steps."""
        if optimizer is None or loss_fn is None:
            absent = "optimizer" if optimizer is None else "loss_fn"
            raise ValueError(f"a training step needs `optimizer` and `loss_fn`: pass `{absent}` too")
        if not isinstance(model, nn.Module):
            raise ValueError("`model` is no `torch.nn.Module`: its parameters are not known")
        began, steps, worst = time.perf_counter(), 0, 0.0
        reason, exception, training = None, None, None
        try:
            both = Steps(model, batch, optimizer, loss_fn, eager)
            for reason, error in both.differences(self.steps, self.rtol, self.atol):
                worst = max(worst, error)
                if reason is not None:
                    break
                steps += 1
            training = both.figures()
        except Exception as error:
            reason, exception = f"{type(error).__name__}: {error}", error
        return SmokeResult(reason is None, steps, worst, time.perf_counter() - began, reason, exception, training)

    def compare(
        self,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shares: Shares | None = None,
    ) -> SmokeResult:
        """Compares the answers of two functions of one module to the same arguments.

        `shares` has what is known of eager's distance from the truth, and takes what is measured.
        """

        def values(answer: Any, kept: Any) -> dict[str, Tensor | None]:
            return batches.named({"output": answer, "input, after the call,": kept})

        def step(*args: Any, **kwargs: Any) -> dict[str, Tensor | None]:
            return values(*_call(eager, args, kwargs))

        began, steps, worst = time.perf_counter(), 0, 0.0

        def result(reason: str | None = None, exception: BaseException | None = None) -> SmokeResult:
            return SmokeResult(reason is None, steps, worst, time.perf_counter() - began, reason, exception)

        with restored_generators(), inference(module):
            for _ in range(self.steps):
                state = generators()
                try:
                    with unchanged_buffers(module) as changed:
                        expected, kept = _call(eager, args, kwargs)
                except Exception as error:
                    return result(f"eager fails: {type(error).__name__}: {error}", error)
                if changed:
                    return result(f"the module changes its buffer `{changed[0]}` in a call")
                restore_generators(state)
                try:
                    got, mine = _call(compiled, args, kwargs)
                except Exception as error:
                    return result(f"{type(error).__name__}: {error}", error)
                truth = Truth(module, step, args, kwargs, state, values(expected, kept), shares=shares)
                judge, plain = truth.judge, self.rtol is not None or self.atol is not None
                half = (lambda _: False) if plain else (lambda one: one.dtype in HALF)
                problem, error_ = batches.difference(
                    got, expected, self.rtol, self.atol, judge=None if plain else judge, judged=half
                )
                worst = max(worst, error_)
                if problem is None:
                    problem, _ = batches.difference(mine, kept, self.rtol, self.atol, "input, after the call,")
                if problem is not None:
                    return result(problem)
                steps += 1
                del got, mine  # a graph lends its outputs while nobody holds them
        return result()


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the answer to copies of the arguments, and these copies as the call left them."""
    args, kwargs = batches.copied((args, kwargs))
    return function(*args, **kwargs), [*args, *kwargs.values()]
