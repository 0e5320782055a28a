"""Graphs that Dynamo hands over, as functions of tensors without side effects.

AOTAutograd makes a forward and a backward graph of each, or one for inference: parameters and buffers are inputs, and
values that are written in place are results.

Private: `aot_autograd`, `min_cut_rematerialization_partition`, `make_fx` and `counters`. Without them: no backend
`"precast"`.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from . import draws
from .saved import separate


def through_autograd(graph: fx.GraphModule, inputs: Sequence[Any], compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a graph of Dynamo; `compiler` gets its forward and backward graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from .partition import _decompositions

    def cut(joint: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        for node in joint.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                # In a checkpoint: a mask is drawn once.
                for one in (node, *node.users):
                    one.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return min_cut_rematerialization_partition(joint, *arguments, **options)

    function: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=cut,
        decompositions=_decompositions(),
    )(graph, inputs)
    return function


def count(name: str) -> None:
    """Counts an event of the backend, beside those of Dynamo."""
    from torch._dynamo.utils import counters

    counters["precast"][name] += 1


def text(graph: fx.GraphModule) -> list[str]:
    """Returns the canonical text of a graph, with the values of its constants."""
    found = []
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        found.append(module.code)
        for node in module.graph.nodes:
            if node.op == "get_attr" and isinstance(held := operator.attrgetter(node.target)(module), Tensor):
                raw = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found.append(f"{node.target} {held.dtype} {list(held.shape)} {hashlib.sha256(raw).hexdigest()}")
            elif "triton_kernel" in str(node.target):
                raise draws.Unsupported("the graph has a Triton kernel of the user's")
    return found


@dataclass
class Static:
    """A graph for fixed sizes: a module that runs it, and what the results of the graph are.

    A result is `["output", n]` of the module, `["input", n]`, or `["value", v]`.
    """

    module: nn.Module
    masks: dict[str, draws.Draw]
    results: list[Any]
    count: int


def static(graph: fx.GraphModule, given: Sequence[Any], orders: Sequence[Sequence[int] | None]) -> Static:
    """Returns a graph for inputs of these sizes; numbers among them are constants.

    The module takes the tensors, each with its axes in the order of memory (`orders`), and then the masks of dropouts.
    """
    tensors = [one.detach() for one in given if isinstance(one, Tensor)]

    def call(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        return fx.Interpreter(graph).run(*(next(rest) if isinstance(one, Tensor) else one for one in given))

    from torch._inductor import inductor_prims

    # A worker that compiles may not have registered Inductor's own operator.
    table: dict[Any, Any] = {torch.ops.aten.scatter.value: _scatter}
    if (fma := getattr(inductor_prims, "fma", None)) is not None:
        table[fma] = _multiplied
    with torch.no_grad():
        made = make_fx(call, table, tracing_mode="fake")(*tensors)
    body = made.graph
    masks = {draw.name(at): draw for at, (_, draw) in enumerate(draws.replaced(body))}
    body.eliminate_dead_code()
    places = {node: at for at, node in enumerate(body.find_nodes(op="placeholder"))}
    (last,) = body.find_nodes(op="output")
    outputs: dict[str, fx.Node] = {}
    numbers: dict[fx.Node, int] = {}
    results: list[Any] = []
    for one in last.args[0]:
        if not isinstance(one, fx.Node):
            results.append(["value", one])
        elif one in places:
            results.append(["input", places[one]])
        else:
            at = numbers.setdefault(one, len(numbers))
            outputs[str(at)] = one
            results.append(["output", at])
    separate(body, outputs)
    last.args = (tuple(outputs.values()),)
    last.meta.clear()
    body.lint()
    return Static(_Runs(made, orders), masks, results, len(outputs))


def _scatter(tensor: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    """Scatters in float32: Inductor gives the result of one in half precision that dtype."""
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return tensor.float().scatter(dim, index, value).to(tensor.dtype)


def _multiplied(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


class _Runs(nn.Module):
    """Runs a graph on tensors whose axes are in the order of memory."""

    def __init__(self, graph: fx.GraphModule, orders: Sequence[Sequence[int] | None]) -> None:
        super().__init__()
        # In a tuple: the graph module is no submodule.
        self._graph = (graph, [None if one is None else _inverse(one) for one in orders])

    def forward(self, *tensors: Any) -> Any:
        graph, backs = self._graph
        turned = [one if back is None else one.permute(back) for one, back in zip(tensors, backs, strict=False)]
        return fx.Interpreter(graph).run(*turned, *tensors[len(turned) :])


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
