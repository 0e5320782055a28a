"""The runtime's eager, called from Python: the C++ of the shim, compiled with the torch of these tests.

It takes the calls that the worker writes; `calls.rs` does the same in the runtime.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .support import ROOT, part

_SHIM = ROOT / "crates/precast-shim/cpp"
_FILES = ("eager.cpp", "shim.cpp")
# As `Kind` of arguments.h.
_KINDS = {"none": 0, "int": 4, "float": 6, "bool": 8, "string": 10, "dtype": 11, "layout": 12, "memory_format": 13}
_KINDS |= {"device": 14, "complex": 15, "value": 16}


class _Fixed(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("text", ctypes.c_char_p),
    ]


class _Given(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("is_list", ctypes.c_int32),
        ("items", ctypes.POINTER(_Fixed)),
        ("n", ctypes.c_size_t),
    ]


@functools.cache
def library(files: tuple[str, ...] = _FILES) -> ctypes.CDLL:
    """Returns these files of the shim, compiled once for each torch and each text of theirs."""
    from torch.utils.cpp_extension import include_paths, library_paths

    digest = hashlib.sha256(f"{torch.__version__} {files}".encode())
    for path in sorted([*_SHIM.glob("*.h"), *(_SHIM / name for name in files)]):
        digest.update(path.read_bytes())
    made = ROOT / "target" / "shim" / f"{digest.hexdigest()[:16]}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        new = made.with_suffix(f".{os.getpid()}")
        headers = [f"-I{path}" for path in include_paths()]
        command = [
            "g++",
            "-O2",
            "-shared",
            "-fPIC",
            f"-std={cpp_standard()}",
            *headers,
            *(str(_SHIM / name) for name in files),
        ]
        libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, *libraries, "-o", str(new)], check=True)
        new.replace(made)
    shim = ctypes.CDLL(str(made))
    shim.precast_last_error.restype = ctypes.c_char_p
    return shim


def cpp_standard() -> str:
    """Returns the version of C++ that torch's headers ask for."""
    return "c++20" if part("torch_private.versions").in_use() >= (2, 12) else "c++17"


class Refused(Exception):
    """The shim's error for calls that it can't make."""


def run(document: Path | dict[str, Any], inputs: list[Any]) -> list[Any]:
    """Runs a list of calls on tensors: the module's inputs, then its weights."""
    graph = json.loads(document.read_text()) if isinstance(document, Path) else document
    with loaded(graph) as handle:
        return call(library().precast_calls_run, handle, inputs, len(graph["outputs"]))


def call(function: Any, handle: ctypes.c_void_p, inputs: list[Any], outputs: int) -> list[Any]:
    given = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
    pointers = [ctypes.pythonapi.PyCapsule_GetPointer(one, None) for one in given]
    results = (ctypes.c_void_p * outputs)()
    try:
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        _checked(function(handle, array, ctypes.c_size_t(len(pointers)), results, ctypes.c_size_t(outputs)))
    finally:
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(given)
    capsules = [ctypes.pythonapi.PyCapsule_New(one, None, None) for one in results]
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)


@contextmanager
def loaded(graph: dict[str, Any]) -> Iterator[ctypes.c_void_p]:
    """Gives a graph, resolved, for as long as the block runs."""
    handle = _made(graph)
    try:
        yield handle
    finally:
        library().precast_calls_delete(handle)


def _made(graph: dict[str, Any]) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _checked(library().precast_calls_new(b"cpu", ctypes.c_size_t(graph["inputs"]), ctypes.byref(handle)))
    for call in graph["calls"]:
        given = [_given(name, value) for name, value in call["args"].items()]
        array, results = (_Given * len(given))(*given), _results(call["results"])
        size = ctypes.c_size_t
        tail = (array, size(len(given)), (ctypes.c_int64 * len(results))(*results), size(len(results)))
        if call["op"] == "cond":
            code = library().precast_calls_add_cond(handle, *(_made(inner) for inner in call["graphs"]), *tail)
        else:
            name, _, overload = call["op"].partition(".")
            code = library().precast_calls_add(handle, name.encode(), overload.encode(), *tail)
        _checked(code, call["op"])
    outputs = graph["outputs"]
    _checked(
        library().precast_calls_finish(handle, (ctypes.c_int64 * len(outputs))(*outputs), ctypes.c_size_t(len(outputs)))
    )
    return handle


def _results(results: list[Any]) -> list[int]:
    numbers = []
    for one in results:
        many = isinstance(one, list)
        numbers += [-2 - len(one)] if many else []
        numbers += [-1 if number is None else number for number in (one if many else [one])]
    return numbers


def _given(name: str, value: Any) -> _Given:
    items = [_fixed(one) for one in (value if isinstance(value, list) else [value])]
    return _Given(name.encode(), isinstance(value, list), (_Fixed * len(items))(*items), len(items))


def _fixed(value: Any) -> _Fixed:
    if value is None:
        return _Fixed(_KINDS["none"])
    if isinstance(value, bool | int):
        return _Fixed(_KINDS["bool" if isinstance(value, bool) else "int"], int(value))
    if isinstance(value, str):
        return _Fixed(_KINDS["string"], 0, 0, value.encode())
    ((kind, held),) = value.items()
    if kind == "float":
        return _Fixed(_KINDS[kind], 0, float(held))
    if kind == "complex":
        return _Fixed(_KINDS[kind], 0, float(held[0]), held[1].encode())
    if kind == "device":
        return _Fixed(_KINDS[kind], 0, 0, held.encode())
    return _Fixed(_KINDS[kind], held)


def _checked(code: int, what: str = "") -> None:
    if code:
        raise Refused(f"{what}: {library().precast_last_error().decode()}".lstrip(": "))


ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
