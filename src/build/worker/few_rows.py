"""Products and attention of few rows, for devices: by kernels of our own.

Where there are few rows, as when one request is answered, a product is a read of its weights, and how fast it is
depends on how many multiprocessors read. One tile of the result for each of them is too few: 64 rows of 1024 columns
are 16 tiles of 64 columns where a device has 132. So tiles are narrow, and parts of the sum are made beside each other,
and added up by who takes the result: the compiler makes one kernel of the additions, the bias and what follows. A
library's product that is split likewise adds up in a kernel of its own. Where nobody can add up, tiles are narrower
yet.

Option `matmul`: `split_k` has this done by a kernel of Triton's, which adds up in float32. Option `attention`:
`one_tile` is for as few keys as one tile holds, and takes queries, keys and values where a product left them.

A library's kernels wait for each other. With `triton.enable_pdl` those here are started before the one in front of them
is over, and read their weights meanwhile.
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


def split(graph: Any, processors: int) -> int:
    """Splits what should be in a graph with shapes; returns how many products that were."""
    import torch

    aten = torch.ops.aten
    count = 0
    for node in [node for node in graph.nodes if node.target is aten.linear.default]:
        x, weight, bias = (*node.args, None)[:3]
        if not _few(x.meta["val"], weight.meta["val"]):
            continue
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
    """Has attention to few keys made by one kernel; returns how often that was."""
    import torch

    operator = torch.ops.aten.scaled_dot_product_attention.default
    count = 0
    for node in [node for node in graph.nodes if node.target is operator]:
        schema = operator._schema.arguments
        said = {one.name: one.default_value for one in schema if one.has_default_value()}
        said |= dict(zip((one.name for one in schema), node.args, strict=False)) | node.kwargs
        query, key, value = (said[name].meta["val"] for name in ("query", "key", "value"))
        if said["attn_mask"] is not None or said["dropout_p"] or said["enable_gqa"] or not _one_tile(query, key, value):
            continue
        scale = query.shape[-1] ** -0.5 if said["scale"] is None else said["scale"]
        args = (said["query"], said["key"], said["value"], scale, said["is_causal"])
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(_operators().attention.default, args))
        graph.erase_node(node)
        count += 1
    return count


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

    importlib.import_module(".few_rows_kernel", __package__)
    return torch.ops.precast
