"""The device's checks of values in training calls, read without a wait.

On CUDA a program clamps the indices that it computes, and notes whether one was out of bounds (the essay `flags.rs` of
the runtime). The note is there when the program has ended. A call that waited for it would leave the device without
work until the next call: two times in each training step. So each note is read after the next program was launched:

| the note of | is read |
|---|---|
| a forward call | in its backward call: `backward` raises, before an optimizer can use the gradients |
| a backward call, and a forward call without one | in the next forward call, `precast_check` or `precast_close` |
| a call that records no gradients | before it returns |
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._native import Notes


class DeferredChecks:
    """The notes of calls of one module that were not read yet."""

    def __init__(self) -> None:
        self._waiting: deque[Notes] = deque()

    def add(self, notes: Notes | None) -> None:
        """Takes the notes of a call."""
        if notes is not None:
            self._waiting.append(notes)

    def settle(self) -> None:
        """Reads the notes, each once. Raises the error of a value that was out of bounds."""
        while True:
            try:
                notes = self._waiting.popleft()
            except IndexError:  # also where another thread took the last one
                return
            notes.check()
