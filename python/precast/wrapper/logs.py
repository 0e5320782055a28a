"""The log of `maybe_compile`: one record for each attempt, and one for each first reason of a fallback.

Without a logger of the caller, what a user should know is also a warning (`PrecastWarning`), once for each reason, at
the line of the caller that led to it.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from ..client.objects import count
from ..config import CompileConfig
from ..errors import Error, PrecastWarning
from .refusal import Refusal

_UNSAID = ("disabled", "closed", "not compiled", "compiling", "busy", "tracing")
"""Reasons of fallbacks without a warning: the caller asked for them, was warned already, or they pass."""
_INSIDE = tuple(f"{one}{os.sep}" for one in (Path(__file__).parents[1], Path(torch.__file__).parent))
"""Folders of files that no warning names."""


class Log:
    """A logger that never raises. Its records have the values in `record.precast` too."""

    def __init__(self, logger: Any = None) -> None:
        self.logger = logger if logger is not None else logging.getLogger("precast")
        self._warns = logger is None
        self._warned: set[str] = set()

    def attempt(
        self, region: str, config: CompileConfig, seconds: float, error: BaseException | None, **more: Any
    ) -> dict[str, Any]:
        """Logs one attempt to compile a region; returns the values."""
        values: dict[str, Any] = {
            "region": region,
            "enabled": config.enabled,
            "backend": config.backend,
            "mode": config.mode,
            "dynamic": config.dynamic,
            "success": error is None and config.enabled,
            "seconds": round(seconds, 3),
            "exception": None if error is None else f"{type(error).__name__}: {error}",
            "stack": None if error is None else "".join(traceback.format_exception(error)),
            **more,
        }
        text = " ".join(f"{key}={value!r}" for key, value in values.items() if key != "stack")
        # The message of a refusal names the line of the module; `stack` has torch's own frames.
        shown = None if isinstance(error, Error) else error
        self._write(logging.INFO if error is None else logging.WARNING, f"maybe_compile: {text}", values, shown)
        if error is not None and config.fail_policy != "raise":
            cause = f"{type(error).__name__}: {error}"
            self.warn(f"{_named(region)} is not compiled, and answers itself: {cause}", cause)
        if slower := more.get("slower"):
            times = ", ".join(f"{one} times{'' if at == 'fixed' else f' at {at}'}" for at, one in slower.items())
            text = f"{_named(region)} is slower than eager by {times}: eager answers"
            self._say(logging.INFO, text, f"slower {times}", slower=slower)
        return values

    def building(self, model: str, programs: int) -> None:
        """Logs the beginning of a build."""
        text = f"`{model}` is being built: {count(programs, 'program')}; a later start takes under a second"
        self._say(logging.INFO, text, f"build of {model}", programs=programs)

    def remote(self, model: str, remote: str, error: Exception) -> None:
        """Logs that a remote failed."""
        self._say(
            logging.WARNING, f"nothing of `{model}` came from {remote}: {error}", f"remote {remote}", remote=remote
        )

    def padding(self, region: str, found: dict[str, Any], buckets: dict[str, list[int]], calls: int) -> None:
        """Logs that more than half of what a region runs is padding."""
        dims = ", ".join(f"`{dim}` {one['share']:.0%}" for dim, one in found["dims"].items())
        text = (
            f"{found['share']:.0%} of what {_named(region)} runs is padding, in {calls} calls ({dims}). For these "
            f"sizes: `buckets={buckets}`; `precast check --sizes` shows the padding of the buckets of a spec"
        )
        self._say(logging.WARNING, text, text, padding=found, buckets=buckets)

    def fallback(self, region: str, refusal: Refusal, error: BaseException | None = None) -> None:
        """Logs why the module itself answers a call."""
        values = {"region": region, "reason": refusal.code, "detail": refusal.detail}
        warns = error is not None or refusal.code in ("gradients", "failed", "cache")
        level = logging.WARNING if warns else logging.INFO
        text = f"{_named(region)} answers itself ({refusal.code}): {refusal.detail}"
        self._write(level, f"maybe_compile: {text}", values, error)
        if refusal.code not in _UNSAID:
            self.warn(text, f"{region} {refusal.code}" if error is not None else f"{refusal.code} {refusal.detail}")

    def note(self, text: str, error: BaseException | None = None, **values: Any) -> None:
        """Logs an event; one with an error is a warning."""
        self._write(logging.INFO if error is None else logging.WARNING, f"maybe_compile: {text}", values, error)

    def _say(self, level: int, text: str, reason: str, **values: Any) -> None:
        self._write(level, f"maybe_compile: {text}", values, None)
        self.warn(text, reason)

    def warn(self, text: str, reason: str) -> None:
        """Warns once of a reason, if there is no logger of the caller."""
        if not self._warns or reason in self._warned:
            return
        self._warned.add(reason)
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
            level, frame = level + 1, frame.f_back
        try:
            warnings.warn(f"precast: {text}", PrecastWarning, stacklevel=level)
        except PrecastWarning:  # a filter of the caller makes it an error, and nothing is raised here
            pass

    def _write(self, level: int, text: str, values: dict[str, Any], error: BaseException | None) -> None:
        try:
            write = self.logger.warning if level >= logging.WARNING else self.logger.info
            try:
                write("%s", text, extra={"precast": values}, exc_info=error)
            except TypeError:  # a logger that takes only a text
                stack = values.get("stack")
                write(f"{text}\n{stack}" if stack else text)
        except Exception:
            self.logger = logging.getLogger("precast")
            self.logger.log(level, "%s", text, extra={"precast": values}, exc_info=error)


def _named(region: str) -> str:
    return f"`{region}`" if region else "the module"
