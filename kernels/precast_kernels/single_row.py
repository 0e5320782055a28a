"""Decode: a step with one row, as one token of a language model, for CUDA devices.

The time of such a step is the time to read weights and cache, and each further kernel costs 2 to 3 us. So one kernel
computes a product with one row, the norm before it, the activation of a gated layer and the addition after it.
Attention to a cache splits the keys over the device, and skips the keys that the mask hides: the part that is not
filled.

Products of the same rows are fused before (`fused_linear`), except the two of a gated layer. All of it is for float16
and bfloat16. With the option `triton.enable_pdl` the kernels start early: a product reads weights while the kernel
before it ends.

A step of a Llama of 1.1 B in bfloat16, with a full cache of 1,024 and the likeliest token, took 1.01 ms on an H100 with
the options `combo_kernels` and `triton.enable_pdl`, 1.12 ms with the first alone, 1.19 ms without them, and 1.46 ms
with `coordinate_descent_tuning` in place of all (`benches/results/decode-h100.json`).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from . import linear, small_batch

_HALF = (torch.bfloat16, torch.float16)
# The sizes of a head.
_HEAD = (16, 32, 64, 128, 256)
# The longest row that a kernel reads at once for its norm.
_MAX_DEPTH = 16384


class Decode:
    """The pass `decode`."""

    def segment(self, module: Any, context: Any) -> None:
        """Replaces products with one row, and attention of one query to a cache."""
        small_batch.need_cuda("decode", context)
        replace(module, context)


def replace(module: Any, context: Any) -> int:
    """Replaces products with one row and attention of one query; returns the number of replacements."""
    graph, aten = module.graph, torch.ops.aten
    count = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.silu.default)):
        count += _gated(graph, node)
    linear.fuse(module, context)
    for node in list(graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)):
        count += _attend(graph, node)
    for node in list(graph.find_nodes(op="call_function", target=aten.linear.default)):
        if takes(node):
            _product(graph, node)
            count += 1
    graph.eliminate_dead_code()
    return count


def takes(node: Any) -> bool:
    """Returns whether a node is a product of one row in half precision with a contiguous matrix."""
    if getattr(node, "target", None) is not torch.ops.aten.linear.default:
        return False
    x, weight = (one.meta["val"] for one in node.args[:2])
    return (
        all(isinstance(size, int) for size in (*x.shape, *weight.shape))
        and x.dtype in _HALF
        and weight.dtype == x.dtype
        and weight.dim() == 2
        and weight.is_contiguous()
        and 64 <= weight.shape[1] <= _MAX_DEPTH
        and x.numel() == weight.shape[1]
    )


def attends(node: Any) -> bool:
    """Returns whether a node is attention of one query to keys with a mask, which the kernels can do."""
    return small_batch.is_attention(node) and _attention(node) is not None


def _gated(graph: Any, activated: Any) -> int:
    """Replaces `silu` of a product that multiplies another product of the same row; returns 1 if it did."""
    gate, whole = activated.args[0], _only_user(activated, torch.ops.aten.mul.Tensor)
    if whole is None:
        return 0
    other = next((one for one in whole.args if one is not activated), None)
    if not all(takes(one) and len(one.users) == 1 for one in (gate, other)) or len(gate.args) > 2:
        return 0
    (x, weight), (row, matrix) = gate.args, other.args[:2]
    if x is not row or weight.meta["val"].shape != matrix.meta["val"].shape:
        return 0
    _insert(graph, other, whole, gate=weight)
    for one in (whole, activated, gate, other):
        graph.erase_node(one)
    return 1


def _product(graph: Any, node: Any) -> None:
    """Replaces a product, with the addition after it."""
    added = _only_user(node, torch.ops.aten.add.Tensor)
    residual = None
    if added and not added.kwargs and all(hasattr(one, "meta") for one in added.args):
        residual = next((one for one in added.args if one is not node), None)
    val = node.meta["val"]
    if residual is None or residual.meta["val"].shape != val.shape or residual.meta["val"].dtype != val.dtype:
        added, residual = None, None
    _insert(graph, node, added or node, residual=residual)
    for one in (added, node):
        if one is not None:
            graph.erase_node(one)


def _insert(graph: Any, node: Any, last: Any, gate: Any = None, residual: Any = None) -> None:
    """Puts the kernel of a product in the place of the last node that it takes in."""
    aten, operator = torch.ops.aten, _operators().row_product.default
    x, weight, bias = (*node.args, None)[:3]
    norm, eps = None, 0.0
    if (found := _norm(x)) is not None:
        x, norm, eps = found
    with graph.inserting_before(last):
        row = graph.call_function(aten.reshape.default, (x, [-1]))
        if residual is not None:
            residual = graph.call_function(aten.reshape.default, (residual, [-1]))
        made = graph.call_function(operator, (row, weight, bias, norm, eps, gate, residual))
        result = graph.call_function(aten.reshape.default, (made, list(last.meta["val"].shape)))
    result.meta = dict(last.meta)
    last.replace_all_uses_with(result)


def _norm(node: Any) -> tuple[Any, Any, float] | None:
    """Returns the row, the weight and the epsilon of a root mean square norm, as transformers writes it."""
    aten = torch.ops.aten
    if getattr(node, "target", None) is not aten.mul.Tensor:
        return None
    weight, rounded = node.args
    if getattr(weight, "op", "") not in ("get_attr", "placeholder") or weight.meta["val"].dim() != 1:
        return None
    scaled = _argument(rounded, aten._to_copy.default)
    if getattr(scaled, "target", None) is not aten.mul.Tensor:
        return None
    wide, root = scaled.args
    mean = _argument(root, aten.rsqrt.default)
    if getattr(mean, "target", None) is not aten.add.Tensor or not isinstance(mean.args[1], float):
        return None
    power = _argument(mean.args[0], aten.mean.dim)
    x = _argument(wide, aten._to_copy.default)
    same = power is not None and _argument(power, aten.pow.Tensor_Scalar) is wide and power.args[1] == 2
    if x is None or not same or mean.args[0].args[1] != [-1] or wide.meta["val"].dtype is not torch.float32:
        return None
    return (x, weight, mean.args[1]) if x.meta["val"].dtype == node.meta["val"].dtype else None


def _argument(node: Any, target: Any) -> Any:
    """Returns the first argument of a call of an operator; None for other nodes."""
    return node.args[0] if getattr(node, "target", None) is target else None


def _only_user(node: Any, target: Any) -> Any:
    """Returns the only user of a node, if it calls an operator; else None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _attend(graph: Any, node: Any) -> int:
    args = _attention(node)
    if args is None:
        return 0
    query, key, value, mask, scale = args
    with graph.inserting_before(node):
        rows = graph.call_function(torch.ops.aten.reshape.default, (mask, [mask.meta["val"].shape[0], -1]))
        made = graph.call_function(_operators().cached_attention.default, (query, key, value, rows, scale))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return 1


def _attention(node: Any) -> tuple[Any, ...] | None:
    """Returns the arguments of the kernel for an attention node; None if the kernel can't do it."""
    given = small_batch.arguments(node)
    mask = given["attn_mask"]
    if mask is None or given["dropout_p"] or given["is_causal"]:
        return None
    key, value = _kept(given["key"]), _kept(given["value"])
    values = [one.meta["val"] for one in (given["query"], key, value, mask)]
    if not all(isinstance(size, int) for one in values for size in (*one.shape, *one.stride())):
        return None
    query, keys, held, hidden = values
    fits = (
        query.dim() == keys.dim() == held.dim() == hidden.dim() == 4
        and query.dtype in _HALF
        and query.dtype == keys.dtype == held.dtype
        and hidden.is_floating_point()
        and query.shape[2] == 1
        and query.shape[3] in _HEAD
        and keys.shape == held.shape
        and query.shape[0] == keys.shape[0]
        and query.shape[1] % keys.shape[1] == 0
        and query.shape[3] == keys.shape[3]
        and hidden.shape[1:3] == (1, 1)
        and hidden.shape[0] in (1, query.shape[0])
        and hidden.shape[3] == keys.shape[2]
    )
    scale = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    return (given["query"], key, value, mask, scale) if fits else None


def _kept(node: Any) -> Any:
    """Returns the keys or values that are repeated for the queries of a group."""
    aten = torch.ops.aten
    viewed = next((one for one in (aten._unsafe_view, aten.view, aten.reshape) if node.target is one.default), None)
    repeated = node.args[0] if viewed is not None else None
    repeated = _argument(repeated, aten.clone.default) or repeated
    narrow = _argument(_argument(repeated, aten.expand.default), aten.unsqueeze.default)
    if narrow is None or narrow.meta["val"].dim() != 4 or repeated.args[0].args[1] != 2:
        return node
    batch, heads, keys, width = narrow.meta["val"].shape
    held = node.meta["val"].shape
    group = repeated.meta["val"].shape[2]
    return narrow if tuple(held) == (batch, heads * group, keys, width) else node


def _operators() -> Any:
    """Returns the operators with Triton kernels; the import registers them."""
    importlib.import_module(".single_row_triton", __package__)
    return torch.ops.precast_kernels
