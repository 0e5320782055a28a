"""Digests of the code of functions: equal in every process with the same Python, whatever comments and lines are.

Of a code object its instructions count, its constants, and the names that it uses. Names of local variables, lines and
documentation do not. Of a function its default values count too, and the functions that it wraps or encloses.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch

_DEEPEST = 8
_BY_NUMBER = frozenset(dis.hasconst) | {dis.opmap.get("KW_NAMES", -1)}


@functools.lru_cache(maxsize=4096)
def of_code(code: types.CodeType) -> str:
    """Returns the digest of a code object."""
    digest = hashlib.sha256(code.co_code)
    for number, one in enumerate(code.co_consts):
        if isinstance(one, types.CodeType):
            part = of_code(one)
        elif number == 0 and isinstance(one, str) and not _uses_first(code.co_code):
            part = "documentation"
        else:
            part = _constant(one)
        digest.update(part.encode() + b"\0")
    given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    names = (code.co_names, code.co_freevars, code.co_varnames[:given], code.co_argcount, code.co_posonlyargcount)
    digest.update(repr((names, code.co_flags, code.co_exceptiontable if code.co_exceptiontable else b"")).encode())
    return digest.hexdigest()[:24]


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"


def _uses_first(instructions: bytes) -> bool:
    """Returns whether an instruction loads the first constant, which is the documentation otherwise."""
    return any(
        instructions[at] in _BY_NUMBER and instructions[at + 1] == 0 and not _extended(instructions, at)
        for at in range(0, len(instructions), 2)
    )


def _extended(instructions: bytes, at: int) -> bool:
    return at >= 2 and instructions[at - 2] == dis.EXTENDED_ARG and instructions[at - 1] != 0


def functions(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """Yields the functions of Python that a value consists of: itself, those that it wraps, those in its closure."""
    if depth > _DEEPEST:
        return
    if isinstance(value, types.FunctionType):
        if not value.__code__.co_filename.startswith(_DYNAMO):  # it wraps `Module.__init__` at its first trace
            yield value
        for cell in value.__closure__ or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if inside is not value and isinstance(inside, (types.FunctionType, types.MethodType)):
                yield from functions(inside, depth + 1)
        return
    for name in ("__func__", "fget", "func"):
        inside = getattr(value, name, None) if _is_holder(value) else None
        if inside is not None:
            yield from functions(inside, depth + 1)


def inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of the functions that code makes when it runs."""
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield one
            yield from inside(one)


def is_of_python(code: types.CodeType) -> bool:
    """Returns whether code is of torch or of Python itself, whose versions a release has."""
    file = code.co_filename
    if file.startswith((_TORCH, _OWN, "<frozen")):
        return True
    return file.startswith(_STDLIB) and not any(f"{os.sep}{part}-packages{os.sep}" in file for part in ("site", "dist"))


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_DYNAMO = os.path.join(_TORCH, "_dynamo", "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "torch_private", "")
_STDLIB = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


def _is_holder(value: Any) -> bool:
    holders = (staticmethod, classmethod, property, types.MethodType, functools.partial, functools.partialmethod)
    return isinstance(value, (*holders, functools.cached_property))
