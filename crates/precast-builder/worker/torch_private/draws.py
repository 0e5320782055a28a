"""Random operations of a training graph as inputs: torch's own generator draws them, before each call.

A compiled program would draw other numbers than eager. So dropout's mask is an input of the forward program. It is
drawn by the operation that eager calls, in the order of the graph: the generator has the same state after a compiled
call as after an eager one, and the masks are equal.

The name of such an input has all that a process without the graph needs: `random.0.dropout.p0_1.float32.4.8` is the
first mask, of a dropout with probability 0.1 on a float32 tensor of 4 x 8. `order` at the end has the order of the axes
in memory, for a tensor that is not contiguous.

Attention on a GPU also returns the state of a generator, for its backward. Without dropout it draws nothing, and leaves
that memory as it was: such results are zeros.

Private: `OpOverload._schema`, for the arguments and results of an operation. Without it: dropout inside attention goes
unseen.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_PREFIX = "random"
# Results of attention that only dropout writes.
_OF_DROPOUT = ("philox_seed", "philox_offset", "rng_state", "unused")


class Unsupported(Exception):
    """A module that can't be captured for training, and a hint for its author."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Draw:
    """One random input: the mask of a dropout."""

    probability: float
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def name(self, number: int) -> str:
        """Returns the name of the input."""
        text = "p" + repr(self.probability).replace(".", "_").replace("-", "m")
        parts = [_PREFIX, str(number), "dropout", text, str(self.dtype).removeprefix("torch."), *map(str, self.shape)]
        if self.order != tuple(range(len(self.order))):
            parts += ["order", *map(str, self.order)]
        return ".".join(parts)

    @staticmethod
    def of(name: str) -> Draw | None:
        """Returns the draw that a name describes; None for the name of another input."""
        parts = name.split(".")
        if len(parts) < 5 or parts[0] != _PREFIX or parts[2] != "dropout":
            return None
        probability = float(parts[3][1:].replace("_", ".").replace("m", "-"))
        end = parts.index("order") if "order" in parts else len(parts)
        shape = tuple(map(int, parts[5:end]))
        order = tuple(map(int, parts[end + 1 :])) or tuple(range(len(shape)))
        return Draw(probability, getattr(torch, parts[4]), shape, order)

    def sample(self, device: torch.device) -> Tensor:
        """Returns a mask as eager's dropout draws it."""
        physical = [self.shape[axis] for axis in self.order]
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        like = torch.empty(physical, dtype=self.dtype, device=device).permute(back)
        if device.type == "cpu":
            return like.bernoulli_(1 - self.probability).bool().contiguous()
        return torch.ops.aten.native_dropout(like, self.probability, True)[1].contiguous()


def replaced(graph: fx.Graph) -> list[tuple[fx.Node, Draw]]:
    """Replaces each dropout of a joint graph by a product with a mask, a new input; returns these inputs.

    Raises `Unsupported` for any other random operation.
    """
    aten = torch.ops.aten
    found: list[tuple[fx.Node, Draw]] = []
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not _random(node):
            _clear(graph, node)
            continue
        if node.target is not aten.native_dropout.default or not node.args[2] or node.args[1] in (0, 1):
            raise Unsupported(
                f"the module draws random numbers with `{node.target}`: only dropout with a probability between 0 and "
                "1 is compiled for training",
                hint="draw them before the call, and pass them as an input",
            )
        value, probability = node.args[0], float(node.args[1])
        held = value.meta["val"]
        draw = Draw(probability, held.dtype, tuple(held.shape), axes_in_memory(held))
        with graph.inserting_before(first):
            mask = graph.placeholder(f"primals_random_{len(found)}")
        mask.meta["val"] = held.new_empty(held.shape, dtype=torch.bool)
        with graph.inserting_before(node):
            kept = _call(graph, aten.mul.Tensor, value, mask)
            kept = _call(graph, aten.mul.Tensor, kept, 1 / (1 - probability))
        for made in (kept, *kept.all_input_nodes):
            made.meta["custom"] = node.meta.get("custom")
        for user in list(node.users):
            user.replace_all_uses_with(kept if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)
        found.append((mask, draw))
    return found


def axes_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Returns the axes of a tensor, the one with the largest stride first."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis)))


def _clear(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces the results of attention that only dropout writes by zeros."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return
    names = [one.name for one in node.target._schema.returns]  # type: ignore[union-attr]
    for user in list(node.users):
        held = user.meta.get("val")
        at = user.args[1] if user.target is operator.getitem else None
        if isinstance(at, int) and names[at] in _OF_DROPOUT and isinstance(held, Tensor):
            with graph.inserting_after(user):
                options: Any = {"dtype": held.dtype, "device": held.device, "pin_memory": False}
                zeros = graph.call_function(torch.ops.aten.full.default, (list(held.shape), 0), options)
            zeros.meta |= user.meta
            user.replace_all_uses_with(zeros)
            graph.erase_node(user)


def _random(node: fx.Node) -> bool:
    """Returns whether an operation draws random numbers; attention does with a dropout probability other than 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in arguments:
        return True
    at = arguments.index("dropout_p")
    return bool(node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0))


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    with values[0].fake_mode:
        node.meta["val"] = target(*values)
    return node
