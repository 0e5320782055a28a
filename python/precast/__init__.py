"""Ahead-of-time compiled PyTorch artifacts: build once, keep by content, load and call.

    import precast

    model = precast.load("artifacts", "minilm")
    out = model.encode(input_ids, attention_mask)

Importing the package imports no torch. `load` uses the libtorch that the process has, or that of the environment.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from . import _native
from ._native import Model, Module, Session, Tensor, __version__
from .errors import BadInput, BuildError, Busy, CallFailed, Error, LoadError, NoFit, NotFound
from .fields import Fields
from .loading import load

if TYPE_CHECKING:
    # What the table below finds when it is asked for.
    pass

# Names that are imported when they are first used.
_EXPORTS: dict[str, str] = {}

__all__ = [
    "BadInput",
    "BuildError",
    "Busy",
    "CallFailed",
    "Error",
    "Fields",
    "LoadError",
    "Model",
    "Module",
    "NoFit",
    "NotFound",
    "Session",
    "Tensor",
    "__version__",
    "load",
    *_EXPORTS,
]

# Objects of the parent are refused in a child.
os.register_at_fork(after_in_child=_native.forked)
logging.getLogger("precast").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module `precast` has no attribute `{name}`")
    found = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
