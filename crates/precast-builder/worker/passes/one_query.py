"""Attention of one query to repeated keys, on a CPU, without the repetition.

In grouped-query attention several heads of queries read one head of keys and values. Models write that as keys and
values repeated for each, and then each step of a language model copies its whole cache, as often as there are heads in
a group. With one query in each head, the heads of a group are as good as several queries of one head: the same
operator computes them, and reads the cache as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..graph import nodes
from ..torch_private import symbols


def rewrite(graph: Any) -> None:
    """Has attention of one query read keys and values that are repeated for the heads of a group as they are."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default):
        query, key, value, mask = [*node.args, None][:4]
        # A mask by position, or a chance of dropout.
        if len(node.args) > 4 or node.kwargs.keys() - {"scale"} or query.meta["val"].device.type != "cpu":
            continue
        shape, sources = query.meta["val"].shape, [_source(key), _source(value)]
        if len(shape) != 4 or symbols.fixed(shape[2]) != 1 or None in sources or not _is_shared(mask):
            continue
        heads = [source.meta["val"].shape[1] for source in sources]
        if heads[0] != heads[1]:
            continue
        _group(graph, node, heads[0], sources)


def _is_shared(mask: Any) -> bool:
    """Returns whether all heads have the same mask."""
    return mask is None or (mask.meta["val"].dim() == 4 and mask.meta["val"].shape[1:3] == (1, 1))


def _source(node: Any) -> Any:
    """Returns what a value is, repeated for the heads of each group, with an axis of 1 for the group; else None."""
    aten = torch.ops.aten
    shape = node.meta["val"].shape
    while node.target in (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.clone.default):
        node = node.args[0]
    if node.target is not aten.expand.default or len(shape) != 4:
        return None
    whole, source = node.meta["val"].shape, node.args[0]
    held = source.meta["val"].shape
    repeats = len(whole) == len(held) == 5 and whole[1] * whole[2] == shape[1]
    same = repeats and all(whole[axis] == held[axis] for axis in (0, 1, 3, 4)) and held[2] == 1
    return source if same and whole[3:] == shape[2:] and whole[0] == shape[0] else None


def _group(graph: Any, node: Any, heads: int, sources: list[Any]) -> None:
    """Replaces an attention by one whose queries are the heads of a group."""
    aten = torch.ops.aten
    shape = list(node.meta["val"].shape)
    batch, all_heads, _, width = node.args[0].meta["val"].shape
    call = partial(nodes.call, graph)
    with graph.inserting_before(node):
        query = call(aten.reshape.default, node.args[0], [batch, heads, all_heads // heads, width])
        keys, values = (call(aten.squeeze.dim, source, 2) for source in sources)
        grouped = call(node.target, query, keys, values, *node.args[3:], **node.kwargs)
        result = call(aten.reshape.default, grouped, shape)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
