"""Rows that are added to a table, on a CPU, without two copies of the table.

The gradient of an embedding is a table of zeros to which the gradients of the tokens are added. The compiler has this
as `index_put`, for which it calls a function of libtorch that copies the table, adds to the copy, and copies it back.
`scatter_add` adds the same in place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import nodes


def rewrite(graph: Any) -> None:
    """Has rows that are added to a table by one list of numbers be added in place."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        table, numbers, rows, adds = [*node.args, False][:4]
        if node.kwargs or not adds or len(numbers) != 1:
            continue
        held = [one.meta["val"] for one in (table, numbers[0], rows)]
        shapes = [tuple(one.shape) for one in held]
        if len(shapes[0]) != 2 or shapes[2] != (*shapes[1], shapes[0][1]) or held[1].dtype != torch.int64:
            continue
        if any(one.device.type != "cpu" for one in held):
            continue
        _scatter(graph, node, table, numbers[0], rows)


def _scatter(graph: Any, node: Any, table: Any, numbers: Any, rows: Any) -> None:
    aten = torch.ops.aten
    count, width = table.meta["val"].shape
    call = partial(nodes.call, graph)
    with graph.inserting_before(node):
        # A number below zero counts from the end.
        below, wrapped = call(aten.lt.Scalar, numbers, 0), call(aten.add.Scalar, numbers, count)
        numbers = call(aten.where.self, below, wrapped, numbers)
        numbers = call(aten.expand.default, call(aten.reshape.default, numbers, [-1, 1]), [-1, width])
        rows = call(aten.reshape.default, rows, [-1, width])
        result = call(aten.scatter_add.default, table, 0, numbers, rows)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
