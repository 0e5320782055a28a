"""Graph passes on segments, and the interface that the worker offers to passes.

A pass is an object with a method for each stage at which it changes a graph; a function is a pass for `graph`:

| stage | its module | in the artifact key |
|---|---|---|
| `graph(module)` | the captured graph, before it is cut (passes.py) | through the changed graph |
| `segment(module, context)` | one segment, its weights `get_attr` nodes, before the compiler | by its source |
| `post_grad_pre(module, context)` | functional, decomposed, before inductor's fusions | by its source |
| `post_grad_post(module, context)` | after inductor's fusions, about to be lowered | by its source |

A pass changes `module.graph` in place. `Context` is its whole interface to the worker; apart from it, a pass may use
torch as it likes. Installed packages may offer passes to `build --tune`: functions `offers(device, graphs)` under the
entry points `precast.passes`, which return option sets for the segments of a program.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import failures
from ..model import entry
from ..torch_private import exported, lowerings
from ..wire import Failure
from . import prepacked

_STAGES = entry.STAGES[1:]
_ENTRY_POINTS = "precast.passes"


class Context:
    """The worker's interface to a pass, while one segment is compiled."""

    def __init__(self, device: str, options: dict[str, Any], weights: prepacked.Weights) -> None:
        self.device = device
        """`cpu` or `cuda`."""
        self.options = dict(options)
        """The options that the segment is compiled with, by inductor's names."""
        self._weights = weights

    @property
    def processors(self) -> int:
        """The number of multiprocessors of the device, or of threads for a CPU's kernels."""
        if self.device == "cuda":
            return torch.cuda.get_device_properties(0).multi_processor_count
        return torch.get_num_threads()

    def is_constant(self, node: Any) -> bool:
        """Returns whether a node is a weight of the segment, or a prepacked one."""
        return getattr(node, "op", "") == "get_attr" and node.target in self._weights

    def prepack(self, node: Any) -> Any:
        """Replaces a new node without users, which calls torch's operators on constants, by a prepacked weight.

        The runtime computes it for each weight set. Returns the constant's node. Returns None, and removes the node,
        with `freezing = false`, and if there is no recipe for the node.
        """
        if not self.options.get("freezing"):
            node.graph.erase_node(node)
            return None
        return prepacked.prepack(node.graph.owning_module, node, self._weights)

    def call_by_name(self, operator: Any, fake: Callable[..., Any], channels_last: bool = False) -> None:
        """Lets the artifact call an operator by name, through the proxy executor: AOTInductor has no C function for it.

        `fake` returns the operator's results for tensors without data. With `channels_last`, images have that layout
        in arguments and results.
        """
        lowerings.call_by_name(operator, fake, channels_last)


class Passes:
    """The passes of one compile, in order."""

    def __init__(self, passes: list[tuple[str, Any]], context: Context, root: Path) -> None:
        self.passes, self.context, self.root = passes, context, root

    def segment(self, module: Any) -> None:
        """Runs the stage `segment`, and removes weights that the graph no longer reads."""
        before = _signature(module.graph)
        if not self._run("segment", module):
            return
        if _signature(module.graph) != before:
            raise Failure("pass", f"{self._named('segment')} changed the inputs or outputs of a segment")
        read = {node.target: self.context.is_constant(node) for node in module.graph.find_nodes(op="get_attr")}
        for name, _ in list(module.named_buffers()):
            if name not in read:
                delattr(module, name)
            elif not read[name]:
                raise Failure(
                    "pass",
                    f"{self._named('segment')} added the tensor `{name}`",
                    hint="make it with an operation, as torch.ops.aten.full, or with `context.prepack`",
                )

    def hooks(self) -> dict[str, Any]:
        """Returns inductor's options that run the other stages."""

        def hook(stage: str) -> Callable[[Any], None]:
            # A function, because inductor copies its options deeply, except functions.
            def run(graph: Any) -> None:
                self._run(stage, graph.owning_module)

            return run

        wanted = [stage for stage in _STAGES[1:] if any(_method(found, stage) for _, found in self.passes)]
        return {f"post_grad_custom_{stage.rpartition('_')[2]}_pass": hook(stage) for stage in wanted}

    def _run(self, stage: str, module: Any) -> bool:
        ran = False
        for name, found in self.passes:
            method = _method(found, stage)
            if method is None:
                continue
            try:
                method(module, self.context)
                module.graph.eliminate_dead_code()
                module.graph.lint()
                module.recompile()
            except Failure:
                raise
            except Exception as error:
                if failures.is_out_of_memory(error):
                    raise
                raise Failure(
                    "pass",
                    f"pass `{name}` raised {type(error).__name__} at `{stage}`: {failures.one_line(error)}",
                    location=failures.location(error, self.root),
                ) from error
            ran = True
        return ran

    def _named(self, stage: str) -> str:
        names = [f"`{name}`" for name, found in self.passes if _method(found, stage)]
        return f"pass {names[0]}" if len(names) == 1 else f"one of the passes {', '.join(names)}"


def _signature(graph: Any) -> tuple[list[str], int]:
    return [node.target for node in graph.find_nodes(op="placeholder")], len(exported.outputs_of(graph))


def _method(found: Any, stage: str) -> Any:
    method = getattr(found, stage, None)
    return method if callable(method) else None


def load(named: list[dict[str, str]], context: Context, root: Path) -> Passes:
    """Returns the passes of a request. Their sources must be the same as when the program was captured."""
    if named and str(root) not in sys.path:
        sys.path.insert(0, str(root))
    passes = []
    for one in named:
        name = one["callable"]
        found = entry.load(root, name)
        if _digest(name, root) != one["source"]:
            raise Failure("pass", f"the source of pass `{name}` changed", hint="run `precast build` again")
        passes.append((name, found))
    return Passes(passes, context, root)


def described(names: list[str], root: Path) -> list[dict[str, str]]:
    """Returns the passes among `names` that run on segments, with the digests of their sources."""
    found = [name for name in names if any(_method(entry.load(root, name), stage) for stage in _STAGES)]
    return [{"callable": name, "source": _digest(name, root)} for name in found]


def offered(opened: entry.Opened, graphs: list[Any]) -> list[dict[str, Any]]:
    """Returns the option sets that installed packages offer for segments: passes with digests, and options."""
    found: list[dict[str, Any]] = []
    points = _entry_points()
    before = entry.module_files(opened.root) if points else set()
    for point in points:
        try:
            for offer in point.load()(opened.device, graphs):
                names = offer["passes"]
                passes = described(names, opened.root)
                if len(passes) != len(names):
                    raise ValueError("only passes that run on segments can be offered")
                found.append({"passes": passes, "options": dict(offer.get("options") or {})})
        except Exception as error:  # an error of another package fails no build
            print(f"`{point.value}` offers nothing: {failures.named(error)}", file=sys.stderr)
    if points:
        # A package may be developed inside the project.
        opened.offering |= entry.module_files(opened.root) - before
    return found


@functools.cache
def _entry_points() -> tuple[Any, ...]:
    found = importlib.metadata.entry_points(group=_ENTRY_POINTS)
    return tuple(sorted({(point.name, point.value): point for point in found}.values(), key=lambda point: point.name))


def _digest(name: str, root: Path) -> str:
    """Returns the digest of a pass's source.

    It covers the project's files that its module imports, or the version and all Python files of its package.
    """
    module = sys.modules[name.partition(":")[0]]
    path = os.path.realpath(module.__file__ or "")
    digest = hashlib.sha256()
    if failures.own_file(path, root):
        for file in sorted(entry.with_later_imports(root, {path})):
            _add(digest, os.path.relpath(file, root), Path(file))
        return digest.hexdigest()
    top = sys.modules[module.__name__.partition(".")[0]]
    for package in entry.packages({top.__name__}):
        digest.update(f"{package['name']} {package['version']}\n".encode())
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            _add(digest, str(file.relative_to(folder)), file)
    if not folders:
        _add(digest, os.path.basename(path), Path(path))
    return digest.hexdigest()


def _add(digest: Any, name: str, path: Path) -> None:
    digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
