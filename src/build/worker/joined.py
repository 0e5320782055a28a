"""Makes one product of those that multiply the same rows, as a query, a key and a value: one call, and one matrix.

Torch does so for two or three matrices of one shape. Where heads share keys and values, those have fewer columns;
apart, the small products cost a call each, and each has the threads wait for each other once more. On a CPU a call of
oneDNN is about 14 us before it computes anything, as much as it takes 4 threads to multiply 32 rows by a matrix of
512 x 128.
"""

from __future__ import annotations

from typing import Any


def join(graph: Any, apart: Any) -> None:
    """Joins products of the same rows with constants of a frozen graph, but those that `apart` says must stay apart."""
    import torch

    aten = torch.ops.aten
    alike: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs and not apart(node):
            *bias, rows, matrix = node.args
            if all(_constant(value, dims) for value, dims in ((matrix, 2), *((value, 1) for value in bias))):
                alike.setdefault((node.target, rows, matrix.meta["val"].dtype), []).append(node)
    for (target, rows, _), products in alike.items():
        if len(products) > 1:
            _join(graph, target, rows, products)


def _constant(node: Any, dims: int) -> bool:
    return getattr(node, "op", "") == "get_attr" and node.meta["val"].dim() == dims


def _join(graph: Any, target: Any, rows: Any, products: list[Any]) -> None:
    import torch

    aten = torch.ops.aten

    def beside(constants: list[Any], dim: int) -> Any:
        copies = [graph.node_copy(node) for node in constants]
        made = graph.call_function(aten.cat.default, (copies, dim))
        made.meta = {"val": torch.cat([node.meta["val"] for node in constants], dim)}
        return made

    with graph.inserting_before(products[0]):
        columns = beside([node.args[-1] for node in products], 1)
        bias = [beside([node.args[0] for node in products], 0)] if target is aten.addmm.default else []
        whole = graph.call_function(target, (*bias, rows, columns))
        whole.meta = {"val": target(*(node.meta["val"] for node in whole.args))}
        start = 0
        for node in products:
            end = start + node.meta["val"].shape[1]
            part = graph.call_function(aten.slice.Tensor, (whole, 1, start, end))
            part.meta = {**node.meta, "val": whole.meta["val"][:, start:end]}
            start = end
            for user in list(node.users):
                # A part has gaps between its rows.
                if user.target in (aten.view.default, aten._unsafe_view.default):
                    user.target = aten.reshape.default
            node.replace_all_uses_with(part)
    for node in products:
        graph.erase_node(node)
