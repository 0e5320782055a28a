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
from collections.abc import Callable
from typing import Any

import torch.nn.modules.module as global_hooks
from torch import nn

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_FORWARD = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)
GLOBAL = (*GLOBAL_FORWARD, global_hooks._global_backward_hooks, global_hooks._global_backward_pre_hooks)
_MISSING = object()


def tables(module: nn.Module, *, backward: bool = True) -> list[dict[int, Any]]:
    """Returns the tables of the hooks of a module's calls."""
    return [getattr(module, name) for name in ((*FORWARD, *BACKWARD) if backward else FORWARD)]


def any_of(module: nn.Module) -> bool:
    """Returns whether calls of a module run hooks."""
    return any(map(bool, tables(module)))


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


def backward(module: nn.Module) -> str | None:
    """Returns the name of the first submodule with hooks of the backward call, if there is one."""
    inside = ((name, each) for name, each in module.named_modules() if each is not module)
    return next((name for name, each in inside if any(getattr(each, table) for table in BACKWARD)), None)


def has_old(module: nn.Module) -> bool:
    """Returns whether a module has hooks of `register_backward_hook`, which get the gradients of one operation."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the `forward` that was set on a module itself, in place of its class's; none that stands in."""
    found = vars(module).get("forward")
    if isinstance(found, StandIn):
        found = None if found.attribute is _MISSING else found.attribute
    return found  # type: ignore[no-any-return]
