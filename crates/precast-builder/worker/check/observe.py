"""One recorded run of a module on sample inputs: the project's lines that ran, and their calls of torch.

A capture stops at the first problem; an eager run meets all of them. Calls of torch come from a `TorchFunctionMode`,
lines from `sys.settrace`, for functions of the project only. Names in a line are resolved from the frame's variables
without running any code of the model.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import tensors
from ..torch_private import fake
from .sources import Place, Sources, executable

MISSING = object()


@dataclass
class Call:
    """One call of torch from a line of the project."""

    name: str
    place: Place
    # Ranks, dtypes and other facts for the rules, taken at the call: the tensors may change.
    facts: dict[str, Any]


@dataclass
class Seen:
    """The record of one run."""

    calls: list[Call] = field(default_factory=list)
    codes: dict[CodeType, set[int]] = field(default_factory=dict)
    error: BaseException | None = None
    # An error that only a recorded run has.
    unwatched: BaseException | None = None

    def skipped(self) -> dict[str, int]:
        """Returns the number of lines that did not run, for each function that ran, by qualified name."""
        found = {}
        for code, ran in self.codes.items():
            left = executable(code) - ran
            if left and not code.co_name.startswith("<"):
                found[code.co_qualname] = len(left)
        return found


def watch(
    function: Callable[..., Any], inputs: dict[str, Any], held: dict[int, str], sources: Sources, visit: Any
) -> Seen:
    """Runs a function on copies of the inputs. `held` names parameters and buffers by storage; `visit` sees lines."""
    seen = Seen()
    given = [value.clone() for value in inputs.values()]
    own = dict(held)
    own.update({fake.storage(value): f"the input `{name}`" for name, value in zip(inputs, given, strict=True)})
    with torch.no_grad(), _lines(seen, sources, visit), _calls(seen, sources, own):
        try:
            function(*given)
        except Exception as error:
            seen.error = error
    if seen.error is not None:
        try:
            with torch.no_grad():
                function(*[value.clone() for value in inputs.values()])
        except Exception:
            return seen
        # It runs without the record: `torch.cond` compiles its branches, and refuses inside a recorded run.
        seen.unwatched, seen.error = seen.error, None
    return seen


@contextmanager
def _lines(seen: Seen, sources: Sources, visit: Any) -> Iterator[None]:
    visited: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            code = frame.f_code
            key = (code.co_filename, frame.f_lineno)
            seen.codes.setdefault(code, set()).add(frame.f_lineno)
            if key not in visited:
                visited.add(key)
                place = sources.place(*key)
                assert place is not None
                visit(place, frame)
        return local

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        return local if sources.file(frame.f_code.co_filename) is not None else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _calls(seen: Seen, sources: Sources, own: dict[int, str]) -> Iterator[None]:
    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            place = _place(inspect.currentframe(), sources)
            if place is not None:
                name = getattr(function, "__name__", str(function))
                facts = _facts(name, args, kwargs or {}, own)
                seen.calls.append(Call(name, place, facts))
            return function(*args, **(kwargs or {}))

    with Watch():
        yield


def _place(frame: FrameType | None, sources: Sources) -> Place | None:
    """Returns the project's line that a call of torch came from."""
    while frame is not None:
        place = sources.place(frame.f_code.co_filename, frame.f_lineno)
        if place is not None:
            return place
        frame = frame.f_back
    return None


def _facts(name: str, args: Any, kwargs: dict[str, Any], own: dict[int, str]) -> dict[str, Any]:
    first = args[0] if args else None
    facts: dict[str, Any] = {"arguments": len(args) + len(kwargs)}
    if isinstance(first, torch.Tensor):
        facts["rank"] = first.dim()
        facts["shape"] = tuple(first.shape)
        facts["dtype"] = tensors.dtype_name(first.dtype)
        facts["held"] = own.get(fake.storage(first))
    if name in ("__getitem__", "__setitem__") and len(args) > 1:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [one for one in index if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)]
        facts["mask"] = masks[0].dim() if masks else None
        facts["plain"] = bool(masks) and masks[0].dtype == torch.bool and len(index) == 1
        if len(args) > 2:
            value = args[2]
            facts["value"] = value.dim() if isinstance(value, torch.Tensor) else None
    if name == "cpu" or (name == "to" and isinstance(first, torch.Tensor) and first.device.type != "cpu"):
        asked = [kwargs.get("device"), *args[1:2]]
        facts["to"] = "cpu" if name == "cpu" else next((str(one) for one in asked if one is not None), None)
    if name == "repeat_interleave":
        facts["by_values"] = len(args) > 1 and isinstance(args[1], torch.Tensor) and "output_size" not in kwargs
    if name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else kwargs.get("train", True))
        facts["draws"] = bool(training) and probability != 0
    return facts


def resolve(node: Any, frame: FrameType) -> Any:
    """Returns the value of a chain of names, without running properties; `MISSING` if it is not known."""
    import ast

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for scope in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in scope:
                return scope[node.id]
        return MISSING
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, frame)
        return MISSING if base is MISSING else attribute(base, node.attr)
    return MISSING


def attribute(base: Any, name: str) -> Any:
    """Returns a stored attribute: of the object, of its class, or of a torch module's tables."""
    import types

    try:
        own = vars(base)
    except TypeError:
        own = {}
    if name in own:
        return own[name]
    if isinstance(base, torch.nn.Module):
        for table in (base.named_children(), base.named_parameters(recurse=False), base.named_buffers(recurse=False)):
            for key, value in table:
                if key == name:
                    return value
    if isinstance(base, types.ModuleType):
        return getattr(base, name, MISSING)
    for kind in type(base).__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            # A property or another descriptor would run code.
            plain = not hasattr(found, "__get__") or isinstance(found, types.FunctionType)
            return found if plain else MISSING
    return MISSING
