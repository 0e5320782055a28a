"""A segment on disk: graph and layouts without weights, which any worker can compile.

The file is an archive of `torch.export` whose weights are inputs named `c0`, `c1`, …, after the segment's own inputs.
Integer and boolean constants are in it with their values. To compile it, the weights become constants again, with
random numbers for values, so that no value of a weight can get into the code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import tensors
from ..torch_private import archives, exported, symbols
from . import canonical, operators
from .cut import Part
from .flat import Flat

_NOTE = "precast_segment.json"


@dataclass
class Segment:
    """One piece of a program, with its own numbers of inputs and constants."""

    graph: Any
    inputs: list[Any]
    constants: list[Any]
    outputs: list[Any]
    # Values of the integer and boolean constants.
    values: dict[Any, Any]
    text: str
    # Symbol of a dynamic size -> its bounds.
    ranges: dict[Any, Any]
    # Libraries of custom operators, which must be loaded first.
    libraries: list[str]


def build(part: Part, flat: Flat) -> Segment:
    """Copies one part out of a flat graph."""
    graph = torch.fx.Graph()
    new: dict[Any, Any] = {}
    for index, node in enumerate(part.inputs):
        new[node] = _placeholder(graph, f"in{index}", node)
    for index, node in enumerate(part.constants):
        new[node] = _placeholder(graph, f"c{index}", node)
    new |= {value: new[state] for value, state in part.written.items() if state in new}
    for node in part.nodes:
        copy = graph.node_copy(node, lambda value: new[value])
        copy.meta = {key: node.meta[key] for key in ("val", "stack_trace") if node.meta.get(key) is not None}
        new[node] = copy
    exported.set_owner(graph, exported.owner_of(flat.graph))
    graph.output(tuple(new[node] for node in part.outputs))
    with_values = [node for node in part.constants if keeps_values(flat.tensors[node])]
    values = {new[node]: flat.tensors[node] for node in with_values}
    inputs = [new[node] for node in part.inputs]
    constants = [new[node] for node in part.constants]
    digests = {new[node]: flat.digest(node) for node in with_values}
    outputs = [new[node] for node in part.outputs]
    libraries = operators.libraries(graph.nodes)
    text = canonical.text(graph, inputs, constants, digests, flat.ranges)
    text += "".join(f"library sha256={digest}\n" for digest in operators.digests(libraries))
    return Segment(graph, inputs, constants, outputs, values, text, flat.ranges, libraries)


def _placeholder(graph: Any, name: str, node: Any) -> Any:
    placeholder = graph.placeholder(name)
    placeholder.meta = {"val": node.meta["val"]}
    return placeholder


def keeps_values(tensor: Any) -> bool:
    """Returns whether a constant's values are part of the program, as indices and masks. Quantised weights are not."""
    return not tensor.dtype.is_floating_point and tensors.dtype_name(tensor.dtype) not in ("int8", "uint8")


def save(segment: Segment, path: Path, root: Path, entry: str) -> Path:
    """Writes a segment. `root` and `entry` name the project that registers its custom operators, if it has any."""
    values = {node.name: value.detach().contiguous() for node, value in segment.values.items()}
    note = {
        "inputs": [node.name for node in segment.inputs],
        "constants": [node.name for node in segment.constants],
        "libraries": segment.libraries,
        "root": str(root),
        "module": entry.partition(":")[0] if segment.libraries else "",
    }
    archives.save_program(segment.graph, values, path, {_NOTE: json.dumps(note)}, segment.ranges)
    return path


def load(path: Path, device: str) -> tuple[Any, list[Any], Path]:
    """Returns a module with constants and inputs of the segment's layouts, and the folder of its project.

    Stack traces in the graph name files of the project.
    """
    note = json.loads(archives.read_note(path, _NOTE))
    operators.load(note["libraries"], note["root"], note["module"])
    program = archives.load_program(path)
    generator = torch.Generator().manual_seed(0)
    graph = exported.copy_graph(program)
    module = exported.module_of(graph)
    inputs: dict[str, Any] = {}
    # Placeholders have their saved names; the order in the archive may differ.
    for node in graph.find_nodes(op="placeholder"):
        held = node.meta["val"]
        if node.target in note["inputs"]:
            inputs[node.target] = _filled(held, device, None)
            continue
        value = program.constants.get(node.target)
        if value is None:
            value = _filled(held, device, generator)
        else:
            value = value.to(held.device if held.device.type == "cpu" else device)
        module.register_buffer(node.target, value)
        with graph.inserting_before(node):
            constant = graph.get_attr(node.target)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module, [inputs[name] for name in note["inputs"]], Path(note["root"])


def _filled(held: Any, device: str, generator: Any) -> Any:
    """Returns a tensor with the layout of a fake one: random values for a weight, zeros for an input."""
    where = "cpu" if held.device.type == "cpu" else device
    shape, stride = map(symbols.example, held.shape), map(symbols.example, held.stride())
    tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=held.dtype, device=where)
    if generator is None or not held.dtype.is_floating_point:
        return tensor.zero_()
    if held.dtype.itemsize > 1 and tensor.device == generator.device:
        return tensor.normal_(generator=generator)
    draw = torch.randn(held.shape, generator=generator, dtype=torch.float32)
    return tensor.copy_(draw.to(held.dtype))
