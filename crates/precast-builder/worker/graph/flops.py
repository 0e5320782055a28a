"""The floating-point operations of a graph: those of matrix products, convolutions and attention, as torch counts them.

Other operations have few, and are limited by memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node, map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .. import tensors


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


# Torch counts the kernels of GPUs only.
_COUNTED = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def of(graph: Any) -> dict[str, int]:
    """Returns the number by the dtype of the operands, on which the speed of a device depends.

    Empty if torch can't count one of the operations: a part would look like a slow device.
    """
    found: dict[str, int] = {}
    for node in graph.nodes:
        count = _COUNTED.get(getattr(node.target, "overloadpacket", None))
        if count is None:
            continue
        # Lists of nodes are arguments too.
        values = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        first = next(one.meta["val"] for one in node.args if isinstance(one, Node))
        if not tensors.supported(first.dtype):
            return {}
        try:
            own = int(count(*values[0], **values[1], out_val=node.meta["val"]))
        except Exception:  # a figure must not end a build
            return {}
        dtype = tensors.dtype_name(first.dtype)
        found[dtype] = found.get(dtype, 0) + own
    return found
