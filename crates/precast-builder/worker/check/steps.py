"""Checks a part of a training step: it is captured as in a build, with its backward pass and its optimizer."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from .. import capture, failures
from ..wire import Failure, Wire
from .finding import HIGH, Finding, Fix
from .sources import Sources, finding_at

# Words of a failure -> the category of its finding.
_CATEGORIES = {"random numbers": "random", "reads a value": "value-read", "operator `": "custom-operator"}


def check(opened: Any, request: dict[str, Any], wire: Wire) -> dict[str, Any]:
    """Returns the protocol's `Checked` for a part of a training step."""
    started = time.perf_counter()
    found = []
    try:
        with tempfile.TemporaryDirectory() as out:
            capture.capture(opened, request["module"], request["sizes"], Path(out), wire)
    except Failure as error:
        found.append(_finding(error, opened))
    return {
        "findings": [one.answer() for one in found],
        "unknown": [],
        "captured": not found,
        "steps": 0 if found else 1,
        "artifacts": 0 if found else 1,
        "dynamic": None,
        "lists": [],
        "graph": [],
        "recompiles": None,
        "cost": None,
        "seconds": time.perf_counter() - started,
    }


def _finding(error: Failure, opened: Any) -> Finding:
    category = next((known for words, known in _CATEGORIES.items() if words in error.message), "step")
    fix = Fix(error.hint or "change the loss or the optimizer; the message names the place")
    place = Sources(opened.root).at(failures.place_of(error, opened.root))
    return finding_at(place, category, HIGH, error.message, fix)
