"""Exported programs: their inputs and bounds, and copies of their graphs that may be changed.

A graph outside its program keeps its values in `meta["val"]`, and remembers the module whose submodules its `get_attr`
nodes name: `torch.cond` has its branches there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def without_suggestions() -> AbstractContextManager[None]:
    """Keeps export's suggestions out of the log; they are about training. Private: the logger's name."""
    return silenced("torch.export")


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Switches a logger off."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_scope(node: Any) -> bool:
    """Returns whether a node is a `with torch.autocast(…)` or the like, whose body export puts into a separate graph.

    Private: `torch.ops.higher_order.wrap_with_autocast` and `wrap_with_set_grad_enabled`, and that
    `run_decompositions` replaces them by their bodies. Without them: a module with autocast can't be captured.
    """
    wraps = torch.ops.higher_order
    return node.target in (wraps.wrap_with_autocast, wraps.wrap_with_set_grad_enabled)


def keep_stacks(program: Any) -> None:
    """Has `run_decompositions` keep the module and the line of every operation inside of those scopes.

    Private: it calls the graphs inside as functions, and `torch.fx.Interpreter` passes on `meta`. Without it: regions
    inside of autocast are not found, and errors lack the line.
    """
    for owner in list(program.graph_module.modules()):
        for node in filter(is_scope, owner.graph.nodes if isinstance(owner, torch.fx.GraphModule) else ()):
            for value in node.all_input_nodes:
                body = getattr(owner, value.target, None) if value.op == "get_attr" else None
                if isinstance(body, torch.fx.GraphModule):
                    body.forward = torch.fx.Interpreter(body).run


def copy_graph(program: Any) -> Any:
    """Returns a copy of an exported program's graph that may be changed; its submodules come along."""
    graph = torch.fx.Graph()
    table: dict[Any, Any] = {}
    result = graph.graph_copy(program.graph, table)
    graph.output(result).meta = dict(program.graph.output_node().meta)
    for source, copied in table.items():
        copied.meta = dict(source.meta)
    set_owner(graph, program.graph_module)
    return graph


def attribute(graph: Any, target: str) -> Any:
    """Returns the submodule or tensor that a `get_attr` node of a copied graph names."""
    found = owner_of(graph)
    for part in target.split("."):
        found = getattr(found, part)
    return found


def owner_of(graph: Any) -> Any:
    """Returns the module whose submodules a graph's `get_attr` nodes name."""
    return graph.precast_owner if hasattr(graph, "precast_owner") else graph.owning_module


def set_owner(graph: Any, owner: Any) -> None:
    """Sets the module whose submodules a graph's `get_attr` nodes name."""
    graph.precast_owner = owner


def module_of(graph: Any) -> Any:
    """Returns a module that runs a copied graph, with the submodules that the graph names."""
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    for node in graph.find_nodes(op="get_attr"):
        setattr(module, node.target, attribute(graph, node.target))
    # GraphModule does not copy the nodes: `graph` stays the graph that it runs.
    return module


def outputs_of(graph: Any) -> list[Any]:
    """Returns the outputs of a graph, of which a single one need not be in a tuple."""
    outputs = graph.output_node().args[0]
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def user_inputs(program: Any) -> list[Any]:
    """Returns the placeholders of an exported program that are its inputs, in order."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [nodes[spec.arg.name] for spec in specs if spec.kind.name == "USER_INPUT"]
