"""Cuts the training step of a module into two programs: `forward` and `backward`.

AOTAutograd traces forward and backward as one joint graph, and the partitioner of `torch.compile` cuts it in two, so
that few values are saved and cheap ones are computed again. The names of inputs and outputs say all that the autograd
function needs, so that a process that loads a release needs no graph:

| forward | |
|---|---|
| inputs | the tensors of the call by name, then `random.…`: see `draws` |
| `output.0`, … | the tensors of the result |
| `buffer.bn.running_mean` | the new value of a buffer that the module writes |
| `saved.0`, … | values for the backward program |

| backward | |
|---|---|
| `tangent.0` | the gradient of `output.0` |
| `saved.0`, `output.0`, `input.x`, `random.0.…` | values of the forward call |
| `grad.parameter.weight`, `grad.input.x` | gradients |

Parameters and buffers are weights of both programs, under their own names. Views are computed again in the backward
program, so that no saved value shares memory with a parameter, an input or an output.

A region marks its operations in the forward graph, and their gradients in the backward graph, so that both graphs are
cut at its borders.

This file, `saved` and `draws` are in the worker of a build, and by links in the Python package: a module of kind
`autograd` in a spec and a module in hand have the same programs.

Private: `aot_export_joint_with_descriptors` for the graph and the meaning of its inputs and outputs,
`min_cut_rematerialization_partition` for the cut, `select_decomp_table` for Inductor's decompositions, and
`_compiling_state_context`, so that `torch.compiler.is_compiling()` is true as in an export. Without them: no module can
be captured for training in Python.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.lowering  # the partitioner reads it
from torch import Tensor, fx, nn
from torch._export.utils import _compiling_state_context
from torch._functorch._aot_autograd import descriptors as meaning
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy

from . import draws
from .draws import Draw, Unsupported
from .saved import Saved, base, first, is_view, reorder, separate

INNER = "m"
"""The attribute of the captured function that holds the module: the names of tensors are relative to it."""

# Operations that stay whole. Random ones become inputs. A maximum pool would save offsets in its window: with
# others than its own, a backward call reads memory out of bounds.
_WHOLE = ("dropout", "bernoulli", "rand", "uniform", "normal", "exponential", "multinomial", "max_pool")
# The mark of an operation in a region: its name, and the number of the call.
_REGION = "precast_region"


@dataclass
class Half:
    """One of the two programs: a module that runs it, its inputs in order with examples, the names of its outputs."""

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: list[str]


@dataclass
class Halves:
    """The programs of a training step. `masks` are the random inputs of the forward program, in the order of draws."""

    forward: Half
    backward: Half
    masks: dict[str, Draw]

    def fill(self, given: dict[str, Tensor], masks: dict[str, Tensor]) -> None:
        """Puts the values of one call into the inputs of both programs, with random tangents."""
        self.forward.inputs = {name: (given | masks)[name] for name in self.forward.inputs}
        with torch.no_grad():
            results = self.forward.module(*self.forward.inputs.values())
        values = {f"input.{name}": one for name, one in given.items()} | masks
        values |= dict(zip(self.forward.outputs, results, strict=True))
        generator = torch.Generator().manual_seed(0)
        for name, one in self.backward.inputs.items():
            if name.startswith("tangent."):
                self.backward.inputs[name] = torch.randn(one.shape, generator=generator).to(one)
            else:
                self.backward.inputs[name] = values[name]


def partition(
    function: nn.Module, names: Sequence[str], inputs: Sequence[Tensor], region: Callable[[str], bool] | None = None
) -> Halves:
    """Returns the programs of a function of tensors, which calls its submodule `INNER` and returns a tuple of tensors.

    Parameters and inputs that require gradients get some. The module is in the modes, and under the autocast, to be
    captured. `region` says which of its submodules are regions. Raises `Unsupported` for a module without such
    programs; other errors are torch's.
    """
    with torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as stack:
        stack.enter_context(_compiling_state_context())
        if region is not None:
            stack.enter_context(_marked(getattr(function, INNER), region))
        joint = aot_export_joint_with_descriptors(stack, function, tuple(inputs), decompositions=_decompositions())
        return _Cut(joint, names, getattr(function, INNER)).halves()


@contextlib.contextmanager
def _marked(net: nn.Module, region: Callable[[str], bool]) -> Iterator[None]:
    """Marks the operations of regions, and so their gradients, while a graph is traced. The outermost region counts."""
    handles: list[Any] = []
    inside: list[Any] = []
    calls = [0]

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[0] += 1
            inside.append(
                fx.traceback.annotate({_REGION: (name, calls[0])}) if not inside else contextlib.nullcontext()
            )
            inside[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        inside.pop().__exit__(None, None, None)

    for name, module in net.named_modules():
        if name and region(name):
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with fx.traceback.preserve_node_meta():
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Cut:
    """The joint graph of a module, cut into a forward and a backward graph."""

    def __init__(self, joint: Any, names: Sequence[str], net: nn.Module) -> None:
        self.names, self.net = list(names), net
        graph = joint.graph_module.graph
        _check(joint)
        self.random = draws.replaced(graph)
        graph.lint()
        output = next(iter(graph.find_nodes(op="output")))
        described = output.meta["desc"]
        kinds = [one is None or isinstance(one, meaning.GradAOTOutput) for one in described]
        count = kinds.index(True) if True in kinds else len(kinds)
        self.sources = {node.name: self._source(node) for node in graph.find_nodes(op="placeholder")}
        static = [at for at, node in enumerate(self.sources) if self.sources[node][0] == "weight"]
        _save_borders(graph)
        _save_seeded(graph)
        joint.graph_module.recompile()
        self.results = [self._result(one) for one in described[:count]]
        self.gradients = [self._gradient(one) for one in described[count:]]
        with torch.no_grad():
            cut = min_cut_rematerialization_partition(
                joint.graph_module, None, num_fwd_outputs=count, static_lifetime_input_indices=static
            )
        # Graph modules: they hold the constant tensors of their graphs.
        self.modules = {one.graph: one for one in cut}
        self.forward, self.backward = self.modules

    def _source(self, node: fx.Node) -> tuple[str, str]:
        """Returns the kind and the name of an input of the joint graph."""
        for number, (mask, draw) in enumerate(self.random):
            if mask is node:
                return "input", draw.name(number)
        match node.meta.get("desc"):
            case meaning.ParamAOTInput(target) | meaning.BufferAOTInput(target):
                return "weight", _own(target)
            case meaning.PlainAOTInput(at):
                return "input", self.names[at]
            case meaning.TangentAOTInput(meaning.PlainAOTOutput(at)):
                return "tangent", f"tangent.{at}"
        raise Unsupported(f"the training graph has an input of another kind: {node.meta.get('desc')}")

    def _result(self, one: Any) -> str:
        match one:
            case meaning.PlainAOTOutput(at):
                return f"output.{at}"
            case meaning.InputMutationAOTOutput(meaning.BufferAOTInput(target)):
                return f"buffer.{_own(target)}"
            case meaning.InputMutationAOTOutput(written):
                raise Unsupported(f"the module writes into {_describe(written, self.names)} in a training call")
        raise Unsupported(f"the training graph has an output of another kind: {one}")

    def _gradient(self, one: Any) -> str | None:
        match one and one.grad_of:
            case None:
                return None
            case meaning.ParamAOTInput(target):
                return f"grad.parameter.{_own(target)}"
            case meaning.PlainAOTInput(at):
                return f"grad.input.{self.names[at]}"
        raise Unsupported(f"the training graph has a gradient of {_describe(one.grad_of, self.names)}")

    def halves(self) -> Halves:
        """Returns both programs."""
        results = list(next(iter(self.forward.find_nodes(op="output"))).args[0])
        known = {node.name: node for node in self.forward.nodes}
        values: dict[str, fx.Node] = {}
        for name, node in zip(self.results, results, strict=False):
            if not isinstance(node, fx.Node):
                raise Unsupported(f"{name} of the training graph is a constant")
            values[name] = node
        tangents: dict[str, fx.Node] = {}
        saved = Saved(self.forward, self.sources, values, known, first(self.backward))
        for node in list(self.backward.find_nodes(op="placeholder")):
            kind, name = self.sources.get(node.name, ("saved", ""))
            if kind == "tangent":
                reorder(self.backward, node)
                tangents[name] = node
            else:
                saved.rebuild(self.backward, node)
        forward = self._forward(values | saved.outputs)
        gradients = list(next(iter(self.backward.find_nodes(op="output"))).args[0])
        named = zip(self.gradients, gradients, strict=True)
        wanted = {name: node for name, node in named if name is not None and node is not None}
        separate(self.backward, wanted)
        backward = self._half(self.backward, wanted, saved.placeholders | tangents, saved.weights)
        return Halves(forward, backward, {draw.name(number): draw for number, (_, draw) in enumerate(self.random)})

    def _forward(self, outputs: dict[str, fx.Node]) -> Half:
        """Returns the forward program."""
        inputs: dict[str, fx.Node] = {}
        weights: dict[str, fx.Node] = {}
        for node in list(self.forward.find_nodes(op="placeholder")):
            kind, name = self.sources[node.name]
            (weights if kind == "weight" else inputs)[name] = node
        separate(self.forward, outputs)
        order = [*self.names, *(draw.name(number) for number, (_, draw) in enumerate(self.random))]
        return self._half(self.forward, outputs, {name: inputs[name] for name in order}, weights)

    def _half(
        self,
        graph: fx.Graph,
        outputs: dict[str, fx.Node],
        inputs: dict[str, fx.Node],
        weights: dict[str, fx.Node],
    ) -> Half:
        """Returns the program of a graph."""
        last = next(iter(graph.find_nodes(op="output")))
        last.args = (tuple(outputs.values()),)
        last.meta.clear()
        graph.eliminate_dead_code()
        _join(graph)
        graph.lint()
        for node in graph.nodes:
            _place(node)
        named = {node: name for name, node in weights.items()}
        module = _Runs(self.net, self.modules[graph], list(inputs.values()), named)
        return Half(module, {name: _example(node) for name, node in inputs.items()}, list(outputs))


def _place(node: fx.Node) -> None:
    """Gives a node the submodule that it is in as torch.export does: its region, or none."""
    marked = _mark(node)
    for key in ("custom", "nn_module_stack", "fwd_nn_module_stack"):
        node.meta.pop(key, None)
    if marked is not None:
        name, call = marked
        node.meta["nn_module_stack"] = {f"{name}@{call}": (f"{INNER}.{name}", "")}


def _mark(node: fx.Node) -> Any:
    """Returns the region and the number of the call that a node is in; None outside of regions."""
    return (node.meta.get("custom") or {}).get(_REGION)


def _save_borders(graph: fx.Graph) -> None:
    """Has the values between regions saved, not computed again: no region computes operations of another one."""
    if any(map(_mark, graph.nodes)):
        for node in graph.nodes:
            if node.op == "call_function" and any(_mark(user) != _mark(node) for user in node.users):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _save_seeded(graph: fx.Graph) -> None:
    """Lets the results of operations that may draw be saved, also in a checkpoint inside of the module.

    An attention without dropout is among them. The partitioner would give one that is computed again the states of a
    generator, as more inputs.
    """
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            for one in (node, *(user for user in node.users if user.target is operator.getitem)):
                one.meta.pop("recompute", None)


def _join(graph: fx.Graph) -> None:
    """Puts the operations of each call of a region side by side, with sums of its gradients and views of its values."""
    if not any(map(_mark, graph.nodes)):
        return
    for node in graph.nodes:
        if node.target is torch.ops.aten.add.Tensor and _mark(node) is None:
            node.meta["custom"] = max(node.all_input_nodes).meta.get("custom")
    for node in list(graph.nodes):
        if _mark(node) is not None and _mark(node.prev) != _mark(node):
            last = max(node.all_input_nodes, default=node)
            if _mark(last) == _mark(node):
                last.append(node)
    for node in reversed(list(graph.nodes)):
        if is_view(node) and _mark(node) is None and base(node).op == "placeholder":
            if len({_mark(user) for user in node.users}) == 1:
                user = min(node.users)
                node.meta["custom"] = user.meta.get("custom")
                user.prepend(node)


class _Runs(nn.Module):
    """Runs a graph on tensors in order, and on the parameters and buffers of a module."""

    def __init__(
        self, net: nn.Module, program: fx.GraphModule, inputs: list[fx.Node], weights: dict[fx.Node, str]
    ) -> None:
        super().__init__()
        setattr(self, INNER, net)
        # In a tuple: the graph module is no submodule.
        self._program = (program, inputs, weights)

    def forward(self, *tensors: Any) -> Any:
        program, inputs, weights = self._program
        given = dict(zip(inputs, tensors, strict=True))
        env: dict[fx.Node, Any] = {}
        with fx.traceback.preserve_node_meta():
            for node in program.graph.nodes:
                if node.op == "placeholder":
                    env[node] = given[node] if node in given else _tensor(getattr(self, INNER), weights.get(node))
                elif node.op == "call_function":
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                    with fx.traceback.set_current_meta(node):
                        env[node] = node.target(*args, **kwargs)
                elif node.op == "output":
                    return fx.node.map_arg(node.args[0], env.__getitem__)
                else:
                    assert node.op == "get_attr", node.op
                    env[node] = getattr(program, node.target)
        return ()


def _tensor(net: nn.Module, name: str | None) -> Any:
    if name is None:  # an unused tangent or weight
        return None
    owner, _, leaf = name.rpartition(".")
    return getattr(net.get_submodule(owner), leaf)


def _example(node: fx.Node) -> Tensor:
    held = node.meta["val"]
    return torch.zeros(tuple(held.shape), dtype=held.dtype, device=held.device)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {key: value for key, value in select_decomp_table().items() if not any(part in str(key) for part in _WHOLE)}


def _check(joint: Any) -> None:
    """Refuses results that share memory with an input or with each other, by name."""
    state = joint._aot_state.fw_metadata
    for at, one in enumerate(state.output_info):
        kind = one.output_type.name
        if kind not in ("non_alias", "unsafe_view_alias", "custom_function_view"):
            raise Unsupported(
                f"result {at} of the module shares memory with one of its inputs, or with another result ({kind})",
                hint="return a copy, as `x.clone()`",
            )


def _own(target: str) -> str:
    """Returns the name of a tensor in the module."""
    return target.removeprefix(f"{INNER}.")


def _describe(source: Any, names: Sequence[str]) -> str:
    match source:
        case meaning.ParamAOTInput(target) | meaning.BufferAOTInput(target):
            return f"`{_own(target)}`"
        case meaning.PlainAOTInput(at):
            return f"its input `{names[at]}`"
    return str(source)
