"""Writes a captured module as a folder from which a build compiles it: see `precast.capture.replay` for the files."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from .. import _native
from ..errors import BuildError
from ..torch_private import modules as of_torch
from . import replay
from .nesting import DTYPES
from .replay import BUFFERS, CAPTURED, EXAMPLES, WEIGHTS, Program, quiet


def tensors_of(net: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yields name, tensor and kind of parameters and buffers; a tied one under each of its names.

    The kind is `parameter`, `buffer`, or `constant`: a buffer that no state dict has, so that its values are in the
    programs.
    """
    for name, parameter in net.named_parameters(remove_duplicate=False):
        yield name, parameter, "parameter"
    # Not by `state_dict`: FSDP2 shards the parameters before it.
    modules = net.named_modules(remove_duplicate=False)
    unsaved = {f"{path}.{key}" if path else key for path, one in modules for key in of_torch.unsaved(one)}
    for name, buffer in net.named_buffers(remove_duplicate=False):
        yield name, buffer, "constant" if name in unsaved else "buffer"


@dataclass
class Function:
    """A function of a model: its inputs with their bucketed dimensions, the nesting of its result, its programs.

    `real`: a build checks the programs with the values of the inputs, not with drawn ones.
    """

    inputs: dict[str, torch.Tensor]
    dims: list[list[str | None]]
    outputs: Any
    programs: list[Program]
    real: bool = False


@dataclass
class Held:
    """A tensor that programs read. Of one that no weight set has (`constant`) the values are in the programs."""

    tensor: torch.Tensor
    kind: str


def held_by(net: torch.nn.Module) -> dict[str, Held]:
    """Returns the tensors of a module, a tied one under each of its names."""
    return {name: Held(tensor, kind) for name, tensor, kind in tensors_of(net)}


def save(
    tensors: Sequence[Mapping[str, Held]],
    functions: Mapping[str, Function],
    folder: Path,
    imports: Sequence[str] = (),
    modules: Sequence[str] = (),
) -> None:
    """Writes the folder. `imports` are modules that register operators, `modules` the names of submodules.

    The names of several groups of tensors are apart. Tensors are tied within one group: a program binds those of its
    own group alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described: dict[str, dict[str, Any]] = {}
    saved: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for group in tensors:
        first: dict[int, str] = {}
        for name, held in group.items():
            tensor = held.tensor
            if tensor.dtype not in DTYPES:
                raise BuildError(f"`{name}` is {tensor.dtype}, which no weight set can hold")
            described[name] = {"kind": held.kind, "dtype": dtype(tensor), "shape": list(tensor.shape)}
            if not tensor.is_contiguous():
                described[name]["stride"] = list(tensor.stride())
            if first.setdefault(id(tensor), name) != name:
                described[name]["same"] = first[id(tensor)]
            elif held.kind == "constant":
                constants[name] = tensor.detach().cpu()
            else:
                saved[name] = tensor
    _native.write_tensors(folder / WEIGHTS, saved, None)
    torch.save(constants, folder / BUFFERS)
    examples = {name: [*map(_plain, one.inputs.values())] for name, one in functions.items() if one.real}
    if examples:
        torch.save(examples, folder / EXAMPLES)
    described_functions: dict[str, Any] = {}
    number = itertools.count()
    for name, one in functions.items():
        rows = []
        for program in one.programs:
            file = f"program{next(number)}.pt2"
            with quiet():
                torch.export.save(_without_weights(program.exported), folder / file)
            rows.append({"file": file, "sizes": program.sizes, "guards": program.guards})
        described_functions[name] = {
            "inputs": [
                {"name": input_, "dtype": dtype(tensor), "shape": shape_of(tensor, dims)}
                for (input_, tensor), dims in zip(one.inputs.items(), one.dims, strict=True)
            ],
            "outputs": one.outputs,
            "programs": rows,
        }
    programs = [program for one in functions.values() for program in one.programs]
    document = {
        "imports": list(imports),
        "operators": sorted(set().union(*map(_operators, programs))),
        "modules": list(modules),
        "tensors": described,
        "functions": described_functions,
    }
    (folder / CAPTURED).write_text(json.dumps(document, indent=1), "utf-8")
    shutil.copyfile(replay.__file__, folder / "replay.py")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _operators(program: Program) -> set[str]:
    """Returns the names of the operators that a program calls."""
    targets = [node.target for node in program.exported.graph.nodes if node.op == "call_function"]
    overloads = [str(target).split(".") for target in targets if of_torch.is_operator(target)]
    return {f"{space}::{name}" for space, name, _ in overloads}


def dtype(tensor: torch.Tensor) -> str:
    """Returns the dtype of a tensor as the spec names it."""
    return str(tensor.dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor, dims: Sequence[str | None]) -> list[int | str]:
    """Returns the shape of an input as the spec has it: sizes, and names of bucketed dimensions."""
    return [size if dim is None else dim for size, dim in zip(tensor.shape, dims, strict=True)]


def _without_weights(program: ExportedProgram) -> ExportedProgram:
    """Returns a program whose parameters and buffers have no data."""

    def empty(tensor: Any) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made

    buffers = {spec.target for spec in program.graph_signature.input_specs if spec.kind.name == "BUFFER"}
    program.state_dict.update({name: empty(tensor) for name, tensor in program.state_dict.items()})
    program.constants.update({name: empty(one) for name, one in program.constants.items() if name in buffers})
    return program
