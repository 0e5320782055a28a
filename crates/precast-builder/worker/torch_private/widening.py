"""Operators that compute with more digits than their code names.

This file is in the worker of a build, and by a link in the Python package.

Private: `torch.utils._python_dispatch.TorchDispatchMode`. Without it: a module that names a dtype, as `x.float()` or
`x.to(torch.bfloat16)`, has no answer with more digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Widening(TorchDispatchMode):
    """A context in which operators that name a smaller dtype of floating point get `dtype`, below autograd."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._dtype = dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no call here is compiled, and torch's compiler takes a second to import

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(self._wide, args), **given)

    def _wide(self, value: Any) -> Any:
        smaller = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize < self._dtype.itemsize
        return self._dtype if smaller else value
