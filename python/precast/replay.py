"""A captured model, as a worker of a build opens it: its programs with the names and weights of the caller's module.

`precast.capture` fills a folder with these files, and the entry of its spec calls `load`:

| file | content |
|---|---|
| `captured.json` | inputs, outputs, tensors and programs |
| `program0.pt2`, … | one program of torch.export for each range of sizes, without weights |
| `weights.safetensors` | parameters and persistent buffers; the spec's `weights` names it |
| `buffers.pt` | the other buffers |

The module that `load` returns has the caller's parameters and buffers under their own names, and one empty submodule
for each of the caller's. A call runs the program whose range has the sizes of its inputs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import BuildError

# The captured module is an attribute of the module that torch.export captures: its tensors have this prefix.
INNER = "m."
# Names of the files.
CAPTURED, WEIGHTS, BUFFERS = "captured.json", "weights.safetensors", "buffers.pt"

# Dimension -> smallest and largest size; None without a largest one.
Range = dict[str, tuple[int, int | None]]


@dataclasses.dataclass
class Program:
    """One exported program, and the sizes that it takes."""

    exported: torch.export.ExportedProgram
    sizes: Range

    def takes(self, sizes: dict[str, int]) -> bool:
        """Returns whether the program takes these sizes."""
        ends = ((sizes[dim], low, high) for dim, (low, high) in self.sizes.items())
        return all(size >= low and (high is None or size <= high) for size, low, high in ends)

    def run(self, tensors: Callable[[str], torch.Tensor], inputs: Sequence[Any]) -> list[Any]:
        """Runs the program on inputs; `tensors` returns a parameter or buffer by name."""
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
        # Region names are in the graph's metadata.
        with torch.fx.traceback.preserve_node_meta():
            results = torch.fx.Interpreter(self.exported.graph_module).run(*arguments.values())
        outputs = []
        for spec, result in zip(signature.output_specs, results, strict=True):
            if spec.kind.name == "USER_OUTPUT":
                outputs.append(result)
            elif spec.kind.name == "BUFFER_MUTATION":
                tensors((spec.target or "").removeprefix(INNER)).copy_(result)
            else:
                arguments[spec.target or ""].copy_(result)
        return outputs


class Replay(torch.nn.Module):
    """A module that runs captured programs. Its inputs are the tensors of a call, in order."""

    def __init__(self, captured: dict[str, Any], programs: list[Program]) -> None:
        super().__init__()
        self._dims = [spec["shape"] for spec in captured["inputs"]]
        self._programs = programs
        self._nested = nester(captured["outputs"])

    def forward(self, *inputs: Any) -> Any:
        """Runs the program for the sizes of the inputs, and nests its outputs as the captured module does."""
        sizes: dict[str, int] = {}
        for tensor, shape in zip(inputs, self._dims, strict=True):
            for axis, dim in enumerate(shape):
                if isinstance(dim, str):
                    sizes.setdefault(dim, tensor.shape[axis])
        program = next((one for one in self._programs if one.takes(sizes)), None)
        if program is None:
            raise ValueError(f"the module was not captured for {', '.join(f'{dim}={sizes[dim]}' for dim in sizes)}")
        return self._nested(program.run(self._tensor, inputs))

    def _tensor(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        return getattr(self.get_submodule(owner), leaf)


def load(folder: str | Path) -> torch.nn.Module:
    """Returns the model in a folder of `precast.capture`. Parameters and persistent buffers have no values yet."""
    folder = Path(folder)
    captured = json.loads((folder / CAPTURED).read_text())
    for name in captured["imports"]:
        importlib.import_module(name)
    programs = [Program(_program(folder / one["file"]), one["sizes"]) for one in captured["programs"]]
    model = Replay(captured, programs)
    for path in captured["modules"]:
        _submodule(model, path)
    with open(folder / BUFFERS, "rb") as file:
        buffers = torch.load(file, weights_only=True)
    made: dict[str, Any] = {}
    for name, spec in captured["tensors"].items():
        dtype = getattr(torch, spec["dtype"])
        tensor = buffers.get(name)
        if "same" in spec:
            tensor = made[spec["same"]]
        elif tensor is None:
            tensor = torch.zeros(spec["shape"], dtype=dtype)
            if spec["kind"] == "parameter":
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
        made[name] = tensor
        owner, leaf = _submodule(model, name.rpartition(".")[0]), name.rpartition(".")[2]
        if spec["kind"] == "parameter":
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor, persistent=spec["kind"] == "buffer")
    return model.eval()


def _submodule(model: torch.nn.Module, path: str) -> torch.nn.Module:
    """Returns the submodule with this name; creates empty modules on the way."""
    for part in filter(None, path.split(".")):
        if part not in dict(model.named_children()):
            model.add_module(part, torch.nn.Module())
        model = model.get_submodule(part)
    return model


def _program(path: Path) -> torch.export.ExportedProgram:
    # Opened in Python: the build notes files that Python opens, and hashes them into its keys.
    with open(path, "rb") as file, quiet():
        try:
            return torch.export.load(file)
        except Exception as error:
            if "torch.ops" not in str(error) and "operator" not in str(error).lower():
                raise
            raise BuildError(
                f"a worker can't load the captured program: {error}",
                hint="name the modules that register its operators: `imports=[…]`",
            ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses torch's warnings about captures, and about programs without weights."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def nester(nesting: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that nests tensors as `capture.nest` described a result.

    A class of the caller's project becomes a dataclass with the same name and fields.
    """
    (kind, held), *_ = nesting.items()
    if kind == "tensor":
        return lambda tensors: tensors[held]
    if kind == "value":
        return lambda tensors: held
    if kind in ("list", "tuple"):
        items = [nester(item) for item in held]
        kind_ = list if kind == "list" else tuple
        return lambda tensors: kind_(item(tensors) for item in items)
    fields = {key: nester(item) for key, item in nesting.get("fields", held).items()}
    make: Callable[..., Any] = dict
    if kind == "namedtuple":
        make = collections.namedtuple(held, list(fields))  # noqa: PYI024
    elif kind == "class":
        make = dataclasses.make_dataclass(held, list(fields))
        torch.export.register_dataclass(make)
    return lambda tensors: make(**{key: item(tensors) for key, item in fields.items()})
