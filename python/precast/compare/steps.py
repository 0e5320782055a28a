"""The comparison of whole training steps with eager's: forward, loss, backward, update."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import batches, gradients
from .bypass import eager as eager_answers
from .figures import Meter, Training, compile_seconds, training
from .truth import Truth
from .undisturbed import generators, restored_generators


class Steps:
    """Training steps of a model on one batch, from the same state for compiled code and for eager.

    Parameters, their gradients, buffers, the optimizer's state and the generators are put back.
    """

    def __init__(
        self, model: nn.Module, batch: Any, optimizer: Any, loss_fn: Callable[..., Tensor], eager: Any = None
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.batch = model, optimizer, loss_fn, batch
        self._original = eager
        self._args, self._kwargs = batches.arguments(batch)
        self._with_batch = _takes_two(loss_fn)
        self._named = dict(model.named_parameters())
        self._device = next(iter(self._named.values())).device
        self._meters = Meter(self._device), Meter(self._device)
        self._compiled = compile_seconds(model)

    def figures(self) -> Training:
        """Returns the figures of the steps that were made."""
        return training(self.model, self._device, *self._meters, self._compiled)

    def differences(self, count: int, rtol: float | None, atol: float | None) -> Iterator[tuple[str | None, float]]:
        """Yields for each step the first difference of the loss or of a gradient, if any, and the largest error.

        Each step begins with the state after the step before it, as the compiled model left it.
        """
        autocast = _autocast(self._device.type)
        if autocast is not None and rtol is None:
            rtol, atol = batches.TOLERANCES[getattr(torch, autocast.removeprefix("torch."))]
        with restored_generators(), self._restored():
            for _ in range(count):
                put_back, state = self._snapshot(), generators()
                with restored_generators(), eager_answers():
                    expected = self._step(self._original or self.model, self._meters[1])
                put_back()
                got = self._step(self.model, self._meters[0])
                judge = self._judge(put_back, state, expected)
                problem, error = batches.difference(got[0], expected[0], rtol, atol, "loss", judge)
                if problem is None:
                    problem, other = gradients.difference(got[1], expected[1], None, autocast, judge)
                    error = max(error, other)
                yield problem, error

    def _judge(
        self, put_back: Callable[[], None], state: tuple[Any, ...], expected: tuple[Tensor, dict[str, Tensor | None]]
    ) -> Callable[[str, Tensor], str | None] | None:
        """Returns what judges the values of a step by eager's with more digits; `expected` is eager's step.

        None where processes average their gradients: another process does not know that this one asks.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None

        @contextmanager
        def before_the_step() -> Iterator[None]:
            with restored_generators(), self._restored(), eager_answers():
                put_back()
                yield

        def step(batch: Any) -> dict[str, Tensor | None]:
            args, kwargs = batches.arguments(batch)
            loss = self._loss(self._original or self.model, args, kwargs, batch)
            # Others are in their places now.
            named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
            got = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            return gradients.named(dict(zip(named, got, strict=True)), {"loss": loss})

        loss, found = expected
        values = gradients.named(found, {"loss": loss})
        return Truth(self.model, step, (self.batch,), {}, state, values, prepared=before_the_step, training=True).judge

    def _step(self, model: Callable[..., Any], meter: Meter) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Returns the loss and the gradients of one step."""
        self._without_gradients()
        args, kwargs = batches.copied((self._args, self._kwargs))
        with meter.step():
            loss = self._loss(model, args, kwargs, self.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            found = {name: self._kept(one.grad) for name, one in self._named.items()}
            self.optimizer.step()
        self._without_gradients()
        return loss.detach().clone(), found

    def _loss(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Tensor:
        answer = model(*args, **kwargs)
        loss = self.loss_fn(answer, batch) if self._with_batch else self.loss_fn(answer)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"`loss_fn` returns {kind}, not a tensor with one value")
        return loss

    def _kept(self, gradient: Tensor | None) -> Tensor | None:
        """Returns a gradient as it is before the update. Torch's optimizers leave gradients as they are."""
        if gradient is None or type(self.optimizer).__module__.startswith("torch.optim"):
            return gradient
        return gradient.detach().clone()

    def _without_gradients(self) -> None:
        for one in self._named.values():
            one.grad = None

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Runs a block and puts tensors and the optimizer's state back."""
        put_back = self._snapshot()
        try:
            yield
        finally:
            put_back()

    def _snapshot(self) -> Callable[[], None]:
        """Returns a function that puts tensors and the optimizer's state back as they are now."""
        gradients_ = [(one, one.grad) for one in self._named.values()]
        tensors = [*self._named.values(), *self.model.buffers()]
        values = [(one, one.detach().clone()) for one in tensors]
        state = {key: _cloned(held) for key, held in self.optimizer.state.items()}
        groups = [{key: copy.deepcopy(held) for key, held in _settings(group)} for group in self.optimizer.param_groups]

        @torch.no_grad()
        def put_back() -> None:
            for one, value in values:
                one.copy_(value)
            for one, grad in gradients_:
                one.grad = grad
            for key in list(self.optimizer.state):
                if key not in state:
                    del self.optimizer.state[key]
            for key, held in state.items():
                if key in self.optimizer.state:
                    _put_back(self.optimizer.state[key], held)
                else:
                    self.optimizer.state[key] = _cloned(held)
            for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(settings))

        return put_back


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, held) for key, held in group.items() if key != "params")


def _cloned(held: Any) -> Any:
    if isinstance(held, dict):
        return {key: one.clone() if isinstance(one, Tensor) else copy.deepcopy(one) for key, one in held.items()}
    return copy.deepcopy(held)


def _put_back(now: Any, before: Any) -> None:
    """Writes values into the tensors that an optimizer has; removes the tensors that it added."""
    for key in list(now):
        if key not in before:
            del now[key]
        elif isinstance(now[key], Tensor) and isinstance(before[key], Tensor) and now[key].shape == before[key].shape:
            now[key].copy_(before[key])
        else:
            now[key] = before[key]


def _takes_two(function: Callable[..., Any]) -> bool:
    """Returns whether a loss takes the batch too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [one for one in parameters if one.default is one.empty and one.kind in (0, 1)]
    return len(required) == 2


def _autocast(device: str) -> str | None:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
