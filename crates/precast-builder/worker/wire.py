"""The protocol's lines, on separate descriptors: stdout belongs to the model and to torch."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

PROTOCOL = 2


class Failure(Exception):
    """The error of a request: a stable code, and one line with the name of the subject."""

    def __init__(
        self, code: str, message: str, *, location: str | None = None, hint: str | None = None, spec: str | None = None
    ) -> None:
        super().__init__(message)
        # The wrong value in the spec, if the spec is wrong.
        self.spec = spec
        self.code = code
        self.message = message
        self.location = location
        self.hint = hint


class Wire:
    """Reads requests and writes answers on descriptors that nothing else in the process uses."""

    def __init__(self, read: int, write: int) -> None:
        self._read = os.fdopen(read, "r", encoding="utf-8", errors="replace")
        self._write = write
        self._process = os.getpid()
        self.id = 0

    def requests(self) -> Iterator[str]:
        """Yields request lines until the other side closes."""
        while line := self._read.readline():
            if line.strip():
                yield line

    def send(self, document: dict[str, Any]) -> None:
        """Writes one line; raises BrokenPipeError when the other side has closed.

        A copy of the worker, forked by the model, reports the fork and ends: only the worker answers.
        """
        if os.getpid() != self._process:
            os.write(self._write, b'{"kind":"forked"}\n')
            os.kill(os.getpid(), signal.SIGKILL)
        data = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(self._write, data) :]

    def event(self, phase: str) -> None:
        """Reports the phase of the current request."""
        self.send({"kind": "event", "id": self.id, "phase": phase})


def take_stdio() -> Wire:
    """Moves the protocol to new descriptors; from then on stdout is stderr, and stdin is empty."""
    sys.stdout.flush()
    read, write = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return Wire(read, write)
