"""Weights as a device's kernels want them: one matrix for products of the same rows, filters with the batch norm after
them multiplied in, and channels last.

The query, the key and the value of attention, or both halves of a gated layer, are products of the same rows. Apart,
each is a kernel that is over before it has filled the device; as one they read the rows once. A batch norm takes a root
and a division for every element; multiplied into the filter before it, there is nothing left of it but a bias. Filters
that a model holds in torch's usual order are turned before every convolution, where the compiler works channels last;
that is a kernel for each as well.

What is made of weights has a recipe, as on a CPU (prepared.py), and the runtime makes it once for each weight set. It
lets matrices that are joined lie one behind the other on a device, so that to join them costs no memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from . import epilogues, prepared

# Operations that may lie between two products that are joined: what comes of the first is kept until the last is read.
_NEAR = 16


def join(module: Any) -> dict[str, prepared.Recipe]:
    """Makes one product of those that multiply the same rows with weights of a module; returns what it is made of."""
    import torch

    aten = torch.ops.aten
    known = {name for name, _ in module.named_buffers()}
    alike: dict[Any, list[list[Any]]] = {}
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        if node.kwargs or not _joinable(node):
            continue
        rows, *weights = node.args
        kinds = tuple(value.meta["val"].dtype for value in weights)
        runs = alike.setdefault((rows, weights[0].meta["val"].shape[1], kinds), [])
        if runs and places[node] - places[runs[-1][-1]] <= _NEAR:
            runs[-1].append(node)
        else:
            runs.append([node])
    made: dict[str, prepared.Recipe] = {}
    for products in (run for runs in alike.values() for run in runs):
        if len(products) > 1:
            _join(module, products, known, made)
    if made:
        _tidy(module, known)
    return made


def _tidy(module: Any, known: set[str]) -> None:
    """Takes weights from a module that its graph does not read any more: what was made of them is there too."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    used = {node.target for node in module.graph.find_nodes(op="get_attr")}
    for name in known - used:
        delattr(module, name)


def _joinable(product: Any) -> bool:
    """Returns whether a product is one with weights whose result may have gaps between its rows."""
    _, *weights = product.args
    return (
        all(getattr(value, "op", "") == "get_attr" for value in weights)
        and [value.meta["val"].dim() for value in weights] in ([2], [2, 1])
        and all(value.meta["val"].is_contiguous() for value in weights)
        and _may_have_gaps(product)
    )


def _may_have_gaps(node: Any) -> bool:
    """Returns whether whoever reads a value, or views of it, takes it with gaps between its rows.

    A result of the segment is laid out as its record says; `as_strided` and operators of others read memory as it was.
    """
    import torch

    aten = torch.ops.aten
    for user in node.users:
        if _views(user):
            if user.target in (aten.as_strided.default, aten._unsafe_view.default) or not _may_have_gaps(user):
                return False
        elif user.op != "call_function" or getattr(user.target, "namespace", "") not in ("aten", "prims"):
            return False
    return True


def _views(node: Any) -> bool:
    """Returns whether a node's result may share memory with what it is given; dropout that is off hands that on."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return schema.name == "aten::dropout" or any(made.alias_info is not None for made in schema.returns)


def _join(module: Any, products: list[Any], known: set[str], made: dict[str, prepared.Recipe]) -> None:
    import torch

    aten, graph = torch.ops.aten, module.graph
    rows = products[0].args[0]
    with graph.inserting_before(products[0]):
        columns = zip(*(node.args[1:] for node in products), strict=True)
        weights = [_beside(module, list(column), known, made) for column in columns]
        if None in weights:
            return
        whole = graph.call_function(aten.linear.default, (rows, *weights))
        start = 0
        for node in products:
            held = node.meta["val"]
            end = start + held.shape[-1]
            part = graph.call_function(aten.slice.Tensor, (whole, held.dim() - 1, start, end))
            part.meta = dict(node.meta)
            start = end
            _reshape(node)
            node.replace_all_uses_with(part)
    whole.meta = {**products[0].meta, "val": torch.cat([node.meta["val"] for node in products], -1)}
    for node in products:
        graph.erase_node(node)


def _reshape(node: Any) -> None:
    """Lets views of a value be copies where it has gaps that they can't have."""
    import torch

    for user in node.users:
        if _views(user):
            _reshape(user)
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default


def _beside(module: Any, weights: list[Any], known: set[str], made: dict[str, prepared.Recipe]) -> Any:
    """Returns a constant that is these weights, one behind the other; none where no recipe can say that."""
    import torch

    copies = [module.graph.node_copy(weight) for weight in weights]
    made_of = module.graph.call_function(torch.ops.aten.cat.default, (copies, 0))
    return prepared.constant(module, made_of, known, made)


def fold(module: Any, made: dict[str, prepared.Recipe]) -> None:
    """Multiplies batch norms into the filters before them; `made` gets what these are made of."""
    import torch

    known = {name for name, _ in module.named_buffers()} - made.keys()
    folded = False
    aten = torch.ops.aten
    for norm in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if len(norm.args) == 9 and not norm.args[5]:
            folded |= _fold(module, norm, norm, known, made)
    # What it is in a program that was made functional; its other results are for training.
    for norm in module.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        results = [user for user in norm.users if user.users]
        if len(norm.args) == 7 and len(results) == 1 and results[0].args == (norm, 0):
            folded |= _fold(module, norm, results[0], known, made)
    if folded:
        _tidy(module, known)


def _fold(module: Any, norm: Any, result: Any, known: set[str], made: dict[str, prepared.Recipe]) -> bool:
    import torch

    aten, graph = torch.ops.aten, module.graph
    if norm.kwargs:
        return False
    convolution, scale, shift, mean, variance = norm.args[:5]
    epsilon = norm.args[-2] if result is norm else norm.args[-1]
    plain = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
    dims = plain.get(convolution.target)
    if dims is None or convolution.kwargs or len(convolution.users) > 1:
        return False
    rows, weight, *rest = convolution.args
    bias = rest[0] if rest else None
    dtype = result.meta["val"].dtype
    # What has no batch is normalised along another axis.
    if rows.meta["val"].dim() != dims + 2:
        return False
    needed, optional = (weight, mean, variance), (bias, scale, shift)
    constants = [*needed, *(value for value in optional if value is not None)]
    if any(getattr(value, "target", None) not in known for value in constants) or weight.meta["val"].dtype != dtype:
        return False
    exact = torch.promote_types(dtype, torch.float32)
    with graph.inserting_before(convolution):

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            made = graph.call_function(target, args, kwargs)
            made.meta = {"val": target(*torch.fx.map_arg(args, lambda of: of.meta["val"]), **kwargs)}
            return made

        def constant(value: Any) -> Any:
            whole = call(aten._to_copy.default, value, dtype=dtype)
            return prepared.constant(module, whole, known, made)

        def factor() -> Any:
            root = call(aten.rsqrt.default, call(aten.add.Tensor, copy(variance), epsilon))
            return root if scale is None else call(aten.mul.Tensor, root, copy(scale))

        def copy(value: Any) -> Any:
            return call(aten._to_copy.default, graph.node_copy(value), dtype=exact)

        turned = call(aten.view.default, factor(), [-1, *[1] * (dims + 1)])
        filters = constant(call(aten.mul.Tensor, copy(weight), turned))
        away = copy(mean) if bias is None else call(aten.sub.Tensor, copy(mean), copy(bias))
        moved = call(aten.neg.default, call(aten.mul.Tensor, away, factor()))
        offset = constant(moved if shift is None else call(aten.add.Tensor, moved, copy(shift)))
    if filters is None or offset is None:
        return False
    convolution.args = (rows, filters, offset, *rest[1:])
    result.replace_all_uses_with(convolution)
    return True


def channels_last(known: set[str], made: dict[str, prepared.Recipe]) -> Callable[[Any], None]:
    """Returns a pass over the graph that is lowered: where the compiler works channels last, filters are laid out once,
    and convolutions do what follows them (epilogues.py). `made` gets what constants are made of.

    Breaks if: `GraphLowering.decide_layout_opt` is no longer what decides.
    """

    def run(graph: Any) -> None:
        from torch._inductor.graph import GraphLowering

        module = graph.owning_module
        if GraphLowering.decide_layout_opt(module, is_inference=True):
            _turn_filters(module, known, made)
            epilogues.take(module, known, made)

    return run


def _turn_filters(module: Any, known: set[str], made: dict[str, prepared.Recipe]) -> None:
    import torch

    aten, graph = torch.ops.aten, module.graph
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        weight = node.args[1]
        if weight.op != "get_attr" or weight.target not in known | made.keys():
            continue
        held = weight.meta["val"]
        if held.dim() != 4 or held.is_contiguous(memory_format=torch.channels_last):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(
                aten.clone.default, (graph.node_copy(weight),), {"memory_format": torch.channels_last}
            )
            constant = prepared.constant(module, turned, known, made)
        if constant is not None:
            node.update_arg(1, constant)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
