"""One call of a module, traced by Dynamo: its graph, and everything that the trace read.

Dynamo follows the code of a call and notes a guard for each value that it reads, with the place of the value: an
attribute, a global variable, the cell of a closure, a key of a dictionary. `Trace.guards` has these as facts of
`precast.record`, and `Trace.codes` the code of each function that was followed.

The call is run once, by the graph, so that its answer says how the results of the graph nest.

Private: `torch._dynamo.config`, `TracingContext.get_traced_code` for the code, `grapharg` of a placeholder for the
place of its value, the warning about objects that a call changes, `real_stack` of an error, `method_requires_grad_` of
a `TensorVariable`. Without them: no module in
hand can be compiled.
"""

from __future__ import annotations

import ast
import copy
import logging
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..record.facts import Guarded
from ..record.places import Path
from . import guards

guards.TRACED = globals()


class NotTraced(Exception):
    """A call that Dynamo can't follow, and the line of the code."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.place = place


Keep = Callable[[list[Guarded], list[types.CodeType]], None]
"""Takes what a trace has read, before the call runs, and the code of the functions that it followed."""


@dataclass
class Trace:
    """What Dynamo made of one call."""

    graph: fx.GraphModule
    inputs: list[tuple[fx.Node, Path]]
    """The placeholders of the graph, and the place of each value."""
    answer: Any
    """What the call returned."""
    results: list[Any]
    """What the graph returned; tensors in `answer` are these, or values that were read."""
    conditions: list[str]
    """Conditions on sizes, as expressions of Python."""
    written: list[Written]
    """The objects that the call changes, by constants alone."""


def trace(
    net: nn.Module,
    own: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep: Keep,
    free: Iterable[tuple[Tensor, int]] = (),
) -> Trace:
    """Traces a call of `forward`, in the modes of this moment. The sizes of the axes in `free` may stay symbols.

    Raises `NotTraced`.
    """
    import torch._dynamo.config as settings
    from torch._dynamo import maybe_mark_dynamic

    entries: list[Any] = []
    graphs: list[fx.GraphModule] = []
    places: list[tuple[fx.Node, Path]] = []
    codes: list[types.CodeType] = []
    results: list[Any] = []
    failures: list[Exception] = []
    written: list[Written] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        codes.extend(torch._guards.TracingContext.get_traced_code() or [])
        try:
            for node in graph.graph.find_nodes(op="placeholder"):
                places.append((node, guards.path(node.meta["grapharg"].source)))
        except guards.Unsupported as error:
            failures.append(error)

        def run(*values: Any) -> Any:
            results[:] = graph(*values)
            return tuple(results)

        return run

    def take(given: Any) -> list[bool]:
        entries.extend(given)
        written.extend(_written(caught, net, own, args, kwargs))
        try:
            keep(guards.read(given, torch.is_grad_enabled()), codes)
        except Exception as error:  # Dynamo would wrap it
            failures.append(error)
        return [True] * len(given)

    for tensor, axis in free:
        maybe_mark_dynamic(tensor, axis)
    # Of its own: Dynamo keeps graphs by the code of the function.
    function = types.FunctionType(forward.__code__.replace(co_name="forward"), globals())
    marked = _marked_values()
    quiet: dict[str, Any] = {"ignore_logging_functions": _Logs(settings.ignore_logging_functions)}
    with (
        settings.patch(**_SETTINGS, **quiet),
        _without_fast_path(),
        marked,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        compiled = torch.compile(
            function, backend=backend, fullgraph=True, dynamic=False, options={"guard_filter_fn": take}
        )
        try:
            answer = compiled(net, own, args, dict(kwargs))
        except Exception as error:
            raise NotTraced(_text(error), _place(error)) from error
    for failure in [*failures, *filter(None, map(Written.problem, written))]:
        for one in written:
            one.undo()
        raise failure
    if not graphs:
        raise NotTraced("it has no operation on tensors, or Dynamo is switched off")
    return Trace(graphs[0], places, answer, results, guards.conditions(entries), written)


class Written:
    """An object that a call changes, and its content before the call."""

    def __init__(self, place: str, held: Any, given: bool) -> None:
        """`given`: it is an argument, another object in each call."""
        self.place, self.given = place, given
        self.held: Any = held if isinstance(held, (dict, list, set)) else getattr(held, "__dict__", {})
        self.before: Any = copy.copy(self.held)

    def problem(self) -> NotTraced | None:
        """Returns the error of a change that no program makes: any but a constant as an attribute."""
        if not isinstance(self.held, dict):
            same = self.held == self.before
            return None if same else NotTraced(f"each call changes `{self.place}`, which an artifact does not")
        for key, value in self.changes().items():
            if self.given or not _is_constant(value):
                return NotTraced(f"each call writes `{self.place}.{key}`, which an artifact does not")
        return None

    def changes(self) -> dict[Any, Any]:
        """Returns the attributes or items that have other values than before."""
        if not isinstance(self.held, dict):
            return {}
        before: dict[Any, Any] = self.before
        return {key: value for key, value in self.held.items() if value is not before.get(key, self)}

    def undo(self) -> None:
        """Puts the content back."""
        if isinstance(self.held, list):
            self.held[:] = self.before
        elif isinstance(self.held, (dict, set)):
            self.held.clear()
            self.held.update(self.before)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def _written(caught: Iterable[Any], net: Any, own: Any, args: Any, kwargs: Any) -> Iterator[Written]:
    """Yields the objects that a call changes, from Dynamo's warning about them."""
    names = {"L": {"net": net, "own": own, "args": args, "kwargs": kwargs}, "G": globals()}
    for warning in caught:
        _, found, listed = str(warning.message).partition("potential sources you can double check: ")
        for name in ast.literal_eval(listed) if found else ():
            try:
                yield Written(_shown(name), eval(name, names), name.startswith(("L['args']", "L['kwargs']")))
            except Exception:  # made in the call itself
                continue


def _shown(name: str) -> str:
    return name.replace("L['net'].", "").replace("L['net']", "the module").replace("._modules['", ".").replace("']", "")


def forward(net: Any, own: Any, args: Any, kwargs: Any) -> Any:
    """Calls `forward` of a module, without its hooks: that of its class, or `own`, which was set on the module."""
    if own is not None:
        return own(*args, **kwargs)
    return type(net).forward(net, *args, **kwargs)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Has `nn.TransformerEncoder` and `nn.MultiheadAttention` use operations that a compiler knows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _marked_values() -> Iterator[None]:
    """Has Dynamo follow `requires_grad_()` of a value that the call computes: it changes no gradient of other tensors.

    `gradient_checkpointing` of transformers sets a hook with it on embeddings.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    own: Any = TensorVariable.method_requires_grad_

    def marked(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        node = self.as_proxy().node
        wanted = requires_grad is True or requires_grad.as_python_constant() is True
        computed = node.op != "placeholder" and node.meta["example_value"].is_floating_point()
        return self if wanted and computed else own(self, tx, requires_grad)

    TensorVariable.method_requires_grad_ = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        TensorVariable.method_requires_grad_ = own  # type: ignore[method-assign]


# The defaults of torch leave out guards on hooks and on defaults of functions. A size is a number unless it is free.
_SETTINGS: dict[str, Any] = {
    "side_effect_replay_policy": "warn",
    "skip_nnmodule_hook_guards": False,
    "skip_guards_on_constant_func_defaults": False,
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "specialize_int": True,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
}


class _Logs(list[Any]):
    """Has the methods by which a logger writes a line, and those that libraries add, as `warning_once`.

    In a trace they write nothing, as in an export: a line is no part of an answer. As a list it is empty, because
    torch writes its settings to a log as JSON.
    """

    def __init__(self, others: Collection[Any]) -> None:
        super().__init__()
        own = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
        self._methods, kinds = {*others}, [logging.Logger]
        for kind in kinds:
            kinds += kind.__subclasses__()
            for name, method in vars(kind).items():
                if name in own or (callable(method) and getattr(method, "__module__", "") != "logging"):
                    self._methods.add(method)

    def __contains__(self, one: object) -> bool:
        return one in self._methods


def _text(error: Exception) -> str:
    """Returns the first lines of Dynamo's error, which say what it can't follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def _place(error: Exception) -> str:
    stack = getattr(error, "real_stack", None)
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
