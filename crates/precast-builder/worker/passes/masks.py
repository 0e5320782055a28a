"""Converts the boolean masks of attentions to numbers, once for each mask, before the graph is cut.

Torch's attention kernels add a mask to the scores, so a boolean mask is converted first: on a device, by a separate
kernel. In a graph that is compiled whole, attentions with the same mask share the conversion; in segments, each layer
would have a separate one: 3 % of a call of MiniLM on an H100 (`benches/results/masks-norms-h100.json`). Also, layers
that differ only in their mask, as in Gemma 2, would be two segments with different artifacts. The numbers depend on the
kernel that torch chooses for the device, so they are taken from torch.
"""

from __future__ import annotations

from typing import Any

from ..graph.flat import Flat
from ..torch_private import fake, overloads

# The operations of torch's conversion; `where` is the last.
_CONVERSION = {"logical_not", "scalar_tensor", "full", "where"}


def as_numbers(flat: Flat) -> int:
    """Converts the masks of attentions with the same shapes, if there are several; returns the number of masks.

    A mask of only one of them is converted too: layers that differ only in their mask, as in Gemma 2, remain the same
    segment.
    """
    import torch

    kinds: dict[Any, dict[Any, list[Any]]] = {}
    operator = torch.ops.aten.scaled_dot_product_attention.default
    for node in flat.graph.find_nodes(op="call_function", target=operator):
        mask = _mask(node)
        given = [one.meta.get("val") for one in node.all_input_nodes]
        if mask is None or mask.meta["val"].dtype != torch.bool or not all(map(_static, given)):
            continue
        # For other shapes torch may choose another kernel.
        alike = tuple((value.dtype, value.shape, value.stride()) for value in given)
        kinds.setdefault(alike, {}).setdefault(_base(mask), []).append(node)
    count = 0
    for masks in kinds.values():
        if sum(map(len, masks.values())) == 1:
            continue
        for mask, attentions in masks.items():
            converted = _converted(mask, attentions[0])
            if converted is None:
                continue
            for node in attentions:
                node.replace_input_with(_mask(node), converted)
            count += 1
    flat.graph.eliminate_dead_code()
    flat.graph.lint()
    return count


def _mask(attention: Any) -> Any:
    return attention.args[3] if len(attention.args) > 3 else attention.kwargs.get("attn_mask")


def _base(mask: Any) -> Any:
    """Returns the tensor that a mask is a view of, as long as its layout is the same: a slice of everything."""
    while mask.op == "call_function" and mask.all_input_nodes and fake.is_view(mask):
        whole, held = mask.all_input_nodes[0].meta["val"], mask.meta["val"]
        if not _static(whole) or _layout(whole) != _layout(held):
            break
        mask = mask.all_input_nodes[0]
    return mask


def _layout(held: Any) -> tuple[Any, ...]:
    return held.dtype, held.shape, held.stride(), held.storage_offset()


def _static(held: Any) -> bool:
    import torch

    return isinstance(held, torch.Tensor) and all(isinstance(size, int) for size in held.shape)


def _converted(mask: Any, attention: Any) -> Any:
    """Returns a mask as torch passes it to the kernel that it chooses for an attention; None if it is the same."""
    import torch

    given = attention.all_input_nodes
    values = {node: node.meta["val"] for node in given}
    args, kwargs = attention.args, attention.kwargs

    def call(*tensors: Any) -> Any:
        at = dict(zip(given, tensors, strict=True))
        return attention.target(*torch.fx.map_arg(args, at.get), **torch.fx.map_arg(kwargs, at.get))

    try:
        traced = fake.trace(call, attention.graph, list(values.values()))
    except Exception:  # the compiler reports the error, or compiles it
        return None
    dtype = attention.args[0].meta["val"].dtype
    placeholders = traced.find_nodes(op="placeholder")
    copies = {placeholders[given.index(_mask(attention))]: mask}
    # The operations on the mask alone, up to the conversion; after it torch may pad the mask for the kernel.
    for node in traced.nodes:
        name = overloads.name_of(node.target)
        if name not in _CONVERSION or any(one not in copies for one in node.all_input_nodes):
            continue
        before = list(copies.values())[-1]
        with attention.graph.inserting_after(before):
            copy = attention.graph.node_copy(node, lambda value: copies[value])
        copy.meta = {**mask.meta, "val": node.meta["val"]}
        copies[node] = copy
        if name == "where":
            held = copy.meta["val"]
            return copy if held.dtype == dtype and held.shape == mask.meta["val"].shape else None
    return None
