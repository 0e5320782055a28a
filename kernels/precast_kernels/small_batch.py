"""Small-batch GEMM and single-tile attention, for CUDA devices: Triton kernels of our own.

With few rows, as in a single request, the time of a product is the time to read its weights, and depends on the number
of multiprocessors that read. The tiles of the result are too few for them: 64 rows of 1024 columns are 16 tiles of 64
columns, and the device has 132 multiprocessors. So tiles are narrow, and the sum is split into parts that are computed
in parallel (split-K). The reader of the result adds the parts: the compiler fuses these additions with the bias and the
operations after it. Split-K kernels of libraries add in a kernel of their own. If the readers can't add, tiles are
narrower still.

Pass `split_k`: products, accumulated in float32. Pass `single_tile_attention`: attention whose keys fit into one tile;
it reads queries, keys and values from the results of products, without copies. Both are for float16 and bfloat16.

Kernels of libraries wait for each other. With the option `triton.enable_pdl`, these start before the previous kernel
has ended, and read their weights in the meantime.

On an H200, a stack of 24 transformer blocks (d = 1024, bfloat16, 64 rows) took 636 us a call with them, and 946 us
without (`benches/results/kernels-h200.json`).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

# The most rows: products with more rows have enough tiles.
_MAX_ROWS = 64
# The widest and the narrowest tile, in columns.
_MAX_TILE = 32
_MIN_TILE = 16
# The shortest part of a sum, and the most parts.
_MIN_PART = 128
_MAX_PARTS = 8
# Elements of a row that are read at once.
_STEP = 64
# The most keys of attention, and the sizes of a head.
_MAX_KEYS = 128
_HEAD = (16, 32, 64, 128)


class SplitK:
    """The pass `split_k`."""

    def segment(self, module: Any, context: Any) -> None:
        """Splits small-batch products with weights."""
        need_cuda("split_k", context)
        split(module.graph, context.processors)


class SingleTileAttention:
    """The pass `single_tile_attention`."""

    def segment(self, module: Any, context: Any) -> None:
        """Replaces attention to few keys by one kernel."""
        need_cuda("single_tile_attention", context)
        attend(module.graph)


def need_cuda(name: str, context: Any) -> None:
    """Refuses a pass for another device."""
    if context.device != "cuda":
        raise ValueError(f"`precast_kernels:{name}` is for CUDA; leave it out for {context.device}")


def splits(node: Any) -> bool:
    """Returns whether a node is a product that the kernels can do: few rows, dtype, layout."""
    return node.target is torch.ops.aten.linear.default and _is_small_batch(
        node.args[0].meta["val"], node.args[1].meta["val"]
    )


def is_attention(node: Any) -> bool:
    """Returns whether a node is torch's attention."""
    return node.target is torch.ops.aten.scaled_dot_product_attention.default


def attends(node: Any) -> bool:
    """Returns whether a node is attention that fits into one tile."""
    return is_attention(node) and _attention(node) is not None


def split(graph: Any, processors: int) -> int:
    """Splits the products of a graph with known shapes; returns their number."""
    aten = torch.ops.aten
    count = 0
    for node in [node for node in graph.nodes if splits(node)]:
        x, weight, bias = (*node.args, None)[:3]
        parts, tile = _parts(weight.meta["val"], processors, _readers_can_add(node))
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
                partial = call(_operators().parts_of_product.default, flat, weight, parts, tile)
                # Pointwise additions, which the compiler fuses with the reader.
                total = call(aten.to.dtype, call(aten.select.int, partial, 0, 0), torch.float32)
                for part in range(1, parts):
                    total = call(aten.add.Tensor, total, call(aten.select.int, partial, 0, part))
                if bias is not None:
                    total = call(aten.add.Tensor, total, bias)
                total = call(aten.to.dtype, total, dtype)
            result = call(aten.reshape.default, total, list(node.meta["val"].shape))
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return count


def attend(graph: Any) -> int:
    """Replaces attention to few keys by one kernel; returns the number of replacements."""
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


def arguments(node: Any) -> dict[str, Any]:
    """Returns all arguments of a call of an operator by name, also those with defaults."""
    schema = node.target._schema.arguments
    given = {one.name: one.default_value for one in schema if one.has_default_value()}
    return given | dict(zip((one.name for one in schema), node.args, strict=False)) | node.kwargs


def _attention(node: Any) -> tuple[Any, ...] | None:
    """Returns the arguments of the kernel for an attention node; None if the kernel can't do it."""
    given = arguments(node)
    query, key, value = (given[name].meta["val"] for name in ("query", "key", "value"))
    unsupported = given["attn_mask"] is not None or given["dropout_p"] or given["enable_gqa"]
    if unsupported or not _small_tile(query, key, value):
        return None
    scale = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    return given["query"], given["key"], given["value"], scale, given["is_causal"]


def _small_tile(query: Any, key: Any, value: Any) -> bool:
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
        and 0 < key.shape[2] <= _MAX_KEYS
        and 0 < query.shape[2] <= _MAX_KEYS
        and query.shape[0] > 0
    )


def _is_small_batch(x: Any, weight: Any) -> bool:
    """Returns whether a product has few rows, and a dtype and a layout of the kernels."""
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or not weight.is_contiguous():
        return False
    columns, depth = weight.shape
    return 0 < x.numel() <= _MAX_ROWS * depth and columns % _MAX_TILE == 0 and depth % _STEP == 0


def _parts(weight: Any, processors: int, added: bool) -> tuple[int, int]:
    """Returns the number of parts of a sum, and the columns of a tile: about one tile for each multiprocessor."""
    columns, depth = weight.shape
    parts, tile = 1, _MAX_TILE
    while (
        added
        and parts < _MAX_PARTS
        and columns // tile * parts * 2 <= processors
        and depth % (parts * 2 * _STEP) == 0
        and depth // (parts * 2) >= _MIN_PART
    ):
        parts *= 2
    while tile > _MIN_TILE and columns // tile * parts * 2 <= processors:
        tile //= 2
    return parts, tile


def _readers_can_add(node: Any) -> bool:
    """Returns whether all readers of a result are pointwise: the compiler fuses the additions with them."""
    views = {"view", "reshape", "unsqueeze", "squeeze"}
    norms = {"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"}
    pending = list(node.users)
    while pending:
        user = pending.pop()
        name = getattr(getattr(user.target, "overloadpacket", None), "__name__", "")
        if name in views:
            pending += user.users
        elif torch.Tag.pointwise not in getattr(user.target, "tags", ()) and name not in norms | {"gelu", "silu", "to"}:
            return False
    return True


def _operators() -> Any:
    """Returns the operators with Triton kernels; the import registers them."""
    importlib.import_module(".small_batch_triton", __package__)
    return torch.ops.precast_kernels
