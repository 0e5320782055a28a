"""Turns the boolean masks of several attentions into numbers once each, before the graph is cut.

Torch's kernels for attention add a mask to the scores, so a boolean one becomes numbers first: a kernel of its own on a
device. Where a graph is compiled whole, attentions of one mask share it; where each layer is a segment, each has one.
What the numbers are depends on the kernel that torch chooses for the device, so torch is asked.
"""

from __future__ import annotations

from typing import Any

from .flat import Flat
from .torch_private import fake, overloads

# What torch makes numbers of a mask with, the last of them at the end.
_NUMBERS = {"logical_not", "scalar_tensor", "full", "where"}


def as_numbers(flat: Flat) -> int:
    """Converts the masks of attentions that are alike, where there is more than one; returns how many masks.

    Also a mask that one alone has: layers that differ in their mask only, as every other one of Gemma 2, stay alike.
    """
    import torch

    kinds: dict[Any, dict[Any, list[Any]]] = {}
    operator = torch.ops.aten.scaled_dot_product_attention.default
    for node in flat.graph.find_nodes(op="call_function", target=operator):
        mask = _mask(node)
        given = [one.meta.get("val") for one in node.all_input_nodes]
        if mask is None or mask.meta["val"].dtype != torch.bool or not all(map(_static, given)):
            continue
        # For others torch may choose another kernel.
        alike = tuple((value.dtype, value.shape, value.stride()) for value in given)
        kinds.setdefault(alike, {}).setdefault(_seen(mask), []).append(node)
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


def _seen(mask: Any) -> Any:
    """Returns what a mask is a view of, where that looks the same: a slice that leaves nothing out."""
    while mask.op == "call_function" and mask.all_input_nodes and fake.is_view(mask):
        base, held = mask.all_input_nodes[0].meta["val"], mask.meta["val"]
        if not _static(base) or _layout(base) != _layout(held):
            break
        mask = mask.all_input_nodes[0]
    return mask


def _layout(held: Any) -> tuple[Any, ...]:
    return held.dtype, held.shape, held.stride(), held.storage_offset()


def _static(held: Any) -> bool:
    import torch

    return isinstance(held, torch.Tensor) and all(isinstance(size, int) for size in held.shape)


def _converted(mask: Any, attention: Any) -> Any:
    """Returns a mask as torch hands it to the kernel that it chooses for an attention; none if that is no other."""
    import torch

    given = attention.all_input_nodes
    values = {node: node.meta["val"] for node in given}
    args, kwargs = attention.args, attention.kwargs

    def call(*tensors: Any) -> Any:
        at = dict(zip(given, tensors, strict=True))
        return attention.target(*torch.fx.map_arg(args, at.get), **torch.fx.map_arg(kwargs, at.get))

    try:
        traced = fake.trace(call, attention.graph, list(values.values()))
    except Exception:  # the compiler will say what is wrong, or take it
        return None
    dtype = attention.args[0].meta["val"].dtype
    placeholders = traced.find_nodes(op="placeholder")
    copies = {placeholders[given.index(_mask(attention))]: mask}
    # What comes of the mask alone, up to the numbers; behind them it may be padded for the kernel.
    for node in traced.nodes:
        name = overloads.name_of(node.target)
        if name not in _NUMBERS or any(one not in copies for one in node.all_input_nodes):
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
