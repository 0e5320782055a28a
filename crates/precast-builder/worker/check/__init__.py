"""`precast check`: findings about a model before a build, with lines and fixes. Nothing is compiled.

Several checks run on a module; each finds problems that the others can't:

| file | input | finds |
|---|---|---|
| `observe`, `calls`, `lines` | one eager run, line by line | problems of every line that runs |
| `breaks` | torch.export, and its draft mode where it fails | lines that stop a build |
| `buckets` | eager runs and captures at the smallest and the largest bucket | sizes that the model does not take |
| `shapes` | captures with free sizes, and runs at size one | lines that fix a bucketed dimension to one size |
| `graphs` | the captured graph, or the eager run | operators that no CUDA graph has, and readers of padding |
| `regions` | parts of the captured graph | repeated submodules that can't share an artifact, and their differences |
| `steps` | the captured part of a training step | losses, optimizers and operators that stop training |
| `recompiles` | calls through torch.compile (optional) | recompilations and graph breaks of torch.compile |
| `cost` | calls on fake tensors (optional) | FLOPs and bytes of each bucket, and their minimum time on this machine |

`subject` is the checked module, `finding` has the categories, `fixes` writes the fixes, `sources` reads the project's
files. Lines that did not run on the sample inputs are counted and get no findings.
"""

from __future__ import annotations

import ast
import inspect
import time
from typing import Any

import torch

from .. import capture, failures
from ..graph import structure
from ..graph.call import INNER
from ..model import entry
from ..torch_private import fake
from ..values import samples
from ..wire import Failure, Wire
from . import breaks, buckets, calls, fixes, observe, steps
from .cost import costs
from .finding import HIGH, MEDIUM, Finding, Fix, ordered
from .graphs import Graphs
from .lines import Lines
from .recompiles import Recompiles
from .regions import Regions
from .shapes import Shapes
from .sources import Sources, finding_at
from .subject import Subject

__all__ = ["check"]


def check(opened: Any, request: dict[str, Any], wire: Wire) -> dict[str, Any]:
    """Returns the protocol's `Checked` for one module."""
    if request["module"].get("train") or request["module"].get("pair"):
        return steps.check(opened, request, wire)
    started = time.perf_counter()
    subject = Subject.of(opened, request, wire)
    sources, unknown = subject.sources, subject.unknown

    wire.event("run")
    seen, found = watched(subject)
    found += _training(opened, sources)
    for function, count in sorted(seen.skipped().items()):
        lines_ = "1 line" if count == 1 else f"{count} lines"
        unknown.append(f"{lines_} of `{function}`: what did not run on the sample inputs was not looked at")
    if seen.error is not None:
        unknown.append("what lies behind the line that fails on sample inputs")
    if seen.unwatched is not None:
        place = failures.location(seen.unwatched, opened.root) or "a line of an installed package"
        unknown.append(f"what eager does behind {place}, which can't be watched: {failures.one_line(seen.unwatched)}")

    captured = breaks.capture(subject)
    found = breaks.ranked(found, captured, subject)
    lasting = seen.error is None and not _repeats(subject, captured.traced)
    refused = seen.error or captured.refused
    if lasting or (refused is not None and capture.ANOTHER in failures.text_of(refused)):
        found = _lasting(found, subject)
    elif refused is not None and not any(one.category == "training" and one.severity == HIGH for one in found):
        found.append(_refused(refused, subject.what, opened, sources))
    shape = Shapes(subject)
    if captured.error is not None:
        shape.draft()
        unknown.append("which bucketed dimensions have one size only: it can't be captured as it is")
    elif subject.dims:
        wire.event("shapes")
        shape.vary(seen)
    found += shape.findings
    if seen.error is None:
        found += buckets.findings(subject, captured.error is None)
    graph = Graphs(subject)
    traced = captured.traced
    graph.look(traced.graph if traced else None, seen)
    if traced is not None:
        graph.leaks(traced)
    known = {one.location for one in found}
    found += [
        one for one in graph.findings if one.category == "padding" or one.location is None or one.location not in known
    ]
    wire.event("regions")
    region = Regions(subject)
    region.compare(traced.graph if traced else None)
    found += region.findings
    recompiles = None
    if request.get("recompiles"):
        wire.event("recompiles")
        recompiles = Recompiles(subject)
        recompiles.vary()
        # Another finding at the same line already explains why the graph ends there.
        known = {one.location for one in found}
        found += [one for one in recompiles.findings if one.category != "graph-break" or one.location not in known]
    cost = None
    if request.get("cost"):
        wire.event("cost")
        cost = costs(subject)
    return {
        "findings": [one.answer() for one in ordered(found)],
        "unknown": unknown,
        "captured": captured.error is None and refused is None and not lasting,
        "steps": captured.steps,
        "artifacts": captured.artifacts,
        "dynamic": shape.dynamic if captured.error is None and subject.dims else None,
        "lists": region.lists,
        "graph": graph.reasons,
        "recompiles": recompiles.answer() if recompiles is not None else None,
        "cost": cost,
        "seconds": time.perf_counter() - started,
    }


def watched(subject: Subject) -> tuple[observe.Seen, list[Finding]]:
    """Runs a module in eager. Returns the record of the run, and the findings of its calls and lines."""
    lines = Lines(subject.call)
    given = {spec["name"]: value for spec, value in zip(subject.specs, subject.inputs, strict=True)}
    seen = observe.watch(subject.call, given, _held(subject.call), subject.sources, lines.visit)
    return seen, [*calls.findings(seen, _method(subject), subject.module.get("state") or ()), *lines.findings]


def _repeats(subject: Subject, traced: capture.Traced | None) -> bool:
    """Returns whether a second call with the same inputs and states gives the same answer."""
    answers = []
    call, inputs = subject.call, subject.inputs
    if traced is not None and traced.states:
        call, inputs = traced.wrapped, samples.lowest(traced.specs, subject.opened.device)
    try:
        with torch.no_grad():
            for _ in range(2):
                entry.seed()
                answers.append(structure.tensors_of(call(*[value.clone() for value in inputs])))
    except Exception:  # it answered before: a cache may be full
        return False
    return capture.same(*answers)


def _lasting(found: list[Finding], subject: Subject) -> list[Finding]:
    """Raises the findings of state to `high`. Adds one without a line if there is none."""
    why = f"{subject.what} {capture.ANOTHER}: a program has the answer of its capture for ever"
    lines = [one for one in found if one.category == "python-state"]
    for one in lines:
        one.severity, one.why = HIGH, f"{one.why}, and {capture.ANOTHER.replace('gives', 'the module gives')}"
    return found if lines else [*found, Finding("python-state", HIGH, why, Fix(capture.STATE))]


def _held(wrapped: Any) -> dict[int, str]:
    """Returns the names of parameters and buffers, by storage."""
    found = {}
    for kind, named in (("parameter", wrapped.named_parameters()), ("buffer", wrapped.named_buffers())):
        for name, tensor in named:
            found[fake.storage(tensor)] = f"the {kind} `{name.partition('.')[2]}`"
    return found


def _training(opened: Any, sources: Sources) -> list[Finding]:
    """Finds a model that the entry returned in training mode."""
    if not opened.training:
        return []
    count = "1 of its modules is" if opened.training == 1 else f"{opened.training} of its modules are"
    why = f"the entry returns the model in training mode ({count}): it is built in eval mode"
    place = sources.at(opened.place)
    return [finding_at(place, "training-mode", MEDIUM, why, fixes.evaluated(place.statement if place else None))]


def _method(subject: Subject) -> ast.FunctionDef | None:
    """Returns the definition of the captured method, if it is in the project."""
    module = subject.call.get_submodule(INNER)
    code = getattr(inspect.unwrap(getattr(module, subject.module["method"])), "__code__", None)
    place = subject.sources.place(code.co_filename, code.co_firstlineno) if code is not None else None
    return place.definition if place is not None else None


def _refused(error: BaseException, what: str, opened: Any, sources: Sources) -> Finding:
    """Returns the finding for a module that has a graph, and that no build takes."""
    failed = not isinstance(error, Failure)
    why = f"{what} fails on sample inputs: {failures.named(error)}" if failed else failures.text_of(error)
    inputs = failed or getattr(error, "code", None) == "bad_input"
    hint = None if inputs else getattr(error, "hint", None)
    fix = Fix(hint or "check the dtypes and shapes of the module's inputs in the spec")
    place = sources.at(failures.place_of(error, opened.root))
    return finding_at(place, "inputs" if inputs else "unsupported", HIGH, why, fix)
