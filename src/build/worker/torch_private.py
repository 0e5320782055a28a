"""Every use of torch that is not documented, in one place: what it is for, and what breaks if it moves.

Written against torch 2.11. `inductor_private` is its sibling for the compiler.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# torch 2.11 warns about its own pytree classes whenever one is copied.
warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)

# --- pytrees: `torch.utils._pytree` is how export flattens arguments; without it, nested results lose their names.


def leaves(value: Any) -> list[Any]:
    """Returns the leaves of a nested value as torch.export sees them."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(value)


def leaves_with_path(value: Any) -> list[tuple[list[str], Any]]:
    """Returns the leaves with the keys, indices and attributes that lead to them."""
    from torch.utils import _pytree

    found = []
    for path, leaf in _pytree.tree_flatten_with_path(value)[0]:
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        found.append((parts, leaf))
    return found


def children(value: Any) -> tuple[str, list[Any] | None, list[Any]] | None:
    """Returns kind, keys (none for a sequence) and children of one level of a nested value, none for a leaf."""
    from torch.utils import _pytree

    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return ("list" if isinstance(value, list) else "tuple", None, list(value))
    if isinstance(value, dict):
        return (type(value).__name__, list(value), list(value.values()))
    node_type = _pytree._get_node_type(value)
    if node_type not in _pytree.SUPPORTED_NODES:
        return None
    pairs, _ = _pytree.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    keys = [
        str(getattr(path[0], "key", getattr(path[0], "idx", getattr(path[0], "name", path[0])))) for path, _ in pairs
    ]
    return (type(value).__name__, keys, [item for _, item in pairs])


# --- exported programs: a graph outside its program keeps `meta["val"]` (fake tensors) and a table of submodules.


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keeps export's suggestions out of the log; they are about training."""
    with _silent("torch.export"):
        yield


@contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def scoped(node: Any) -> bool:
    """Returns whether a node is a `with torch.autocast(…)` or the like, which export makes a graph of its own of.

    Breaks if: export calls them otherwise, or `run_decompositions` does not write them out any more.
    """
    import torch

    wraps = torch.ops.higher_order
    return node.target in (wraps.wrap_with_autocast, wraps.wrap_with_set_grad_enabled)


def keep_stacks(program: Any) -> None:
    """Has what is inside of those keep the modules and lines it comes from when it is written out.

    Breaks if: the graphs inside are no longer called, or `Interpreter` does not hand on what nodes say.
    """
    import torch

    for owner in list(program.graph_module.modules()):
        for node in filter(scoped, owner.graph.nodes if isinstance(owner, torch.fx.GraphModule) else ()):
            for value in node.all_input_nodes:
                inner = getattr(owner, value.target, None) if value.op == "get_attr" else None
                if isinstance(inner, torch.fx.GraphModule):
                    inner.forward = torch.fx.Interpreter(inner).run


def copy_graph(program: Any) -> Any:
    """Returns a copy of an exported program's graph that may be changed; its submodules come along."""
    import torch

    graph = torch.fx.Graph()
    table: dict[Any, Any] = {}
    result = graph.graph_copy(program.graph, table)
    old = next(node for node in program.graph.nodes if node.op == "output")
    end = graph.output(result)
    end.meta = dict(old.meta)
    for source, made in table.items():
        made.meta = dict(source.meta)
    graph._precast_owner = program.graph_module
    return graph


def attribute(graph: Any, target: str) -> Any:
    """Returns what a `get_attr` node of a copied graph stands for."""
    found = graph._precast_owner if hasattr(graph, "_precast_owner") else graph.owning_module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def carry_attributes(source: Any, graph: Any) -> None:
    """Gives a graph the submodules of another."""
    graph._precast_owner = source._precast_owner


def own_attributes(graph: Any, owner: Any) -> None:
    """Names the module whose submodules a graph's `get_attr` nodes stand for."""
    graph._precast_owner = owner


def module_of(graph: Any) -> Any:
    """Returns a module that runs a copied graph, with the submodules that the graph names."""
    import torch

    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(module, node.target, attribute(graph, node.target))
    # GraphModule copies the graph's nodes nowhere: `graph` stays the one it runs.
    return module


# --- fake tensors: they show shapes, strides and shared memory without running anything.


def propagate(graph: Any) -> None:
    """Runs a graph on fake tensors and keeps every value, so that shared memory shows as a shared storage."""
    import torch

    mode = mode_of(graph)
    env: dict[Any, Any] = {}
    with mode, torch.no_grad(), _symbolic(graph):
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = node.meta["val"]
            elif node.op == "get_attr":
                env[node] = attribute(graph, node.target)
            elif node.op == "call_function":
                env[node] = node.meta["val"] = _run(node, env)


def propagate_node(node: Any) -> None:
    """Runs one new node on the fake values of its arguments."""
    import torch

    env = {value: value.meta["val"] for value in node.all_input_nodes}
    with mode_of(node.graph), torch.no_grad(), _symbolic(node.graph):
        node.meta["val"] = _run(node, env)


def _symbolic(graph: Any) -> Any:
    """Composite operations look at sizes in C++, which symbolic ones forbid; their Python versions do not."""
    from contextlib import nullcontext

    import torch
    from torch._dispatch.python import enable_python_dispatcher

    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return nullcontext() if all(isinstance(size, int) for size in sizes) else enable_python_dispatcher()


def fixed(size: Any) -> int | None:
    """Returns a size that is one number, none for one that is still symbolic."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def _run(node: Any, env: dict[Any, Any]) -> Any:
    import torch

    args = torch.fx.node.map_arg(node.args, lambda value: env[value])
    kwargs = torch.fx.node.map_arg(node.kwargs, lambda value: env[value])
    return node.target(*args, **kwargs)


def mode_of(graph: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for node in graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode()


def storage(tensor: Any) -> int:
    """Returns an identity of a tensor's memory."""
    return tensor.untyped_storage()._cdata


def plain(tensor: Any) -> bool:
    """Returns whether a tensor starts its memory and fills it without overlap."""
    if tensor.storage_offset() != 0:
        return False
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step != expected:
            return False
        expected *= size
    return True


def is_view(node: Any) -> bool:
    """Returns whether a node's result shares memory with its first argument."""
    import torch

    base, made = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(base, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    return storage(base) == storage(made)


@contextmanager
def fake_world(device: str) -> Iterator[Any]:
    """Yields a fake mode in which real parameters may be used: for running a module at other sizes at no cost."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # It logs a trace for every operation that fails, and a size that does not fit is no failure here.
    with _silent("torch._subclasses.fake_tensor"), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


# --- archives: an ExportedProgram is made from parts, because tracing a segment again would only cost time.


def save_program(
    graph: Any, constants: dict[str, Any], path: Path, notes: dict[str, str], ranges: dict[Any, Any]
) -> None:
    """Saves a graph as a torch.export archive; placeholders named in `constants` are stored with their values."""
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
    from torch.utils import _pytree

    # A program numbers its constants before its inputs.
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
    in_spec = _pytree.tree_structure((tuple(examples), {}))
    out_spec = _pytree.tree_structure(tuple(range(len(results))))
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    root = torch.nn.Module()
    for node in ordered.nodes:
        if node.op == "get_attr":
            setattr(root, node.target, attribute(graph, node.target))
    program = ExportedProgram(
        root=root,
        graph=ordered,
        graph_signature=ExportGraphSignature(input_specs=specs, output_specs=results),
        state_dict={},
        range_constraints=dict(ranges),
        module_call_graph=[ModuleCallEntry(fqn="", signature=signature)],
        constants=dict(constants),
        verifiers=[TrainingIRVerifier],
    )
    with _without_rehearsal():
        torch.export.save(program, str(path), extra_files=notes)


@contextmanager
def _without_rehearsal() -> Iterator[None]:
    """Keeps the serialiser from bringing a copy of the program into a form that it then throws away.

    It does so to see that there is one, and most of the time that saving takes goes there. What is saved here is
    verified as every program is, and runs before it is published. Breaks if: the function moves; saving is slower then.
    """
    from torch._export.serde import serialize

    original = serialize.canonicalize
    serialize.canonicalize = lambda program, constants=None: program
    try:
        yield
    finally:
        serialize.canonicalize = original


def load_program(path: Path) -> Any:
    """Loads what `save_program` saved."""
    import torch

    return torch.export.load(str(path))


def read_note(path: Path, name: str) -> str:
    """Reads a note without loading the program, whose operators may not be known yet.

    Breaks if: an archive is no longer a zip with the notes under `extra/`.
    """
    with zipfile.ZipFile(path) as archive:
        inside = next(entry for entry in archive.namelist() if entry.endswith(f"extra/{name}"))
        return archive.read(inside).decode()


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


# --- symbolic sizes: export names the symbols, the shape environment knows where it gave one up.


def user_inputs(program: Any) -> list[Any]:
    """Returns the placeholders of an exported program that are its inputs, in order."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [nodes[spec.arg.name] for spec in specs if spec.kind.name == "USER_INPUT"]


def ranges(program: Any) -> dict[str, tuple[int, int]]:
    """Returns the bounds of every symbol, by its name."""

    def whole(value: Any, other: int) -> int:
        try:
            return int(value)
        except (AttributeError, TypeError, ValueError, OverflowError):  # infinity has no digits
            return other

    return {
        str(symbol): (whole(bounds.lower, 0), whole(bounds.upper, 2**63 - 1))
        for symbol, bounds in program.range_constraints.items()
    }


def sized_by_values(value: Any) -> bool:
    """Returns whether a size of a tensor follows from values and not from the inputs' sizes.

    Breaks if: `free_unbacked_symbols` moves; such a program then fails later, with a message that says less.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, torch.Tensor) and bool(free_unbacked_symbols(value))


def specialisations(program: Any) -> list[tuple[str, int]]:
    """Returns file and line of every place that fixed a symbol, while exporting with `Dim.AUTO`.

    Breaks if: `ShapeEnv.replacements_slocs` moves; errors then lack the place.
    """
    mode = mode_of(program.graph)
    slocs = getattr(mode.shape_env, "replacements_slocs", {}) if mode.shape_env is not None else {}
    found = []
    for sloc in slocs.values():
        frames = getattr(sloc, "maybe_user_loc", None), getattr(sloc, "framework_loc", None)
        for frame in frames:
            if isinstance(frame, str):
                path, _, line = frame.partition(":")
                found += [(path, int(number.split()[0]))] if (number := line) and number.split()[0].isdigit() else []
            elif frame is not None:
                found.append((frame.filename, frame.lineno))
    return found


# --- marks: `torch.compiler.disable` leaves an attribute on the function it wraps.


def is_disabled(function: Any) -> bool:
    """Returns whether a function is marked with `torch.compiler.disable`."""
    return bool(getattr(function, "_torchdynamo_disable", False))


# --- the dispatcher: its dump says where each kernel of an operator was registered.


def has_native_kernel(name: str, device: str) -> bool:
    """Returns whether an operator has a kernel for a device that was registered from C++.

    Breaks if: the text of `_dispatch_dump` changes; every custom operator is then taken for Python.
    """
    import torch

    keys = {device.upper(), "CompositeExplicitAutograd[alias]", "CompositeImplicitAutograd[alias]"}
    keys.add("CompositeExplicitAutogradNonFunctional[alias]")
    for line in torch._C._dispatch_dump(name).splitlines():
        key, _, rest = line.partition(": registered at ")
        if key in keys and rest and not re.match(r"\S+\.py:\d+", rest):
            return True
    return False
