"""The state of a module that its artifacts were captured with, and a fast check that it is still the same.

An artifact has the module's code, flags and plain attributes inside, and reads its tensors by pointer. So each call
compares, before an artifact answers it:

- the attributes of all submodules, `training` among them, and the attributes of objects that they hold, as a
  configuration: by identity, then by `==`
- the tree of submodules
- forward hooks, of submodules and global ones; in training also hooks of the backward call
- modes of torch that change a computation: autocast, tracing, function and dispatch modes
- the tensors: their identity and their addresses

Attributes that the module writes in its own forward, and those that FSDP2 adds, are left out. Changes inside an
object that an attribute of such an object holds, and of global variables, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import batches, hooks, sharding

_MISSING = object()
_PLAIN = (nn.Module, Tensor, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_SEPARATE = ("_parameters", "_buffers")
_address = Tensor.data_ptr
_values = dict.values
_version = attrgetter("_version")


class Refusal(NamedTuple):
    """A reason for which the module itself answers a call."""

    code: str
    """The name of the counter."""
    detail: str
    """The reason in words."""


_TRAINING = Refusal(
    "training", 'the module is in training mode; artifacts answer in eval mode, and with `kind = "autograd"` in both'
)


class _Except:
    """A dictionary that is compared without some of its keys."""

    __slots__ = ("held", "keys")

    def __init__(self, held: dict[Any, Any], keys: frozenset[Any]) -> None:
        self.held, self.keys = held, keys

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, dict)
        mine = {key: value for key, value in self.held.items() if key not in self.keys}
        return mine == {key: value for key, value in other.items() if key not in self.keys}

    __hash__ = None  # type: ignore[assignment]


class Guard:
    """A module's state at one moment."""

    def __init__(
        self,
        module: nn.Module,
        ignored: Iterable[tuple[str, str]] = (),
        *,
        inference: bool = True,
        hooked: bool = False,
    ) -> None:
        """Takes the state. `ignored`: attributes, as `changes` returns them.

        With `inference` all submodules have to be in eval mode and no gradients recorded; else the modes are those at
        this moment, and gradients and autocast are the caller's to compare. With `hooked` the module may have hooks of
        its own, which run around the artifact.
        """
        self.ignored = set(ignored)
        self._module = module
        self._inference = inference
        self._places: list[str] = []
        self._live: list[Any] = []
        self._taken: list[Any] = []
        modules = dict(module.named_modules())
        for name, each in modules.items():
            self._add(name, vars(each), hooks.attributes(each), training=inference)
            self._add(name, each._modules, each._modules.copy())
        for name, value in _objects(modules):
            self._add(name, value, value.copy())
        own = {name: each for name, each in modules.items() if name or not hooked}
        self._own_hooks = {name: hooks.tables(each, backward=not inference) for name, each in own.items()}
        self._global_hooks = [*hooks.GLOBAL_FORWARD, *(() if inference else hooks.GLOBAL_BACKWARD)]
        self._hooks = [*chain.from_iterable(self._own_hooks.values()), *self._global_hooks]
        self._owners = [getattr(each, kind) for each in modules.values() for kind in _SEPARATE]
        self._device = next((tensor.device.type for tensor in self.tensors()), "cpu")

    def _add(self, name: str, held: Any, taken: Any, training: bool = False) -> None:
        if training:
            taken["training"] = False
        keys = frozenset(key for place, key in self.ignored if place == name)
        if isinstance(held, dict) and keys:
            held = _Except(held, keys)
        self._places.append(name)
        self._live.append(held)
        self._taken.append(taken)

    def tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers as they are now."""
        return [tensor for tensor in chain.from_iterable(map(_values, self._owners)) if tensor is not None]

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        """Returns the reason for which a call can't be answered by an artifact, if there is one."""
        if self._inference and self._module.training:
            return _TRAINING
        if (active := mode()) is not None:
            return active
        if any(self._hooks) or self._has_old_hooks():
            return self.hooked()
        if not self._is_same() and (changed := self._changed()) is not None:
            return changed
        if not self._inference:
            return None
        if torch.is_autocast_enabled(self._device):
            return Refusal("autocast", f"autocast is on for {self._device}")
        if torch.is_grad_enabled():
            if any(tensor.requires_grad for tensor in (*self.tensors(), *batches.tensors((args, kwargs)))):
                return Refusal(
                    "gradients",
                    "gradients are recorded, and artifacts have none: call it under `torch.no_grad()` or "
                    "`torch.inference_mode()`, switch gradients off with `requires_grad_(False)`, or set "
                    '`kind = "autograd"`',
                )
        return None

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yields the submodule's name and the attribute of each change."""
        for name, live, taken in zip(self._places, self._live, self._taken, strict=True):
            if isinstance(live, _Except):
                skipped, live = live.keys, live.held
            else:
                skipped = frozenset()
            if not isinstance(live, dict):
                if not _same(live, taken):
                    yield name, "content"
                continue
            for key in live.keys() | taken.keys():
                now = live.get(key, _MISSING)
                if key in skipped or _passes(key, now) or _same(now, taken.get(key, _MISSING)):
                    continue
                yield name, str(key)

    def _changed(self) -> Refusal | None:
        changes = list(self.changes())
        training = [name for name, key in changes if key == "training"]
        if training and self._inference:
            return Refusal("training", f"{_named(training[0])} is in training mode; artifacts answer in eval mode")
        if not changes and (self._adopted() or self._is_same()):
            return None
        if not changes:
            return Refusal("attributes", "an attribute can't be compared")
        name, key = changes[0]
        where = f"{name}.{key}" if name else key
        return Refusal("attributes", f"`{where}` is not as it was when the module was compiled")

    def _is_same(self) -> bool:
        try:
            return self._live == self._taken
        except Exception:  # an `==` of the module's own objects
            return False

    def _adopted(self) -> bool:
        """Takes attributes that change no computation into the state; returns whether there are any."""
        found = False
        for live, taken in zip(self._live, self._taken, strict=True):
            held = live.held if isinstance(live, _Except) else live
            for key, value in held.copy().items() if isinstance(held, dict) else ():
                if _passes(key, value) and not _same(value, taken.get(key, _MISSING)):
                    found = True
                    if not isinstance(value, hooks.StandIn):
                        taken[key] = value
        return found

    def hooked(self) -> Refusal | None:
        """Returns the refusal for hooks that a program does not run, if there are any."""
        for name, (after, before, *backward) in self._own_hooks.items():
            if after or before:
                return Refusal("hooks", f"{_named(name)} has forward hooks")
            if any(backward):
                return Refusal("hooks", f"{_named(name)} has backward hooks")
        if self._has_old_hooks():
            return Refusal("hooks", "the module has backward hooks that are not full: they get those of one operation")
        return Refusal("hooks", "there are global hooks of modules") if any(self._global_hooks) else None

    def _has_old_hooks(self) -> bool:
        """Returns whether the module itself has hooks of `register_backward_hook`."""
        old = self._module._is_full_backward_hook is False and bool(self._module._backward_hooks)
        return old and not self._inference


def mode() -> Refusal | None:
    """Returns the refusal for modes of torch that record or change a computation, if there are any."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return Refusal("tracing", "a tracer records the call")
    if (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return Refusal("mode", "a function or dispatch mode, or a transform of `torch.func`, is active")
    return None


class Tensors:
    """The tensors of a module at one moment: by identity and address, constants also by version."""

    def __init__(self, guard: Guard) -> None:
        self._owners = guard._owners
        self._constants = [tensor for _, tensor in constants(guard._module) if not tensor.is_inference()]
        self._versions = list(map(_version, self._constants))
        self._values = list(chain.from_iterable(map(_values, self._owners)))
        self._ids = list(map(id, self._values))
        self._tensors = [tensor for tensor in self._values if tensor is not None]
        self._addresses = list(map(_address, self._tensors))

    def forget(self) -> None:
        """Lets the next call see moved tensors."""
        self._ids = []

    def moved(self) -> bool:
        """Returns whether a tensor was replaced since, or has another address, or a constant was written."""
        ids = list(map(id, chain.from_iterable(map(_values, self._owners))))
        return (
            ids != self._ids
            or list(map(_address, self._tensors)) != self._addresses
            or list(map(_version, self._constants)) != self._versions
        )


def constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors whose values a program has inside: buffers that are not persistent, and plain attributes."""
    for name, each in module.named_modules():
        own = {key: each._buffers.get(key) for key in each._non_persistent_buffers_set}
        for key, value in {**own, **vars(each)}.items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}" if name else key, value


def _objects(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yields each object and container that an attribute of a submodule holds, once."""
    seen: set[int] = set()
    for name, module in modules.items():
        for key, value in hooks.attributes(module).items():
            if key.startswith("_") and key in vars(_EMPTY):
                continue
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            seen.add(id(value))
            where = f"{name}.{key}" if name else key
            if isinstance(value, (dict, list, set)):
                yield where, value
            elif isinstance(getattr(value, "__dict__", None), dict):
                yield where, vars(value)


_EMPTY = nn.Module()


def _same(here: Any, there: Any) -> bool:
    try:
        return here is there or bool(here == there)
    except Exception:
        return False


def _passes(key: Any, value: Any) -> bool:
    """Returns whether an attribute changes no computation: FSDP2's, that of hooks, the stand-in of another thread."""
    return sharding.mark(key) or key == hooks.KIND or isinstance(value, hooks.StandIn)


def _named(name: str) -> str:
    return f"submodule `{name}`" if name else "the module"
