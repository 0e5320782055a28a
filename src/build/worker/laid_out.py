"""Weights as a device's kernels want them: one matrix for products of the same rows, and filters channels last.

The query, the key and the value of attention, or both halves of a gated layer, are products of the same rows. Apart,
each is a kernel that is over before it has filled the device; as one they read the rows once. Filters that a model
holds in torch's usual order are turned before every convolution, where the compiler works channels last; that is a
kernel for each as well.

What is made of weights has a recipe, as on a CPU (prepared.py), and the runtime makes it once for each weight set. It
lets matrices that are joined lie one behind the other on a device, so that to join them costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import prepared


def join(module: Any) -> dict[str, prepared.Recipe]:
    """Makes one product of those that multiply the same rows with weights of a module; returns what it is made of."""
    import torch

    aten = torch.ops.aten
    known = {name for name, _ in module.named_buffers()}
    alike: dict[Any, list[Any]] = {}
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        rows, matrix, bias = (*node.args, None)[:3]
        weights = [matrix] if bias is None else [matrix, bias]
        if node.kwargs or not all(_is_weight(value) for value in weights):
            continue
        dtypes = tuple(value.meta["val"].dtype for value in weights)
        alike.setdefault((rows, matrix.meta["val"].shape[1], dtypes), []).append(node)
    made: dict[str, prepared.Recipe] = {}
    for (rows, *_), products in alike.items():
        if len(products) > 1:
            _join(module, rows, products, known, made)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return made


def _is_weight(node: Any) -> bool:
    return getattr(node, "op", "") == "get_attr" and node.meta["val"].is_contiguous()


def _join(module: Any, rows: Any, products: list[Any], known: set[str], made: dict[str, prepared.Recipe]) -> None:
    import torch

    aten, graph = torch.ops.aten, module.graph
    with graph.inserting_before(products[0]):
        columns = zip(*(node.args[1:] for node in products), strict=True)
        weights = [_beside(module, list(column), known, made) for column in columns]
        if None in weights:
            return
        whole = graph.call_function(aten.linear.default, (rows, *weights))
        start = 0
        for node in products:
            held = node.meta["val"]
            end = start + held.shape[-1]
            part = graph.call_function(aten.slice.Tensor, (whole, held.dim() - 1, start, end))
            part.meta = dict(node.meta)
            start = end
            for user in list(node.users):
                # A part has gaps between its rows.
                if user.target is aten.view.default:
                    user.target = aten.reshape.default
            node.replace_all_uses_with(part)
    whole.meta = {**products[0].meta, "val": torch.cat([node.meta["val"] for node in products], -1)}
    for node in products:
        graph.erase_node(node)


def _beside(module: Any, weights: list[Any], known: set[str], made: dict[str, prepared.Recipe]) -> Any:
    """Returns a constant that is these weights, one behind the other; none where no recipe can say that."""
    import torch

    copies = [module.graph.node_copy(weight) for weight in weights]
    made_of = module.graph.call_function(torch.ops.aten.cat.default, (copies, 0))
    return prepared.constant(module, made_of, known, made)


def channels_last(known: set[str], made: dict[str, prepared.Recipe]) -> Callable[[Any], None]:
    """Returns a pass over the graph that is lowered, which has filters laid out once where the compiler works channels
    last; `made` gets what they are made of.

    Breaks if: `GraphLowering.decide_layout_opt` is no longer what decides.
    """

    def run(graph: Any) -> None:
        from torch._inductor.graph import GraphLowering

        module = graph.owning_module
        if GraphLowering.decide_layout_opt(module, is_inference=True):
            _turn_filters(module, known, made)

    return run


def _turn_filters(module: Any, known: set[str], made: dict[str, prepared.Recipe]) -> None:
    import torch

    aten, graph = torch.ops.aten, module.graph
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        weight = node.args[1]
        if weight.op != "get_attr" or weight.target not in known:
            continue
        held = weight.meta["val"]
        if held.dim() != 4 or held.is_contiguous(memory_format=torch.channels_last):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(
                aten.clone.default, (graph.node_copy(weight),), {"memory_format": torch.channels_last}
            )
            constant = prepared.constant(module, turned, known, made)
        if constant is not None:
            node.update_arg(1, constant)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
