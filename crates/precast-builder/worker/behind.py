"""Moves the norm that begins a region behind the region before it, where one kernel can then do the work of two.

A block of a transformer ends with an addition and the next one begins with a norm of what it gave. Apart, each is a
kernel that reads and writes the hidden state; in one segment the compiler makes one kernel of them, as it does where a
stack is compiled whole. So a region may begin behind its norm and end with that of the next. It does only where that
brings no further segment but the first norm alone: the norm behind the last block is taken for one of theirs, which it
is if it has the same graph, by giving the last instance the results that the others give, wanted or not.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from . import cut, segment
from .cut import Part
from .flat import Flat
from .torch_private import overloads

# Operations that reduce or normalise; what is moved ends with one of them and what follows it point by point.
_REDUCES = {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "mean", "sum", "var", "var_mean"}
_REDUCES |= {"std", "linalg_vector_norm"}
_CASTS = {"to", "_to_copy", "type_as"}


def cut_behind_norms(flat: Flat, patterns: list[str], path: str) -> list[Part]:
    """Returns the parts as `cut.cut` does, with norms moved where that pays."""
    plain = cut.cut(flat, patterns, path)
    runs = cut.runs(flat, patterns, path)
    if not _move(runs):
        return plain
    moved = cut.connect(runs, flat)
    return moved if _give_the_same(moved, flat) <= _distinct(plain, flat) else plain


def _move(parts: list[Part]) -> bool:
    """Moves norms in place; returns whether there was one."""
    found = False
    # The first part has none before it.
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        count = _norm(part.nodes)
        whole = count == len(part.nodes)
        # A region that is a norm and no more was asked for.
        if not count or (whole and (index == 0 or not part.glue)):
            continue
        found = True
        if index == 0:
            parts.insert(0, Part("", part.nodes[:count], glue=True))
        else:
            parts[index - 1].nodes += part.nodes[:count]
        part.nodes = part.nodes[count:]
    parts[:] = [part for part in parts if part.nodes]
    for number, part in enumerate(part for part in parts if part.glue):
        part.name = f"glue.{number}"
    return found


def _norm(nodes: list[Any]) -> int:
    """Returns how many operations at the beginning are a norm: light ones, a reduction among them."""
    count = reduces = 0
    for node in nodes:
        name = overloads.name_of(node.target)
        reduces += name in _REDUCES
        if not (name in _REDUCES or _light(node, name)):
            break
        count += 1
    return count if reduces else 0


def _light(node: Any, name: str) -> bool:
    import torch

    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or name in _CASTS or node.target is operator.getitem


def _give_the_same(parts: list[Part], flat: Flat) -> int:
    """Has parts that differ only in which results others want give the results that any of them gives.

    Returns how many segments there are then that are more than a norm.
    """
    alike: dict[str, list[Part]] = {}
    for part in parts:
        alike.setdefault(_text(part, flat, []), []).append(part)
    for group in alike.values():
        places = [[part.nodes.index(node) for node in part.outputs] for part in group]
        wanted = sorted({place for one in places for place in one})
        for part in group:
            part.outputs = [part.nodes[place] for place in wanted]
    return sum(not _is_norm(group[0]) for group in alike.values())


def _distinct(parts: list[Part], flat: Flat) -> int:
    """Returns how many segments there are that are more than a norm."""
    return len({_text(part, flat, part.outputs) for part in parts if not _is_norm(part)})


def _is_norm(part: Part) -> bool:
    return _norm(part.nodes) == len(part.nodes)


def _text(part: Part, flat: Flat, outputs: list[Any]) -> str:
    return segment.build(replace(part, outputs=outputs), flat).text
