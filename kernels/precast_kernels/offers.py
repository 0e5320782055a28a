"""Offers of passes for `precast build --tune`, which adds them to its own option sets."""

from __future__ import annotations

from typing import Any

import torch

from . import products, single_row, small_batch

_EARLY = {"triton.enable_pdl": True}


def offers(device: str, graphs: list[Any]) -> list[dict[str, Any]]:
    """Returns option sets for the segments of a program: names of passes, and options in addition to the module's own.

    In these graphs inputs are placeholders `in0`, `in1`, …, and weights are placeholders `c0`, `c1`, ….
    """
    found: list[dict[str, Any]] = []
    fuse = ["precast_kernels:fuse"] if any(_fuses(graph, device) for graph in graphs) else []
    if fuse:
        found.append({"passes": fuse, "options": {}})
    if device != "cuda":
        return found
    nodes = [node for graph in graphs for node in graph.nodes]
    attends = any(small_batch.attends(node) for node in nodes)
    if fuse and any(small_batch.is_attention(node) for node in nodes):
        found.append({"passes": fuse, "options": {"attention": "efficient"}})
    if any((single_row.takes(node) and _weight(node.args[1])) or single_row.attends(node) for node in nodes):
        # Small operations beside the kernels share one launch.
        combined = {"combo_kernels": True}
        found += [{"passes": ["precast_kernels:decode"], "options": more} for more in (combined, combined | _EARLY)]
    if any(small_batch.splits(node) and _weight(node.args[1]) for node in nodes):
        split = [*fuse, "precast_kernels:split_k"]
        found.append({"passes": split, "options": _EARLY})
        if attends:
            found.append({"passes": [*split, "precast_kernels:single_tile_attention"], "options": _EARLY})
    return found


def _fuses(graph: Any, device: str) -> bool:
    """Returns whether the pass `fuse` may change a graph: products of the same rows, small ones, or convolutions."""
    aten = torch.ops.aten
    linears = [node for node in graph.nodes if node.target is aten.linear.default and _weight(node.args[1])]
    rows = [node.args[0] for node in linears]
    if len(set(rows)) < len(rows):
        return True
    if device == "cuda":
        return any("conv" in getattr(node.target, "__name__", "") for node in graph.nodes)
    return any(products.is_small(node.args[0].meta["val"], node.args[1].meta["val"].t()) for node in linears)


def _weight(node: Any) -> bool:
    return node.op == "placeholder" and node.target.startswith("c")
