"""The canonical text of a segment: everything that decides the compiled code, and nothing else.

Values are numbered in order of appearance. The text has: operations with their overloads and arguments; dtype, shape,
strides and device kind of every value; the layouts of inputs and constants; the outputs that share memory; digests of
integer and boolean constants. It lacks the names of nodes, modules and files, and the values of float weights.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch

from .. import tensors
from ..torch_private import exported, fake, overloads
from ..wire import Failure

VERSION = 1


def text(
    graph: Any,
    inputs: list[Any],
    constants: list[Any],
    digests: dict[Any, str],
    ranges: dict[Any, Any] | None = None,
) -> str:
    """Returns the text of a graph. `digests` has the constants whose values count, `ranges` the symbols' bounds."""
    return _symbols(_text(graph, inputs, constants, digests), ranges or {})


def _symbols(plain: str, ranges: dict[Any, Any]) -> str:
    """Numbers the symbols of dynamic sizes in order of appearance, and adds their bounds."""
    found = dict.fromkeys(re.findall(r"\b[su]\d+\b", plain)) if ranges else {}
    numbers = {name: f"d{index}" for index, name in enumerate(found)}
    bounds = {str(symbol): f"[{held.lower}, {held.upper}]" for symbol, held in ranges.items()}
    lines = [f"{number} in {bounds[name]}" for name, number in numbers.items() if name in bounds]
    renamed = re.sub(r"\b[su]\d+\b", lambda match: numbers.get(match.group(), match.group()), plain)
    return renamed + "".join(f"{line}\n" for line in lines)


def _text(graph: Any, inputs: list[Any], constants: list[Any], digests: dict[Any, str]) -> str:
    lines = [f"precast graph {VERSION}"]
    numbers: dict[Any, str] = {}
    for index, node in enumerate(inputs):
        numbers[node] = f"%i{index}"
        lines.append(f"%i{index} = input {_value(node.meta['val'])}")
    for index, node in enumerate(constants):
        numbers[node] = f"%c{index}"
        suffix = f" sha256={digests[node]}" if node in digests else ""
        lines.append(f"%c{index} = constant {_value(node.meta['val'])}{suffix}")
    count = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.extend(_outputs(node, numbers))
            continue
        numbers[node] = f"%{count}"
        count += 1
        if node.op == "get_attr":
            lines.append(f"{numbers[node]} = graph {{")
            lines.extend("  " + line for line in _subgraph(exported.attribute(graph, node.target)))
            lines.append("}")
            continue
        arguments = [_argument(value, numbers) for value in node.args]
        arguments += [f"{key}={_argument(node.kwargs[key], numbers)}" for key in sorted(node.kwargs)]
        value = _value(node.meta.get("val"))
        lines.append(f"{numbers[node]} = {_operation(node.target)}({', '.join(arguments)}) -> {value}")
    return "\n".join(lines) + "\n"


def _subgraph(module: Any) -> list[str]:
    return text(module.graph, module.graph.find_nodes(op="placeholder"), [], {}).splitlines()


def _outputs(node: Any, numbers: dict[Any, str]) -> list[str]:
    held: dict[int, str] = {}
    for value, number in numbers.items():
        if value.op == "placeholder" and isinstance(value.meta.get("val"), torch.Tensor):
            held[fake.storage(value.meta["val"])] = number
    lines = []
    for index, value in enumerate(exported.outputs_of(node.graph)):
        line = f"output {_argument(value, numbers)}"
        tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
        if isinstance(tensor, torch.Tensor):
            key = fake.storage(tensor)
            if key in held:
                line += f" alias={held[key]}"
            held.setdefault(key, f"output{index}")
        lines.append(line)
    return lines


def _operation(target: Any) -> str:
    if overloads.is_overload(target):
        name = str(target)
        # A custom operator may change its meaning; its schema is the part that is visible here.
        return name if target.namespace in ("aten", "prims", "prim") else f"{name}<{overloads.schema(target)}>"
    if overloads.is_higher_order(target):
        return f"higher_order.{target.name()}"
    if getattr(target, "__module__", None) in ("_operator", "math", "builtins", "torch"):
        return f"{target.__module__.strip('_')}.{target.__name__}"
    if target is operator.getitem:
        return "operator.getitem"
    raise Failure("capture", f"the graph calls `{target}`, which is no ATen operation")


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ",".join(str(size) for size in value.shape)
        stride = ",".join(str(step) for step in value.stride())
        offset = value.storage_offset()
        where = f"+{offset}" if str(offset) != "0" else ""
        return f"{tensors.dtype_name(value.dtype)}[{shape}]({stride}{where}){value.device.type}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_value(item) for item in value) + ")"
    if value is None:
        return "none"
    return f"{type(value).__name__} {value}"


def _argument(value: Any, numbers: dict[Any, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return numbers[value]
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_argument(item, numbers) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_argument(value[key], numbers)}" for key in sorted(value)) + "}"
    if isinstance(value, torch.device):
        return f"device:{value.type}"
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return f"float:{value.hex()}"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    return f"{type(value).__name__}:{value}"
