"""Runs a compiled artifact through its C functions, as the Rust runtime does, on the CPU or a CUDA device."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_Handle = ctypes.c_void_p


class _Pair(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("handle", _Handle))


def run(library: str, device: str, weights: dict[str, Any], inputs: list[Any], outputs: int) -> list[Any]:
    """Loads, binds weights by their names `c0`, `c1`, …, runs once; the container is left to the process's end."""
    import torch

    # A Python that holds other C++ libraries may have other versions of the templates an artifact brings (std::regex):
    # its own come first.
    code = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
    container = _Handle()

    def call(name: str, *arguments: Any) -> None:
        status = getattr(code, f"AOTInductorModelContainer{name}")(*arguments)
        assert status == 0, f"{name} failed"

    call("CreateWithDevice", ctypes.byref(container), ctypes.c_size_t(1), device.encode(), None)
    count = ctypes.c_size_t()
    call("GetNumConstants", container, ctypes.byref(count))
    pairs = (_Pair * count.value)()
    for index in range(count.value):
        name, original = ctypes.c_char_p(), ctypes.c_char_p()
        call("GetConstantName", container, ctypes.c_size_t(index), ctypes.byref(name))
        call("GetConstantOriginalFQN", container, ctypes.c_size_t(index), ctypes.byref(original))
        assert original.value is not None
        pairs[index] = _Pair(name.value, _handle(weights[original.value.decode()]))
    arguments = (ctypes.c_size_t(count.value), ctypes.c_bool(False), ctypes.c_bool(True))
    call("UpdateUserManagedConstantBufferPairs", container, pairs, *arguments)
    given = (_Handle * len(inputs))(*[_handle(value) for value in inputs])
    made = (_Handle * outputs)()
    counts = (ctypes.c_size_t(len(inputs)), made, ctypes.c_size_t(outputs))
    call("Run", container, given, *counts, None, None)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [_Handle, ctypes.c_char_p, _Handle]
    steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
    results = [steal(capsule(handle, None, None)) for handle in made]
    if device != "cpu":
        torch.cuda.synchronize()
    return results


def _handle(tensor: Any) -> int:
    import torch

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = _Handle, [ctypes.py_object, ctypes.c_char_p]
    return pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)
