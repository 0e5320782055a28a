"""Convolutions on CUDA that add their bias, what is added to them, and the ReLU after it, in their own kernel.

The compiler calls cuDNN for a convolution and makes a kernel of its own for the rest, which reads and writes every
element once more. With cuDNN's fused kernels ResNet-50 takes 54 kernels instead of 105: on an H200 332 us instead of
384 at a batch of one, and 1.05 ms instead of 1.30 at 32 (benches/results/kernels-h200.json). AOTInductor has no C entry
point for these operators of ATen: an artifact calls them by name, as it does custom ones.

Which kernels there are depends on the device, and some make a zero of a NaN (on an H200 that for seven channels): so
each is tried before it is taken.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from . import failures, prepared


def take(module: Any, known: set[str], made: dict[str, prepared.Recipe]) -> None:
    """Makes one operator of each convolution and the ReLU after it, and of what is added between, in a graph that is
    lowered channels last. `made` gets what biases are made of that are added up.

    Breaks if: the compiler hands on a convolution as anything but `aten.convolution` with nine arguments.
    """
    import torch

    aten, graph = torch.ops.aten, module.graph
    _tell_layouts()
    for relu in graph.find_nodes(op="call_function", target=aten.relu.default):
        convolution, added = _before(relu)
        if convolution is None:
            continue
        rows, filters, bias, *where, _, _, groups = convolution.args
        # Convolutions take one number for both; these operators do not.
        where = [list(given) * 2 if len(given) == 1 else list(given) for given in where] + [groups]
        if added is None:
            target, args = aten.cudnn_convolution_relu.default, (rows, filters, bias, *where)
        else:
            target, args = aten.cudnn_convolution_add_relu.default, (rows, filters, added, None, bias, *where)
        if not _works(target, args, relu.meta["val"].shape):
            continue
        with graph.inserting_before(relu):
            if added is not None:
                bias = _with_bias_of(added, bias, module, known, made)
                args = (rows, filters, added, None, bias, *where)
            fused = graph.call_function(target, args)
        fused.meta = dict(relu.meta)
        relu.replace_all_uses_with(fused)
        graph.erase_node(relu)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _before(relu: Any) -> tuple[Any, Any]:
    """Returns the convolution whose result a ReLU takes, and what is added to it; none that can't be fused."""
    import torch

    (value,) = relu.args
    if _takes(value):
        return value, None
    if value.target is not torch.ops.aten.add.Tensor or value.kwargs or len(value.users) != 1:
        return None, None
    held = value.meta["val"]
    for convolution, added in (value.args, value.args[::-1]):
        if not isinstance(added, torch.fx.Node) or not _takes(convolution):
            continue
        both = [node.meta["val"] for node in (convolution, added)]
        if all(part.shape == held.shape and part.dtype == held.dtype for part in both):
            return convolution, added
    return None, None


def _takes(node: Any) -> bool:
    """Returns whether a node is a convolution that cuDNN has fused kernels for, and one other reads it.

    They are for tensor cores, and add up in float32.
    """
    import torch

    if getattr(node, "target", None) is not torch.ops.aten.convolution.default or len(node.users) != 1 or node.kwargs:
        return False
    rows, filters, bias, _, _, _, transposed, _, groups = node.args
    held = filters.meta["val"]
    return (
        bias is not None
        and not transposed
        and groups == 1
        and held.dim() == 4
        and held.dtype in (torch.float16, torch.bfloat16)
        and all(value.meta["val"].dtype == held.dtype for value in (rows, bias, node))
    )


def _works(target: Any, args: tuple[Any, ...], shape: Any) -> bool:
    """Returns whether a fused kernel takes such arguments, reads nothing of the memory that it is to fill, and keeps a
    NaN."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    def eighths(node: Any) -> Any:
        # So that no sum is too large for float16.
        held = node.meta["val"]
        made = torch.full(held.shape, 0.125, dtype=held.dtype, device=held.device)
        return made.contiguous(memory_format=torch.channels_last) if made.dim() == 4 else made

    with _disable_current_modes(), torch.no_grad():
        try:
            given = torch.fx.map_arg(args, eighths)
            # The allocator hands out again what was given back last.
            unwritten = torch.full(shape, math.nan, dtype=given[0].dtype, device=given[0].device)
            del unwritten
            if not target(*given).isfinite().all():
                return False
            given[0].fill_(math.nan)
            return bool(target(*given).isnan().all())
        except (NotImplementedError, RuntimeError) as error:
            print(f"a convolution stays apart from what follows it: {failures.one_line(error)}", file=sys.stderr)
            return False


def _with_bias_of(added: Any, bias: Any, module: Any, known: set[str], made: dict[str, prepared.Recipe]) -> Any:
    """Takes the bias from a convolution that is added, and returns the sum of both, where they are constants."""
    import torch

    if not _takes(added) or any(value.op != "get_attr" for value in (added.args[2], bias)):
        return bias
    parts = tuple(module.graph.node_copy(value) for value in (added.args[2], bias))
    whole = module.graph.call_function(torch.ops.aten.add.Tensor, parts)
    whole = prepared.constant(module, whole, known, made)
    if whole is None:
        return bias
    added.update_arg(2, None)
    return whole


def _tell_layouts() -> None:
    """Says what the fused operators make, and that they take everything channels last."""
    import torch
    from torch._inductor import ir, lowering

    aten = torch.ops.aten
    both = (aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default)
    if both[0] in lowering.lowerings:
        return

    def last(value: Any) -> Any:
        is_image = isinstance(value, ir.TensorBox) and len(value.get_size()) == 4
        return ir.ExternKernel.require_channels_last(value) if is_image else value

    def lower(operator: Any) -> Any:
        fall_back = lowering.fallback_handler(operator)
        return lambda *args: fall_back(*[last(value) for value in args])

    for operator in both:
        lowering.register_lowering(operator, type_promotion_kind=None)(lower(operator))
    torch.library.register_fake("aten::cudnn_convolution_relu", _shape, allow_override=True)
    torch.library.register_fake("aten::cudnn_convolution_add_relu", _shape_added, allow_override=True)


def _shape(rows: Any, filters: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    import torch

    return torch.ops.aten.convolution(rows, filters, bias, stride, padding, dilation, False, [0, 0], groups)


def _shape_added(rows: Any, filters: Any, _added: Any, _alpha: Any, bias: Any, *where: Any) -> Any:
    return _shape(rows, filters, bias, *where)
