"""Repeated submodules: lists of one class, such as the blocks of a transformer, and facts to compare their members."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from .. import tensors
from ..graph import segment
from ..torch_private import modules


@dataclass
class Repeat:
    """Submodules of one class whose names differ in numbers only."""

    # A glob of their names, as a region is written.
    glob: str
    kind: type
    members: dict[str, Any]


@dataclass(frozen=True)
class Fact:
    """A fact that a module's graph depends on."""

    # `class`, `dtype`, `shape`, `values`, `flag` or `constant`.
    kind: str
    value: str


def find(model: Any) -> list[Repeat]:
    """Returns the outermost submodules that repeat and consist of others, in the order of the model."""
    found: dict[tuple[str, type], dict[str, Any]] = {}

    def walk(module: Any, name: str) -> None:
        lists: dict[tuple[str, type], dict[str, Any]] = {}
        for last, child in module.named_children():
            full = f"{name}.{last}" if name else last
            if last.isdigit() and name and any(True for _ in child.children()):
                lists.setdefault((f"{name}.*", type(child)), {})[full] = child
            else:
                walk(child, full)
        for key, members in lists.items():
            if len(members) > 1:
                found[key] = members
            else:
                for full, child in members.items():
                    walk(child, full)

    walk(model, "")
    return [Repeat(glob, kind, members) for (glob, kind), members in found.items()]


def facts(module: Any) -> dict[str, Fact]:
    """Returns the facts that a module's graph depends on, by attribute; values of weights are none."""
    found: dict[str, Fact] = {}
    for path, part in module.named_modules():
        head = f"{path}." if path else ""
        kind = type(part)
        found[path or "class"] = Fact("class", f"{kind.__module__}.{kind.__qualname__}")
        found[f"{head}training"] = Fact("flag", str(part.training))
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            layout = tensors.layout(tensor)
            found[f"{head}{name}"] = Fact("dtype", layout["dtype"])
            found[f"{head}{name}.shape"] = Fact("shape", str(layout["shape"]))
            if segment.keeps_values(tensor):
                found[f"{head}{name} (values)"] = Fact("values", f"sha256 {tensors.digest(tensor)[:12]}")
        for name, value in modules.own_attributes(part):
            fact = _plain(value)
            if fact is not None:
                found[f"{head}{name}"] = fact
    return found


def _plain(value: Any) -> Fact | None:
    """Returns an attribute as a fact, if it is a plain value or a function."""
    if isinstance(value, bool):
        return Fact("flag", str(value))
    if value is None or isinstance(value, int | float | complex | str | torch.dtype | torch.device | torch.Size):
        return Fact("constant", repr(value))
    if isinstance(value, list | tuple) and all(
        one is None or isinstance(one, bool | int | float | str) for one in value
    ):
        return Fact("constant", repr(value))
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return Fact("constant", f"{value.__module__}.{value.__qualname__}")
    return None
