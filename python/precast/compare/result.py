"""The result of a comparison with the module itself."""

from __future__ import annotations

from dataclasses import dataclass

from .figures import Training


@dataclass(frozen=True)
class SmokeResult:
    """The result of a comparison."""

    ok: bool
    """Whether every step agreed within the tolerance."""
    steps: int
    """Steps that agreed."""
    max_error: float
    """The largest error of an element, relative to the largest value of its output."""
    seconds: float
    """The time of all calls."""
    reason: str | None = None
    """The first difference, or the failure."""
    exception: BaseException | None = None
    """The exception of a call that failed."""
    training: Training | None = None
    """Of whole training steps: first step, steps a second and peak memory, beside eager's."""
