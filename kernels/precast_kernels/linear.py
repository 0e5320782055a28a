"""Fused linear: one product instead of several products of the same rows.

Query, key and value of attention, or both halves of a gated layer, are products of the same rows. On a device, each is
a kernel that ends before it has filled the device; the fused product reads the rows once. On a CPU, a call of oneDNN
takes about 14 us before it computes anything, as long as 4 threads take to multiply 32 rows by a matrix of 512 x 128.
There the compiler fuses two or three matrices of one shape by itself; here matrices may have different widths, as in
grouped-query attention.

The fused matrix is a prepacked weight: the concatenation of the others. On a device the runtime uploads those
contiguously, so that it takes no further memory. On an H200 a prefill of `benches/models/llama` at 64 tokens took 1.03
ms with it, and 1.28 ms before it and one other change.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

# The most operations between two products that are fused: the first result is kept until the last is read.
_MAX_DISTANCE = 16


class FusedLinear:
    """The pass `fused_linear`."""

    def segment(self, module: Any, context: Any) -> None:
        """Fuses products of the same rows with weights."""
        fuse(module, context)


def fuse(module: Any, context: Any) -> None:
    """Fuses products of the same rows with weights of a module."""
    aten = torch.ops.aten
    alike: dict[Any, list[list[Any]]] = {}
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        if node.kwargs or not _fusible(node, context):
            continue
        rows, *weights = node.args
        kinds = tuple(value.meta["val"].dtype for value in weights)
        runs = alike.setdefault((rows, weights[0].meta["val"].shape[1], kinds), [])
        if runs and places[node] - places[runs[-1][-1]] <= _MAX_DISTANCE:
            runs[-1].append(node)
        else:
            runs.append([node])
    for products in (run for runs in alike.values() for run in runs):
        if len(products) > 1:
            _fuse(module.graph, products, context)


def _fusible(product: Any, context: Any) -> bool:
    """Returns whether a product has constant weights, and a result that may have gaps between its rows."""
    _, *weights = product.args
    return (
        all(context.is_constant(value) for value in weights)
        and [value.meta["val"].dim() for value in weights] in ([2], [2, 1])
        and all(value.meta["val"].is_contiguous() for value in weights)
        and _may_have_gaps(product)
    )


def _may_have_gaps(node: Any) -> bool:
    """Returns whether all readers of a value, and of views of it, take it with gaps between its rows.

    A result of the segment has the layout of its record; `as_strided` and custom operators read the memory itself.
    """
    aten = torch.ops.aten
    for user in node.users:
        if _is_view(user):
            if user.target in (aten.as_strided.default, aten._unsafe_view.default) or not _may_have_gaps(user):
                return False
        elif user.op != "call_function" or getattr(user.target, "namespace", "") not in ("aten", "prims"):
            return False
    return True


def _is_view(node: Any) -> bool:
    """Returns whether a node's result may share memory with its argument; in eval mode, that of dropout does."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return schema.name == "aten::dropout" or any(made.alias_info is not None for made in schema.returns)


def _fuse(graph: Any, products: list[Any], context: Any) -> None:
    aten = torch.ops.aten
    rows = products[0].args[0]
    with graph.inserting_before(products[0]):
        columns = zip(*(node.args[1:] for node in products), strict=True)
        weights = [_concatenated(graph, list(column), context) for column in columns]
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
            _reshape(node)
            node.replace_all_uses_with(part)
    whole.meta = {**products[0].meta, "val": torch.cat([node.meta["val"] for node in products], -1)}
    for node in products:
        graph.erase_node(node)


def _reshape(node: Any) -> None:
    """Replaces `view` on a value by `reshape`, which copies where the value has gaps."""
    for user in node.users:
        if _is_view(user):
            _reshape(user)
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default


def _concatenated(graph: Any, weights: list[Any], context: Any) -> Any:
    """Returns the concatenation of weights, prepacked; None if it can't be prepacked."""
    copies = [graph.node_copy(weight) for weight in weights]
    return context.prepack(graph.call_function(torch.ops.aten.cat.default, (copies, 0)))
