"""Findings from the calls of torch that a module made while it ran."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Any

from . import fixes, numpy_fixes
from .finding import HIGH, LOW, MEDIUM, Finding, Fix
from .observe import Call, Seen
from .sources import finding_at

_READS = {"item", "tolist", "__int__", "__float__", "__index__", "__complex__", "__contains__"}
_NUMPY = {"numpy", "__array__"}
_SIZES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "combinations"}
_DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"}
_DRAWS |= {"multinomial", "poisson", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_"}
_DRAWS |= {"cauchy_", "log_normal_"}
_WRITES = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__"}
_WRITES |= {"__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "__idiv__"}


def findings(seen: Seen, method: ast.FunctionDef | None, states: Collection[str]) -> Iterator[Finding]:
    """Yields the findings of a run's calls, once for each line and kind. `method` is the captured method.

    `states` are the inputs that the spec names as such.
    """
    known = set()
    meant = {f"the input `{name}`" for name in states}
    held = (call.facts["held"] for call in seen.calls if _writes(call.name) and call.facts.get("held"))
    written = [one.split("`")[1] for one in dict.fromkeys(held) if one.startswith("the input")]
    for call in seen.calls:
        if _writes(call.name) and call.facts.get("held") in meant:
            continue
        for category, severity, why, fix in _of(call, method, written):
            key = (category, call.place.location)
            if key not in known:
                known.add(key)
                yield finding_at(call.place, category, severity, why, fix)


def _of(call: Call, method: ast.FunctionDef | None, written: list[str]) -> Iterator[Any]:
    name, facts, place, statement = call.name, call.facts, call.place, call.place.statement
    if name == "__bool__" or (name in _READS and _branches(statement)):
        why = "a branch depends on values of a tensor: a captured graph has one side only"
        yield "control-flow", MEDIUM, why, fixes.branch(place, facts.get("rank"))
    elif name in _READS:
        why = f"`{_shown(name)}` reads a value of a tensor into Python: a captured graph has no value yet"
        yield "value-read", HIGH if fixes.is_size(place) else MEDIUM, why, fixes.read(place, facts)
    elif name in _NUMPY:
        why = "a tensor goes to numpy: torch.export follows that in strict mode alone, where it can"
        yield "numpy", MEDIUM, why, numpy_fixes.instead(place, floating=facts.get("dtype") == "float32")
    elif name in ("__getitem__", "__setitem__") and facts.get("mask") is not None:
        what = "is chosen" if name == "__getitem__" else "is written"
        why = f"how much {what} by a boolean mask depends on its values"
        # A write is captured; with a number it is the same as `masked_fill`.
        severity = HIGH if name == "__getitem__" else LOW if facts.get("value") in (None, 0) else MEDIUM
        yield "value-size", severity, why, fixes.masked(place, facts)
    elif name in _SIZES or facts.get("by_values") or (name == "where" and facts["arguments"] == 1):
        why = f"the size of what `{name}` returns depends on values"
        yield "value-size", HIGH, why, fixes.masked(place, facts)
    elif name in _DRAWS:
        why = f"`{name}` draws other numbers than eager does, so the artifact can't be compared with it"
        yield "random", MEDIUM, why, Fix("draw outside, and take the numbers as an input")
    elif facts.get("draws"):
        why = f"`{name}` is on in eval mode too: every call draws other numbers, so none can be compared with eager"
        yield "random", MEDIUM, why, fixes.dropout()
    elif name == "expand" and facts.get("shape") and _by_size(statement):
        why = "what `expand` returns has other strides for a size of one: torch.compile compiles again"
        yield "expand", LOW, why, fixes.repeated(statement, facts)
    elif name == "squeeze" and facts["arguments"] == 1:
        why = "`squeeze` without a dimension drops a bucketed one whose size is one"
        yield "size-one", LOW, why, Fix("name the dimension to drop")
    if name in ("backward", "grad"):
        yield "training", HIGH, f"`{name}` computes gradients, and a program computes answers alone", fixes.TRAINING
    if _writes(name) and str(facts.get("held")).startswith("the buffer"):
        why = f"`{_shown(name)}` writes into {facts['held']}, a state: a session keeps it from call to call"
        yield "in-place", LOW, why, Fix("nothing, where that is meant; else return the new value as an output")
    elif _writes(name) and facts.get("held"):
        why = f"`{_shown(name)}` writes into {facts['held']}: a program owns no tensor but its outputs and states"
        yield "in-place", HIGH, why, fixes.in_place(facts["held"], method, written)


def on_host(call: Call) -> str | None:
    """Returns the reason why a call keeps its program out of a CUDA graph; None if it does not."""
    name, facts = call.name, call.facts
    if name == "__bool__" or name in _READS:
        return f"`{_shown(name)}` waits for a value and reads it on the host"
    if name in _NUMPY or facts.get("to") == "cpu":
        return f"`{name}` copies to the CPU"
    by_mask = name == "__getitem__" and facts.get("mask") is not None
    by_mask |= name == "__setitem__" and facts.get("mask") is not None and facts.get("value") not in (None, 0)
    if by_mask or name in _SIZES or facts.get("by_values") or (name == "where" and facts["arguments"] == 1):
        return f"the size of what `{_shown(name)}` takes or returns is known on the host only, when it has run"
    if _writes(name) and facts.get("held"):
        return f"`{_shown(name)}` changes {facts['held']} in place"
    return None


def _writes(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _branches(statement: ast.stmt | None) -> bool:
    """Returns whether a statement chooses the next one, as a branch does."""
    if isinstance(statement, ast.Assign | ast.Return | ast.Expr | ast.AugAssign):
        return isinstance(statement.value, ast.IfExp)
    return isinstance(statement, ast.If | ast.While | ast.For | ast.Assert)


def _shown(name: str) -> str:
    table = {"__int__": "int()", "__float__": "float()", "__index__": "an index", "__contains__": "in"}
    table |= {"item": ".item()", "tolist": ".tolist()", "__setitem__": "x[…] = …", "__getitem__": "x[…]"}
    table |= {"__bool__": "bool()"}
    return table.get(name, name)


def _by_size(statement: ast.stmt | None) -> bool:
    """Returns whether a line expands to a size that another tensor has."""
    for node in ast.walk(statement) if statement is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "expand":
            return any(not isinstance(one, ast.Constant | ast.UnaryOp) for one in node.args)
    return False
