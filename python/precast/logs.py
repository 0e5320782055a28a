"""The log of `maybe_compile`: one record for each attempt, and one for each first reason of a fallback."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from .config import CompileConfig
from .refusal import Refusal


class Log:
    """A logger that never raises. Its records have the values in `record.precast` too."""

    def __init__(self, logger: Any = None) -> None:
        self.logger = logger if logger is not None else logging.getLogger("precast")

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
        self._write(logging.INFO if error is None else logging.WARNING, f"maybe_compile: {text}", values, error)
        return values

    def fallback(self, region: str, refusal: Refusal, error: BaseException | None = None) -> None:
        """Logs why the module itself answers a call."""
        values = {"region": region, "reason": refusal.code, "detail": refusal.detail}
        warns = error is not None or refusal.code in ("gradients", "failed", "cache")
        level = logging.WARNING if warns else logging.INFO
        where = f"`{region}`" if region else "the module"
        self._write(level, f"maybe_compile: {where} answers itself ({refusal.code}): {refusal.detail}", values, error)

    def note(self, text: str, error: BaseException | None = None, **values: Any) -> None:
        """Logs an event; one with an error is a warning."""
        self._write(logging.INFO if error is None else logging.WARNING, f"maybe_compile: {text}", values, error)

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
