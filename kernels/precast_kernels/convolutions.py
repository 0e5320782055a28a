"""Convolutions on CUDA: batch norms folded into filters; bias, addition and ReLU in cuDNN's kernel.

- A batch norm computes a root and a division for every element. Folded into the filter before it, it leaves a bias.
- Where the compiler chooses channels last, it converts filters in torch's usual layout in every call, with a kernel for
  each. Here they are converted once.
- The compiler calls cuDNN for a convolution, and generates a kernel for the operations after it, which reads and writes
  every element once more. cuDNN has fused kernels for both: ResNet-50 in float16 takes 54 kernels instead of 105, on
  an H200 332 us instead of 384 at a batch of one, and 1.05 ms instead of 1.30 at 32. The first two points took it from
  449 us to 384, and from 1.47 ms to 1.30.

Folded and converted filters are prepacked weights. AOTInductor has no C function for ATen's fused operators: artifacts
call them by name. Devices differ in their kernels, and some kernels turn a NaN into a zero (on an H200 the one for
seven channels), so each is run before it is used.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch


class ConvEpilogues:
    """The pass `conv_epilogues`."""

    def segment(self, module: Any, context: Any) -> None:
        """Folds batch norms into filters. On a CPU the compiler does it by itself."""
        if context.device == "cuda":
            fold(module, context)

    def post_grad_post(self, module: Any, context: Any) -> None:
        """Converts filters to channels last where the compiler chooses that layout, and fuses epilogues.

        Private: `GraphLowering.decide_layout_opt`, which chooses. Without it: this pass fails.
        """
        from torch._inductor.graph import GraphLowering

        if context.device == "cuda" and GraphLowering.decide_layout_opt(module, is_inference=True):
            convert_filters(module, context)
            fuse_epilogues(module, context)


def fold(module: Any, context: Any) -> None:
    """Folds batch norms into the filters before them."""
    aten = torch.ops.aten
    for norm in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if len(norm.args) == 9 and not norm.args[5]:
            _fold(module.graph, norm, norm, context)
    # The operator in a functional program; its other results are for training.
    for norm in module.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        results = [user for user in norm.users if user.users]
        if len(norm.args) == 7 and len(results) == 1 and results[0].args == (norm, 0):
            _fold(module.graph, norm, results[0], context)


def _fold(graph: Any, norm: Any, result: Any, context: Any) -> None:
    aten = torch.ops.aten
    if norm.kwargs:
        return
    convolution, scale, shift, mean, variance = norm.args[:5]
    epsilon = norm.args[-2] if result is norm else norm.args[-1]
    plain = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
    dims = plain.get(convolution.target)
    if dims is None or convolution.kwargs or len(convolution.users) > 1:
        return
    rows, weight, *rest = convolution.args
    bias = rest[0] if rest else None
    dtype = result.meta["val"].dtype
    # Without a batch axis, the norm is over another axis.
    if rows.meta["val"].dim() != dims + 2:
        return
    needed, optional = (weight, mean, variance), (bias, scale, shift)
    constants = [*needed, *(value for value in optional if value is not None)]
    if not all(context.is_constant(value) for value in constants) or weight.meta["val"].dtype != dtype:
        return
    exact = torch.promote_types(dtype, torch.float32)
    with graph.inserting_before(convolution):

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            node = graph.call_function(target, args, kwargs)
            node.meta = {"val": target(*torch.fx.map_arg(args, lambda of: of.meta["val"]), **kwargs)}
            return node

        def constant(value: Any) -> Any:
            return context.prepack(call(aten._to_copy.default, value, dtype=dtype))

        def factor() -> Any:
            root = call(aten.rsqrt.default, call(aten.add.Tensor, copy(variance), epsilon))
            return root if scale is None else call(aten.mul.Tensor, root, copy(scale))

        def copy(value: Any) -> Any:
            return call(aten._to_copy.default, graph.node_copy(value), dtype=exact)

        factors = call(aten.view.default, factor(), [-1, *[1] * (dims + 1)])
        filters = constant(call(aten.mul.Tensor, copy(weight), factors))
        center = copy(mean) if bias is None else call(aten.sub.Tensor, copy(mean), copy(bias))
        offset = call(aten.neg.default, call(aten.mul.Tensor, center, factor()))
        offset = constant(offset if shift is None else call(aten.add.Tensor, offset, copy(shift)))
    if filters is None or offset is None:
        return
    convolution.args = (rows, filters, offset, *rest[1:])
    result.replace_all_uses_with(convolution)


def convert_filters(module: Any, context: Any) -> None:
    """Replaces filters of images by prepacked ones, channels last."""
    aten, graph = torch.ops.aten, module.graph
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        weight = node.args[1]
        if not context.is_constant(weight):
            continue
        held = weight.meta["val"]
        if held.dim() != 4 or held.is_contiguous(memory_format=torch.channels_last):
            continue
        with graph.inserting_before(node):
            converted = graph.call_function(
                aten.clone.default, (graph.node_copy(weight),), {"memory_format": torch.channels_last}
            )
            constant = context.prepack(converted)
        if constant is not None:
            node.update_arg(1, constant)
    graph.eliminate_dead_code()


def fuse_epilogues(module: Any, context: Any) -> None:
    """Fuses each convolution with the ReLU after it, and an addition between them, in a graph with channels last.

    Private: the compiler lowers convolutions as `aten.convolution` with nine arguments. Without it: none is fused.
    """
    aten, graph = torch.ops.aten, module.graph
    context.call_by_name(aten.cudnn_convolution_relu.default, _shape, channels_last=True)
    context.call_by_name(aten.cudnn_convolution_add_relu.default, _shape_added, channels_last=True)
    for relu in graph.find_nodes(op="call_function", target=aten.relu.default):
        convolution, added = _before(relu)
        if convolution is None:
            continue
        rows, filters, bias, *where, _, _, groups = convolution.args
        # Convolutions take one number for both axes; these operators do not.
        where = [list(given) * 2 if len(given) == 1 else list(given) for given in where] + [groups]
        if added is None:
            target, args = aten.cudnn_convolution_relu.default, (rows, filters, bias, *where)
        else:
            target, args = aten.cudnn_convolution_add_relu.default, (rows, filters, added, None, bias, *where)
        if not _is_usable(target, args, relu.meta["val"].shape):
            continue
        with graph.inserting_before(relu):
            if added is not None:
                bias = _with_bias_of(added, bias, module.graph, context)
                args = (rows, filters, added, None, bias, *where)
            fused = graph.call_function(target, args)
        fused.meta = dict(relu.meta)
        relu.replace_all_uses_with(fused)
        graph.erase_node(relu)
    graph.eliminate_dead_code()


def _before(relu: Any) -> tuple[Any, Any]:
    """Returns the convolution before a ReLU, and the tensor added between; None twice if they can't be fused."""
    (value,) = relu.args
    if _is_fusible(value):
        return value, None
    if value.target is not torch.ops.aten.add.Tensor or value.kwargs or len(value.users) != 1:
        return None, None
    held = value.meta["val"]
    for convolution, added in (value.args, value.args[::-1]):
        if not isinstance(added, torch.fx.Node) or not _is_fusible(convolution):
            continue
        both = [node.meta["val"] for node in (convolution, added)]
        if all(part.shape == held.shape and part.dtype == held.dtype for part in both):
            return convolution, added
    return None, None


def _is_fusible(node: Any) -> bool:
    """Returns whether a node is a convolution with one reader that cuDNN has fused kernels for.

    These kernels use tensor cores, and accumulate in float32.
    """
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


def _is_usable(target: Any, args: tuple[Any, ...], shape: Any) -> bool:
    """Returns whether a fused kernel takes such arguments, does not read the memory of its result, and keeps a NaN.

    Private: `torch.utils._python_dispatch._disable_current_modes`. Without it: this pass fails.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    def eighths(node: Any) -> Any:
        # No sum of these is too large for float16.
        held = node.meta["val"]
        values = torch.full(held.shape, 0.125, dtype=held.dtype, device=held.device)
        return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values

    with _disable_current_modes(), torch.no_grad():
        try:
            given = torch.fx.map_arg(args, eighths)
            # The allocator reuses the memory that was freed last.
            unwritten = torch.full(shape, math.nan, dtype=given[0].dtype, device=given[0].device)
            del unwritten
            if not target(*given).isfinite().all():
                return False
            given[0].fill_(math.nan)
            return bool(target(*given).isnan().all())
        except (NotImplementedError, RuntimeError) as error:
            print(f"a convolution is not fused with its epilogue: {str(error).partition(chr(10))[0]}", file=sys.stderr)
            return False


def _with_bias_of(added: Any, bias: Any, graph: Any, context: Any) -> Any:
    """Removes the bias of a convolution that is added, and returns the sum of both biases, if they are constants."""
    if not _is_fusible(added) or not all(context.is_constant(value) for value in (added.args[2], bias)):
        return bias
    parts = tuple(graph.node_copy(value) for value in (added.args[2], bias))
    whole = context.prepack(graph.call_function(torch.ops.aten.add.Tensor, parts))
    if whole is None:
        return bias
    added.update_arg(2, None)
    return whole


def _shape(rows: Any, filters: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    return torch.ops.aten.convolution(rows, filters, bias, stride, padding, dilation, False, [0, 0], groups)


def _shape_added(rows: Any, filters: Any, _added: Any, _alpha: Any, bias: Any, *where: Any) -> Any:
    return _shape(rows, filters, bias, *where)
