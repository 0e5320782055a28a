"""New nodes of a captured graph."""

from __future__ import annotations

from typing import Any

import torch


def call(graph: Any, target: Any, *args: Any, **named: Any) -> Any:
    """Adds a call at the graph's place for new nodes, with its value without data."""
    made = graph.call_function(target, args, named)
    given, names = torch.fx.map_arg((args, named), lambda value: value.meta["val"])
    made.meta["val"] = target(*given, **names)
    return made
