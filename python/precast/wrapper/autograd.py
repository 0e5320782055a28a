"""The engine of a module that trains: a forward and a backward program behind one `torch.autograd.Function`.

Parameters are inputs of the function, so that autograd puts their gradients where it does for eager: hooks, frozen
parameters, accumulation and DDP work as ever. A tensor that the loss does not depend on gets none, as in eager: the
graph of eager's answer, in the first comparison, says which results follow from which tensors.

Saved values go through `save_for_backward`: a parameter, an input or a result that is changed in place before the
backward call is an error, as in eager, and hooks for saved tensors run. A parameter that got another `data` meanwhile
is read as it was in the forward call.

The forward program writes no buffer: the function copies the new values into the module's buffers after the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..capture import exported, pairs
from ..capture.programs import check_build, failure, resized
from ..compare import batches
from ..errors import BadInput, BuildError, CallFailed, Error
from ..torch_private import modules as of_torch
from ..torch_private import profiling, sharding
from ..torch_private.draws import Draw
from . import parts
from .artifacts import ArtifactEngine, Captured, gate, named, refusals
from .contract import Contract
from .deferred import DeferredChecks
from .engine import Passed
from .refusal import Refused
from .traced import Traced, prefixed
from .uses import Uses

if TYPE_CHECKING:
    from .subject import Subject


# The version of the names of inputs and outputs.
_FORMAT = 1


class PairEngine(ArtifactEngine):
    """Answers with gradients, by the pair of the exact sizes of a call."""

    _region: Subject
    kind = "autograd"
    _LENDS = "pairs"

    def _prepare(self, tensors: Mapping[str, Tensor]) -> None:
        self._binding = threading.Lock()
        self.deferred = DeferredChecks()
        self.follows: dict[str, set[int]] = {}
        self._device = next(iter([*self._weights().values(), *tensors.values()])).device

    @staticmethod
    def request(region: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        settings = ArtifactEngine.request(region, args, kwargs)
        tensors = [*region.module.parameters(), *batches.tensors((args, kwargs))]
        if tensors[0].device.type == "cpu":
            # Convolutions of a training are slower in channels-last order: each gradient of a filter is converted.
            settings["options"] = {"layout_optimization": False, **settings["options"]}
        return settings | {"format": _FORMAT}

    @classmethod
    def part(cls, region: Any, args: tuple[Any, ...], kwargs: dict[str, Any], under: str) -> Captured:
        """Captures the pairs of a region as the part of a build."""
        from ..capture import joint  # imports Inductor, which a process that finds its release does not need

        source = Traced(region.net, region.own, args, kwargs, region.names, under)
        given = [source.tensors[name] for name in source.names]
        shapes = {name: axes for name, axes in region.shapes.items() if name in source.names}
        dims, points = exported.sizes_of(source.names, given, shapes, region.points or None)
        device = check_build({**source.weights(), **dict(zip(source.names, given, strict=True))})
        grads = dict(zip(source.tensors, region.captured.inputs, strict=True))
        found = []
        for point in points:
            inputs = [
                resized(tensor, {axis: point[dim] for axis, dim in enumerate(axes) if dim is not None}).requires_grad_(
                    grads[name] and tensor.is_floating_point()
                )
                for name, tensor, axes in zip(source.names, given, dims, strict=True)
            ]
            flat = source.at(inputs, [[] for _ in inputs])
            try:
                found.append(joint.capture(flat, source.names, inputs))
            except BuildError:
                raise
            except Exception as error:
                raise failure(source, error) from None
        settings = cls.request(region, args, kwargs)
        functions, modules = pairs.functions_of(source.weights(), found, gate(region.config), under)
        for module in modules:
            module.mode, module.options = settings["mode"], settings["options"]
        contract = Contract.of(source)
        part = parts.Part(under, device, source.held(), functions, modules, contract.document(), pairs.IMPORTS)
        return Captured(part, contract, source.code)

    def _open(self) -> None:
        count = len(self._region.points or [{}])
        own = self._weights()
        named = [pairs.names(number, count, self.contract.under) for number in range(count)]
        self._take([(self._model[one], self._model[other]) for one, other in named], own)

    def _take(self, programs: Sequence[tuple[Any, Any]], own: dict[str, Tensor]) -> None:
        """Takes the forward and the backward program of each bucket."""
        points = self._region.points
        self._pairs = [
            _Pair(self, forward, backward, own, named(points[at]) if len(points) == len(programs) else "")
            for at, (forward, backward) in enumerate(programs)
        ]
        self._inputs = tuple(name for name in self._pairs[0].inputs if Draw.of(name) is None)
        self._took(own)

    def _took(self, weights: dict[str, Tensor]) -> None:
        # These keep the memory of a call for its backward call, where the caller gives a parameter another `data`.
        self.live = weights
        self._bound = {name: tensor.data_ptr() for name, tensor in weights.items()}

    def uses(self) -> Uses:
        """Counts the forward calls from now on."""
        forward, backward = zip(*((pair.forward.name, pair.backward.name) for pair in self._pairs), strict=True)
        return Uses(self._model.stats, forward, backward)

    def tables(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Returns the table of the module that has each tensor, and its name there."""
        record, found = self.contract.record, {}
        live = record.live(self._region.roots(*self.sample))
        for name, node in record.weights.items():
            parent, _, key = record.nodes[node]
            holder = live.value(parent)
            found[prefixed(self.contract.under, name)] = (holder if isinstance(holder, dict) else vars(holder), key)
        return found

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer, with gradients if they are recorded."""
        given = self._in_order(args, kwargs)
        number = self._exact.get(tuple(tuple(tensor.shape) for tensor in given))
        if number is None:
            sizes = [list(each.shape) for each in given]
            raise Refused("shape", f"no bucket has exactly {sizes}, and a training call is not padded")
        if torch.is_grad_enabled() and any(tensor.is_inference() for tensor in given):
            raise Refused("inputs", "a tensor of inference mode can't be saved for the backward call")
        pair = self._pairs[number]
        if (name := pair.hooked(given)) is not None and torch.is_grad_enabled():
            raise Refused("hooks", f"not all results follow from `{name}`, and its hooks would run with no gradient")
        return self._nested(pair(given), args, kwargs)

    def bind(self) -> None:
        """Binds the tensors that the module has now."""
        super().bind()
        self._took(self._weights())

    def learn(self, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes a call of the module and its answer: others have its structure, and follow from the same tensors."""
        if self._template is None:
            inputs = batches.flat(args, kwargs, self._names)[0]
            named = [(f"input.{name}", one) for name, one in inputs.items()]
            named += [(f"parameter.{name}", table[key]) for name, (table, key) in self.tables().items()]
            self.follows = _follows(zip(self.contract.results, batches.leaves(answer), strict=True), named)
        super().learn(answer, args, kwargs)

    def check(self) -> None:
        """Waits for the calls, and raises the error of a value that was out of bounds."""
        self.deferred.settle()
        super().check()

    def close(self) -> None:
        """Frees the artifacts after their last call."""
        try:
            self.deferred.settle()
        except Error as error:
            self._region.log.note(f"the last training call was wrong: {error}", error)
        super().close()

    def bind_saved(self, saved: dict[str, Tensor]) -> None:
        """Binds the tensors of a forward call for its backward call, if others were bound since."""
        if all(self._bound[name] == tensor.data_ptr() for name, tensor in saved.items()):
            return
        with self._binding:
            now = {**self._weights(), **{name: tensor.detach() for name, tensor in saved.items()}}
            if (detail := sharding.unbindable(now)) is not None:
                raise CallFailed(f"the backward call can't read the parameters of its forward call: {detail}")
            self._model.swap(now)
            self._bound = {name: tensor.data_ptr() for name, tensor in now.items()}
        self._region.unbind()


class _Pair:
    """The programs of one bucket, and the places of their values."""

    def __init__(
        self, engine: PairEngine, forward: Any, backward: Any, weights: dict[str, Tensor], bucket: str
    ) -> None:
        self.engine, self.forward, self.backward, self.bucket = engine, forward, backward, bucket
        self.inputs = list(forward.inputs)
        self.draws = [draw for name in self.inputs if (draw := Draw.of(name)) is not None]
        outputs = list(forward.outputs)
        self.results = [at for at, name in enumerate(outputs) if name.startswith("output.")]
        self.weights = [name for name in backward.weights if name in weights]
        given = {f"input.{name}": ("input", at) for at, name in enumerate(self.inputs)}
        given |= {name: ("input", at) for at, name in enumerate(self.inputs) if name.startswith("random.")}
        given |= {name: ("output", at) for at, name in enumerate(outputs)}
        # The kind and the place of each input of the backward program.
        self.reads = [
            ("tangent", int(name.removeprefix("tangent."))) if name.startswith("tangent.") else given[name]
            for name in backward.inputs
        ]
        self.differentiable = {at for kind, at in self.reads if kind == "tangent"}
        self.saved = [one for one in self.reads if one[0] != "tangent"]
        gradients = {name: at for at, name in enumerate(backward.outputs)}
        self.parameters = [name.removeprefix("grad.parameter.") for name in gradients if "grad.parameter." in name]
        self.wanted = [f"input.{name}" for name in self.inputs[: len(self.inputs) - len(self.draws)]]
        self.wanted += [f"parameter.{name}" for name in self.parameters]
        self.gradients = [gradients.get(f"grad.{name}") for name in self.wanted]
        self._results: list[tuple[torch.Size, torch.dtype]] = []
        self._partial: list[tuple[int, str]] | None = None
        tables = engine.tables()
        # Where the module has its tensors. A guard has compared the tree of submodules before each call.
        # By dtype: those of one dtype are written by one kernel.
        self.buffers: dict[torch.dtype, list[tuple[int, dict[str, Any], str]]] = {}
        for at, name in enumerate(outputs):
            if name.startswith("buffer."):
                table, key = tables[name.removeprefix("buffer.")]
                self.buffers.setdefault(table[key].dtype, []).append((at, table, key))
        self.own = [tables[name] for name in self.parameters]
        self.held = [tables[name] for name in self.weights]

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results of a call."""
        inputs, values = self.run(given)
        if not torch.is_grad_enabled():
            with refusals():
                self.engine.deferred.settle()
            return [values[at] for at in self.results]
        own = [table[key] for table, key in self.own]
        try:
            return list(_Function.apply(self, inputs, values, *given, *own))  # type: ignore[no-untyped-call]
        except Exception as error:  # a hook for saved tensors
            raise Passed from error

    def recorded(self, module: Any) -> AbstractContextManager[Any]:
        """Names a call of one of its modules in a profile."""
        return profiling.record(lambda: self.engine.title(module.name, self.bucket))

    def inputs_of(self, ctx: Any, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Returns the inputs of the backward program, and binds the tensors of the forward call."""
        count, saved = len(self.weights), ctx.saved_tensors
        named = zip(self.weights, saved[:count], ctx.own, strict=True)
        self.engine.bind_saved({name: ctx.live[name] if one is own else one for name, one, own in named})
        rest = iter(saved[count:])
        return [
            self._tangent(at, tangents[at]) if kind == "tangent" else next(rest).detach() for kind, at in self.reads
        ]

    def _tangent(self, at: int, given: Tensor | None) -> Tensor:
        """Returns the gradient of a result: zeros for one that the loss does not use."""
        if given is not None:
            return given
        shape, dtype = self._results[at]
        return torch.zeros(shape, dtype=dtype, device=self.engine._device)

    def hooked(self, given: Sequence[Tensor]) -> str | None:
        """Returns the first tensor with hooks of its gradient, of those that the loss may not depend on."""
        if self._partial is None:
            follows, count = self.engine.follows, len(self.differentiable)
            self._partial = [
                (at, name) for at, name in enumerate(self.wanted) if len(follows.get(name, self.differentiable)) < count
            ]
        for at, name in self._partial:
            table, key = self.own[at - len(given)]
            tensor: Any = given[at] if at < len(given) else table[key]
            if of_torch.has_hooks(tensor):
                return name
        return None

    def needed(self, tangents: Sequence[Tensor | None]) -> list[int | None]:
        """Returns the place of each gradient; None for a tensor that the loss does not depend on."""
        if all(tangents[at] is not None for at in self.differentiable):
            return self.gradients
        used, follows = {at for at, one in enumerate(tangents) if one is not None}, self.engine.follows
        return [
            None if name in follows and follows[name].isdisjoint(used) else at
            for name, at in zip(self.wanted, self.gradients, strict=True)
        ]

    def run(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the forward program. Returns its inputs and its outputs; writes the buffers."""
        inputs = [*given, *(draw.sample(self.engine._device) for draw in self.draws)]
        with refusals(), self.recorded(self.forward):
            found, notes = self.forward._run_taking([one.detach() for one in inputs])
        values = list(found.values())
        self._results = [(values[at].shape, values[at].dtype) for at in self.results]
        try:
            self.engine.deferred.settle()
        except Error as error:  # of the backward call before
            raise Passed from error
        self.engine.deferred.add(notes)
        with torch.no_grad():
            for places in self.buffers.values():
                of_torch.write([table[key] for _, table, key in places], [values[at] for at, _, _ in places])
        return inputs, values


class _Function(torch.autograd.Function):
    """One training call: gives the results of the forward program a gradient, by the backward program."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, inputs: list[Tensor], values: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        weights = [table[key] for table, key in pair.held]
        sources = {"input": inputs, "output": values}
        ctx.pair = pair
        ctx.own, ctx.live = weights, pair.engine.live
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights, *(sources[kind][at] for kind, at in pair.saved))
        results = tuple(values[at] for at in pair.results)
        fixed = [one for at, one in enumerate(results) if at not in pair.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        pair: _Pair = ctx.pair
        if torch.is_grad_enabled():
            raise CallFailed(
                "`create_graph=True`: a compiled backward program has no gradient of its own",
                hint="compute second derivatives with the original module, `wrapped._orig_mod`",
            )
        inputs = pair.inputs_of(ctx, tangents)
        # Unless the caller retains the graph, the program frees each saved value after it has read it.
        ctx.maybe_clear_saved_tensors()
        try:
            with pair.recorded(pair.backward):
                answer, notes = pair.backward._run_taking(inputs)
        except BadInput as error:
            raise CallFailed(
                f"a compiled backward program can't read the gradient of a result: {error.args[0]}",
                hint="`is_grads_batched=True` and transforms need the original module, `wrapped._orig_mod`",
            ) from error
        pair.engine.deferred.settle()
        pair.engine.deferred.add(notes)
        found = list(answer.values())
        return None, None, None, *(None if at is None else found[at] for at in pair.needed(tangents))


def _follows(leaves: Iterable[tuple[Any, tuple[str, Any]]], named: Sequence[tuple[str, Tensor]]) -> dict[str, set[int]]:
    """Returns the results that follow from each tensor, in the graph that autograd has of an answer."""
    found: dict[str, set[int]] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    for (kind, where), (_, leaf) in leaves:
        waiting, seen = [leaf.grad_fn] if kind == "output" else [], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
            for name in names.get(id(getattr(node, "variable", None)), ()):
                found.setdefault(name, set()).add(where)
    return found
