"""Helpers of the passes' tests: a context like the worker's, and recorded recipes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.worker.support import SOURCES, part

from . import FOLDER

# The head of a script that runs a segment's graph: the module, its inputs, and kernels that the interpreter runs.
SCRIPT = """
import importlib, os, sys
from pathlib import Path
sys.path[:0] = [os.path.dirname(sys.argv[1]), sys.argv[3]]
import torch
torch.library.wrap_triton = lambda kernel: kernel  # the interpreter's is called without a wrapper
worker = os.path.basename(sys.argv[1])
segment = importlib.import_module(f"{worker}.graph.segment")
module, inputs, _ = segment.load(Path(sys.argv[2]), "cpu")
"""


def interpreted(code: str, file: str) -> None:
    """Runs a script on a captured segment; it fails by itself."""
    command = [sys.executable, "-P", "-c", SCRIPT + code, str(SOURCES), file, str(FOLDER)]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=300)


def context_of(module: Any, device: str = "cuda", freezing: bool = True, **options: Any) -> Any:
    """Returns the context of a segment that is compiled for a device, none of whose weights is prepacked yet."""
    weights = part("passes.prepacked").Weights.of(module)
    return part("passes.segments").Context(device, {"freezing": freezing, **options}, weights)


def recipes(context: Any) -> dict[str, Any]:
    return context._weights.prepacked


def tidy(module: Any, context: Any, passes: list[Any]) -> None:
    """Runs the stage `segment` of some passes, as a compile does."""
    named = [(type(one).__name__, one) for one in passes]
    part("passes.segments").Passes(named, context, None).segment(module)


def hooks(context: Any, passes: list[Any]) -> dict[str, Any]:
    """Returns inductor's options that run the other stages of some passes."""
    named = [(type(one).__name__, one) for one in passes]
    return part("passes.segments").Passes(named, context, None).hooks()


def graph_of(function: Any, constants: dict[str, Any], x: Any, pre_dispatch: bool = False) -> Any:
    """Returns a functional graph: constants are attributes, and every node has its value as `meta["val"]`."""
    module = torch.nn.Module()
    for name, value in constants.items():
        module.register_buffer(name, value)
    traced = make_fx(lambda x: function(module, x), pre_dispatch=pre_dispatch)(x)

    class Values(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            node.meta["val"] = super().run_node(node)
            return node.meta["val"]

    Values(traced).run(x)
    return traced
