"""Archives of torch.export, built from the parts of a program: a segment is not traced again.

Private: the constructor of `torch.export.ExportedProgram`, `torch.export.graph_signature`, and
`torch._export.verifier.TrainingIRVerifier`. Without them: a segment can't be saved.
"""

from __future__ import annotations

import copy
import importlib
import zipfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from . import pytrees
from .exported import attribute
from .patches import replaced


def save_program(
    graph: Any, constants: dict[str, Any], path: Path, notes: dict[str, str], ranges: dict[Any, Any]
) -> None:
    """Saves a graph; `constants` has the values of those placeholders that are constants."""
    with _not_canonical():
        torch.export.save(_program(graph, constants, ranges), str(path), extra_files=notes)


def load_program(path: Path) -> Any:
    """Loads a program that `save_program` saved.

    Private: `torch._inductor.inductor_prims`. Without it: no program with an operator of Inductor's own loads, as the
    backward program of a softmax.
    """
    with suppress(ImportError):
        importlib.import_module("torch._inductor.inductor_prims")
    return torch.export.load(str(path))


def read_note(path: Path, name: str) -> str:
    """Reads a note without loading the program, whose operators may not be known yet.

    Private: an archive is a zip with the notes under `extra/`. Without it: no segment with custom operators compiles.
    """
    with zipfile.ZipFile(path) as archive:
        inside = next(entry for entry in archive.namelist() if entry.endswith(f"extra/{name}"))
        return archive.read(inside).decode()


def number(value: Any) -> int:
    """Returns the number of a dtype, a layout or a memory format in archives, in recipes and in lists of calls.

    Private: `_TORCH_TO_SERIALIZE_DTYPE`, `_TORCH_TO_SERIALIZE_LAYOUT` and `_TORCH_TO_SERIALIZE_MEMORY_FORMAT` of
    `torch._export.serde.serialize`. Without them: no weight can be prepacked, and eager can't be encoded.
    """
    from torch._export.serde import serialize

    return int(getattr(serialize, f"_TORCH_TO_SERIALIZE_{type(value).__name__.upper()}")[value])


def _program(graph: Any, constants: dict[str, Any], ranges: dict[Any, Any]) -> Any:
    from torch._export.verifier import TrainingIRVerifier
    from torch.export import ExportedProgram
    from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
    from torch.export.graph_signature import (
        ExportGraphSignature,
        InputKind,
        InputSpec,
        OutputKind,
        OutputSpec,
        TensorArgument,
    )

    # A program has its constants before its inputs.
    names = {node.name for node in graph.nodes if node.op == "placeholder" and node.name in constants}
    ordered = _constants_first(graph, names)
    specs, examples = [], []
    for node in ordered.find_nodes(op="placeholder"):
        argument = TensorArgument(name=node.name)
        if node.name in constants:
            specs.append(InputSpec(InputKind.CONSTANT_TENSOR, argument, node.name))
        else:
            specs.append(InputSpec(InputKind.USER_INPUT, argument, None))
            examples.append(node.meta["val"])
    outputs = ordered.output_node().args[0]
    results = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in outputs]
    in_spec = pytrees.structure((tuple(examples), {}))
    out_spec = pytrees.structure(tuple(range(len(results))))
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    root = torch.nn.Module()
    for node in ordered.find_nodes(op="get_attr"):
        setattr(root, node.target, attribute(graph, node.target))
    return ExportedProgram(
        root=root,
        graph=ordered,
        graph_signature=ExportGraphSignature(input_specs=specs, output_specs=results),
        state_dict={},
        range_constraints=dict(ranges),
        module_call_graph=[ModuleCallEntry(fqn="", signature=signature)],
        constants=dict(constants),
        verifiers=[TrainingIRVerifier],
    )


def _constants_first(graph: Any, names: set[str]) -> Any:
    ordered = torch.fx.Graph()
    table: dict[Any, Any] = {}
    placeholders = graph.find_nodes(op="placeholder")
    rest = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in sorted(placeholders, key=lambda node: node.name not in names) + rest:
        table[node] = ordered.node_copy(node, lambda value: table[value])
        table[node].meta = copy.copy(node.meta)
    ordered.output(tuple(table[value] for value in graph.output_node().args[0]))
    return ordered


def _not_canonical() -> AbstractContextManager[None]:
    """Prevents the serialiser from converting a copy of the program to canonical form.

    The serialiser only checks that a canonical form exists, and discards the copy. This takes most of the time of
    saving. A segment is verified like every program, and runs before it is published.

    Private: `torch._export.serde.serialize.canonicalize`. Without it: saving is slower.
    """
    from torch._export.serde import serialize

    return replaced((serialize, "canonicalize", lambda program, constants=None: program))
