"""Seconds by phase of one compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of each phase, and reports the start of each."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    def begin(self, name: str) -> None:
        """Reports that a phase has begun."""
        self._on_phase(name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase."""
        self.begin(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
