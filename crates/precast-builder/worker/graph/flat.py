"""The captured module as one flat graph: inputs, weights by name, plain ATen operations, tensor outputs.

`torch.export` captures. Its program is then simplified, so that it can be cut and its weights have names:

- operations that write into their arguments become functional. New values of states are outputs until `own_outputs`
  makes each the last write into its state; a write into a weight or another input is refused;
- the body of `torch.autocast` becomes plain operations, with its casts;
- assertions about sizes and dtypes are removed: they are static;
- tensors that the code creates (`torch.tensor([…])`) have no name: small ones become operations, others become
  constants of the program;
- an output that shares memory with an input, a weight or another output is copied: the caller owns outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import failures, tensors
from ..torch_private import errors, exported, fake, overloads, pytrees, symbols
from ..weights import Named
from ..wire import Failure
from .call import outer_name

# Unnamed constants up to this many elements are written into the graph.
_INLINE = 16


@dataclass
class Check:
    """A check of values while a program runs. The outcome is a boolean output, true if the check failed."""

    outcome: Any
    text: str
    location: str | None
    # The name of the input whose values are checked, if it is one.
    input: str | None = None


@dataclass
class Flat:
    """A graph whose nodes all have `meta["val"]`: fake tensors that share memory as the real ones do."""

    graph: Any
    inputs: list[Any]
    # Placeholder -> name in the weight set.
    weights: dict[Any, str]
    outputs: list[Any]
    # Further outputs, which the runtime reads.
    checks: list[Check] = field(default_factory=list)
    # Tensors of this program that have no name in the model, by content.
    extra: dict[str, Any] = field(default_factory=dict)
    tensors: dict[Any, Any] = field(default_factory=dict)
    # Symbol of a dynamic size -> its bounds.
    ranges: dict[Any, Any] = field(default_factory=dict)
    # Inputs whose new values are the last of `outputs`, until `own_outputs`.
    written: list[Any] = field(default_factory=list)
    # The operations that copy them into these inputs, after it.
    writes: list[Any] = field(default_factory=list)
    _digests: dict[Any, str] = field(default_factory=dict)

    def computed(self) -> list[Check]:
        """Returns the checks of values that the module computes."""
        return [check for check in self.checks if check.input is None]

    def digest(self, node: Any) -> str:
        """Returns the digest of a weight's values. It is computed once: the weight may be large, and on a device."""
        if node not in self._digests:
            self._digests[node] = tensors.digest(self.tensors[node])
        return self._digests[node]


def export(call: Any, inputs: list[Any], root: Path, what: str, shapes: Any = None, deferred: bool = False) -> Any:
    """Captures with torch.export: not strictly first, strictly if that fails. The first failure is reported.

    `shapes` are dynamic dimensions; with `deferred`, conditions on them that can't be proven become checks in the
    graph.
    """
    first: BaseException | None = None
    # With dynamic sizes a strict capture fails for the same reason.
    for strict in (False, True) if shapes is None else (False,):
        try:
            with torch.no_grad(), exported.without_suggestions():
                return torch.export.export(
                    call,
                    tuple(inputs),
                    dynamic_shapes=shapes,
                    strict=strict,
                    prefer_deferred_runtime_asserts_over_guards=deferred,
                )
        except Exception as error:
            first = first or error
    assert first is not None
    unknown = _unknown_output(call, inputs)
    if unknown is not None:
        name = unknown.__name__
        hint = "return tensors, in lists, tuples and dicts; a transformers model with `config.use_cache = False`"
        if dataclasses.is_dataclass(unknown):
            hint = f"`torch.export.register_dataclass({name})` after its definition, or return a dict of its tensors"
        raise Failure(
            "capture", f"{what} returns a `{name}`, which can't be taken apart into tensors", hint=hint
        ) from first
    message, hint = f"can't capture {what}: {failures.named(first)}", None
    if errors.depends_on_data(first):
        message = f"can't capture {what}: a branch or a loop depends on values of a tensor"
        hint = failures.BRANCH
    raise Failure("capture", message, location=failures.location(first, root), hint=hint) from first


def _unknown_output(call: Any, inputs: list[Any]) -> type | None:
    """Returns the type of an output that torch.export can't flatten, if there is one."""
    known = (torch.Tensor, int, float, complex, bool, str, bytes, type(None))
    try:
        with torch.no_grad():
            leaves = pytrees.leaves(call(*inputs))
    except Exception:  # the module itself fails
        return None
    # To torch.export, torch's own values, as a dtype, are constants.
    unknown = (type(leaf) for leaf in leaves if not isinstance(leaf, known) and type(leaf).__module__ != "torch")
    return next(unknown, None)


def _check_sizes(graph: Any, root: Path) -> None:
    """Refuses sizes that depend on values: the size of an output would be unknown until the program has run."""
    for node in graph.nodes:
        if node.op != "output" and symbols.depends_on_values(node.meta.get("val")):
            raise Failure(
                "capture",
                "a size depends on values of a tensor, and not on the inputs' sizes alone",
                location=failures.line_of(node, root),
                hint=failures.SIZE,
            )


def flatten(
    program: Any, named: Named, path: str, root: Path, names: Sequence[str] = (), states: Collection[int] = ()
) -> Flat:
    """Returns the simplified graph of an exported program; weights have their names in the opened model.

    `names` are the names of its inputs, `states` the positions of the inputs that it may write into.
    """
    program, written = _functional(program, root, names, states)
    graph = exported.copy_graph(program)
    flat = Flat(graph, [], {}, [], ranges=dict(program.range_constraints))
    # The functional form has new values first.
    end = graph.output_node()
    end.args = (tuple([*end.args[0][len(written) :], *end.args[0][: len(written)]]),)
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        kind = spec.kind.name
        node = placeholders.get(getattr(spec.arg, "name", ""))
        if node is None:
            continue
        if kind == "USER_INPUT":
            flat.inputs.append(node)
        elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            held = program.state_dict.get(spec.target)
            held = held if held is not None else program.constants.get(spec.target)
            _bind(flat, node, held, outer_name(path, spec.target), named)
        else:
            raise Failure(
                "capture", f"can't capture `{spec.target or node.name}`: inputs of kind {kind} are not supported"
            )
    _drop_assertions(graph)
    graph.eliminate_dead_code()
    _check_sizes(graph, root)
    flat.weights = {node: name for node, name in flat.weights.items() if node in set(graph.nodes)}
    fake.propagate(graph)
    if _drop_copies(graph):
        fake.propagate(graph)
    _fold_products(graph)
    flat.outputs = exported.outputs_of(graph)
    flat.written = [placeholders[name] for name in written]
    return flat


class WritesBuffers(Exception):
    """The module writes into its own buffers: their names inside the captured module."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


def _functional(program: Any, root: Path, names: Sequence[str], states: Collection[int]) -> tuple[Any, list[str]]:
    """Returns a program without writes, whose outputs begin with the new values of these inputs."""

    def writes(node: Any) -> bool:
        return overloads.is_overload(node.target) and overloads.is_mutable(node.target)

    kept = any(spec.kind.name.endswith("MUTATION") for spec in program.graph_signature.output_specs)
    if not kept and not any(writes(node) or exported.is_scope(node) for node in program.graph.nodes):
        return program, []
    writer = next((node for node in program.graph.nodes if writes(node)), None)
    exported.keep_stacks(program)
    functional = program.run_decompositions({})
    signature = functional.graph_signature
    given = [spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
    allowed = {given[position] for position in states}
    written, buffers = [], []
    for spec in signature.output_specs:
        kind = spec.kind.name
        if kind == "BUFFER_MUTATION":
            buffers.append(outer_name("", spec.target or ""))
        elif kind == "USER_INPUT_MUTATION" and spec.target in allowed:
            written.append(spec.target)
        elif kind in ("PARAMETER_MUTATION", "USER_INPUT_MUTATION"):
            name = dict(zip(given, names, strict=False)).get(spec.target, outer_name("", spec.target or ""))
            raise _refused(kind, name, failures.line_of(writer, root) if writer is not None else None)
    if buffers:
        raise WritesBuffers(buffers)
    return functional, written


def _refused(kind: str, name: str, location: str | None) -> Failure:
    if kind == "PARAMETER_MUTATION":
        message, hint = f"the module writes into its own parameter `{name}`", "only buffers and inputs are state"
    else:
        message = f"the module writes into its input `{name}`"
        hint = "name it under `[module.state]`, or return the new value as an output"
    return Failure("capture", message, location=location, hint=hint)


def _bind(flat: Flat, node: Any, held: Any, name: str, named: Named) -> None:
    """Gives a lifted tensor its name in the weight set, or replaces it by operations."""
    if not node.users:
        return
    if name in named.tensors or name in named.aliases:
        known: str | None = named.name_of(name)
    else:
        known = named.find(held)
    numel = held.numel()
    if (known is None and numel <= _INLINE) or numel == 0:
        _inline(flat.graph, node, held)
        return
    if not tensors.supported(held.dtype):
        raise Failure("capture", f"`{name}` is {tensors.dtype_name(held.dtype)}, which no weight set can hold")
    if known is None:
        known = f"constant.{tensors.digest(held)[:16]}"
        flat.extra[known] = held
        flat.tensors[node] = held
    else:
        flat.tensors[node] = named.tensors[known]
    flat.weights[node] = known


def _inline(graph: Any, node: Any, held: Any) -> None:
    aten = torch.ops.aten
    place = {"dtype": held.dtype, "device": held.device, "pin_memory": False}
    values = held.detach().cpu().reshape(-1).tolist()
    with graph.inserting_before(next(one for one in graph.nodes if one.op != "placeholder")):
        if len(values) == 0 or held.dim() == 0 or len(set(map(repr, values))) == 1:
            fill = values[0] if values else 0
            tensor = graph.call_function(aten.full.default, (list(held.shape), fill), place)
        else:
            parts = [graph.call_function(aten.full.default, ([1], value), place) for value in values]
            flat = graph.call_function(aten.cat.default, (parts,))
            tensor = graph.call_function(aten.reshape.default, (flat, list(held.shape)))
    node.replace_all_uses_with(tensor)


def _drop_assertions(graph: Any) -> None:
    """Removes assertions that always hold: sizes, dtypes and devices are those of the capture."""
    target = torch.ops.aten._assert_tensor_metadata.default
    for node in graph.find_nodes(op="call_function", target=target):
        if not node.users:
            graph.erase_node(node)


def _drop_copies(graph: Any) -> bool:
    """Removes casts to the same dtype, and copies: no operation writes into its arguments any more.

    Each value then has a single node. Dropout in eval mode becomes such a copy when operations become functional.
    Returns whether more values share memory than before.
    """
    aten = torch.ops.aten
    shared = False
    for node in list(graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        if node.op != "call_function" or packet not in (aten.to, aten.clone):
            continue
        source, result = node.args[0].meta.get("val"), node.meta["val"]
        if source is None:
            continue
        static = all(isinstance(size, int) for size in source.shape)
        copied = packet == aten.clone and static and fake.is_dense(source) and source.stride() == result.stride()
        if copied or fake.storage(source) == fake.storage(result):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            shared = shared or copied
    return shared


def _fold_products(graph: Any) -> None:
    """Multiplies what is no matrix by one as a matrix, where its rows are not one after the other in memory.

    Without a gradient torch then multiplies each of its matrices with the same one, as `nn.MultiheadAttention` with
    `batch_first` shows: 16 rows at a time in place of all. `torch.compile` copies: parameters require gradients there.
    The copy is part of the operation before.
    """
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.linear.default, aten.matmul.default):
            continue
        left, right = (one.meta.get("val") for one in node.args[:2])
        if left.dim() < 3 or right.dim() != 2:
            continue
        sizes, strides = left.shape, left.stride()
        steps = range(left.dim() - 2)
        if not any(symbols.differ(strides[at], strides[at + 1] * sizes[at + 1]) for at in steps):
            continue

        def new(before: Any, target: Any, *args: Any) -> Any:
            with graph.inserting_before(before):
                made = graph.call_function(target, args)
            made.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}  # noqa: B023
            fake.propagate_node(made)
            return made

        source, following = node.args[0], node.next
        shape = [symbols.fixed(size) for size in node.meta["val"].shape]
        lengths = [new(node, aten.sym_size.int, source, at) if one is None else one for at, one in enumerate(shape)]
        node.update_arg(0, new(node, aten.reshape.default, source, [-1, sizes[-1]]))
        users = list(node.users)
        fake.propagate_node(node)
        whole = new(following, aten.view.default, node, lengths)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user, users=users: user in users)


def own_outputs(flat: Flat) -> None:
    """Copies outputs that share memory with an input, a state, a weight or another output; drops outputs that are no
    tensors. New values of states become writes into them, the last operations of the graph.
    """
    graph = flat.graph
    end = graph.output_node()
    count = len(end.args[0]) - len(flat.written)
    returned, news = end.args[0][:count], end.args[0][count:]
    taken = {fake.storage(node.meta["val"]) for node in graph.find_nodes(op="placeholder")}
    taken |= {fake.storage(value.meta["val"]) for value in news}
    outputs = []
    for value in returned:
        if not isinstance(value, torch.fx.Node) or not isinstance(value.meta["val"], torch.Tensor):
            continue
        held = value.meta["val"]
        if fake.storage(held) in taken or not fake.is_dense(held):
            with graph.inserting_before(end):
                copy = graph.call_function(
                    torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
                )
            fake.propagate_node(copy)
            copy.meta["stack_trace"] = value.meta.get("stack_trace")
            value = copy
        taken.add(fake.storage(value.meta["val"]))
        outputs.append(value)
    for state, value in zip(flat.written, news, strict=True):
        if value is state:
            continue
        with graph.inserting_before(end):
            write = graph.call_function(torch.ops.aten.copy_.default, (state, value))
        fake.propagate_node(write)
        flat.writes.append(write)
    flat.outputs = outputs
    end.args = (tuple([*outputs, *(check.outcome for check in flat.checks)]),)
