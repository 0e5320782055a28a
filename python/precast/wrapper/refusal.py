"""Why a module itself answers a call in the place of compiled code."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """A reason for which the module itself answers a call."""

    code: str
    """The name of the counter."""
    detail: str
    """The reason in words."""


class Refused(Exception):
    """An engine has no answer for a call; the module itself answers it."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(code, detail)
