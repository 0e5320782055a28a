"""The results of `check`: categories, severities, findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Stops the build; on the path of every call; worth knowing.
HIGH, MEDIUM, LOW = "high", "medium", "low"
ORDER = {HIGH: 0, MEDIUM: 1, LOW: 2}

# Name -> description. The crate has the same names in spec/check.rs; a test compares them.
CATEGORIES = {
    "control-flow": "a branch or a loop depends on values of a tensor",
    "value-read": "a value of a tensor is read into Python",
    "value-size": "a size depends on values of a tensor",
    "python-object": "a Python object is read in forward",
    "python-state": "a list, a dict or an attribute changes in forward",
    "python-branch": "a branch is decided while the module is captured",
    "list-input": "an input is a list",
    "print": "forward prints or logs",
    "numpy": "forward computes with numpy",
    "random": "forward draws random numbers",
    "custom-operator": "a custom operator lacks a C++ or a fake kernel",
    "in-place": "forward writes into an input, a parameter or a buffer",
    "training": "forward takes a step of training",
    "training-mode": "the model is in training mode",
    "step": "a training step can't be captured",
    "expand": "strides change with a bucketed dimension",
    "fixed-size": "a bucketed dimension has one size only",
    "symbolic-flag": "a flag follows from sizes",
    "size-one": "size one gives another graph",
    "padding": "an operator reads the padding of a bucketed dimension",
    "cuda-graph": "no CUDA graph has it",
    "region": "a repeated submodule needs an artifact of its own",
    "graph-break": "torch.compile breaks its graph",
    "recompile": "torch.compile compiles again",
    "unsupported": "torch.export can't capture it",
    "inputs": "the module fails on sample inputs",
}


@dataclass
class Fix:
    """A fix: a sentence, and lines to write if they follow from the user's own."""

    text: str
    lines: list[str] = field(default_factory=list)


@dataclass
class Finding:
    """A construct that prevents the compilation of a module, or has another effect in a compiled module."""

    category: str
    severity: str
    why: str
    fix: Fix
    # `file:line`, relative to the spec's folder; the qualified name of the function; the line itself.
    location: str | None = None
    function: str | None = None
    source: str | None = None

    def answer(self) -> dict[str, Any]:
        """Returns the protocol's form."""
        return asdict(self)


def ordered(findings: list[Finding]) -> list[Finding]:
    """Returns findings by severity, then by place; one for each category and line, but every guard of torch.compile."""
    best: dict[Any, Finding] = {}
    for one in findings:
        key = (one.category, one.why if one.category == "recompile" else one.location or one.why)
        if key not in best or ORDER[one.severity] < ORDER[best[key].severity]:
            best[key] = one
    return sorted(best.values(), key=lambda one: (ORDER[one.severity], *_place(one.location), one.category))


def _place(location: str | None) -> tuple[str, int]:
    path, _, line = (location or "").rpartition(":")
    return path, int(line) if line.isdigit() else 0
