"""Lines that stop a build: found by the capture of a build, and by torch's draft mode where that fails."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from .. import capture as capturing
from .. import failures
from ..torch_private import drafts
from ..wire import Failure
from . import fixes
from .finding import HIGH, LOW, MEDIUM, Finding, Fix
from .sources import Sources, finding_at
from .subject import Subject

# Categories of findings that stop a capture where the value decides something.
_STOPS = {"control-flow", "value-read", "value-size", "numpy", "in-place", "custom-operator", "python-state"}
# Words of torch's errors -> category, in order.
_WORDS = (
    ("data-dependent", "control-flow"),
    ("DataDependent", "control-flow"),
    ("depends on values", "control-flow"),
    ("writes into", "in-place"),
    ("mutat", "in-place"),
    ("were assigned during export", "python-state"),
    ("numpy", "numpy"),
    ("C++ kernel", "custom-operator"),
    ("fake impl", "custom-operator"),
    ("fake kernel", "custom-operator"),
    ("Meta kernel", "custom-operator"),
    ("SymBool", "symbolic-flag"),
    ("SymInt", "symbolic-flag"),
)


@dataclass
class Captured:
    """The result of a capture."""

    error: BaseException | None = None
    location: str | None = None
    # What a build refuses of a module whose graph there is.
    refused: BaseException | None = None
    # Calls of artifacts in the program, and distinct artifacts.
    steps: int | None = None
    artifacts: int | None = None
    # The capture that a build would cut; none without a capture.
    traced: capturing.Traced | None = None


def capture(subject: Subject) -> Captured:
    """Captures a module as a build does, and counts steps and artifacts. Padding refuses nothing, and is not tried."""
    plain = {**subject.module, "dynamic": None, "padding": "trusted"}
    opened, wire = subject.opened, subject.wire
    traced = None
    try:
        traced = capturing.trace(opened, plain, subject.sizes, wire)
        with tempfile.TemporaryDirectory() as out:
            captured = capturing.written(opened, plain, traced, Path(out), wire)
    except Exception as error:
        if isinstance(error, Failure) and error.code == "no_module":
            raise  # a mistake in the spec
        if traced is not None:
            return Captured(refused=error, traced=traced)
        return Captured(error, failures.place_of(error, opened.root))
    return Captured(steps=len(captured["steps"]), artifacts=len(captured["segments"]), traced=traced)


def ranked(found: list[Finding], captured: Captured, subject: Subject) -> list[Finding]:
    """Raises findings that stop the build to `high`, and adds those of the capture."""
    sources = subject.sources
    if captured.error is None or _only_operator(captured.error):
        # The module can be captured, so these are no breaks.
        kept = [one for one in found if one.category not in ("control-flow", "value-read")]
        for one in kept:
            one.severity = LOW if one.category == "value-size" else MEDIUM if one.severity == HIGH else one.severity
        return kept if captured.error is None else [*kept, _from_error(captured, captured.location, subject)]
    stops = {captured.location}
    try:
        for stack in drafts.breaks(subject.call, subject.inputs):
            stops.add(_own(stack, sources))
    except Exception as error:
        place = failures.location(error, sources.root)
        stops.add(place)
        if place is None:
            subject.unknown.append("what else stops the capture behind its first break: torch's draft mode fails too")
    for one in found:
        # A read value may decide something at a later line.
        near = one.category == "value-read" and one.function in {_function(stop, sources) for stop in stops}
        if one.category in _STOPS and (one.location in stops or one.category == "control-flow" or near):
            one.severity = HIGH
    for place in sorted(stop for stop in stops if stop):
        if not any(one.location == place and one.severity == HIGH for one in found):
            found.append(_from_error(captured, place, subject))
    if captured.location is None:
        found.append(_from_error(captured, None, subject))
    return found


def _only_operator(error: BaseException) -> bool:
    """Returns whether torch.export captured a module, and only an operator without a C++ kernel is in the way."""
    return isinstance(error, Failure) and "has no C++ kernel" in error.message


def _function(location: str | None, sources: Sources) -> str | None:
    place = sources.at(location)
    return None if place is None else place.function


def _from_error(captured: Captured, location: str | None, subject: Subject) -> Finding:
    """Returns a finding for an error of torch on a line without one."""
    sources = subject.sources
    error = captured.error
    assert error is not None
    cause = failures.cause_of(error)
    text = f"{type(cause).__name__}: {cause} {error}"
    message = error.message if isinstance(error, Failure) else failures.one_line(error)
    category = next((known for words, known in _WORDS if words in text), "unsupported")
    if _only_operator(error):
        category = "custom-operator"
    place = sources.at(location)
    hint = error.hint if isinstance(error, Failure) else None
    fix = Fix(hint or "leave it out of forward, or give it to another module that is left to the caller")
    if subject.module["method"] == "generate":
        fix = Fix(fixes.LOOP)
    elif category == "in-place" and hint is None:
        fix = fixes.in_place("a tensor of its own", None, [])
    elif category == "control-flow" and place is not None:
        fix = fixes.branch(place)
    one = finding_at(place, category, HIGH, message, fix)
    if location is None:
        one.location, one.source = library_line(cause)
    return one


def library_line(error: BaseException) -> tuple[str | None, str | None]:
    """Returns the innermost line of an installed package other than torch that an error passed through."""
    folder = os.path.dirname(os.path.dirname(importlib.util.find_spec("torch").origin))  # type: ignore[union-attr, type-var, arg-type]
    torch = os.path.join(folder, "torch") + os.sep
    worker = str(Path(__file__).resolve().parent.parent) + os.sep
    found: tuple[str | None, str | None] = (None, None)
    for cause in failures.causes_of(error):
        for frame in traceback.extract_tb(cause.__traceback__):
            path = os.path.realpath(frame.filename)
            if path.startswith(folder + os.sep) and not path.startswith((torch, worker)):
                found = (f"{os.path.relpath(path, folder)}:{frame.lineno}", frame.line)
    return found


def _own(stack: list[tuple[str, int]], sources: Sources) -> str | None:
    """Returns the innermost line of the project in a stack."""
    places = [failures.inside(path, line, sources.root) for path, line in stack]
    return next((place for place in reversed(places) if place), None)
