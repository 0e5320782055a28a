"""Captures the training step of a module as two programs: `forward` and `backward`.

AOTAutograd traces forward and backward as one joint graph, and the partitioner of `torch.compile` cuts it in two, so
that few values are saved and cheap ones are computed again. The names of inputs and outputs say all that the autograd
function needs, so that a process that loads a release needs no graph:

| forward | |
|---|---|
| inputs | the tensors of the call by name, then `random.…`: see `precast.draws` |
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

The functions of torch that are private: `aot_export_joint_with_descriptors` for the graph and the meaning of its inputs
and outputs, `min_cut_rematerialization_partition` for the cut, `select_decomp_table` for Inductor's decompositions, and
`_compiling_state_context`, so that `torch.compiler.is_compiling()` is true as in an export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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

from . import draws
from .capture import Flat, failure, resized, tidied, undisturbed
from .errors import BuildError
from .nesting import Call
from .replay import INNER, Program, quiet
from .saved import Saved, first, reorder, separate
from .smoke import restored_buffers

# Operations that stay whole. Random ones become inputs. A maximum pool would save offsets in its window: with
# others than its own, a backward call reads memory out of bounds.
_WHOLE = ("dropout", "bernoulli", "rand", "uniform", "normal", "exponential", "multinomial", "max_pool")


@dataclass
class Function:
    """One program of a pair: its inputs in order with their values in one call, and the names of its outputs."""

    inputs: dict[str, Tensor]
    outputs: list[str]
    program: Program


@dataclass
class Pair:
    """The programs of a training step."""

    forward: Function
    backward: Function


def capture(net: nn.Module, call: Call, grads: Sequence[bool]) -> Pair:
    """Returns the programs for the sizes of a call, in the module's present modes and under the present autocast.

    `grads` says for each tensor of the call whether it requires a gradient. Raises `BuildError` for a module that has
    no such programs.
    """
    flat = Flat(net, "forward", call)
    inputs = [
        resized(tensor, {}).requires_grad_(grad and tensor.is_floating_point())
        for tensor, grad in zip(call.tensors, grads, strict=True)
    ]
    with restored_buffers(net), torch.inference_mode(False), torch.enable_grad():
        try:
            with contextlib.ExitStack() as stack, quiet(), _compiling_state_context():
                joint = aot_export_joint_with_descriptors(stack, flat, tuple(inputs), decompositions=_decompositions())
                found = _Cut(joint, call, net)
        except BuildError:
            raise
        except Exception as error:
            raise failure(net, "forward", error) from error
    with undisturbed(net), quiet(), _without_autocast():
        forward, backward = found.functions(net)
        _fill(forward, backward, found, net, inputs)
    return Pair(forward, backward)


def _fill(forward: Function, backward: Function, cut: _Cut, net: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Puts the values of one call into the inputs of both programs, with random tangents."""
    held = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))
    given = {name: one.detach() for name, one in zip(cut.call.names, inputs, strict=True)}
    for number, (_, draw) in enumerate(cut.random):
        given[draw.name(number)] = draw.sample(inputs[0].device)
    forward.inputs = {name: given[name] for name in forward.inputs}
    results = forward.program.run(held.__getitem__, list(forward.inputs.values()))
    values = {f"input.{name}": one for name, one in given.items()} | given
    values |= dict(zip(forward.outputs, results, strict=True))
    generator = torch.Generator().manual_seed(0)
    for name, one in backward.inputs.items():
        random = name.startswith("tangent.")
        backward.inputs[name] = torch.randn(one.shape, generator=generator).to(one) if random else values[name]


class _Cut:
    """The joint graph of a module, cut into a forward and a backward graph."""

    def __init__(self, joint: Any, call: Call, net: nn.Module) -> None:
        self.call = call
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
        joint.graph_module.recompile()
        self.results = [self._result(one) for one in described[:count]]
        self.gradients = [self._gradient(one) for one in described[count:]]
        with torch.no_grad():
            cut = min_cut_rematerialization_partition(
                joint.graph_module, None, num_fwd_outputs=count, static_lifetime_input_indices=static
            )
        # Graph modules: they hold the constant tensors of their graphs.
        self.modules = cut
        self.forward, self.backward = (one.graph for one in cut)

    def _source(self, node: fx.Node) -> tuple[str, str]:
        """Returns the kind and the name of an input of the joint graph."""
        for number, (mask, draw) in enumerate(self.random):
            if mask is node:
                return "input", draw.name(number)
        match node.meta.get("desc"):
            case meaning.ParamAOTInput(target) | meaning.BufferAOTInput(target):
                return "weight", target.removeprefix(INNER)
            case meaning.PlainAOTInput(at):
                return "input", self.call.names[at]
            case meaning.TangentAOTInput(meaning.PlainAOTOutput(at)):
                return "tangent", f"tangent.{at}"
        raise BuildError(f"the training graph has an input of another kind: {node.meta.get('desc')}")

    def _result(self, one: Any) -> str:
        match one:
            case meaning.PlainAOTOutput(at):
                return f"output.{at}"
            case meaning.InputMutationAOTOutput(meaning.BufferAOTInput(target)):
                return f"buffer.{target.removeprefix(INNER)}"
            case meaning.InputMutationAOTOutput(written):
                raise BuildError(f"the module writes into {_describe(written, self.call)} in a training call")
        raise BuildError(f"the training graph has an output of another kind: {one}")

    def _gradient(self, one: Any) -> str | None:
        match one and one.grad_of:
            case None:
                return None
            case meaning.ParamAOTInput(target):
                return f"grad.parameter.{target.removeprefix(INNER)}"
            case meaning.PlainAOTInput(at):
                return f"grad.input.{self.call.names[at]}"
        raise BuildError(f"the training graph has a gradient of {_describe(one.grad_of, self.call)}")

    def functions(self, net: nn.Module) -> tuple[Function, Function]:
        """Returns both programs."""
        results = list(next(iter(self.forward.find_nodes(op="output"))).args[0])
        known = {node.name: node for node in self.forward.nodes}
        values: dict[str, fx.Node] = {}
        for name, node in zip(self.results, results, strict=False):
            if not isinstance(node, fx.Node):
                raise BuildError(f"{name} of the training graph is a constant")
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
        forward = self._forward(net, values | saved.outputs)
        gradients = list(next(iter(self.backward.find_nodes(op="output"))).args[0])
        named = zip(self.gradients, gradients, strict=True)
        wanted = {name: node for name, node in named if name is not None and node is not None}
        separate(self.backward, wanted)
        backward = self._function(net, self.backward, wanted, saved.placeholders | tangents, saved.weights)
        return forward, backward

    def _forward(self, net: nn.Module, outputs: dict[str, fx.Node]) -> Function:
        """Returns the forward program."""
        inputs: dict[str, fx.Node] = {}
        weights: dict[str, fx.Node] = {}
        for node in list(self.forward.find_nodes(op="placeholder")):
            kind, name = self.sources[node.name]
            (weights if kind == "weight" else inputs)[name] = node
        separate(self.forward, outputs)
        order = [*self.call.names, *(draw.name(number) for number, (_, draw) in enumerate(self.random))]
        return self._function(net, self.forward, outputs, {name: inputs[name] for name in order}, weights)

    def _function(
        self,
        net: nn.Module,
        graph: fx.Graph,
        outputs: dict[str, fx.Node],
        inputs: dict[str, fx.Node],
        weights: dict[str, fx.Node],
    ) -> Function:
        """Returns the exported program of a graph."""
        last = next(iter(graph.find_nodes(op="output")))
        last.args = (tuple(outputs.values()),)
        last.meta.clear()
        graph.eliminate_dead_code()
        graph.lint()
        examples = {name: _example(node) for name, node in inputs.items()}
        module = _Runs(net, graph, list(inputs.values()), {node: name for name, node in weights.items()})
        exported = torch.export.export(module, tuple(examples.values()), strict=False)
        return Function(examples, list(outputs), Program(tidied(exported), {}, []))


class _Runs(nn.Module):
    """Runs a graph on tensors in order, and on the parameters and buffers of a module."""

    def __init__(self, net: nn.Module, graph: fx.Graph, inputs: list[fx.Node], weights: dict[fx.Node, str]) -> None:
        super().__init__()
        self.m = net
        self._graph = (graph, inputs, weights)

    def forward(self, *tensors: Any) -> Any:
        graph, inputs, weights = self._graph
        given = dict(zip(inputs, tensors, strict=True))
        env: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = given[node] if node in given else _tensor(self.m, weights.get(node))
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            else:
                assert node.op == "get_attr", node.op
                env[node] = getattr(graph.owning_module, node.target)
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
            raise BuildError(
                f"result {at} of the module shares memory with one of its inputs, or with another result ({kind})",
                hint="return a copy, as `x.clone()`",
            )


def _describe(source: Any, call: Call) -> str:
    match source:
        case meaning.ParamAOTInput(target) | meaning.BufferAOTInput(target):
            return f"`{target.removeprefix(INNER)}`"
        case meaning.PlainAOTInput(at):
            return f"its input `{call.names[at]}`"
    return str(source)


@contextlib.contextmanager
def _without_autocast() -> Any:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
