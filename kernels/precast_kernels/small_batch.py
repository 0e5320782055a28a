"""Small-batch GEMM and single-tile attention, for CUDA devices: Triton kernels of our own.

With few rows, as when one request is answered, a product is a read of its weights, and its speed depends on how many
multiprocessors read. One tile of the result for each is too few: 64 rows of 1024 columns are 16 tiles of 64 columns
where a device has 132. So tiles are narrow, and the sum is split into parts that are computed in parallel. The reader
of the result adds them up: the compiler makes one kernel of the additions, the bias and what follows. A library's split
product adds up in a kernel of its own. Where no reader can add up, tiles are narrower still.

Pass `split_k`: products, added up in float32. Pass `single_tile_attention`: attention whose keys fit into one tile; it
reads queries, keys and values where a product left them. Both are for float16 and bfloat16.

A library's kernels wait for each other. With the option `triton.enable_pdl` these start before the kernel in front of
them has ended, and read their weights meanwhile.

On an H200, a stack of 24 transformer blocks (d = 1024, bfloat16, 64 rows) took 636 us a call with them, and 946 us
without (`benches/results/kernels-h200.json`).
"""

from __future__ import annotations

import importlib
from typing import Any

# Rows above which a product has tiles enough, and columns of a tile: at most, and at least.
_ROWS = 64
_TILE = 32
_NARROW = 16
# What one part adds up over, at least; and how many parts there are at most.
_LEAST = 128
_MOST = 8
# What is read at once of a row.
_STEP = 64
# Keys that attention may have, and sizes of a head.
_KEYS = 128
_HEAD = (16, 32, 64, 128)


class SplitK:
    """The pass `split_k`."""

    def segment(self, module: Any, context: Any) -> None:
        """Splits products of few rows with weights."""
        _need_cuda("split_k", context)
        split(module.graph, context.processors)


class SingleTileAttention:
    """The pass `single_tile_attention`."""

    def segment(self, module: Any, context: Any) -> None:
        """Has attention to few keys computed by one kernel."""
        _need_cuda("single_tile_attention", context)
        attend(module.graph)


def _need_cuda(name: str, context: Any) -> None:
    if context.device != "cuda":
        raise ValueError(f"`precast_kernels:{name}` is for CUDA; leave it out for {context.device}")


def splits(node: Any) -> bool:
    """Returns whether a node is a product of few rows, in a dtype and an order that the kernels are for."""
    import torch

    return node.target is torch.ops.aten.linear.default and _few(node.args[0].meta["val"], node.args[1].meta["val"])


def is_attention(node: Any) -> bool:
    """Returns whether a node is torch's attention."""
    import torch

    return node.target is torch.ops.aten.scaled_dot_product_attention.default


def attends(node: Any) -> bool:
    """Returns whether a node is attention that fits into one tile."""
    return is_attention(node) and _attention(node) is not None


def split(graph: Any, processors: int) -> int:
    """Splits products of a graph with shapes; returns how many."""
    import torch

    aten = torch.ops.aten
    count = 0
    for node in [node for node in graph.nodes if splits(node)]:
        x, weight, bias = (*node.args, None)[:3]
        parts, tile = _parts(weight.meta["val"], processors, _added_by_others(node))
        depth = weight.meta["val"].shape[1]
        rows = x.meta["val"].numel() // depth
        dtype = node.meta["val"].dtype

        def call(target: Any, *args: Any) -> Any:
            return graph.call_function(target, args)

        with graph.inserting_before(node):
            flat = call(aten.reshape.default, x, [rows, depth])
            if parts == 1:
                total = call(_operators().product.default, flat, weight, bias, tile)
            else:
                made = call(_operators().parts_of_product.default, flat, weight, parts, tile)
                # One after the other: point by point, so that they become part of the kernel that takes the result.
                total = call(aten.to.dtype, call(aten.select.int, made, 0, 0), torch.float32)
                for part in range(1, parts):
                    total = call(aten.add.Tensor, total, call(aten.select.int, made, 0, part))
                if bias is not None:
                    total = call(aten.add.Tensor, total, bias)
                total = call(aten.to.dtype, total, dtype)
            result = call(aten.reshape.default, total, list(node.meta["val"].shape))
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return count


def attend(graph: Any) -> int:
    """Has attention to few keys computed by one kernel; returns how often."""
    count = 0
    for node in [node for node in graph.nodes if is_attention(node)]:
        args = _attention(node)
        if args is None:
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(_operators().attention.default, args))
        graph.erase_node(node)
        count += 1
    return count


def _attention(node: Any) -> tuple[Any, ...] | None:
    """Returns the arguments of the kernel for an attention node; None where it is not for it."""
    schema = node.target._schema.arguments
    said = {one.name: one.default_value for one in schema if one.has_default_value()}
    said |= dict(zip((one.name for one in schema), node.args, strict=False)) | node.kwargs
    query, key, value = (said[name].meta["val"] for name in ("query", "key", "value"))
    if said["attn_mask"] is not None or said["dropout_p"] or said["enable_gqa"] or not _one_tile(query, key, value):
        return None
    scale = query.shape[-1] ** -0.5 if said["scale"] is None else said["scale"]
    return said["query"], said["key"], said["value"], scale, said["is_causal"]


def _one_tile(query: Any, key: Any, value: Any) -> bool:
    import torch

    static = all(isinstance(size, int) for one in (query, key, value) for size in (*one.shape, *one.stride()))
    return (
        static
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.dim() == 4
        and key.shape == value.shape
        and query.shape[:2] == key.shape[:2]
        and query.shape[3] == key.shape[3]
        and query.shape[3] in _HEAD
        and 0 < key.shape[2] <= _KEYS
        and 0 < query.shape[2] <= _KEYS
        and query.shape[0] > 0
    )


def _few(x: Any, weight: Any) -> bool:
    """Returns whether a product is one of few rows, in a dtype and an order that the kernels are for."""
    import torch

    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or not weight.is_contiguous():
        return False
    columns, depth = weight.shape
    return 0 < x.numel() <= _ROWS * depth and columns % _TILE == 0 and depth % _STEP == 0


def _parts(weight: Any, processors: int, added: bool) -> tuple[int, int]:
    """Returns into how many parts a sum is split, and how many columns a tile has: about one for each processor."""
    columns, depth = weight.shape
    parts, tile = 1, _TILE
    while (
        added
        and parts < _MOST
        and columns // tile * parts * 2 <= processors
        and depth % (parts * 2 * _STEP) == 0
        and depth // (parts * 2) >= _LEAST
    ):
        parts *= 2
    while tile > _NARROW and columns // tile * parts * 2 <= processors:
        tile //= 2
    return parts, tile


def _added_by_others(node: Any) -> bool:
    """Returns whether all that take a result work on it point by point: they can add it up at no cost of a kernel."""
    import torch

    follow = {"view", "reshape", "unsqueeze", "squeeze"}
    norms = {"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"}
    pending = list(node.users)
    while pending:
        user = pending.pop()
        name = getattr(getattr(user.target, "overloadpacket", None), "__name__", "")
        if name in follow:
            pending += user.users
        elif torch.Tag.pointwise not in getattr(user.target, "tags", ()) and name not in norms | {"gelu", "silu", "to"}:
            return False
    return True


def _operators() -> Any:
    """Returns the operators whose kernels are Triton's; the import registers them."""
    import torch

    importlib.import_module(".small_batch_triton", __package__)
    return torch.ops.precast_kernels
