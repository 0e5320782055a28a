"""Findings that a trace does not show: from each line that ran, with the values of its names."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import types
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ..graph import operators
from ..torch_private import overloads
from . import fixes, numpy_fixes
from .finding import HIGH, LOW, MEDIUM, Finding, Fix
from .observe import MISSING, resolve
from .sources import Place, finding_at

_CHANGES = {"appendleft", "popleft", "sort", "reverse", "append", "extend", "insert", "pop", "remove", "clear", "add"}
_CHANGES |= {"update", "setdefault", "popitem", "discard"}
_LOGS = {"debug", "info", "warning", "warning_once", "warn", "error", "exception", "critical", "log"}
_CONTAINERS = (list, dict, set, deque)
_CODE = types.ModuleType | types.FunctionType | types.MethodType
_STATE = Fix("take what changes as an input, and return its new value: the caller keeps it between calls")
# Attributes of a module that give no finding: plain values and settings.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, frozenset, range, type)


class Lines:
    """Collects the findings of lines; `visit` is called once for each line, in its frame."""

    def __init__(self, model: Any) -> None:
        self.findings: list[Finding] = []
        # The objects that modules hold, by identity.
        self._kept: dict[int, Any] = {}
        for module in model.modules():
            self._keep(module, 4)

    def visit(self, place: Place, frame: FrameType) -> None:
        """Adds the findings of one line."""
        statement = place.statement
        if statement is None or statement.lineno != place.line:
            # The first line of a statement represents all of it.
            return
        for node in _expressions(statement):
            for category, severity, why, fix in self._node(node, statement, place, frame):
                self.findings.append(finding_at(place, category, severity, why, fix))
        if frame.f_code.co_name != "__init__" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            for name in self._changed(statement, frame):
                self.findings.append(finding_at(place, "python-state", MEDIUM, _lasts(name), _STATE))

    def _keep(self, value: Any, depth: int) -> None:
        """Notes an object that outlives a call, and the objects inside it."""
        known = torch.Tensor | types.ModuleType | types.FunctionType | type | str | int | float | None
        if isinstance(value, known) or id(value) in self._kept:
            return
        self._kept[id(value)] = value
        inner: Any = vars(value).values() if hasattr(value, "__dict__") else ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list | tuple | set | deque):
            inner = value
        for one in [*inner] if depth else ():
            self._keep(one, depth - 1)

    def _outlives(self, node: ast.expr, frame: FrameType) -> bool:
        """Returns whether an expression is an object that outlives the call: of a module, a class, a global."""
        value = resolve(node, frame)
        if isinstance(value, torch.Tensor):
            return False
        if id(value) in self._kept or isinstance(value, type | types.ModuleType) or _rooted(node, frame):
            return True
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in frame.f_locals and resolve(node, frame) is not MISSING

    def _changed(self, statement: ast.stmt, frame: FrameType) -> Iterator[str]:
        """Yields the lasting targets of a statement: attributes, items, global names."""
        for target in _targets(statement):
            if isinstance(target, ast.Name):
                if target.id not in (*frame.f_code.co_varnames, *frame.f_code.co_cellvars):
                    yield target.id
            elif isinstance(target, ast.Attribute) and self._outlives(target.value, frame):
                # A write into a tensor is a call of torch: `calls` reports it.
                if not isinstance(statement, ast.AugAssign) or not isinstance(resolve(target, frame), torch.Tensor):
                    yield ast.unparse(target)
            elif isinstance(target, ast.Subscript) and self._outlives(target.value, frame):
                yield ast.unparse(target.value)

    def _node(self, node: ast.AST, statement: ast.stmt, place: Place, frame: FrameType) -> Iterator[Any]:
        if isinstance(node, ast.Call):
            yield from self._call(node, statement, place, frame)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield from _object(node, place, frame)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            if isinstance(node.comparators[0], ast.Constant) and _decides(node, statement, place):
                name = ast.unparse(node.left)
                yield "python-branch", LOW, f"whether `{name}` is there is decided at capture", _variant(name)

    def _call(self, node: ast.Call, statement: ast.stmt, place: Place, frame: FrameType) -> Iterator[Any]:
        called, name = resolve(node.func, frame), fixes.called(node)
        base = resolve(node.func.value, frame) if isinstance(node.func, ast.Attribute) else MISSING
        if called is print or _is_log(base, name):
            if not _guarded(place, statement):
                why = "a compiled program says nothing, and torch.compile breaks the graph here"
                yield "print", MEDIUM, why, fixes.printed(statement)
        elif called in (isinstance, hasattr, issubclass) and node.args:
            value = resolve(node.args[0], frame)
            name = ast.unparse(node.args[0])
            kind = "" if value is MISSING else f": {type(value).__name__}"
            why = f"the type of `{name}` is decided at capture{kind}"
            yield "python-branch", LOW, why, _variant(name)
            if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in _flat(value)):
                why = f"`{name}` is a {type(value).__name__} of {len(value)}: number and nesting are fixed at capture"
                fix = Fix("take one tensor with a dimension for them, as `torch.stack` makes")
                yield "list-input", MEDIUM, why, fix
        elif _module(called).partition(".")[0] == "numpy" or _module(base) == "numpy":
            inside = [one for arg in node.args for one in ast.walk(arg)]
            named = [resolve(one, frame) for one in inside if isinstance(one, ast.Name)]
            tensors = any(isinstance(one, torch.Tensor) or type(one).__name__ == "ndarray" for one in named)
            constant = not tensors and not any(isinstance(one, ast.Call) for one in inside)
            why = "numpy computes once, at capture: what it gives is a constant of the compiled program"
            yield "numpy", MEDIUM, why, numpy_fixes.instead(place, node=node, constant=constant)
        elif _module(called) == "random" or _random(called):
            why = "a number is drawn once, at capture, and every later call has the same one"
            yield "random", MEDIUM, why, Fix("draw it outside, and take it as an input")
        elif name in _CHANGES and isinstance(base, _CONTAINERS) and self._changes(node.func, frame):
            yield "python-state", MEDIUM, _lasts(ast.unparse(node.func.value)), _STATE  # type: ignore[union-attr]
        elif called in (next, setattr, delattr) and node.args and self._outlives(node.args[0], frame):
            yield "python-state", MEDIUM, _lasts(ast.unparse(node.args[0])), _STATE
        elif isinstance(base, torch.optim.Optimizer) and name in ("step", "zero_grad"):
            yield "training", HIGH, f"`{name}` is of an optimizer: a program computes answers alone", fixes.TRAINING
        else:
            yield from self._operator(called, node, frame)

    def _changes(self, func: Any, frame: FrameType) -> bool:
        """Returns whether the container whose method is called outlives the call, or is an argument."""
        code, held = frame.f_code, func.value
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return self._outlives(held, frame) or (isinstance(held, ast.Name) and held.id in arguments)

    def _operator(self, called: Any, node: ast.Call, frame: FrameType) -> Iterator[Any]:
        name = overloads.called(called) or _operator_name(node.func, frame)
        if name is None or name.partition("::")[0] in operators.OWN:
            return
        if not overloads.has_fake_kernel(name):
            why = f"`{name}` has no fake kernel: torch can't say what shape it returns"
            fix = f'say it: `@torch.library.register_fake("{name}")` on a function that returns `torch.empty` of it'
            yield "custom-operator", HIGH, why, Fix(fix)


def _lasts(name: str) -> str:
    return f"`{name}` outlives the call: the change happens at capture and never again"


def _operator_name(func: ast.expr, frame: FrameType) -> str | None:
    """Returns the name of an operator that is called as `torch.ops.space.name(…)`."""
    parts = ast.unparse(func).split(".")
    if len(parts) >= 4 and parts[1] == "ops" and resolve(ast.Name(parts[0]), frame) is torch:
        return f"{parts[2]}::{parts[3]}"
    return None


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yields the expressions of a statement, without those of blocks inside it."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        for child in ast.iter_child_nodes(node):
            inner = isinstance(child, ast.stmt | ast.Lambda | ast.ExceptHandler | ast.match_case)
            if not inner:
                pending.append(child)
                yield child


def _targets(statement: ast.stmt) -> list[ast.expr]:
    """Returns the targets that a statement sets or deletes."""
    found = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    inside = [one.elts if isinstance(one, ast.Tuple | ast.List) else [one] for one in found if one is not None]
    return [one for several in inside for one in several]


def _object(node: ast.Attribute, place: Place, frame: FrameType) -> Iterator[Any]:
    """Finds values computed by an object of the module that torch does not know, such as a tokenizer."""
    base = resolve(node.value, frame)
    if base is MISSING or not _rooted(node.value, frame) or isinstance(base, (torch.nn.Module, torch.Tensor, *_PLAIN)):
        return
    kind = type(base)
    settings = dataclasses.is_dataclass(base) or kind.__name__.endswith("Config")
    if settings or kind.__module__.partition(".")[0] in ("torch", "builtins", "logging", "numpy"):
        return
    if isinstance(base, _CODE | types.SimpleNamespace | enum.Enum):
        return
    if node.attr in getattr(base, "__dict__", {}) and "okenizer" not in kind.__name__:
        # A stored value, as those of a configuration.
        return
    why = f"`{ast.unparse(node)}` asks a {kind.__name__}: its answer at capture is a constant of the compiled program"
    taken = resolve(ast.Attribute(ast.Name("self"), node.attr), frame) is not MISSING
    yield "python-object", MEDIUM, why, fixes.stored(place, node, taken)


def _rooted(node: ast.expr, frame: FrameType) -> bool:
    """Returns whether a chain of names starts at a module."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(resolve(node, frame), torch.nn.Module):
            return True
    return False


def _decides(node: ast.AST, statement: ast.stmt, place: Place) -> bool:
    """Returns whether an expression is in the test of a branch."""
    for one in place.file.around(node):
        parent = place.file.parents.get(one)
        if isinstance(parent, ast.If | ast.IfExp | ast.While | ast.Assert) and parent.test is one:
            return True
        if parent is statement:
            return False
    return False


def _guarded(place: Place, statement: ast.stmt) -> bool:
    """Returns whether a statement runs only outside of captures."""
    tests = (ast.unparse(one.test) for one in place.file.around(statement) if isinstance(one, ast.If))
    return any(word in test for test in tests for word in ("is_compiling", "is_exporting", "is_dynamo_compiling"))


def _is_log(base: Any, name: str) -> bool:
    import logging
    import warnings

    if base is MISSING:
        return False
    return name in _LOGS and (isinstance(base, logging.Logger | logging.LoggerAdapter) or base in (logging, warnings))


def _module(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    return "" if value is MISSING else str(getattr(value, "__module__", None) or "")


def _random(called: Any) -> bool:
    import random

    return isinstance(getattr(called, "__self__", None), random.Random)


def _flat(value: Any) -> Iterator[Any]:
    for one in value:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


def _variant(name: str) -> Fix:
    text = f"one module for each case: two `[[module]]` of one name, of which one has the input `{name}`"
    return Fix(text if name.isidentifier() else "one module for each case, chosen by the caller")
