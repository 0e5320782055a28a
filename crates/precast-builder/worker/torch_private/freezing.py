"""The compiler's passes over weights ("freezing"), and the constants that they make.

Inductor evaluates everything that depends on weights alone, and puts the values into the artifact. Here the caller
evaluates it, and decides which of oneDNN's packed weights are worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .overloads import overload_of
from .patches import replaced


@contextmanager
def folded_by(
    fold: Callable[[Any], None], linear: Callable[[Any], bool], convolution: Callable[[Any], bool], isa: str
) -> Iterator[None]:
    """Makes `fold` replace the constants of a module, for the time of one compile with freezing.

    `linear` and `convolution` return whether oneDNN should pack a node's weight; `isa` is the baseline of the target.

    Private: `torch._inductor.freezing.constant_fold`, the only place that replaces nodes by values;
    `torch._inductor.fx_passes.mkldnn_fusion` with `_is_packable_linear`, `_is_packable_convolution`,
    `_is_packable_mkldnn_rnn_layer`, `is_mkldnn_bf16_supported` and `is_mkldnn_fp16_supported`, which it reads when it
    registers its patterns; `freezing_patterns.binary_folding_pass`. Without them: values of weights get into the
    artifact, which the check of its constants refuses; the segment is then compiled without freezing.
    """
    from torch._inductor import freezing
    from torch._inductor.fx_passes import freezing_patterns, mkldnn_fusion

    def both(theirs: Callable[[Any], Any], ours: Callable[[Any], bool]) -> Callable[[Any], Any]:
        return lambda match: theirs(match) and ours(match.output_node())

    folding = freezing_patterns.binary_folding_pass
    apply = folding.apply
    patches: list[tuple[Any, str, Any]] = [
        (freezing, "constant_fold", lambda module, *_, **__: fold(module)),
        (folding, "apply", lambda graph: _without_numbers(graph, apply)),
        # The first compile registers the patterns, with these checks, for all that follow.
        (mkldnn_fusion, "_is_packable_linear", both(mkldnn_fusion._is_packable_linear, linear)),
        (mkldnn_fusion, "_is_packable_convolution", both(mkldnn_fusion._is_packable_convolution, convolution)),
        # AOTInductor has no call for how it is packed.
        (mkldnn_fusion, "_is_packable_mkldnn_rnn_layer", lambda _: False),
    ]
    if isa != "native":
        # oneDNN has kernels below float32 only for instructions that a baseline need not have.
        patches += [(mkldnn_fusion, f"is_mkldnn_{kind}_supported", lambda _: False) for kind in ("bf16", "fp16")]
    with replaced(*patches):
        yield


def _without_numbers(graph: Any, apply: Callable[[Any], Any]) -> None:
    """Folds weights into filters, but no numbers: torch 2.11 takes the last number of a graph for every other."""
    kept = {node: node.args for node in graph.nodes if any(isinstance(value, float) for value in node.args)}
    # The pass folds floats only.
    for node, args in kept.items():
        node.args = tuple(0 if isinstance(value, float) else value for value in args)
    apply(graph)
    for node, args in kept.items():
        pairs = zip(args, node.args, strict=True)
        node.args = tuple(old if isinstance(old, float) else new for old, new in pairs)


def foldable(module: Any) -> dict[Any, Any]:
    """Returns the nodes that depend only on constants, with their values.

    Private: `torch._inductor.constant_folding.ConstantFolder` and its `node_replacements`. Without it: as `folded_by`.
    """
    from torch._inductor.constant_folding import ConstantFolder

    folder = ConstantFolder(module, skip_constructors=True)
    folder.run()
    return folder.node_replacements


def replace_by_constant(module: Any, node: Any, value: Any, name: str) -> None:
    """Puts a constant of the module in the place of a node.

    Private: `torch._inductor.constant_folding.replace_node_with_constant`. Without it: no weight can be prepacked.
    """
    from torch._inductor.constant_folding import replace_node_with_constant

    replace_node_with_constant(module, node, value, name)


def share_layouts(module: Any, rows: int) -> None:
    """Makes buckets use the same packed weights of oneDNN where it costs nothing: matrices for `rows` rows, and filters
    for a batch of one where the layout is the same.

    Private: the operators `mkldnn::_reorder_linear_weight`, `_reorder_convolution_weight` and
    `_get_mkldnn_serialized_md`. Without it: each bucket has separate prepacked weights.
    """
    mkldnn = torch.ops.mkldnn
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        operator = overload_of(node.target)
        if operator is mkldnn._reorder_linear_weight.default:
            node.args = (node.args[0], rows)
        elif operator is mkldnn._reorder_convolution_weight.default and len(node.args) == 6:
            weight, *rest, size = node.args
            value = getattr(module, weight.target, None) if weight.op == "get_attr" else None
            if not isinstance(value, torch.Tensor) or not all(isinstance(part, int) for part in size):
                continue
            own, one = list(size), [1, *size[1:]]
            layouts = [
                mkldnn._get_mkldnn_serialized_md(operator(value.detach(), *rest, sizes)).tolist()
                for sizes in (own, one)
            ]
            if layouts[0] == layouts[1]:
                node.args = (weight, *rest, one)
