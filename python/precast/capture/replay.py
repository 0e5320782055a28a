"""A captured model, as a worker of a build opens it: its programs with the names and weights of the caller's module.

`precast.capture.captured` fills a folder with these files. The entry of its spec is `load` in the copy of this file,
which needs torch and nothing else:

| file | content |
|---|---|
| `replay.py` | this file |
| `captured.json` | tensors, and the inputs, outputs and programs of each function |
| `program0.pt2`, … | one program of torch.export for each range of sizes, without weights |
| `weights.safetensors` | parameters and persistent buffers; the spec's `weights` names it |
| `buffers.pt` | the other buffers |
| `examples.pt` | the inputs of one call, for functions that take no drawn values; absent without such functions |

The module that `load` returns has the caller's parameters and buffers under their own names, and an empty submodule for
each of the caller's. A call runs the program that takes the sizes of its inputs. A function
other than `forward` is a method.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

# The captured module is an attribute of the module that torch.export captures: its tensors have this prefix.
INNER = "m."
CAPTURED, WEIGHTS, BUFFERS, EXAMPLES = "captured.json", "weights.safetensors", "buffers.pt", "examples.pt"

Sizes = dict[str, int]


@dataclasses.dataclass
class Program:
    """One exported program, and the sizes that it takes."""

    exported: torch.export.ExportedProgram
    # Dimension -> smallest and largest size; None without a largest one.
    sizes: dict[str, tuple[int, int | None]]
    # Further conditions, as expressions of Python over `L["tensors"]`, the inputs.
    guards: list[str]

    def takes(self, sizes: Sizes, inputs: Sequence[Any]) -> bool:
        """Returns whether the program takes inputs of these sizes."""
        ends = ((sizes[dim], low, high) for dim, (low, high) in self.sizes.items())
        if not all(size >= low and (high is None or size <= high) for size, low, high in ends):
            return False
        names = {"L": {"tensors": inputs}, "math": math, "torch": torch}
        return all(eval(guard, names) for guard in self.guards)

    def run(self, tensors: Callable[[str], torch.Tensor], inputs: Sequence[Any]) -> list[Any]:
        """Runs the program on inputs; `tensors` returns a parameter or a buffer by name."""
        signature = self.exported.graph_signature
        given, arguments = iter(inputs), {}
        for spec in signature.input_specs:
            target, kind = spec.target or "", spec.kind.name
            if kind == "USER_INPUT":
                arguments[spec.arg.name] = next(given)
            elif kind in ("PARAMETER", "BUFFER"):
                arguments[spec.arg.name] = tensors(target.removeprefix(INNER))
            else:
                arguments[spec.arg.name] = self.exported.constants[target]
        # The graph's metadata has the names of submodules, which regions are found by.
        with torch.fx.traceback.preserve_node_meta():
            results = torch.fx.Interpreter(self.exported.graph_module).run(*arguments.values())
        outputs = []
        for spec, result in zip(signature.output_specs, results, strict=True):
            target = spec.target or ""
            if spec.kind.name == "USER_OUTPUT":
                outputs.append(result)
            elif spec.kind.name == "BUFFER_MUTATION":
                tensors(target.removeprefix(INNER)).copy_(result)
            else:
                arguments[target].copy_(result)
        return outputs


class Replay(torch.nn.Module):
    """A module that runs captured functions, by default `forward`. Their inputs are the tensors of a call, in order."""

    def __init__(self, functions: dict[str, Any]) -> None:
        super().__init__()
        self._functions = functions
        for name in functions:
            if name != "forward":
                setattr(self, name, functools.partial(self._run, name))

    def forward(self, *inputs: Any) -> Any:
        """Runs the function `forward`."""
        return self._run("forward", *inputs)

    def _run(self, name: str, *inputs: Any) -> Any:
        """Runs the program for the sizes of the inputs, and nests its outputs as the captured function does."""
        shapes, programs, nested = self._functions[name]
        sizes: Sizes = {}
        for tensor, shape in zip(inputs, shapes, strict=True):
            for axis, dim in enumerate(shape):
                if isinstance(dim, str):
                    sizes.setdefault(dim, tensor.shape[axis])
        program = next((one for one in programs if one.takes(sizes, inputs)), None)
        if program is None:
            raise ValueError(f"the module was not captured for {' '.join(f'{dim}={sizes[dim]}' for dim in sizes)}")
        return nested(program.run(self._tensor, inputs))

    def _tensor(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.get_submodule(owner), leaf)
        return tensor


def load() -> torch.nn.Module:
    """Returns the model in the folder of this file. Parameters and persistent buffers have no values yet."""
    folder = Path(__file__).parent
    captured = json.loads((folder / CAPTURED).read_text("utf-8"))
    for name in captured["imports"]:
        importlib.import_module(name)
    for name in captured["operators"]:
        space, _, operator = name.partition("::")
        if not hasattr(getattr(torch.ops, space), operator):
            raise LookupError(f"no operator `{name}` in a worker: `imports` names the modules that register operators")
    model = Replay({name: _function(folder, one) for name, one in captured["functions"].items()})
    if (folder / EXAMPLES).exists():
        with open(folder / EXAMPLES, "rb") as file:
            # A build checks its programs with these.
            model.precast_examples = torch.load(file, weights_only=True)
    for path in captured["modules"]:
        _submodule(model, path)
    with open(folder / BUFFERS, "rb") as file:
        buffers = torch.load(file, weights_only=True)
    made: dict[str, Any] = {}
    for name, spec in captured["tensors"].items():
        tensor = made[spec["same"]] if "same" in spec else buffers.get(name)
        if tensor is None:
            kind = getattr(torch, spec["dtype"])
            tensor = torch.zeros(spec["shape"], dtype=kind)
            if "stride" in spec:
                tensor = torch.empty_strided(spec["shape"], spec["stride"], dtype=kind).zero_()
            if spec["kind"] == "parameter":
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
        made[name] = tensor
        owner, _, leaf = name.rpartition(".")
        if spec["kind"] == "parameter":
            _submodule(model, owner).register_parameter(leaf, tensor)
        else:
            _submodule(model, owner).register_buffer(leaf, tensor, persistent=spec["kind"] == "buffer")
    return model.eval()


def _submodule(model: torch.nn.Module, path: str) -> torch.nn.Module:
    """Returns the submodule with this name; adds empty modules on the way."""
    for part in filter(None, path.split(".")):
        if part not in dict(model.named_children()):
            model.add_module(part, torch.nn.Module())
        model = model.get_submodule(part)
    return model


def _function(folder: Path, captured: dict[str, Any]) -> tuple[list[Any], list[Program], Callable[..., Any]]:
    """Returns the shapes of the inputs of a function, its programs, and the nesting of its outputs."""
    rows = captured["programs"]
    programs = [Program(_program(folder / one["file"]), one["sizes"], one["guards"]) for one in rows]
    return [spec["shape"] for spec in captured["inputs"]], programs, nester(captured["outputs"])


def _program(path: Path) -> torch.export.ExportedProgram:
    # Opened in Python: the build notes the files that Python opens, and hashes them into its keys.
    with open(path, "rb") as file, quiet():
        return torch.export.load(file)


def nester(nesting: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that nests the tensors of a result.

    A named tuple and a class have the name and the fields of the caller's; their types are new.
    """
    (kind, held), *_ = nesting.items()
    if kind == "tensor":
        return lambda tensors: tensors[held]
    if kind == "value":
        return lambda tensors: held
    if kind in ("list", "tuple"):
        items = [nester(item) for item in held]
        sequence: Callable[..., Any] = list if kind == "list" else tuple
        return lambda tensors: sequence(item(tensors) for item in items)
    fields = {key: nester(item) for key, item in nesting.get("fields", held).items()}
    make: Callable[..., Any] = dict
    if kind == "namedtuple":
        make = collections.namedtuple(held, list(fields))  # type: ignore[misc, no-redef]
    elif kind == "class":
        made = dataclasses.make_dataclass(held, list(fields))
        torch.export.register_dataclass(made)
        make = made
    return lambda tensors: make(**{key: item(tensors) for key, item in fields.items()})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what torch says of captures, and of programs without weights."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    # Private: these modules print the graph of a failed capture. Without them it is shown before the error.
    printing: list[dict[str, Any]] = []
    for name in ("torch.export._trace", "torch.fx.graph_module"):
        with contextlib.suppress(ImportError):
            printing.append(vars(importlib.import_module(name)))
    before = [names.get("print", print) for names in printing]
    for names in printing:
        names["print"] = lambda *_, **__: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        for names, own in zip(printing, before, strict=True):
            names["print"] = own
