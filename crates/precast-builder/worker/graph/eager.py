"""Eager: the captured graph of a module as a list of operator calls, which the runtime runs in order.

The list is JSON (`calls.rs` of the runtime reads it):

    {"format": 1, "inputs": 2, "outputs": [3], "calls": [
        {"op": "aten::mul.Tensor", "args": {"self": {"value": 0}, "other": {"value": 1}}, "results": [2]},
        {"op": "aten::sum.dim_IntList", "args": {"self": {"value": 2}, "dim": [-1]}, "results": [3]}]}

Values are numbered: the inputs of the module, then its weights, then the results of the calls in their order. A result
that nothing reads is null; a list of tensors is a list of numbers. An argument is `{"value": n}`, a list, null, a
boolean, an integer, a string, or one of these:

| JSON | value |
|---|---|
| `{"float": "0.5"}` | a float, also `inf` and `nan`, with all its digits |
| `{"complex": ["0.0", "1.0"]}` | real and imaginary part |
| `{"dtype": 7}`, `{"layout": 7}`, `{"memory_format": 1}` | as torch.export numbers them |
| `{"device": "cuda:0"}` | a device; the runtime replaces it by its own, if that is of the same kind |

Missing arguments have the default of the operator's schema. An operator is an overload of the dispatcher, or a function
on numbers (`number::add`) for sizes. `cond` has two graphs, in `graphs`: their inputs are its arguments after the
first.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..torch_private import archives, exported, overloads, symbols
from . import flat

FORMAT = 1

_NAMED = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, operator.pow)
_NAMED += (operator.neg, operator.abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_NAMED += (operator.and_, operator.or_, operator.xor, operator.not_, abs, max, min, round)
_NAMED += (math.floor, math.ceil, math.sqrt)
# Functions on numbers -> their names in the list.
_NUMBERS: dict[Any, str] = {function: function.__name__.strip("_") for function in _NAMED} | {math.trunc: "int"}
_NUMBERS_OF_TORCH = {"sym_max": "max", "sym_min": "min", "sym_not": "not", "sym_float": "float", "sym_int": "int"}
_NUMBERS_OF_TORCH |= {"sym_ite": "ite", "sym_sum": "sum", "_sym_sqrt": "sqrt"}


class Refused(Exception):
    """A graph that can't be a list of calls."""


@dataclass
class Choice:
    """A graph for calls in which these axes of inputs, as position and axis, are all 1."""

    axes: list[tuple[int, int]]
    graph: flat.Flat


def save(graph: flat.Flat, order: list[int], path: Path, choices: Sequence[Choice] = ()) -> list[str]:
    """Writes the calls of a whole module. Returns the names of its weights, which are further inputs.

    `order` has the positions of the graph's inputs as a call gives them. A choice with more axes comes before those
    with fewer.
    """
    graphs = [graph, *(choice.graph for choice in choices)]
    weights = [_weights(one) for one in graphs]
    keys = list(dict.fromkeys(key for one in weights for key in one))
    calls = []
    for one, own in zip(graphs, weights, strict=True):
        # A graph takes the weights of all, in one order.
        given = [*(one.inputs[at] for at in order), *(own.get(key, key) for key in keys)]
        calls.append(encode(one.graph, given, [*one.outputs, *(check.outcome for check in one.checks)]))
    whole = calls[0]
    for choice, yes in sorted(zip(choices, calls[1:], strict=True), key=lambda pair: len(pair[0].axes)):
        whole = _chosen(choice.axes, yes, whole)
    path.write_text(json.dumps({"format": FORMAT, **whole}, separators=(",", ":")))
    return [name for name, _ in keys]


def _weights(graph: flat.Flat) -> dict[tuple[str, int], Any]:
    """Returns the used weights by name; a tied one can be there several times."""
    found: dict[tuple[str, int], Any] = {}
    for node, name in graph.weights.items():
        if node.users:
            found[name, sum(known == name for known, _ in found)] = node
    return found


def _chosen(axes: list[tuple[int, int]], yes: dict[str, Any], no: dict[str, Any]) -> dict[str, Any]:
    """Returns a graph that is `yes` where these axes are 1, else `no`."""
    inputs, calls = yes["inputs"], []
    value = inputs
    for count, (given, axis) in enumerate(axes):
        size = {"op": "aten::sym_size.int", "args": {"self": {"value": given}, "dim": axis}, "results": [value]}
        one = {"op": "number::eq", "args": {"0": {"value": value}, "1": 1}, "results": [value + 1]}
        calls += [size, one]
        value += 2
        if count:
            both = {"0": {"value": value - 3}, "1": {"value": value - 1}}
            calls.append({"op": "number::and", "args": both, "results": [value]})
            value += 1
    args = {str(at): {"value": number} for at, number in enumerate((value - 1, *range(inputs)))}
    results = list(range(value, value + len(yes["outputs"])))
    calls.append({"op": "cond", "args": args, "graphs": [yes, no], "results": results})
    return {"inputs": inputs, "outputs": results, "calls": calls}


def encode(graph: Any, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    """Returns inputs, outputs and calls of a graph; calls that nothing needs are left out."""
    return _Encoder(graph, inputs).encoded(outputs)


class _Encoder:
    def __init__(self, graph: Any, inputs: list[Any]) -> None:
        self.graph, self.inputs = graph, inputs
        # None: a result without readers.
        self.numbers: dict[Any, Any] = {node: index for index, node in enumerate(inputs)}
        self.values = len(inputs)

    def encoded(self, outputs: list[Any]) -> dict[str, Any]:
        needed = _needed(self.graph, outputs)
        calls = []
        for node in self.graph.nodes:
            if node.op == "call_function" and node in needed and not self._picked(node):
                try:
                    call = self._call(node)
                except Refused as reason:
                    raise Refused(f"`{_title(node.target)}`: {reason}") from None
                calls.append({**call, "results": self._results(node, needed)})
        return {"inputs": len(self.inputs), "outputs": [self._number(node) for node in outputs], "calls": calls}

    def _picked(self, node: Any) -> bool:
        """Returns whether a node only selects a result of another node; then it has the number of that result."""
        if node.target is not operator.getitem or not isinstance(self.numbers.get(node.args[0]), list):
            return False
        self.numbers[node] = self.numbers[node.args[0]][node.args[1]]
        return True

    def _call(self, node: Any) -> dict[str, Any]:
        overload = overloads.overload_of(node.target)
        if overload is not None:
            args = {}
            for argument, value in _bound(overload, node):
                try:
                    args[argument.name] = self._argument(value, argument)
                except Refused as reason:
                    raise Refused(f"argument `{argument.name}`: {reason}") from None
            return {"op": overloads.full_name(overload), "args": args}
        name = _NUMBERS.get(node.target)
        if getattr(node.target, "__module__", None) == "torch" or node.target in (torch.sym_max, torch.sym_min):
            name = _NUMBERS_OF_TORCH.get(getattr(node.target, "__name__", ""), name)
        if name is not None and not node.kwargs:
            given = node.args[0] if name == "sum" else node.args
            return {"op": f"number::{name}", "args": {str(at): self._argument(one) for at, one in enumerate(given)}}
        if overloads.is_higher_order(node.target) and node.target.name() == "cond":
            return self._cond(node)
        raise Refused("no operator that the runtime can call")

    def _cond(self, node: Any) -> dict[str, Any]:
        predicate, yes, no, operands = node.args
        graphs = []
        for branch in (yes, no):
            inner = exported.attribute(self.graph, branch.target).graph
            graphs.append(encode(inner, inner.find_nodes(op="placeholder"), exported.outputs_of(inner)))
        args = {str(at): self._argument(one) for at, one in enumerate((predicate, *operands))}
        return {"op": "cond", "args": args, "graphs": graphs}

    def _results(self, node: Any, needed: set[Any]) -> list[Any]:
        """Numbers the results of a call."""
        held, overload = node.meta.get("val"), overloads.overload_of(node.target)
        count = 1 if overload is None else len(overloads.returned(overload))
        many = count > 1 or overloads.is_higher_order(node.target)
        given = list(held) if many and isinstance(held, tuple | list) else [held] * count
        results = [self._result(one) for one in given]
        # Results without readers are not kept.
        if many and all(user.target is operator.getitem for user in node.users):
            picked = {user.args[1] for user in node.users if user in needed}
            results = [one if at in picked else None for at, one in enumerate(results)]
        results = [self._numbered(one) for one in results]
        self.numbers[node] = results if many else (results[0] if results else None)
        return results

    def _result(self, held: Any) -> Any:
        """Returns a placeholder for a result without a number: 0, or a 0 for each tensor of a list."""
        return [0 for _ in held] if isinstance(held, tuple | list) else 0

    def _numbered(self, result: Any) -> Any:
        if isinstance(result, list):
            return [self._numbered(one) for one in result]
        if result is None:
            return None
        self.values += 1
        return self.values - 1

    def _number(self, node: Any) -> int:
        number = self.numbers.get(node)
        if not isinstance(number, int):
            raise Refused(f"`{node}` is no single value")
        return number

    def _argument(self, value: Any, argument: Any = None) -> Any:
        length = None if argument is None else overloads.fixed_length(argument)
        if length and not isinstance(value, tuple | list | torch.fx.Node) and value is not None:
            value = [value] * length  # `int[2]` takes one integer for both
        if isinstance(value, torch.fx.Node):
            numbers = self.numbers.get(value)
            if isinstance(numbers, list) and None not in numbers:
                return [{"value": number} for number in numbers]
            return {"value": self._number(value)}
        if isinstance(value, tuple | list):
            return [self._argument(one) for one in value]
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, torch.SymInt):
            fixed = symbols.fixed(value)
            if fixed is not None:
                return fixed
        return _fixed(value)


def _fixed(value: Any) -> dict[str, Any]:
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {type(value).__name__: archives.number(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise Refused(f"a `{type(value).__name__}`, which has no place in a list of calls")


def _bound(overload: Any, node: Any) -> Iterable[tuple[Any, Any]]:
    """Yields the arguments of an operator that a node gives, with their values."""
    arguments = overloads.arguments(overload)
    yield from zip(arguments, node.args, strict=False)
    by_name = {argument.name: argument for argument in arguments}
    for name, value in node.kwargs.items():
        yield by_name[name], value


def _needed(graph: Any, outputs: list[Any]) -> set[Any]:
    """Returns the nodes that the outputs depend on, and nodes with side effects."""
    needed: set[Any] = set()
    todo = [*outputs, *(node for node in graph.nodes if node.op == "call_function" and node.is_impure())]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend(node.all_input_nodes)
    return needed


def _title(target: Any) -> str:
    return str(target) if overloads.is_overload(target) else getattr(target, "__name__", str(target))
