"""Archives of torch.export, built from the parts of a program: a segment is not traced again.

Private: the constructor of `torch.export.ExportedProgram`, `torch.export.graph_signature`, and
`torch._export.verifier.TrainingIRVerifier`. Without them: a segment can't be saved.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import pytrees
from .exported import attribute


def save_program(
    graph: Any, constants: dict[str, Any], path: Path, notes: dict[str, str], ranges: dict[Any, Any]
) -> None:
    """Saves a graph; `constants` has the values of those placeholders that are constants."""
    import torch

    with _not_canonical():
        torch.export.save(_program(graph, constants, ranges), str(path), extra_files=notes)


def load_program(path: Path) -> Any:
    """Loads a program that `save_program` saved."""
    import torch

    return torch.export.load(str(path))


def read_note(path: Path, name: str) -> str:
    """Reads a note without loading the program, whose operators may not be known yet.

    Private: an archive is a zip with the notes under `extra/`. Without it: no segment with custom operators compiles.
    """
    with zipfile.ZipFile(path) as archive:
        inside = next(entry for entry in archive.namelist() if entry.endswith(f"extra/{name}"))
        return archive.read(inside).decode()


def dtype_number(dtype: Any) -> int:
    """Returns the number of a dtype in archives and in recipes.

    Private: `torch._export.serde.serialize._TORCH_TO_SERIALIZE_DTYPE`. Without it: no weight can be prepacked.
    """
    from torch._export.serde import serialize

    return int(serialize._TORCH_TO_SERIALIZE_DTYPE[dtype])


def memory_format_number(memory_format: Any) -> int:
    """Returns the number of a memory format in archives and in recipes.

    Private: `torch._export.serde.serialize._TORCH_TO_SERIALIZE_MEMORY_FORMAT`. Without it: as `dtype_number`.
    """
    from torch._export.serde import serialize

    return int(serialize._TORCH_TO_SERIALIZE_MEMORY_FORMAT[memory_format])


def layout_number(layout: Any) -> int:
    """Returns the number of a tensor's layout in archives.

    Private: `torch._export.serde.serialize._TORCH_TO_SERIALIZE_LAYOUT`. Without it: as `dtype_number`.
    """
    from torch._export.serde import serialize

    return int(serialize._TORCH_TO_SERIALIZE_LAYOUT[layout])


def _program(graph: Any, constants: dict[str, Any], ranges: dict[Any, Any]) -> Any:
    import torch
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
    for node in ordered.nodes:
        if node.op == "placeholder":
            argument = TensorArgument(name=node.name)
            if node.name in constants:
                specs.append(InputSpec(InputKind.CONSTANT_TENSOR, argument, node.name))
            else:
                specs.append(InputSpec(InputKind.USER_INPUT, argument, None))
                examples.append(node.meta["val"])
    end = next(node for node in ordered.nodes if node.op == "output")
    results = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in end.args[0]]
    in_spec = pytrees.structure((tuple(examples), {}))
    out_spec = pytrees.structure(tuple(range(len(results))))
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    root = torch.nn.Module()
    for node in ordered.nodes:
        if node.op == "get_attr":
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
    import torch

    ordered = torch.fx.Graph()
    table: dict[Any, Any] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    rest = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in sorted(placeholders, key=lambda node: node.name not in names) + rest:
        table[node] = ordered.node_copy(node, lambda value: table[value])
        table[node].meta = copy.copy(node.meta)
    end = next(node for node in graph.nodes if node.op == "output")
    ordered.output(tuple(table[value] for value in end.args[0]))
    return ordered


@contextmanager
def _not_canonical() -> Iterator[None]:
    """Keeps the serialiser from bringing a copy of the program into canonical form.

    The serialiser only checks that there is a canonical form, and discards the copy: most of the time of saving. A
    segment is verified like every program, and runs before it is published.

    Private: `torch._export.serde.serialize.canonicalize`. Without it: saving is slower.
    """
    from torch._export.serde import serialize

    original = serialize.canonicalize
    serialize.canonicalize = lambda program, constants=None: program
    try:
        yield
    finally:
        serialize.canonicalize = original
