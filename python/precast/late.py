"""The device's checks of values in training calls, read without a wait.

On CUDA a program clamps the indices that it computes, and notes whether one was out of bounds (the essay `flags.rs` of
the runtime). The note is there when the program has ended. A call that waited for it would leave the device without
work until the next call: two times in each training step. So each note is copied to the host behind its program, and
read after the next program was launched:

| the note of | is read |
|---|---|
| a forward call | in its backward call: `backward` raises, before an optimizer can use the gradients |
| a backward call, and a forward call without one | in the next forward call, or at `precast_close` |
| a call that records no gradients | before it returns |
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._native import Notes


class Late:
    """The notes of calls of one module that were not read yet."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Notes, Tensor, torch.cuda.Event]] = deque()

    def add(self, notes: Notes | None) -> None:
        """Queues the copy of a call's notes, on the call's stream."""
        if notes is None:
            return
        given = notes.tensor()
        copy = torch.empty_like(given, device="cpu", pin_memory=True)
        copy.copy_(given, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(given.device))
        self._waiting.append((notes, copy, done))

    def settle(self) -> None:
        """Reads the notes that are queued. Raises the error of a value that was out of bounds."""
        while True:
            try:
                notes, copy, done = self._waiting.popleft()
            except IndexError:  # also where another thread took the last one
                return
            done.synchronize()
            notes.judge(copy.tolist())
