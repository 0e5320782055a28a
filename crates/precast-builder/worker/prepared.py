"""Constants that are made of weights once, when these are bound, and not in every call.

Inductor's freezing knows what pays on a CPU: a batch norm folded into the convolution before it, filters and matrices
in the order that oneDNN's kernels read them. Graph passes may ask for more, on any device (segment_passes.py). Inductor
does it with the values of weights, which an artifact must not have.
Here the same passes run, and beside every tensor they make stands how it is made: a *recipe*, operators of torch on
constants of the segment. The artifact gets a constant in its place; the runtime follows the recipe for each weight set.

What is not made: anything much larger than what it is made of, results of the module, views with gaps, and whatever
needs more than operators that libtorch itself has. That stays in the code, as without freezing. A program that torch's
passes can't take at all is compiled without them; its log says so.

Buckets share what they make alike. So a recipe says no more of its bucket than it must: a matrix is laid out for many
rows, and a filter for a batch of one where oneDNN chooses the same order for both.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from . import tensors
from .torch_private import archives, fake, freezing, overloads, symbols

Recipe = dict[str, Any]

# A call of oneDNN costs 10 to 15 us before it computes anything, and one of MKL 2 to 6: packing has to be worth it.
# Measured on 4 cores with AVX-512, rows 1 to 64, columns 32 to 2048: from these on it was, below it was not.
_ELEMENTS = 1 << 19
_PRODUCTS = 1 << 21

# Whose operators a recipe may call: libtorch has them. The runtime follows no others (runtime/prepared.rs).
_NAMESPACES = ("aten", "mkldnn", "onednn")

# For this many rows oneDNN takes the blocked order of its own kernels. For fewer, or when it is not told how many, it
# may take a transposed matrix and its general product: for 32 to 1024 rows that was no faster, with 4 threads up to
# a third slower, and the code of the general product takes 35 ms to make when a process first needs it.
_ROWS = 1024

# A value that is used twice is made twice, so a chain of squares would grow without end; and JSON is read to a depth of
# 128, of which a call takes 4.
_CALLS = 28


@dataclass
class Weights:
    """The constants of a segment, and what is made of them."""

    known: frozenset[str]
    """Names of the segment's own."""
    made: dict[str, Recipe] = field(default_factory=dict)
    """Name of a prepacked constant -> how it is made, and its layout."""

    def __contains__(self, name: object) -> bool:
        return name in self.known or name in self.made

    @classmethod
    def of(cls, module: Any) -> Weights:
        """Returns those of a segment of which nothing is made yet."""
        return cls(frozenset(name for name, _ in module.named_buffers()))


def recording(weights: Weights, isa: str) -> AbstractContextManager[None]:
    """Has `weights` get what is made while their segment is compiled with freezing."""
    return freezing.folded_by(lambda module: _fold(module, weights), _worth_packing, _ours, isa)


def _ours(node: Any) -> bool:
    """Returns whether oneDNN has kernels for what a node multiplies; the passes ask for some dtypes only."""
    import torch

    dtypes = {value.meta["val"].dtype for value in node.args[:3] if isinstance(value, torch.fx.Node)}
    return dtypes <= {torch.float32, torch.bfloat16, torch.float16}


def _worth_packing(product: Any) -> bool:
    """Returns whether a product with a weight is large enough for oneDNN's order to pay."""
    import torch

    rows, weight = (node.meta["val"] for node in product.args[-2:])
    elements = symbols.example(weight.shape[0]) * symbols.example(weight.shape[1])
    products = symbols.example(rows.shape[0]) * elements
    # MKL has no kernels for what is below float32: there it is oneDNN either way.
    worth = weight.dtype != torch.float32 or elements >= _ELEMENTS or products >= _PRODUCTS
    return worth and _ours(product)


def _fold(module: Any, weights: Weights) -> None:
    graph = module.graph
    with fake.real_values():
        freezing.share_layouts(module, _ROWS)
        for node, value in freezing.foldable(module).items():
            recipe = _recipe(module, node, value, weights)
            if recipe is None:
                continue
            name = f"p{len(weights.made)}"
            weights.made[name] = recipe
            freezing.replace_by_constant(module, node, value, name)
        for node in graph.find_nodes(op="get_attr"):
            if not node.users:
                graph.erase_node(node)
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()


def constant(module: Any, node: Any, weights: Weights) -> Any:
    """Puts a constant of its own in the place of a new node, made of the segment's or of other new nodes of these;
    returns none, and takes the node away, if no recipe can say how."""
    import torch

    def run(node: Any, value_of: Any) -> Any:
        def part(of: Any) -> Any:
            return value_of(of) if of.op == "get_attr" else run(of, value_of)

        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), part)
        with torch.no_grad():
            return node.target(*args, **kwargs)

    value = run(node, lambda of: getattr(module, of.target))
    recipe = _recipe(module, node, value, weights)
    if recipe is None:
        module.graph.erase_node(node)
        return None
    node.meta = {"val": run(node, lambda of: of.meta["val"])}
    name = f"p{len(weights.made)}"
    weights.made[name] = recipe
    before = node.prev
    freezing.replace_by_constant(module, node, value, name)
    return before.next


def _recipe(module: Any, node: Any, value: Any, weights: Weights) -> Recipe | None:
    """Returns how a node's value is made of the segment's constants; none for what is better left in the code."""
    import torch

    if not isinstance(value, torch.Tensor) or not tensors.supported(value.dtype) or _escapes(node):
        return None
    if not value.is_mkldnn and not fake.is_dense(value):
        return None
    roots: dict[str, int] = {}
    room = [_CALLS]
    try:
        call = _call(module, node, weights.made, roots, room)
    except _Left:
        return None
    # A pass of torch's may bring constants of its own; blocks of columns may need some zeros.
    if not roots or not roots.keys() <= weights.known or 8 * value.numel() > 9 * sum(roots.values()):
        return None
    shape = list(value.shape)
    dtype = tensors.dtype_name(value.dtype)
    stride = None if value.is_mkldnn else list(value.stride())
    return {"call": call, "dtype": dtype, "shape": shape, "stride": stride, "roots": roots, "calls": _CALLS - room[0]}


def _escapes(node: Any) -> bool:
    """Returns whether a result of the module may share memory with a node's value: a result is the caller's alone."""
    import torch

    def views(user: Any) -> bool:
        operator = overloads.overload_of(user.target)
        if operator in (torch.ops.prims.inductor_force_stride_order.default, torch.ops.aten._unsafe_view.default):
            return True
        return operator is None or overloads.returns_view(operator)

    return any(user.op == "output" or (views(user) and _escapes(user)) for user in node.users)


class _Left(Exception):
    """A value that no recipe can say."""


def _call(module: Any, node: Any, made: dict[str, Recipe], roots: dict[str, int], room: list[int]) -> dict[str, Any]:
    """Returns a call with all arguments in the order of its schema; `roots` gets the sizes of the constants in it, and
    `room` has how many calls it may still be."""
    import torch

    _spend(room, 1)
    operator, given = overloads.overload_of(node.target), dict(node.kwargs)
    if operator is torch.ops.prims.convert_element_type.default:
        operator, given = torch.ops.aten._to_copy.default, {"dtype": node.args[1]}
        positional = node.args[:1]
    else:
        positional = node.args
    if operator is None or operator.namespace not in _NAMESPACES or overloads.is_mutable(operator):
        raise _Left
    # The shape, or the code, would depend on a weight's values.
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(operator.tags):
        raise _Left
    arguments = []
    for index, argument in enumerate(overloads.arguments(operator)):
        if index < len(positional):
            value = positional[index]
        elif argument.name in given:
            value = given[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise _Left
        if isinstance(value, int | float):
            wanted = str(argument.type)
            if "Tensor" in wanted:
                arguments.append([argument.name, {"call": _number(node, value)}])
                continue
            value = float(value) if "float" in wanted and not isinstance(value, bool) else value
        arguments.append([argument.name, _argument(module, value, made, roots, room)])
    name, overload = overloads.name_of(operator), overloads.overload_name(operator)
    suffix = f".{overload}" if overload != "default" else ""
    return {"operator": f"{operator.namespace}::{name}{suffix}", "arguments": arguments}


def _number(node: Any, value: float) -> dict[str, Any]:
    """A number in a tensor's place is a tensor without axes, which does not decide the dtype beside one with axes."""
    import torch

    beside = [operand.meta.get("val") for operand in node.all_input_nodes]
    if isinstance(value, bool) or not all(isinstance(held, torch.Tensor) and held.dim() > 0 for held in beside):
        raise _Left
    # A tensor of float64 does decide beside integers, and a number stands for the default dtype.
    if isinstance(value, float) and not any(held.is_floating_point() for held in beside):
        raise _Left
    kind, dtype = ("int", torch.int64) if isinstance(value, int) else ("float", torch.float64)
    if not math.isfinite(value):
        raise _Left
    fixed = [[name, {"none": None}] for name in ("layout", "device", "pin_memory")]
    made = [["s", {kind: value}], ["dtype", _dtype(dtype)], *fixed]
    return {"operator": "aten::scalar_tensor", "arguments": made}


def _dtype(dtype: Any) -> dict[str, Any]:
    return {"scalar_type": archives.dtype_number(dtype)}


def _spend(room: list[int], calls: int) -> None:
    room[0] -= calls
    if room[0] < 0:
        raise _Left


def _argument(
    module: Any, value: Any, made: dict[str, Recipe], roots: dict[str, int], room: list[int]
) -> dict[str, Any]:
    import torch

    if isinstance(value, torch.fx.Node):
        if value.op == "call_function":
            return {"call": _call(module, value, made, roots, room)}
        if value.op != "get_attr":
            raise _Left
        if value.target in made:
            roots |= made[value.target]["roots"]
            _spend(room, made[value.target]["calls"])
            return {"call": made[value.target]["call"]}
        held = getattr(module, value.target, None)
        if not isinstance(held, torch.Tensor):
            raise _Left
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
        return {"memory_format": archives.memory_format_number(value)}
    if isinstance(value, list | tuple):
        if all(isinstance(part, int) and not isinstance(part, bool) for part in value):
            return {"ints": list(value)}
        if all(isinstance(part, torch.fx.Node) for part in value):
            return {"tensors": [_argument(module, part, made, roots, room) for part in value]}
    raise _Left
