"""`precast check`: what will break, where, and what to write instead; nothing is compiled.

A module is looked at in three ways, because each sees what the others can't:

| file | looks at | sees |
|---|---|---|
| `observe`, `calls`, `lines` | one eager run, line by line | everything on the path, also behind what stops a capture |
| `breaks` | torch.export, and its draft mode where it fails | what really stops a build |
| `shapes` | captures with free sizes, and runs at size one | what ties a bucketed dimension to one size |

`finding` has the categories, `mends` what to write instead, `sources` the project's files. Lines that did not run on
the sample inputs are counted, not judged.
"""

from __future__ import annotations

import time
from typing import Any

from .. import failures
from ..torch_private import fake
from ..wire import Failure, Wire
from . import breaks, calls, observe
from .finding import HIGH, MEDIUM, Finding, Mend, ordered
from .lines import Lines
from .shapes import Shapes
from .sources import Sources, made
from .subject import Subject

__all__ = ["check"]


def check(opened: Any, request: dict[str, Any], wire: Wire) -> dict[str, Any]:
    """Returns the protocol's `Checked` for one module."""
    started = time.perf_counter()
    subject = Subject.of(opened, request, wire)
    sources, unknown = subject.sources, subject.unknown

    wire.event("run")
    lines = Lines(opened.device)
    seen = observe.watch(subject.call, subject.inputs, _held(subject.call), sources, lines.visit)
    found = [*calls.findings(seen), *lines.findings, *_training(opened, sources)]
    for function, count in sorted(seen.skipped().items()):
        lines_ = "1 line" if count == 1 else f"{count} lines"
        unknown.append(f"{lines_} of `{function}`: what did not run on the sample inputs was not looked at")
    if seen.error is not None:
        found.append(_failed(seen.error, subject.what, opened, sources))
        unknown.append("what lies behind the line that fails on sample inputs")

    captured = breaks.capture(subject)
    found = breaks.judge(found, captured, subject)
    shape = Shapes(subject)
    if captured.error is not None:
        shape.draft()
        unknown.append("which bucketed dimensions have one size only: it can't be captured as it is")
    elif subject.dims:
        wire.event("shapes")
        shape.vary(seen)
    found += shape.findings
    return {
        "findings": [one.answer() for one in ordered(found)],
        "unknown": unknown,
        "captured": captured.error is None,
        "steps": captured.steps,
        "artifacts": captured.artifacts,
        "dynamic": shape.dynamic if captured.error is None and subject.dims else None,
        "seconds": time.perf_counter() - started,
    }


def _held(wrapped: Any) -> dict[int, str]:
    """Returns what the storages of parameters and buffers are called."""
    found = {}
    for kind, named in (("parameter", wrapped.named_parameters()), ("buffer", wrapped.named_buffers())):
        for name, tensor in named:
            found[fake.storage(tensor)] = f"the {kind} `{name.partition('.')[2]}`"
    return found


def _training(opened: Any, sources: Sources) -> list[Finding]:
    """Finds a model that the entry returned in training mode."""
    if not opened.training:
        return []
    why = f"the entry returns the model in training mode ({opened.training}): it is built in eval mode"
    mend = Mend("return it in eval mode", ["return model.eval()"])
    return [made(sources.at(opened.place), "training-mode", MEDIUM, why, mend)]


def _failed(error: BaseException, what: str, opened: Any, sources: Sources) -> Finding:
    location = failures.location(error, opened.root)
    place = sources.at(location)
    why = f"{what} fails on sample inputs: {type(error).__name__}: {failures.one_line(error)}"
    mend = Mend("check the dtypes and shapes of the module's inputs in the spec")
    if isinstance(error, Failure):
        why = error.message
    one = Finding("inputs", HIGH, why, mend, location)
    if place is not None:
        one.function, one.source = place.function, place.source
    return one
