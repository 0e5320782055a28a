"""Random numbers of a training step: integer operations on a seed, a counter and positions, all in the graph.

torch's generator is no part of a captured graph, and a compiled program would draw other numbers than eager does. So
dropout is replaced while the loss runs, in the captured form and in eager's: an element's bits are a hash of the seed,
of the number of the call, of the number of the draw in it, and of the element's position. Integers have no rounding,
so both forms have equal masks on any device, and the gate compares dropout as exactly as the rest. Seed and counter
are states: a checkpoint has them, and a run that continues from it draws the same masks.

The hash mixes 32 bits twice with different keys, by multiplications and shifts (the constants are those of a published
search for little bias). It is for masks, and no cipher.

| operator | of |
|---|---|
| `native_dropout`, `bernoulli_.float` | dropout in all its forms, dropped paths |
| `bernoulli`, `rand`, `rand_like` | masks that a model makes itself |
| attention with `dropout_p` | attention, spelled out |

Any other operator, and a draw in the backward pass (a recomputed region), is left in the graph and refused there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..torch_private import tracing

SEED, COUNT = "random.seed", "random.calls"

_WORD = 0xFFFFFFFF
# Beyond 2**31 a constant is written as negative: a product with 32 bits then stays within 64.
_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97 - 2**32
_KEYS = 0x243F6A88, 0x85A308D3


class Draws:
    """Draws from a seed and the number of the call, two integer tensors, in place of torch's generator."""

    def __init__(self, seed: Any, count: Any) -> None:
        self.drawn = 0
        self._bases = [_folded(key, seed, count) for key in _KEYS]

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replaces the random operators that run meanwhile."""
        table = {operator: functools.partial(draw, self) for operator, draw in _OPERATORS.items()}
        with _Attention(), tracing.replacing(table):
            yield

    def bits(self, shape: Any, device: Any) -> Any:
        """Returns integers from 0 to below 2**32, and counts the draw."""
        self.drawn += 1
        first, second = (_mixed(base ^ self.drawn) for base in self._bases)
        places = torch.arange(math.prod(shape), device=device).view(list(shape))
        return _mixed(_mixed((places & _WORD) ^ first) ^ second)

    def kept(self, like: Any, probability: float) -> Any:
        """Returns a mask of a tensor's shape that is true with this probability."""
        return self.bits(like.shape, like.device) < round(probability * 2**32)

    def uniform(self, shape: Any, dtype: Any, device: Any) -> Any:
        """Returns numbers from 0 to below 1, in steps that the dtype has below 1."""
        dtype = dtype or torch.get_default_dtype()
        digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
        return (self.bits(shape, device) >> (32 - digits)).to(dtype) * 2.0**-digits


class _Attention(TorchFunctionMode):
    """Has attention with dropout spelled out: the other kernels draw in themselves."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            probability = args[4] if len(args) > 4 else given.get("dropout_p", 0.0)
            if probability:
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    return function(*args, **given)
        return function(*args, **given)


def _mixed(x: Any) -> Any:
    """Returns another 32 bits for each 32 bits; no two of the same."""
    x = ((x ^ (x >> 16)) * _FIRST) & _WORD
    x = ((x ^ (x >> 15)) * _SECOND) & _WORD
    return x ^ (x >> 15)


def _folded(key: int, *numbers: Any) -> Any:
    """Returns 32 bits of a key and of 64-bit numbers."""
    base: Any = key
    for number in numbers:
        for word in (number & _WORD, (number >> 32) & _WORD):
            base = _mixed(word ^ base)
    return base


def _dropout(draws: Draws, value: Any, probability: float, train: bool | None) -> Any:
    if train is False or probability == 0:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    kept = draws.kept(value, 1 - probability)
    return value * kept * (0.0 if probability == 1 else 1 / (1 - probability)), kept


def _bernoulli_in_place(draws: Draws, value: Any, p: float = 0.5, *, generator: Any = None) -> Any:
    return value.copy_(draws.kept(value, p))


def _bernoulli(draws: Draws, value: Any, *, generator: Any = None) -> Any:
    uniform = draws.uniform(value.shape, torch.float64, value.device)
    return (uniform < value).to(value.dtype)


def _bernoulli_of(draws: Draws, value: Any, p: float, *, generator: Any = None) -> Any:
    return draws.kept(value, p).to(value.dtype)


def _rand(draws: Draws, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return draws.uniform(size, dtype, device)


def _rand_like(draws: Draws, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return draws.uniform(value.shape, dtype or value.dtype, device or value.device)


_aten = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.native_dropout.default: _dropout,
    _aten.bernoulli_.float: _bernoulli_in_place,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli_of,
    _aten.rand.default: _rand,
    _aten.rand_like.default: _rand_like,
}
