"""Products of one row with a matrix of weights on a CPU, as loops of the artifact's own code.

A step of a language model at batch 1 has only such products, and takes as long as it takes to read the weights. A call
of oneDNN or MKL for each is slower than that: oneDNN reads its own layout at 0.8 of what a plain read reaches, a call
of either takes microseconds before it multiplies, and its threads start and wait for each other anew. As a sum over a
row of the matrix the product is part of the loop nest around it, in one parallel region. The weights stay as the file
has them: nothing is packed, kept or copied.

A sum at a time waits for its own additions. So the matrix is cut into quarters, whose sums the compiler puts into one
loop: four sums that read the row once. The row is computed before: the compiler would compute it again for each sum.
Measured with such loops written in C, one core with AVX-512, 300 MB of matrices of 576 x 576: four sums 13.9 GB/s, a
plain read 13.7, one sum at a time 12.1, a norm computed again 9.3, oneDNN 10.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

# Products with so many elements at most are left to the pass `small_products` of kernels/, and to MKL without it.
_SMALL = 1 << 16

# The parts of a matrix whose sums are computed in one loop.
_PARTS = 4

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def is_one_row(rows: Any, weight: Any) -> bool:
    """Returns whether a product of values without data is one of one row with a large matrix, in float32 on a CPU."""
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in (rows, weight)):
        return False
    sizes = [*rows.shape[:-1], *weight.shape]
    if weight.dim() != 2 or not all(isinstance(size, int) for size in sizes):
        return False
    return math.prod(rows.shape[:-1]) == 1 and weight.numel() > _SMALL


def has_one_row(graph: Any) -> bool:
    """Returns whether a segment's graph has such products."""
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return any(is_one_row(*(value.meta["val"] for value in node.args[:2])) for node in products)


def after(first: Callable[[Any], None] | None, is_constant: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns inductor's option that rewrites the products before its fusions, after a pass that it may have."""

    def run(graph: Any) -> None:
        if first is not None:
            first(graph)
        rewrite(graph, is_constant)

    return {"post_grad_custom_pre_pass": run}


def rewrite(graph: Any, is_constant: Callable[[Any], bool]) -> None:
    """Replaces products of one row with a weight by sums."""
    aten = torch.ops.aten
    rows: dict[Any, Any] = {}
    for target in _PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, row, matrix = node.args
            if not _takes(node) or not _is_transposed(matrix) or not is_constant(matrix.args[0]):
                continue
            with graph.inserting_before(node):
                if row not in rows:
                    depth = row.meta["val"].shape[1]
                    rows[row] = _call(graph, torch.ops.prims.inductor_force_stride_order.default, row, [depth, 1])
                product = _product(graph, rows[row], matrix.args[0])
                if bias:
                    product = _call(graph, aten.add.Tensor, product, bias[0])
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)


def stays(node: Any) -> bool:
    """Returns whether a node is a transposed weight that products of one row alone read: as it is, and not folded."""
    reads = [_takes(user) and user.args[-1] is node for user in node.users]
    return _is_transposed(node) and bool(reads) and all(reads)


def _takes(node: Any) -> bool:
    return node.target in _PRODUCTS and not node.kwargs and is_one_row(*(one.meta["val"] for one in node.args[-2:]))


def _is_transposed(node: Any) -> bool:
    """Returns whether a node is a constant transposed, each of whose rows lies in one piece."""
    if node.target is not torch.ops.aten.permute.default or node.args[0].op != "get_attr":
        return False
    return list(node.args[1]) == [1, 0] and node.args[0].meta["val"].is_contiguous()


def _product(graph: Any, row: Any, weight: Any) -> Any:
    """Returns sums of products with a row, one for each row of the weight."""
    aten = torch.ops.aten
    columns, depth = weight.meta["val"].shape
    parts = _PARTS if columns % _PARTS == 0 else 1
    split = _call(graph, aten.view.default, weight, [parts, -1, depth])
    sums = []
    for part in range(parts):
        products = _call(graph, aten.mul.Tensor, row, _call(graph, aten.select.int, split, 0, part))
        sums.append(_call(graph, aten.sum.dim_IntList, products, [1]))
    return _call(graph, aten.view.default, _call(graph, aten.cat.default, sums), [1, columns])


def _call(graph: Any, target: Any, *args: Any) -> Any:
    """Returns a new node with its result without data."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda value: value.meta["val"]))
    return node
