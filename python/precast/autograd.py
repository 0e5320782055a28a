"""The engine of a module that trains: a forward and a backward program behind one `torch.autograd.Function`.

Parameters are inputs of the function, so that autograd puts their gradients where it does for eager: hooks, frozen
parameters, accumulation and DDP work as ever. Saved values go through `save_for_backward`: a parameter, an input or a
result that is changed in place before the backward call is an error, as in eager, and hooks for saved tensors run.

The forward program writes no buffer: the function copies the new values into the module's buffers after the call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import batches, captured, pairs, parts, sharding
from .artifacts import ArtifactEngine, build_settings, causes, device_of_load, refusals
from .capture import check_build
from .draws import Draw
from .engine import Passed, Refused
from .errors import CallFailed, Error
from .late import Late
from .nesting import call_of
from .regions import resized

if TYPE_CHECKING:
    from .config import CompileConfig
    from .joint import Pair
    from .nesting import Call
    from .parts import Part
    from .region import Region
    from .training import PairRegion


# The version of the names of inputs and outputs.
_FORMAT = 1


class PairEngine(ArtifactEngine):
    """Answers with gradients, by the pair of the exact sizes of a call."""

    _region: PairRegion
    _LENDS = True

    def _release_name(self, name: str) -> str:
        # Equal submodules have equal digests, and share one release.
        return f"{name}.{type(self._net).__name__}.training" if self._region.name else f"{name}.training"

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._device = next(iter([*self._net.parameters(), *self._net.buffers()])).device
        self._binding = threading.Lock()
        self.late = Late()

    @staticmethod
    def _settings(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        settings = ArtifactEngine._settings(region, args, kwargs)
        tensors, _ = batches.flat(args, kwargs, region.names)
        if device_of_load(region.module, tensors).type == "cpu":
            # Convolutions of a training are slower in channels-last order: each gradient of a filter is converted.
            settings["options"] = {"layout_optimization": False, **settings["options"]}
        return settings

    @staticmethod
    def _distinguished(region: PairRegion) -> dict[str, Any]:
        return {"kind": "autograd", "format": _FORMAT, "state": region.captured}

    @classmethod
    def part(cls, region: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
        """Captures the pairs of a region as the part of a build."""
        call, found = cls._captures(region, args, kwargs, name)
        settings = cls._settings(region, args, kwargs)
        kept = {key: settings[key] for key in ("gate", "mode", "options") if key in settings}
        return parts.of_pairs(name, region.bare(), call, found, **kept)

    @staticmethod
    def _captures(
        region: PairRegion, args: tuple[Any, ...], kwargs: dict[str, Any], under: str = ""
    ) -> tuple[Call, list[Pair]]:
        """Returns the pair of each bucket, and the call of the last one."""
        from . import joint  # imports Inductor, which a process that finds its release does not need

        net, found = region.bare(), []
        for point in region.points or [{}]:
            given = resized((args, kwargs), region.shapes, region.names, point)
            call = call_of(net.forward, given)
            check_build(net, call)
            found.append(joint.capture(net, call, region.captured.inputs, under))
        return call, found

    def _build(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], config: CompileConfig, *, name: str, **settings: Any
    ) -> None:
        call, captures = self._captures(self._region, args, kwargs)
        for key in ("shapes", "buckets", "pad", "dynamic"):
            settings.pop(key, None)
        with causes():
            pairs.build(self._net, call, captures, name=name, **build_settings(config), **settings)

    def _weights(self) -> dict[str, Tensor]:
        if self._region.config.release is None:
            return super()._weights()
        # A build of a spec has the tensors without a place in the state dict as weights, too.
        return {name: tensor.detach() for name, tensor, _ in captured.tensors_of(self._held)}

    def _sizes(self, tensors: dict[str, Tensor]) -> list[tuple[tuple[int, ...], ...]]:
        if self._region.config.release is None:
            return super()._sizes(tensors)
        shapes = [pair.forward.shapes for pair in self._pairs]
        return [tuple(tuple(one[name]) for name in self._inputs) for one in shapes]

    def at_bucket(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments at the sizes of a bucket: their own, or those of the last one."""
        tensors, _ = batches.flat(args, kwargs, self._names)
        if (
            set(tensors) != set(self._inputs)
            or tuple(tuple(tensors[name].shape) for name in self._inputs) in self._exact
        ):
            return args, kwargs
        last = dict(zip(self._inputs, list(self._exact)[-1], strict=True))
        if any(len(shape) != tensors[name].dim() for name, shape in last.items()):
            return args, kwargs
        dims = {name: [f"{name}.{axis}" for axis in range(len(shape))] for name, shape in last.items()}
        sizes = {dim: size for name, shape in last.items() for dim, size in zip(dims[name], shape, strict=True)}
        return resized((args, kwargs), dims, self._names, sizes)

    def _open(self) -> None:
        count = len(self._region.points or [{}])
        own = self._weights()
        if self._region.config.release is None:
            shared = self._region.shared
            under = shared.part if shared is not None else ""
            named = [pairs.names(number, count, under) for number in range(count)]
        else:
            named = pairs.found(self._model)
        self._pairs = [_Pair(self, self._model[one], self._model[other], own) for one, other in named]
        self._inputs = tuple(name for name in self._pairs[0].inputs if Draw.of(name) is None)
        self._bound = {name: tensor.data_ptr() for name, tensor in own.items()}

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer, with gradients if they are recorded."""
        given = self._in_order(args, kwargs)
        number = self._exact.get(tuple(tuple(tensor.shape) for tensor in given))
        if number is None:
            sizes = [list(each.shape) for each in given]
            raise Refused("shape", f"no bucket has exactly {sizes}, and a training call is not padded")
        return self._nested(self._pairs[number](given))

    def _nested(self, answer: Any) -> Any:
        if isinstance(self._template, Tensor):
            return answer[0]
        return super()._nested(answer)

    def bind(self) -> None:
        """Binds the tensors that the module has now."""
        super().bind()
        self._bound = {name: tensor.data_ptr() for name, tensor in self._weights().items()}

    def close(self) -> None:
        """Frees the artifacts after their last call."""
        try:
            self.late.settle()
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

    def __init__(self, engine: PairEngine, forward: Any, backward: Any, weights: dict[str, Tensor]) -> None:
        self.engine, self.forward, self.backward = engine, forward, backward
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
        wanted = [f"grad.input.{name}" for name in self.inputs[: len(self.inputs) - len(self.draws)]]
        wanted += [f"grad.parameter.{name}" for name in self.parameters]
        self.gradients = [gradients.get(name) for name in wanted]
        # Where the module has its tensors. A guard has compared the tree of submodules before each call.
        # By dtype: those of one dtype are written by one kernel.
        self.buffers: dict[torch.dtype, list[tuple[int, dict[str, Any], str]]] = {}
        for at, name in enumerate(outputs):
            if name.startswith("buffer."):
                table, key = _place(engine._held, name.removeprefix("buffer."))
                self.buffers.setdefault(table[key].dtype, []).append((at, table, key))
        self.own = [_place(engine._held, name) for name in self.parameters]
        self.held = [_place(engine._held, name) for name in self.weights]

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results of a call."""
        inputs, values = self.run(given)
        if not torch.is_grad_enabled():
            with refusals():
                self.engine.late.settle()
            return [values[at] for at in self.results]
        own = [table[key] for table, key in self.own]
        try:
            return list(_Function.apply(self, inputs, values, *given, *own))  # type: ignore[no-untyped-call]
        except Exception as error:  # a hook for saved tensors
            raise Passed from error

    def inputs_of(self, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        """Returns the inputs of the backward program, and binds the tensors of the forward call."""
        count = len(self.weights)
        self.engine.bind_saved(dict(zip(self.weights, saved[:count], strict=True)))
        rest = iter(saved[count:])
        return [tangents[at] if kind == "tangent" else next(rest).detach() for kind, at in self.reads]

    def run(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the forward program. Returns its inputs and its outputs; writes the buffers."""
        inputs = [*given, *(draw.sample(self.engine._device) for draw in self.draws)]
        with refusals():
            found, notes = self.forward._run_taking([one.detach() for one in inputs])
        values = list(found.values())
        try:
            self.engine.late.settle()
        except Error as error:  # of the backward call before
            raise Passed from error
        self.engine.late.add(notes)
        with torch.no_grad():
            for places in self.buffers.values():
                torch._foreach_copy_([table[key] for _, table, key in places], [values[at] for at, _, _ in places])
        return inputs, values


class _Function(torch.autograd.Function):
    """One training call: gives the results of the forward program a gradient, by the backward program."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, inputs: list[Tensor], values: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        weights = [table[key] for table, key in pair.held]
        sources = {"input": inputs, "output": values}
        ctx.pair = pair
        ctx.save_for_backward(*weights, *(sources[kind][at] for kind, at in pair.saved))
        results = tuple(values[at] for at in pair.results)
        fixed = [one for at, one in enumerate(results) if at not in pair.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        pair: _Pair = ctx.pair
        if torch.is_grad_enabled():
            raise CallFailed(
                "`create_graph=True`: a compiled backward program has no gradient of its own",
                hint="compute second derivatives with the original module, `wrapped._orig_mod`",
            )
        inputs = pair.inputs_of(ctx.saved_tensors, tangents)
        # Unless the caller retains the graph, the program frees each saved value after it has read it.
        ctx.maybe_clear_saved_tensors()
        answer, notes = pair.backward._run_taking(inputs)
        pair.engine.late.settle()
        pair.engine.late.add(notes)
        found = list(answer.values())
        return None, None, None, *(None if at is None else found[at] for at in pair.gradients)


def _place(net: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Returns the table of a submodule that has a tensor, and its name there."""
    owner, _, leaf = name.rpartition(".")
    module = net.get_submodule(owner)
    tables = (module._parameters, module._buffers, vars(module))
    return next(table for table in tables if leaf in table), leaf
