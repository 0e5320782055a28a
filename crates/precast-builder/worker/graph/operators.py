"""Custom operators: whether they run without Python, and the libraries that they come from."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .. import failures
from ..torch_private import overloads
from ..wire import Failure
from .call import outer_name

# Namespaces of libtorch's own operators.
OWN = ("aten", "prims", "prim", "quantized", "mkldnn", "inductor", "higher_order")

# Operators of ATen by the values of their result. All values of the first argument, perhaps several times:
KEEPING = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "contiguous"}
KEEPING |= {"clone", "alias", "detach", "flatten", "unflatten", "transpose", "t", "permute", "movedim", "repeat"}
KEEPING |= {"tile", "broadcast_to", "flip", "roll", "lift_fresh_copy", "swapaxes", "reshape_as"}
# The same in another dtype:
CASTS = {"to", "_to_copy", "type_as"}
# Some values of the first argument:
PASSING = KEEPING | {"slice", "select", "index_select", "gather", "index", "narrow", "split", "chunk", "unbind"}
PASSING |= {"split_with_sizes", "unfold", "take_along_dim", "amax", "amin"}
# Values that depend only on the shape of the first argument:
OF_SHAPES = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}


def custom(nodes: Iterable[Any]) -> dict[str, Any]:
    """Returns the custom operators of a graph by qualified name, each with a node that calls it."""
    found: dict[str, Any] = {}
    for node in nodes:
        # An operator that writes into its inputs is an argument of the node that makes it functional.
        for target in (node.target, *getattr(node, "args", ())):
            if overloads.is_overload(target) and target.namespace not in OWN:
                found.setdefault(overloads.qualified_name(target), node)
    return found


def inline(program: Any, device: str, root: Path) -> Any:
    """Returns an exported program with the bodies of operators whose kernels are Python in place of their calls."""
    bodies, nodes = {}, {}
    for name, node in custom(program.graph.nodes).items():
        body = None if overloads.has_native_kernel(name, device) else overloads.python_body(name, device)
        # An operator that writes into its inputs is functionalised, and then refused by `check`.
        if body is not None and overloads.is_overload(node.target) and not overloads.is_mutable(node.target):
            bodies[node.target], nodes[node.target] = body, (name, node)
    for target, body in bodies.items():
        try:
            program = program.run_decompositions({target: body})
        except Exception as error:
            name, node = nodes[target]
            why = f"and its body can't be traced: {failures.named(error)}"
            raise _refused(name, node, device, root, why) from error
    return program


def check(nodes: Iterable[Any], device: str, root: Path) -> None:
    """Refuses operators whose kernels are Python and that are not traced: an artifact runs without Python."""
    for name, node in custom(nodes).items():
        if not overloads.has_native_kernel(name, device):
            raise _refused(name, node, device, root, "and no function whose body can be traced")


def _refused(name: str, node: Any, device: str, root: Path, why: str) -> Failure:
    hint = (
        "register it in C++ (TORCH_LIBRARY_IMPL) in a library that the entry loads with torch.ops.load_library, or "
        "write its body in torch operations under `torch.library.custom_op`"
    )
    if name.startswith("transformers::"):
        hint = 'give the model\'s config another implementation, as `experts_implementation="batched_mm"` for experts'
    return Failure(
        "capture",
        f"operator `{name}`, called by {caller(node)}, has no C++ kernel for {device}, only Python, {why}",
        location=failures.line_of(node, root),
        hint=hint,
    )


def caller(node: Any) -> str:
    """Returns the module whose code calls an operator."""
    stack = list((getattr(node, "meta", {}).get("nn_module_stack") or {}).values())
    path = outer_name("", str(stack[-1][0]).removeprefix("L['self'].")) if stack else ""
    return f"`{path}`" if path else "the model"


def libraries(nodes: Iterable[Any]) -> list[str]:
    """Returns the libraries that the custom operators of a graph come from, in the order of their digests."""
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
    for path in paths:
        torch.ops.load_library(path)
    if module and module not in sys.modules:
        if root not in sys.path:
            sys.path.insert(0, root)
        importlib.import_module(module)
