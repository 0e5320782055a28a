"""Operators that compute with more digits than their code names, and the settings of such a run.

This file is in the worker of a build, and by a link in the Python package.

Private: `torch.utils._python_dispatch.TorchDispatchMode` and `torch._C._AutoDispatchBelowAutograd`. Without them: a
module that names a dtype, as `x.float()` or `x.to(torch.bfloat16)`, has no answer with more digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Values = TypeVar("_Values", bound=Mapping[str, Any])


class Widening(TorchDispatchMode):
    """A context in which operators that name a smaller dtype of floating point get `dtype`, below autograd.

    With `tensors` they get tensors of smaller dtypes in it too, but for those that they write into. Autograd is left
    out then: it takes a convolution apart, which refuses a wide input beside a parameter that is not, before the
    context sees it, and it would note that a view of a wide copy is one of the parameter.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, *, tensors: bool = False) -> None:
        super().__init__()
        self._dtype, self._tensors = dtype, tensors
        self._around = ExitStack()

    def __enter__(self) -> Self:
        if self._tensors:
            self._around.enter_context(torch._C._AutoDispatchBelowAutograd())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        with self._around:
            super().__exit__(*raised)

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


def without_draws(run: Callable[[], _Values]) -> _Values:
    """Returns a run's results, which no random number may change: with more digits they are others.

    A module may draw numbers and use none of them, as layers do that are dropped in training only: where numbers were
    drawn, it runs once more, with those that come next. Raises `RuntimeError` if its results are others then.
    """
    before = _generators()
    found = run()
    if not all(map(torch.equal, before, _generators())):
        again = run()
        if not all(_same(found[name], again[name]) for name in found):
            raise RuntimeError("it draws random numbers, which are others with more digits")
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    # Sums in another order differ by a few roundings of the wide dtype.
    finite, others = (value.nan_to_num(0.0, 0.0, 0.0) for value in (one, other))
    near = float((finite - others).norm()) <= 100 * torch.finfo(one.dtype).eps * float(finite.norm())
    return near and torch.equal(one.isfinite(), other.isfinite())


def _generators() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
