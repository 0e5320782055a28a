"""A submodule's own hooks, run by torch around compiled code.

A region is entered at `_compiled_call_impl`: copies and pickles of a submodule leave that out. torch runs a module's
hooks in `_call_impl`, around `forward`. So a call of a submodule with hooks puts a stand-in in the place of its
`forward`, and goes through `_call_impl`. The stand-in is there until it is called: while pre-hooks run. A call in
another thread that meets it gets the module's own `forward`.

Private: the tables of hooks, `_call_impl`, and that it calls `self.forward`. Without them regions with hooks of their
own are answered by the original, or not at all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch.nn.modules.module as global_hooks
from torch import nn

from . import sharding

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_FORWARD = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)
GLOBAL_BACKWARD = (global_hooks._global_backward_hooks, global_hooks._global_backward_pre_hooks)
KIND = "_is_full_backward_hook"
"""An attribute of modules, which says what their backward hooks are."""
_MISSING = object()


def tables(module: nn.Module, *, backward: bool = True) -> list[dict[int, Any]]:
    """Returns the tables of the hooks of a module's calls."""
    return [getattr(module, name) for name in ((*FORWARD, *BACKWARD) if backward else FORWARD)]


class StandIn:
    """Stands for the `forward` of a module in calls that run the module's hooks."""

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        """Takes `answer(args, kwargs)`, which gets the arguments that the pre-hooks leave."""
        self._module, self._answer = module, answer
        self._lock, self._here = threading.Lock(), threading.local()
        self._waiting = 0
        self.own: Callable[..., Any] = module.forward
        self.attribute: Any = _MISSING

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the module's hooks make of the answer."""
        before = getattr(self._here, "waiting", 0)
        self._put()
        try:
            return self._module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            if self._here.waiting > before:  # a pre-hook raised
                self._take()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the answer, in a call of this thread; else that of the module's own `forward`."""
        if not getattr(self._here, "waiting", 0):
            return self.own(*args, **kwargs)
        self._take()
        return self._answer(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy that another thread makes meanwhile.
        return _itself, (self.own,)

    def _put(self) -> None:
        self._here.waiting = getattr(self._here, "waiting", 0) + 1
        held = vars(self._module)
        with self._lock:
            self._waiting += 1
            if held.get("forward") is not self:
                self.own, self.attribute = self._module.forward, held.get("forward", _MISSING)
                held["forward"] = self

    def _take(self) -> None:
        self._here.waiting -= 1
        held = vars(self._module)
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0 and held.get("forward") is self:
                if self.attribute is _MISSING:
                    del held["forward"]
                else:
                    held["forward"] = self.attribute


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the `forward` of a module, without a stand-in."""
    found = module.forward
    return found.own if isinstance(found, StandIn) else found


def attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module, without a stand-in."""
    held = vars(module).copy()
    found = held.get("forward")
    if isinstance(found, StandIn):
        del held["forward"]
        if found.attribute is not _MISSING:
            held["forward"] = found.attribute
    return held


def bare(module: nn.Module) -> nn.Module:
    """Returns a module whose calls run no hooks of its own and enter no region: itself, or a twin of it.

    A twin has the same class, tables of tensors and submodules, and the attributes of this moment.
    """
    if module._compiled_call_impl is None and not any(tables(module)):
        return module
    twin: nn.Module = object.__new__(sharding.original(type(module)))
    vars(twin).update({key: value for key, value in attributes(module).items() if not sharding.mark(key)})
    vars(twin).pop("_compiled_call_impl", None)
    for name in (*FORWARD, *BACKWARD):
        vars(twin)[name] = OrderedDict()
    return twin
