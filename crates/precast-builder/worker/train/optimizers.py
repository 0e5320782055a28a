"""Optimizers: the update of one parameter in torch operations, and torch's own optimizers for comparison.

A callable of the project is an optimizer too: `update(param, grad, state, lr, step)` writes into `param` and into the
tensors of `state`, and its attribute `state` names these tensors. They have the parameter's shape and begin with zeros.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..model import entry
from ..wire import Failure

# Inductor unrolls a reduction of fewer elements into the loop.
_REDUCED = 16

# The parameter, its gradient, its states by name, the learning rate, and the number of this step from 1 on, or what
# `Optimizer.once` makes of it.
Update = Callable[[Any, Any, dict[str, Any], Any, Any], None]


@dataclass(frozen=True)
class Optimizer:
    """One optimizer with its options."""

    update: Update
    # Names of the states of each parameter, and of those that are sums of squares.
    states: Sequence[str]
    squares: Sequence[str] = ()
    # Makes torch's optimizer of parameters, with a learning rate. None: torch has no such optimizer.
    of_torch: Callable[[list[Any], float], Any] | None = None
    # Computes from the learning rate and the number of the step what `update` gets in place of the number.
    once: Callable[[Any, Any], Any] = lambda _, step: step


def find(train: dict[str, Any], root: Path) -> Optimizer:
    """Returns the optimizer that the spec names."""
    name, options = train["optimizer"], train["options"]
    if name in ("adamw", "adam"):
        return _adam(decoupled=name == "adamw", **options)
    if name == "sgd":
        return _sgd(**options)
    update = entry.load(root, name)
    states = getattr(update, "state", ())
    if isinstance(states, str) or not all(isinstance(one, str) and one.isidentifier() for one in states):
        hint = f'as in `{name.partition(":")[2]}.state = ("momentum",)`'
        raise Failure("entry_call", f"`state` of `{name}` is no sequence of names", hint=hint, spec=name)
    try:
        inspect.signature(update).bind(*range(5))
    except TypeError as error:
        hint = "an optimizer takes `(param, grad, state, lr, step)`"
        raise Failure(
            "entry_call", f"`{name}` can't be called as an optimizer: {error}", hint=hint, spec=name
        ) from error
    return Optimizer(update, tuple(states))


def _adam(decoupled: bool, betas: Sequence[float], eps: float, weight_decay: float) -> Optimizer:
    first, second = betas

    def once(lr: Any, step: Any) -> Callable[[Any], tuple[Any, Any]]:
        # In double precision: `1 - 0.999` has few digits in single precision.
        count = step.to(torch.float64)
        size, root = lr / (1 - first**count), (1 - second**count).sqrt()
        return functools.cache(lambda dtype: (_hoisted(size.to(dtype)), _hoisted(root.to(dtype))))

    def update(param: Any, grad: Any, state: dict[str, Any], lr: Any, corrections: Any) -> None:
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad = grad + weight_decay * param
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        size, root = corrections(param.dtype)
        param.sub_(size * average / (square.sqrt() / root + eps))

    def of_torch(params: list[Any], lr: float) -> Any:
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        return kind(params, lr=lr, betas=(first, second), eps=eps, weight_decay=weight_decay)

    return Optimizer(update, ("exp_avg", "exp_avg_sq"), ("exp_avg_sq",), of_torch, once)


def _hoisted(number: Any) -> Any:
    """Returns a number that the compiled program computes once: as a reduction, here of equal values.

    Inductor computes a tensor of one element again wherever it is used, inside of loops: a power in double precision
    for each element of the parameters. The result of a reduction it keeps.
    """
    return number.expand(_REDUCED).amax()


def _sgd(momentum: float, weight_decay: float) -> Optimizer:
    def update(param: Any, grad: Any, state: dict[str, Any], lr: Any, step: Any) -> None:
        if weight_decay:
            grad = grad + weight_decay * param
        if momentum:
            state["momentum_buffer"].mul_(momentum).add_(grad)
            grad = state["momentum_buffer"]
        param.sub_(lr.to(param.dtype) * grad)

    def of_torch(params: list[Any], lr: float) -> Any:
        return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)

    return Optimizer(update, ("momentum_buffer",) if momentum else (), (), of_torch)


def step_of_torch(
    optimizer: Optimizer, params: list[Any], grads: list[Any], states: list[dict[str, Any]], lr: float, step: int
) -> None:
    """Makes step number `step` with torch's optimizer, in place."""
    assert optimizer.of_torch is not None
    leaves = [torch.nn.Parameter(param) for param in params]
    own = optimizer.of_torch(leaves, lr)
    for leaf, grad, state in zip(leaves, grads, states, strict=True):
        leaf.grad = grad
        if state:
            own.state[leaf] = {"step": torch.tensor(float(step - 1)), **state}
    own.step()


def clipped(grads: Sequence[Any], clip: float | None, eager: bool) -> tuple[Any, Sequence[Any]]:
    """Returns the global norm of gradients, and the gradients within its limit; in eager's form by torch, in place.

    Eager adds the squares in float64. torch's own sum of 3 million squares in float32 is wrong in the fourth digit on a
    CPU, beyond the tolerance of a right artifact.
    """
    if eager:
        leaves = [torch.nn.Parameter(grad) for grad in grads]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        dtype = functools.reduce(torch.promote_types, [grad.dtype for grad in grads])
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        norm = torch.linalg.vector_norm(torch.stack(norms)).to(dtype)
        torch.nn.utils.clip_grads_with_norm_(leaves, math.inf if clip is None else clip, norm)
        return norm, grads
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    if clip is None or math.isinf(clip):
        return norm, grads
    scale = (clip / (norm + 1e-6)).clamp(max=1.0)
    return norm, [grad * scale.to(grad.dtype) for grad in grads]
