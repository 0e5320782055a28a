"""Custom operators: whether they run without Python, and the libraries that they come from."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import failures
from .torch_private import overloads
from .wire import Failure

# Namespaces of libtorch's own operators.
OWN = ("aten", "prims", "prim", "quantized", "mkldnn", "inductor", "higher_order")


def custom(nodes: Iterable[Any]) -> dict[str, Any]:
    """Returns the custom operators of a graph by qualified name, each with a node that calls it."""
    found: dict[str, Any] = {}
    for node in nodes:
        # An operator that writes into its inputs is an argument of the node that makes it functional.
        for target in (node.target, *getattr(node, "args", ())):
            if overloads.is_overload(target) and target.namespace not in OWN:
                found.setdefault(overloads.qualified_name(target), node)
    return found


def check(nodes: Iterable[Any], device: str, root: Path) -> None:
    """Refuses operators whose kernels are Python: an artifact runs without Python."""
    for name, node in custom(nodes).items():
        if not overloads.has_native_kernel(name, device):
            raise Failure(
                "capture",
                f"operator `{name}` has no C++ kernel for {device}, only Python",
                location=failures.from_stack_trace(getattr(node, "stack_trace", None), root),
                hint="register it in C++ (TORCH_LIBRARY_IMPL) in a library that the entry loads with "
                "torch.ops.load_library, or leave the module to eager Python with `enabled = false`",
            )


def libraries(nodes: Iterable[Any]) -> list[str]:
    """Returns the libraries that the custom operators of a graph come from, in the order of their digests."""
    import torch

    names = custom(nodes)
    loaded = {path: Path(path).read_bytes() for path in torch.ops.loaded_libraries if Path(path).is_file()}
    needed: dict[str, str] = {}
    for name in names:
        space, _, plain = name.partition("::")
        holding = [path for path, data in loaded.items() if space.encode() in data and plain.encode() in data]
        for path in holding or loaded:
            needed[hashlib.sha256(loaded[path]).hexdigest()] = path
    return [needed[digest] for digest in sorted(needed)]


def digests(paths: Iterable[str]) -> list[str]:
    """Returns the SHA-256 of each library."""
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]


def load(paths: Iterable[str], root: str, module: str) -> None:
    """Loads libraries, and the module that registers their fake kernels, in a worker that has not opened the model."""
    import torch

    for path in paths:
        torch.ops.load_library(path)
    if module and module not in sys.modules:
        if root not in sys.path:
            sys.path.insert(0, root)
        importlib.import_module(module)
