"""Cuts a flat graph at region boundaries: runs of operations that become segments, and the tensors between them.

An instance of a region is one call of the outermost module whose FQN matches a glob (`*` matches one part of a dotted
name): a module that is called three times is three steps of one segment. The operations between two instances are glue,
and become separate segments; norm_fusion.py decides about norms between two regions.

Only dense tensors that start their memory pass from part to part. Other views, such as an expanded mask or a slice of a
buffer, are computed again by each part that uses them.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import failures
from ..globs import matches
from ..torch_private import fake, overloads
from ..wire import Failure
from .call import joined, outer_name
from .flat import Flat

# Operations that fill a new tensor: cheaper to run again than to pass on.
_FACTORIES = ("full", "arange", "zeros", "ones", "scalar_tensor")


@dataclass
class Part:
    """One run of operations, with its inputs, weights and results."""

    name: str
    nodes: list[Any]
    glue: bool = False
    inputs: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    # New values of states that an earlier part wrote -> the state, which has them.
    written: dict[Any, Any] = field(default_factory=dict)


def called(flat: Flat) -> list[str]:
    """Returns the names of the submodules that a graph has operations of, inside the captured module."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in flat.graph.nodes)
    return [name for name in dict.fromkeys(_inner(named) for stack in stacks for named, _ in stack.values()) if name]


def check_regions(flat: Flat, patterns: list[str], path: str) -> None:
    """Refuses a region that matches no submodule which the captured module calls."""
    names = called(flat)
    for pattern in patterns:
        if any(matches(pattern, name) or matches(pattern, joined(path, name)) for name in names):
            continue
        globs = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
        where = f" of `{path}`" if path else ""
        raise Failure(
            "no_module",
            f"region `{pattern}` matches no submodule{where} that is called",
            hint=failures.nearest(pattern, globs, "it calls") or "it calls none: leave `regions` out",
            spec=pattern,
        )


def cut(flat: Flat, patterns: list[str], path: str) -> list[Part]:
    """Returns the parts in the order in which they run; without patterns there is one."""
    return connect(runs(flat, patterns, path), flat)


def connect(parts: list[Part], flat: Flat) -> list[Part]:
    """Fills in the writes, inputs, weights and results of each part; leaves out parts without results or writes."""
    _place_writes(parts, flat)
    home = {node: part for part in parts for node in part.nodes}
    for part in parts:
        _imports(part, flat, home)
    used = {node for part in parts for node in part.inputs} | set(flat.outputs)
    used |= {check.outcome for check in flat.checks}
    for part in parts:
        part.outputs = [node for node in part.nodes if node in used]
    return [part for part in parts if part.outputs or any(node in flat.writes for node in part.nodes)]


def _place_writes(parts: list[Part], flat: Flat) -> None:
    """Puts each write into the part that computes the new value, or into the last part that reads the old one.

    Later parts read the new value from the state.
    """
    home = {node: index for index, part in enumerate(parts) for node in part.nodes}
    for write in flat.writes:
        state, value = write.args
        place = max([home.get(value, 0), *(home[node] for node in _readers(state, flat) if node in home)])
        parts[place].nodes.append(write)
        for part in parts[place + 1 :]:
            part.written[value] = state


def _readers(state: Any, flat: Flat) -> set[Any]:
    """Returns the operations that read a state or a view of it, which each part computes again."""
    found: set[Any] = set()
    pending = [state]
    while pending:
        for user in pending.pop().users:
            if user not in found and user not in flat.writes:
                found.add(user)
                if _is_repeated(user, flat):
                    pending.append(user)
    return found


def runs(flat: Flat, patterns: list[str], path: str) -> list[Part]:
    """Returns the runs of operations, with names and operations only."""
    parts: list[Part] = []
    home: dict[Any, Part] = {}
    last: tuple[str, str] | bool | None = False
    glue = 0
    seen: dict[str, int] = {}
    for node in flat.graph.nodes:
        if node.op not in ("call_function", "get_attr") or node in flat.writes:
            continue
        if node.target is operator.getitem and node.args[0] in home:
            home[node] = home[node.args[0]]
            home[node].nodes.append(node)
            continue
        region = _region(node, patterns, path) if patterns else None
        if region != last or not parts:
            if region is None:
                name = f"glue.{glue}" if patterns else "main"
                glue += 1
            else:
                fqn, _ = region
                seen[fqn] = seen.get(fqn, 0) + 1
                name = fqn if seen[fqn] == 1 else f"{fqn}#{seen[fqn]}"
            parts.append(Part(name, [], glue=region is None))
            last = region
        parts[-1].nodes.append(node)
        home[node] = parts[-1]
    return parts


def _inner(named: str) -> str:
    """Returns the name inside the captured module. A strict capture numbers the calls in it."""
    return outer_name("", re.sub(r"@\d+", "", named))


def _region(node: Any, patterns: list[str], path: str) -> tuple[str, str] | None:
    """Returns the FQN of the instance that an operation is in, and an identity of the call."""
    for call, (named, _) in (node.meta.get("nn_module_stack") or {}).items():
        short = _inner(named)
        full = joined(path, short)
        if short and any(matches(pattern, full) or matches(pattern, short) for pattern in patterns):
            return full, f"{call} {named}"
    return None


def _imports(part: Part, flat: Flat, home: dict[Any, Part]) -> None:
    """Fills in the inputs and weights of a part, in order of first use; repeats views that can't be passed on."""
    own = set(part.nodes)
    inputs: dict[Any, None] = {}
    constants: dict[Any, None] = {}
    repeated: list[Any] = []

    def need(value: Any) -> None:
        value = part.written.get(value, value)
        if value in own or value in inputs or value in constants:
            return
        if value in flat.weights:
            constants[value] = None
        elif value.op == "placeholder":
            inputs[value] = None
        elif value.op == "get_attr" or _is_repeated(value, flat):
            own.add(value)
            for argument in value.all_input_nodes:
                need(argument)
            repeated.append(value)
        else:
            inputs[value] = None

    for node in part.nodes:
        for argument in node.all_input_nodes:
            need(argument)
    part.nodes = repeated + part.nodes
    part.inputs, part.constants = list(inputs), list(constants)


def _is_repeated(node: Any, flat: Flat) -> bool:
    """Returns whether a part computes a value again that another part has."""
    held = node.meta["val"]
    if not isinstance(held, torch.Tensor):
        return True
    if not node.all_input_nodes:
        return node.op == "call_function" and overloads.name_of(node.target) in _FACTORIES
    if len(node.all_input_nodes) != 1 or not fake.is_view(node):
        return False
    base = node.all_input_nodes[0]
    weight = any(fake.storage(held) == fake.storage(weight.meta["val"]) for weight in flat.weights)
    return weight or not fake.is_dense(held) or base.op == "placeholder"
