"""Reads and writes safetensors files. Written bytes are deterministic: tensors are contiguous, without holes.

Every tensor starts at a multiple of its element's size, because larger elements come first. The data starts at a
multiple of 64 bytes. Tensors whose size is a multiple of 64 bytes are before the others, so that each of them starts at
one too: products of a matrix have other last bits at other addresses, and torch's own tensors start at such ones.

The worker needs torch alone, so it writes and reads the files itself, and not by the package `safetensors`, whose order
has the larger elements first but not those multiples.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch

from .torch_private.symbols import example

ALIGN = 64

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def dtype_name(dtype: Any) -> str:
    """Returns torch's name of a dtype without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")


def supported(dtype: Any) -> bool:
    """Returns whether records and weight sets can hold this dtype."""
    return dtype_name(dtype) in DTYPES


def layout(tensor: Any) -> dict[str, Any]:
    """Returns the protocol's `Layout` of a tensor; symbolic sizes have their values at the capture."""
    shape, stride = ([example(size) for size in sizes] for sizes in (tensor.shape, tensor.stride()))
    return {"dtype": dtype_name(tensor.dtype), "shape": shape, "stride": stride}


def dense(shape: Any) -> list[int]:
    """Returns the strides of a tensor in row-major order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def digest(tensor: Any) -> str:
    """Returns the SHA-256 of a tensor's values in row-major order."""
    plain = tensor.detach().cpu().contiguous()
    return hashlib.sha256(_bytes(plain)).hexdigest()


def write(path: Path, tensors: dict[str, Any]) -> Path:
    """Writes named tensors; they are copied to the CPU one by one, in row-major order."""

    def size(name: str) -> int:
        return tensors[name].numel() * tensors[name].element_size()

    order = sorted(tensors, key=lambda name: (size(name) % ALIGN != 0, -tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + size(name)
        shape = [int(length) for length in tensor.shape]
        header[name] = {"dtype": DTYPES[dtype_name(tensor.dtype)], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            plain = tensors[name].detach().cpu().contiguous()
            file.write(_bytes(plain))
    return path


def read(path: Path, maps: list[mmap.mmap] | None = None) -> dict[str, Any]:
    """Maps a safetensors file: data is read on use, and writes into the tensors stay in memory. `maps` gets the map."""
    names = {short: name for name, short in DTYPES.items()}
    with open(path, "rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if 8 + length <= size else None
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise ValueError("it is no safetensors file, or it was cut off")
        start = file.tell()
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if maps is not None:
        maps.append(data)
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        try:
            begin, end = map(int, entry["data_offsets"])
            shape, kind = [int(axis) for axis in entry["shape"]], str(entry["dtype"])
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"its header does not say where tensor `{name}` is") from None
        if kind not in names:
            raise ValueError(f"tensor `{name}` is {kind}; weight sets have {', '.join(names)}")
        dtype = getattr(torch, names[kind])
        count = math.prod(shape)
        if min([begin, *shape]) < 0 or end - begin != count * dtype.itemsize:
            raise ValueError(f"tensor `{name}` is {kind} {shape} and has {end - begin} bytes")
        if start + end > size:
            raise ValueError(f"it was cut off: tensor `{name}` ends at byte {start + end} of {size}")
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin) if count else None
        found[name] = (torch.empty(0, dtype=dtype) if flat is None else flat).reshape(shape)
    return found


def _bytes(tensor: Any) -> Any:
    """Returns the memory of a contiguous CPU tensor, which the caller keeps alive."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
