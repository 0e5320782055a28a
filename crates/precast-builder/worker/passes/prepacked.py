"""Prepacked weights: constants that are computed from weights once, when the weights are bound, and not in every call.

On a CPU, inductor's freezing decides about most of them: batch norms are folded into convolutions, filters and matrices
get the layout that oneDNN's kernels read. Graph passes may ask for more, on any device (segments.py). Inductor
computes with the values of weights, which an artifact must not contain. Here its passes run too, and each tensor that
they compute gets a *recipe*: calls of torch's operators on constants of the segment. The artifact has a constant in
its place; the runtime runs the recipe for each weight set.

Not prepacked are tensors much larger than their weights, results of the module, views with gaps, and anything that
needs operators which libtorch itself lacks. These stay in the code, as without freezing. A program that inductor's
passes can't handle is compiled without them, and its log says so.

A segment whose products have one or two rows of float32, as a step of decoding, keeps its weights as they are
(`is_faster`): the process of such a bucket maps the weight set and nothing beside it.

Buckets share equal prepacked weights. So a recipe depends on its bucket as little as possible: a matrix has the layout
for many rows, and a filter the one for a batch of one where oneDNN chooses the same for both.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import tensors
from ..torch_private import archives, fake, freezing, overloads, symbols, versions
from . import one_row

Recipe = dict[str, Any]

# A call of oneDNN costs 10 to 15 us before it computes anything, a call of MKL 2 to 6. Measured on 4 cores with
# AVX-512, rows 1 to 64, columns 32 to 2048: products of at least these sizes were faster packed, smaller ones were not.
_MIN_ELEMENTS = 1 << 19
_MIN_PRODUCTS = 1 << 21

# A product of so few rows reads each weight once, in whichever order. Measured on 2 cores with AVX-512, weights not in
# the caches (benches/results/prepacking-cpu.json): with float32 as it is, MKL took 0.5 to 0.9 times as long as oneDNN
# with packed weights; from 4 rows on about as long, or longer. Smaller dtypes were faster packed from one row on.
_FEW_ROWS = 2
_PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm"}

# Namespaces of the operators that a recipe may call: libtorch has them. The runtime refuses others.
_NAMESPACES = ("aten", "mkldnn", "onednn")

# For this many rows oneDNN chooses the blocked layout of its own kernels. For fewer, or an unknown number, it may
# choose a transposed matrix and its general product: for 32 to 1024 rows that was no faster, with 4 threads up to a
# third slower, and a process needs 35 ms to generate the general product when it first runs.
_MANY_ROWS = 1024

# The maximum of calls in a recipe. A value that is used twice is computed twice, so a chain of squares would grow
# exponentially; and JSON is read to a depth of 128, of which a call takes 4.
_MAX_CALLS = 28


@dataclass
class Weights:
    """The constants of a segment, and the prepacked ones."""

    own: frozenset[str]
    """Names of the segment's constants."""
    prepacked: dict[str, Recipe] = field(default_factory=dict)
    """Name of a prepacked constant -> its recipe and its layout."""

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.prepacked

    @classmethod
    def of(cls, module: Any) -> Weights:
        """Returns the weights of a segment before anything is prepacked."""
        return cls(frozenset(name for name, _ in module.named_buffers()))


def is_faster(module: Any) -> bool:
    """Returns whether a segment may be faster with prepacked weights. Not known of one without products."""
    values = [node.meta.get("val") for node in module.graph.nodes if overloads.name_of(node.target) in _PRODUCTS]
    if any("conv" in overloads.name_of(node.target) for node in module.graph.nodes):
        return True
    few = (value.dtype == torch.float32 and _rows(value) <= _FEW_ROWS for value in values)
    return not values or not all(few)


def _rows(product: Any) -> int:
    return math.prod(symbols.example(size) for size in product.shape[:-1])


def recording(weights: Weights, isa: str) -> AbstractContextManager[None]:
    """Adds the weights that are prepacked while a segment is compiled with freezing."""
    if not versions.works(versions.PREPACKED):
        return nullcontext()
    return freezing.folded_by(lambda module: _fold(module, weights), _is_worth_packing, _has_kernels, isa)


def _has_kernels(node: Any) -> bool:
    """Returns whether oneDNN has kernels for the dtypes of a node's operands; inductor checks some dtypes only."""
    dtypes = {value.meta["val"].dtype for value in node.args[:3] if isinstance(value, torch.fx.Node)}
    return dtypes <= {torch.float32, torch.bfloat16, torch.float16}


def _is_worth_packing(product: Any) -> bool:
    """Returns whether a product with a weight is large enough to be faster in oneDNN's layout."""
    rows, weight = (node.meta["val"] for node in product.args[-2:])
    if one_row.is_one_row(rows, weight):
        return False
    elements = symbols.example(weight.shape[0]) * symbols.example(weight.shape[1])
    products = symbols.example(rows.shape[0]) * elements
    # MKL has no kernels below float32: those products are oneDNN's in any case.
    worth = weight.dtype != torch.float32 or elements >= _MIN_ELEMENTS or products >= _MIN_PRODUCTS
    return worth and _has_kernels(product)


def _fold(module: Any, weights: Weights) -> None:
    graph = module.graph
    with fake.real_values():
        freezing.share_layouts(module, _MANY_ROWS)
        for node, value in freezing.foldable(module).items():
            recipe = None if one_row.stays(node) else _recipe(module, node, value, weights)
            if recipe is None:
                continue
            name = f"p{len(weights.prepacked)}"
            weights.prepacked[name] = recipe
            freezing.replace_by_constant(module, node, value, name)
        for node in graph.find_nodes(op="get_attr"):
            if not node.users:
                graph.erase_node(node)
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()


def prepack(module: Any, node: Any, weights: Weights) -> Any:
    """Replaces a new node, which depends only on constants, by a prepacked constant; returns the constant's node.

    Returns None, and removes the node, if there is no recipe for it.
    """

    def run(node: Any, value_of: Any) -> Any:
        def operand(of: Any) -> Any:
            return value_of(of) if of.op == "get_attr" else run(of, value_of)

        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), operand)
        with torch.no_grad():
            return node.target(*args, **kwargs)

    value = run(node, lambda of: getattr(module, of.target))
    recipe = _recipe(module, node, value, weights) if versions.works(versions.PREPACKED) else None
    if recipe is None:
        module.graph.erase_node(node)
        return None
    node.meta = {"val": run(node, lambda of: of.meta["val"])}
    name = f"p{len(weights.prepacked)}"
    weights.prepacked[name] = recipe
    before = node.prev
    freezing.replace_by_constant(module, node, value, name)
    return before.next


def _recipe(module: Any, node: Any, value: Any, weights: Weights) -> Recipe | None:
    """Returns the recipe of a node's value; None for a value that is better computed in every call."""
    if not isinstance(value, torch.Tensor) or not tensors.supported(value.dtype) or _escapes(node):
        return None
    if not value.is_mkldnn and not fake.is_dense(value):
        return None
    roots: dict[str, int] = {}
    remaining = [_MAX_CALLS]
    try:
        call = _call(module, node, weights.prepacked, roots, remaining)
    except _NoRecipe:
        return None
    # A pass of inductor may add constants; blocks of columns may need some zeros.
    if not roots or not roots.keys() <= weights.own or 8 * value.numel() > 9 * sum(roots.values()):
        return None
    shape = list(value.shape)
    dtype = tensors.dtype_name(value.dtype)
    stride = None if value.is_mkldnn else list(value.stride())
    return {
        "call": call,
        "dtype": dtype,
        "shape": shape,
        "stride": stride,
        "roots": roots,
        "calls": _MAX_CALLS - remaining[0],
    }


def _escapes(node: Any) -> bool:
    """Returns whether a result of the module may share memory with a node's value: the caller owns results."""

    def views(user: Any) -> bool:
        operator = overloads.overload_of(user.target)
        if operator in (torch.ops.prims.inductor_force_stride_order.default, torch.ops.aten._unsafe_view.default):
            return True
        return operator is None or overloads.returns_view(operator)

    return any(user.op == "output" or (views(user) and _escapes(user)) for user in node.users)


class _NoRecipe(Exception):
    """A value that no recipe can compute."""


def _call(
    module: Any, node: Any, prepacked: dict[str, Recipe], roots: dict[str, int], remaining: list[int]
) -> dict[str, Any]:
    """Returns a call with all arguments in the order of its schema.

    `roots` gets the sizes of the constants that it reads; `remaining` counts down the calls that a recipe may have.
    """
    _spend(remaining, 1)
    operator, given = overloads.overload_of(node.target), dict(node.kwargs)
    if operator is torch.ops.prims.convert_element_type.default:
        operator, given = torch.ops.aten._to_copy.default, {"dtype": node.args[1]}
        positional = node.args[:1]
    else:
        positional = node.args
    if operator is None or operator.namespace not in _NAMESPACES or overloads.is_mutable(operator):
        raise _NoRecipe
    # The shape, or the code, would depend on a weight's values.
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(operator.tags):
        raise _NoRecipe
    arguments = []
    for index, argument in enumerate(overloads.arguments(operator)):
        if index < len(positional):
            value = positional[index]
        elif argument.name in given:
            value = given[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise _NoRecipe
        if isinstance(value, int | float):
            wanted = str(argument.type)
            if "Tensor" in wanted:
                arguments.append([argument.name, {"call": _number(node, value)}])
                continue
            value = float(value) if "float" in wanted and not isinstance(value, bool) else value
        arguments.append([argument.name, _argument(module, value, prepacked, roots, remaining)])
    return {"operator": overloads.full_name(operator), "arguments": arguments}


def _number(node: Any, value: float) -> dict[str, Any]:
    """Returns the call that creates a tensor without axes from a number. Tensors with axes decide a result's dtype."""
    others = [_without_data(operand) for operand in node.all_input_nodes]
    if isinstance(value, bool) or not all(isinstance(held, torch.Tensor) and held.dim() > 0 for held in others):
        raise _NoRecipe
    # Next to integers a float64 tensor decides the dtype, while a number has the default dtype.
    if isinstance(value, float) and not any(held.is_floating_point() for held in others):
        raise _NoRecipe
    kind, dtype = ("int", torch.int64) if isinstance(value, int) else ("float", torch.float64)
    if not math.isfinite(value):
        raise _NoRecipe
    fixed = [[name, {"none": None}] for name in ("layout", "device", "pin_memory")]
    arguments = [["s", {kind: value}], ["dtype", _dtype(dtype)], *fixed]
    return {"operator": "aten::scalar_tensor", "arguments": arguments}


def _without_data(node: Any) -> Any:
    """Returns the result of a node without data; None if it is not known.

    Inductor's passes leave it out of new nodes until the next pass.
    """
    if "val" not in node.meta and node.op == "call_function":
        if all(_without_data(operand) is not None for operand in node.all_input_nodes):
            fake.propagate_node(node)
    return node.meta.get("val")


def _dtype(dtype: Any) -> dict[str, Any]:
    return {"scalar_type": archives.number(dtype)}


def _spend(remaining: list[int], calls: int) -> None:
    remaining[0] -= calls
    if remaining[0] < 0:
        raise _NoRecipe


def _argument(
    module: Any, value: Any, prepacked: dict[str, Recipe], roots: dict[str, int], remaining: list[int]
) -> dict[str, Any]:
    if isinstance(value, torch.fx.Node):
        if value.op == "call_function":
            return {"call": _call(module, value, prepacked, roots, remaining)}
        if value.op != "get_attr":
            raise _NoRecipe
        if value.target in prepacked:
            roots |= prepacked[value.target]["roots"]
            _spend(remaining, prepacked[value.target]["calls"])
            return {"call": prepacked[value.target]["call"]}
        held = getattr(module, value.target, None)
        if not isinstance(held, torch.Tensor):
            raise _NoRecipe
        roots[value.target] = held.numel()
        return {"constant": value.target}
    if value is None:
        return {"none": None}
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    if isinstance(value, float) and math.isfinite(value):
        return {"float": value}
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if isinstance(value, torch.memory_format):
        return {"memory_format": archives.number(value)}
    if isinstance(value, list | tuple):
        if all(isinstance(part, int) and not isinstance(part, bool) for part in value):
            return {"ints": list(value)}
        if all(isinstance(part, torch.fx.Node) for part in value):
            return {"tensors": [_argument(module, part, prepacked, roots, remaining) for part in value]}
    raise _NoRecipe
