"""Graph passes on whole programs: they change the captured ATen graph before it is cut.

A pass is a function, or an object with a method `graph`; for its other stages see segments.py. It takes a
`torch.fx.GraphModule` whose placeholders are the inputs and the weights, and changes it in place or returns another. It
may not add inputs or outputs. The gate notices a pass that changes results: it compares artifacts with the module, not
with this graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .. import failures
from ..graph.flat import Flat
from ..model import entry
from ..torch_private import exported, fake
from ..wire import Failure


def run(name: str, flat: Flat, root: Path) -> None:
    """Runs one pass, `module:callable`, on a flat graph, if it has the stage `graph`."""
    found = entry.load(root, name)
    function = getattr(found, "graph", None)
    if not callable(function):
        if any(callable(getattr(found, stage, None)) for stage in entry.STAGES):
            return
        function = found
    before = [node.name for node in flat.graph.find_nodes(op="placeholder")]
    count = len(flat.outputs)
    module = exported.module_of(flat.graph)
    try:
        returned = function(module)
    except Exception as error:
        raise failures.raised("pass", f"pass `{name}`", error, root) from error
    changed = module if returned is None else returned
    if not isinstance(changed, torch.fx.GraphModule):
        raise Failure("pass", f"pass `{name}` returned {type(changed).__name__}, not a torch.fx.GraphModule or None")
    graph = changed.graph
    graph.eliminate_dead_code()
    try:
        graph.lint()
    except RuntimeError as error:
        raise Failure("pass", f"pass `{name}` left a broken graph: {failures.one_line(error)}") from error
    _adopt(name, flat, changed, before, count)
    try:
        fake.propagate(flat.graph)
    except Exception as error:
        raise Failure("pass", f"the graph of pass `{name}` does not run: {failures.one_line(error)}") from error


def _adopt(name: str, flat: Flat, changed: Any, before: list[str], count: int) -> None:
    """Takes over the changed graph. Inputs and weights are found by the names of their placeholders."""
    graph = changed.graph
    exported.set_owner(graph, changed)
    after = {node.name: node for node in graph.find_nodes(op="placeholder")}
    added = [key for key in after if key not in before]
    missing = [node.name for node in flat.inputs if node.name not in after]
    if added or missing:
        what = f"added the input `{added[0]}`" if added else f"removed the input `{missing[0]}`"
        raise Failure("pass", f"pass `{name}` {what}", hint="a pass keeps the inputs of the graph as they are")
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(exported.attribute(graph, node.target), torch.Tensor):
            raise Failure(
                "pass",
                f"pass `{name}` added the tensor `{node.target}`",
                hint="make it with an operation, as torch.ops.aten.full, or make it a buffer of the module",
            )
    outputs = exported.outputs_of(graph)
    if len(outputs) != count:
        raise Failure("pass", f"pass `{name}` left {len(outputs)} outputs where there were {count}")
    flat.weights = {after[node.name]: weight for node, weight in flat.weights.items() if node.name in after}
    flat.tensors = {after[node.name]: tensor for node, tensor in flat.tensors.items() if node.name in after}
    flat.inputs = [after[node.name] for node in flat.inputs]
    flat.written = [after[node.name] for node in flat.written]
    flat.graph, flat.outputs = graph, outputs
