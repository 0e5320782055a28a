"""Globs over dotted names of submodules, parameters and buffers."""

from __future__ import annotations

import functools
import re


def matches(pattern: str, name: str) -> bool:
    """Returns whether a glob matches a dotted name: `**` matches parts, `*` matches one part or some of its letters."""
    return _regex(pattern).fullmatch(f"{name}.") is not None


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    letters = {"*": r"[^.]*"}
    one = ["".join(letters.get(char, re.escape(char)) for char in part) + r"\." for part in pattern.split(".")]
    return re.compile("".join(one).replace(r"[^.]*[^.]*\.", r"(?:[^.]+\.)*"))
