"""Reasons that keep a program out of a CUDA graph, which is launched whole, on the device, with the same tensors.

For a module that can be captured, the graph is searched; for any other one the calls of its eager run, so that lines
after the first break are named too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import failures
from ..capture import Traced
from ..graph import operators
from ..graph.flat import Flat
from ..sizes import padding_graph
from ..torch_private import overloads, symbols
from . import calls
from .finding import LOW, MEDIUM, Finding, Fix
from .observe import Seen
from .sources import Place, finding_at
from .subject import Subject

_READS = {"item", "_local_scalar_dense", "is_nonzero", "equal"}
_KEEP = Fix("keep it a tensor on the device: what the host does with the value, a tensor operation can do")


@dataclass
class Graphs:
    """Reasons that keep a module out of one CUDA graph."""

    subject: Subject
    findings: list[Finding] = field(default_factory=list)
    reasons: list[dict[str, Any]] = field(default_factory=list)

    def look(self, graph: Flat | None, seen: Seen) -> None:
        """Collects the reasons. `graph` is none if the module can't be captured."""
        for place, why in self._of_calls(seen) if graph is None else self._of_graph(graph):
            self._reason(place, why, found=graph is not None)
        for dim in sorted(self.subject.asked):
            self._reason(None, f"`{dim}` is dynamic: a graph is of one size", found=False)

    def leaks(self, traced: Traced) -> None:
        """Finds operators that read padding; a program of them has its exact sizes only."""
        subject = self.subject
        if subject.module.get("padding") == "trusted":
            return
        sizes = {dim: subject.sizes.get(dim, 1) for dim in subject.dims}
        for leak in padding_graph.leaks(traced.graph, traced.specs, sizes, traced.ranges):
            place = subject.sources.at(leak.location(subject.sources.root))
            why = f"{leak.why}: requests must have the sizes of its buckets"
            fix = Fix(f'{leak.fix}; where its values make it harmless, `padding = "trusted"` in the module')
            self.findings.append(finding_at(place, "padding", LOW, why, fix))

    def _reason(self, place: Place | None, why: str, found: bool) -> None:
        reason = {"why": why, "location": place.location if place is not None else None}
        if reason in self.reasons:
            return
        self.reasons.append(reason)
        if found:
            severity = MEDIUM if self.subject.opened.device == "cuda" else LOW
            self.findings.append(finding_at(place, "cuda-graph", severity, f"{why}: no CUDA graph has it", _KEEP))

    def _of_calls(self, seen: Seen) -> Iterator[tuple[Place, str]]:
        for call in seen.calls:
            if why := calls.on_host(call):
                yield call.place, why

    def _of_graph(self, graph: Flat) -> Iterator[tuple[Place | None, str]]:
        device = self.subject.opened.device
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            name = overloads.name_of(node.target)
            held = node.meta.get("val")
            if overloads.is_higher_order(node.target):
                yield self._line(node), f"`{name}` chooses on the host what runs"
            elif name in _READS:
                yield self._line(node), f"`{name}` waits for a value and reads it on the host"
            elif symbols.depends_on_values(held):
                yield self._line(node), f"the size of what `{name}` returns is known on the host only, when it has run"
            elif device == "cuda" and (where := _crossed(node)):
                yield self._line(node), f"`{name}` copies {where}"

    def _line(self, node: Any) -> Place | None:
        """Returns the project's line of an operation. Records the operation as unknown if it has none."""
        sources = self.subject.sources
        place = sources.at(failures.line_of(node, sources.root))
        if place is None:
            self.subject.unknown.append(f"which line keeps {operators.caller(node)} out of a CUDA graph")
        return place


def _crossed(node: Any) -> str | None:
    """Returns between which devices an operation copies."""
    given = [value.meta.get("val") for value in node.all_input_nodes]
    devices = {value.device.type for value in given if isinstance(value, torch.Tensor) and value.dim() > 0}
    held = node.meta.get("val")
    own = held.device.type if isinstance(held, torch.Tensor) else None
    if own == "cpu" and "cuda" in devices:
        return "to the CPU"
    return "from the CPU" if own == "cuda" and "cpu" in devices else None
