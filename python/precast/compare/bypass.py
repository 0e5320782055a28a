"""Calls that the original modules answer, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_depth = 0


def bypassed() -> bool:
    """Returns whether the original modules answer all calls of this process."""
    return _depth > 0


@contextmanager
def eager() -> Iterator[None]:
    """Runs a block in which the originals answer in place of compiled code, also that of `torch.compile`.

    It holds for all threads: a backward call runs in threads of its own, and may call modules again.
    """
    global _depth
    _depth += 1
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _depth -= 1
