"""Operators that compute with more digits than their code names, and the settings of such a run.

This file is in the worker of a build, and by a link in the Python package.

Private: `torch.utils._python_dispatch.TorchDispatchMode`. Without it: a module that names a dtype, as `x.float()` or
`x.to(torch.bfloat16)`, has no answer with more digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Widening(TorchDispatchMode):
    """A context in which operators that name a smaller dtype of floating point get `dtype`, below autograd.

    With `tensors` they get tensors of smaller dtypes in it too, but for those that they write into.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, *, tensors: bool = False) -> None:
        super().__init__()
        self._dtype, self._tensors = dtype, tensors

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no call here is compiled, and torch's compiler takes a second to import

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = self._tensors and not function._schema.is_mutable
        given = {name: self._wide(value, tensors) for name, value in (kwargs or {}).items()}
        return function(*(self._wide(value, tensors) for value in args), **given)

    def _wide(self, value: Any, tensors: bool) -> Any:
        if isinstance(value, torch.dtype):
            return self._dtype if self._smaller(value) else value
        if tensors and isinstance(value, torch.Tensor) and self._smaller(value.dtype):
            return value.to(self._dtype)
        return [self._wide(one, tensors) for one in value] if tensors and type(value) in (list, tuple) else value

    def _smaller(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self._dtype.itemsize


@contextmanager
def precise() -> Iterator[None]:
    """Runs a block without TF32."""
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = False
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


@contextmanager
def without_draws() -> Iterator[None]:
    """Runs a block that draws no random numbers: with more digits they are others. Raises `RuntimeError` if it does."""
    before = _generators()
    yield
    if not all(map(torch.equal, before, _generators())):
        raise RuntimeError("it draws random numbers, which are others with more digits")


def _generators() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
