"""Other values for names of torch, for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces attributes of modules, classes and objects, each as owner, name and value, inside a `with` block."""
    before = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in places]
    try:
        for place in places:
            setattr(*place)
        yield
    finally:
        for owner, name, original in before:
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
