"""The digest of a module in hand: computed without a capture, so that a second process finds its release at once.

It covers:

- code: the files of the classes of all submodules, and of the project's modules that these files import. Code without a
  file, as in a notebook, counts by its byte code and by the globals that it names, and installed packages by version;
- structure: the class of each submodule, and its attributes: numbers, text, configurations, names of functions and
  hooks; of a region that equal ones share, without the integers that no call reads (`reads`);
- tensors: name, dtype and shape of parameters and persistent buffers, and which are tied. Of other buffers, and of
  tensors that are plain attributes, the values too: they are constants of a program;
- the request: inputs, constants, buckets and all other arguments of the build;
- the versions of torch and Python, the device and the default dtype.

It does not cover variables of enclosing functions, attributes without a stable text, and files that the code reads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import captured, reads, sharding

_FORMAT = 1
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_PATHS += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
_INSTALLED = tuple(os.path.join(os.path.realpath(path), "") for path in _PATHS)


def of_module(net: torch.nn.Module, request: Any, without: Container[reads.Place] = ()) -> str:
    """Returns the digest of a module and of a request for it, as 32 hexadecimal digits; `without` some attributes."""
    parts = {
        "format": _FORMAT,
        "torch": torch.__version__,
        "python": sys.version_info[:2],
        "default dtype": str(torch.get_default_dtype()),
        "code": _code(net),
        "structure": _structure(net, without),
        "tensors": _tensors(net),
        "request": request,
    }
    text = json.dumps(parts, sort_keys=True, default=stable)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stable(value: Any) -> Any:
    """Returns a value as JSON that is equal in every process: its type, for a value without a stable text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): stable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [stable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(stable(item), sort_keys=True) for item in value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.device):
        return value.type  # a release is for every device of a kind
    if isinstance(value, functools.partial):
        return [stable(value.func), stable(value.args), stable(value.keywords)]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), _values(value)]
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


def described(net: torch.nn.Module) -> bool:
    """Returns whether the digest covers all of each attribute: no variables of functions, no object without a text."""
    return all(
        _has_text(value)
        for module in net.modules()
        for key, value in vars(module).items()
        if key not in reads.TABLES and not sharding.mark(key)
    )


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_has_text, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_has_text, value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    return isinstance(value, torch.Tensor | type | types.BuiltinFunctionType) or " at 0x" not in repr(value)


def _structure(net: torch.nn.Module, without: Container[reads.Place]) -> list[Any]:
    # Many submodules share one configuration, whose text is long.
    texts: dict[int, Any] = {}
    found = []
    for name, module in net.named_modules(remove_duplicate=False):
        own = {}
        for key, value in vars(module).items():
            if key not in reads.TABLES and (name, key) not in without and not sharding.mark(key):
                own[key] = texts[id(value)] if id(value) in texts else texts.setdefault(id(value), stable(value))
        hooks = [stable(hook) for hook in _hooks(module)]
        found.append([name, stable(type(module)), own, hooks, [key for key, _ in module.named_children()]])
    return found


def _hooks(module: torch.nn.Module) -> list[Any]:
    """Returns the hooks that run in a call. Private: the tables of hooks. Without them a changed hook is not seen."""
    tables = ("_forward_pre_hooks", "_forward_hooks")
    return [hook for table in tables for hook in vars(module).get(table, {}).values()]


def _tensors(net: torch.nn.Module) -> list[Any]:
    found: list[Any] = []
    first: dict[int, str] = {}
    for name, tensor, kind in captured.tensors_of(net):
        holder = first.setdefault(id(tensor), name)
        values = _values(tensor) if kind == "constant" and holder == name else None
        found.append([name, kind, str(tensor.dtype), list(tensor.shape), holder, values])
    return found


def _values(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(bytes(plain.untyped_storage())).hexdigest()


def _code(net: torch.nn.Module) -> dict[str, Any]:
    """Returns the digest of each source file, the version of each package, and the byte code of code without a file."""
    found: dict[str, Any] = {}
    pending: list[Any] = []
    for module in net.modules():
        # Hooks and an own `forward` run too.
        for one in [*type(module).__mro__, *_hooks(module), *filter(None, [vars(module).get("forward")])]:
            name = getattr(one, "__module__", None)
            pending.append(name)
            if name != "builtins" and _file(sys.modules.get(name or "")) is None:
                found[str(stable(one))] = _byte_code(one, pending)
    seen: set[Any] = {"builtins", __package__}
    while pending:
        name = pending.pop()
        if name in seen or not isinstance(name, str):
            continue
        seen.add(name)
        file = _file(sys.modules.get(name))
        if file is None:
            continue
        if os.path.realpath(file).startswith(_INSTALLED):
            top = name.partition(".")[0]
            found[top] = str(getattr(sys.modules.get(top), "__version__", ""))
            continue
        found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for value in list(vars(sys.modules[name]).values()):
            pending.append(
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            )
    return found


def _file(module: types.ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and os.path.isfile(file) else None


def _byte_code(one: Any, modules: list[Any]) -> list[Any]:
    """Returns the code of a class or a function without a file, and of the functions and values that it names.

    The names of other modules that it uses are appended to `modules`.
    """
    seen: set[str] = set()

    def members(kind: type) -> list[Any]:
        return [[name, *member(value)] for name, value in sorted(vars(kind).items())]

    def member(value: Any) -> Iterator[Any]:
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not isinstance(function, types.FunctionType):
            if isinstance(value, bool | int | float | str | list | tuple | dict):
                yield stable(value)
            return
        yield _of_code(function.__code__)
        yield stable([function.__defaults__, function.__kwdefaults__])
        for name in _names(function.__code__):
            if name in seen or name not in function.__globals__:
                continue
            seen.add(name)
            other = function.__globals__[name]
            home = other.__name__ if isinstance(other, types.ModuleType) else getattr(other, "__module__", None)
            if home not in (None, function.__module__):
                modules.append(home)
            else:
                yield [name, *(members(other) if isinstance(other, type) else member(other))]

    return members(one) if isinstance(one, type) else list(member(one))


def _of_code(code: types.CodeType) -> list[Any]:
    constants = [_of_code(one) if isinstance(one, types.CodeType) else stable(one) for one in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)
