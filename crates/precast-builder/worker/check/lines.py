"""What tracing hides: found by looking at each line that ran, with the values that its names had."""

from __future__ import annotations

import ast
import dataclasses
import enum
import types
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .. import operators
from ..torch_private import overloads
from . import fixes
from .finding import HIGH, LOW, MEDIUM, Finding, Fix
from .observe import MISSING, resolve
from .sources import Place, made

_CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "popitem", "add", "discard"}
_LOGS = {"debug", "info", "warning", "warning_once", "warn", "error", "exception", "critical", "log"}
# What a module may hold beside tensors and modules without a word: plain values and settings.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, frozenset, range, type)


class Lines:
    """Collects what lines show; `visit` is called once for each line, in its frame."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.findings: list[Finding] = []

    def visit(self, place: Place, frame: FrameType) -> None:
        """Looks at one line."""
        statement = place.statement
        if statement is None or statement.lineno != place.line:
            # The other lines of a statement were looked at with its first.
            return
        for node in _expressions(statement):
            for category, severity, why, fix in self._node(node, statement, place, frame):
                self.findings.append(made(place, category, severity, why, fix))
        for category, severity, why, fix in _assigned(statement, frame):
            self.findings.append(made(place, category, severity, why, fix))

    def _node(self, node: ast.AST, statement: ast.stmt, place: Place, frame: FrameType) -> Iterator[Any]:
        if isinstance(node, ast.Call):
            yield from self._call(node, statement, place, frame)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield from _object(node, frame)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            if isinstance(node.comparators[0], ast.Constant) and _decides(node, statement, place):
                name = ast.unparse(node.left)
                yield "python-branch", LOW, f"whether `{name}` is there is decided at capture", _variant(name)

    def _call(self, node: ast.Call, statement: ast.stmt, place: Place, frame: FrameType) -> Iterator[Any]:
        import torch

        called = resolve(node.func, frame)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        base = resolve(node.func.value, frame) if isinstance(node.func, ast.Attribute) else MISSING
        if called is print or _is_log(base, name):
            if not _guarded(place, statement):
                why = "a compiled program says nothing, and torch.compile breaks the graph here"
                yield "print", MEDIUM, why, fixes.quiet(statement)
        elif called in (isinstance, hasattr, issubclass) and node.args:
            value = resolve(node.args[0], frame)
            name = ast.unparse(node.args[0])
            why = f"the type of `{name}` is decided at capture: {type(value).__name__}"
            if value is MISSING:
                why = f"the type of `{name}` is decided at capture"
            yield "python-branch", LOW, why, _variant(name)
            if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in _flat(value)):
                why = f"`{name}` is a {type(value).__name__} of {len(value)}: number and nesting are fixed at capture"
                yield (
                    "list-input",
                    MEDIUM,
                    why,
                    Fix("take one tensor with a dimension for them, as `torch.stack` makes"),
                )
        elif _module(called).partition(".")[0] == "numpy" or _module(base) == "numpy":
            why = "numpy computes once, at capture: what it gives is a constant of the compiled program"
            yield "numpy", MEDIUM, why, fixes.torch_instead(statement, _names(frame, "numpy"))
        elif _module(called) == "random" or _random(called):
            why = "a number is drawn once, at capture, and every later call has the same one"
            yield "random", MEDIUM, why, Fix("draw it outside, and take it as an input")
        elif name in _CHANGES and isinstance(base, list | dict | set) and _outlives(node.func, frame):
            held = ast.unparse(node.func.value)  # type: ignore[union-attr]
            why = f"`{held}` outlives the call: the change happens at capture and never again"
            yield "python-state", MEDIUM, why, Fix("return what is kept as an output, and keep it outside")
        else:
            yield from self._operator(called, node, frame)

    def _operator(self, called: Any, node: ast.Call, frame: FrameType) -> Iterator[Any]:
        name = overloads.called(called) or _operator_name(node.func, frame)
        if name is None or name.partition("::")[0] in operators.OWN:
            return
        if not overloads.has_fake_kernel(name):
            why = f"`{name}` has no fake kernel: torch can't say what shape it returns"
            fix = Fix("say it", [f'@torch.library.register_fake("{name}")', "def _(…): return torch.empty(…)"])
            yield "custom-operator", HIGH, why, fix


def _operator_name(func: ast.expr, frame: FrameType) -> str | None:
    """Returns the name of an operator that is called as `torch.ops.space.name(…)`."""
    import torch

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


def _assigned(statement: ast.stmt, frame: FrameType) -> Iterator[Any]:
    """Finds what forward writes to its module: an attribute, or an item of a list or a dict that the module holds."""
    import torch

    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        targets = [statement.target]
    if frame.f_code.co_name == "__init__":
        return
    for target in targets:
        if isinstance(target, ast.Attribute):
            base = resolve(target.value, frame)
            held = resolve(target, frame)
            # A buffer that is written is seen by what torch is asked for.
            if isinstance(base, torch.nn.Module) and not (
                isinstance(statement, ast.AugAssign) and isinstance(held, torch.Tensor)
            ):
                why = f"`{ast.unparse(target)}` is set at capture, and never by a compiled program"
                yield "python-state", MEDIUM, why, Fix("return it as an output, and take it as an input")
        elif isinstance(target, ast.Subscript):
            base = resolve(target.value, frame)
            if isinstance(base, list | dict) and _rooted(target.value, frame):
                why = f"`{ast.unparse(target.value)}` outlives the call: the change happens at capture and never again"
                yield "python-state", MEDIUM, why, Fix("return what is kept as an output, and keep it outside")


def _object(node: ast.Attribute, frame: FrameType) -> Iterator[Any]:
    """Finds what is computed by an object that the module holds and torch knows nothing of, as a tokenizer."""
    import torch

    base = resolve(node.value, frame)
    if base is MISSING or not _rooted(node.value, frame) or isinstance(base, (torch.nn.Module, torch.Tensor, *_PLAIN)):
        return
    kind = type(base)
    space = kind.__module__.partition(".")[0]
    if space in ("torch", "builtins", "logging", "numpy") or isinstance(
        base, types.ModuleType | types.FunctionType | types.MethodType
    ):
        return
    if node.attr in getattr(base, "__dict__", {}) and "okenizer" not in kind.__name__:
        # A stored value, as those of a configuration.
        return
    if (
        dataclasses.is_dataclass(base)
        or isinstance(base, types.SimpleNamespace | enum.Enum)
        or kind.__name__.endswith("Config")
    ):
        return
    why = f"`{ast.unparse(node)}` asks a {kind.__name__}: its answer at capture is a constant of the compiled program"
    yield "python-object", MEDIUM, why, fixes.stored(node)


def _rooted(node: ast.expr, frame: FrameType) -> bool:
    """Returns whether a chain of names starts at a module."""
    import torch

    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(resolve(node, frame), torch.nn.Module):
            return True
    return False


def _outlives(func: ast.expr, frame: FrameType) -> bool:
    """Returns whether the list or dict whose method is called is the module's, a global or an argument."""
    assert isinstance(func, ast.Attribute)
    if _rooted(func.value, frame):
        return True
    if isinstance(func.value, ast.Name):
        name = func.value.id
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return name in arguments or name not in frame.f_locals
    return False


def _decides(node: ast.AST, statement: ast.stmt, place: Place) -> bool:
    """Returns whether an expression is in the test of a branch."""
    while node is not statement:
        parent = place.file.parents.get(node)
        if parent is None:
            return False
        if isinstance(parent, ast.If | ast.IfExp | ast.While | ast.Assert) and parent.test is node:
            return True
        node = parent
    return False


def _guarded(place: Place, statement: ast.stmt) -> bool:
    """Returns whether a statement runs only outside of captures."""
    node: ast.AST | None = statement
    while node is not None:
        if isinstance(node, ast.If) and any(
            word in ast.unparse(node.test) for word in ("is_compiling", "is_exporting", "is_dynamo_compiling")
        ):
            return True
        node = place.file.parents.get(node)
    return False


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


def _names(frame: FrameType, module: str) -> set[str]:
    """Returns what a module is called where a line is."""
    scopes = {**frame.f_globals, **frame.f_locals}
    return {name for name, value in scopes.items() if isinstance(value, types.ModuleType) and value.__name__ == module}


def _flat(value: Any) -> Iterator[Any]:
    for one in value:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


def _variant(name: str) -> Fix:
    text = f"one module for each case: two `[[module]]` of one name, of which one has the input `{name}`"
    return Fix(text if name.isidentifier() else "one module for each case, chosen by the caller")
