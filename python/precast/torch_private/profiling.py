"""Whether a profiler is on.

Private: `torch.autograd.profiler._is_profiler_enabled`. Without it: profiles do not name artifacts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_OFF = nullcontext()


def record(title: Callable[[], str]) -> AbstractContextManager[Any]:
    """Names a block in the profile, if a profiler is on and the title is not empty."""
    named = title() if getattr(profiler, "_is_profiler_enabled", False) else ""
    return profiler.record_function(named) if named else _OFF  # type: ignore[no-untyped-call,no-any-return]
