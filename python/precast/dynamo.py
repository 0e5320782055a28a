"""The backend of `torch.compile(net, backend="precast")`: graph breaks, recompiles and dynamic shapes are Dynamo's.

Each graph that Dynamo hands over is compiled once for a store: a second process traces the module, finds the releases
of its graphs, and compiles nothing. The name of a release is a digest:

| part | content |
|---|---|
| graph | its text, and the values of its constants |
| inputs | dtype, shape, order of the axes in memory and kind of device of tensors; the values of numbers |
| settings | `mode`, options, tolerances, the version of torch, and the modes of the process |

Parameters and buffers are inputs of a graph. A graph with symbolic sizes has a release for each size that it is called
with, up to `SIZES` in a process. A graph without a program runs as it is, with a warning.

`torch._dynamo.utils.counters["precast"]` counts: `artifact` and `eager` are calls of graphs, `built` and `found` are
releases.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from . import _native
from .capture import joint, pairs
from .capture.programs import check_build, tidied
from .capture.replay import Program, quiet
from .client.loading import load
from .compare.undisturbed import restored_generators
from .config import CompileConfig
from .errors import LoadError, NotFound
from .torch_private import draws, graphs, modes
from .wrapper import contract, parts
from .wrapper.artifacts import build_settings, gate, refusals
from .wrapper.engine import CompileFailed, Passed
from .wrapper.logs import Log
from .wrapper.refusal import Refused

SIZES = 8
"""Sizes of one graph with symbolic sizes that a process builds a program for."""
_FORMAT = 1
_OWN = ("store", "name", "fail_policy", "smoketest_steps", "rtol", "atol", "check")


def backend(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Returns the function of a graph of Dynamo.

    `options` has settings of `CompileConfig` by their names (`store`, `name`, `fail_policy`, `smoketest_steps`, `rtol`,
    `atol`, `check`), and options of Inductor. The store is else `PRECAST_STORE`, else `artifacts`.
    """
    config = settings(mode, options or {})
    return graphs.through_autograd(graph, inputs, lambda one, _: Graph(one, config))


def settings(mode: str | None, options: Mapping[str, Any]) -> CompileConfig:
    """Returns the settings of a backend. Raises `ValueError` for those that a backend does not have."""
    own = {key: value for key, value in options.items() if key in _OWN}
    others = {key: value for key, value in options.items() if key not in _OWN}
    for key in others:
        if key in {field.name for field in fields(CompileConfig)}:
            raise ValueError(f'`{key}` is no option of `torch.compile(backend="precast")`: it is for `maybe_compile`')
    store = own.pop("store", None) or os.environ.get("PRECAST_STORE") or CompileConfig.store
    return replace(CompileConfig(mode=mode or "default", options=others, store=store), **own)


class Graph:
    """A graph of AOTAutograd: a function of a list, which it empties."""

    def __init__(self, graph: fx.GraphModule, config: CompileConfig) -> None:
        self.graph, self.config, self.log = graph, config, Log()
        self._boxed_call = True  # AOTAutograd's mark of a function that takes a list
        self._programs: dict[Any, _Compiled | None] = {}
        self._opening = threading.Lock()
        self._built = 0
        held = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
        self._tensors = all(isinstance(one, Tensor) for one in held)

    def __call__(self, given: list[Any]) -> Sequence[Any]:
        numbers = () if self._tensors else tuple(one for one in given if not isinstance(one, Tensor))
        if numbers not in self._programs:
            with self._opening:
                if numbers not in self._programs:
                    self._programs[numbers] = self._opened(given)
        program = self._programs[numbers]
        if program is not None:
            try:
                answer = program([one for one in given if isinstance(one, Tensor)])
            except Passed as passed:
                assert passed.__cause__ is not None
                raise passed.__cause__ from None
            except Exception as error:
                self._failed(error.refusal.detail if isinstance(error, Refused) else str(error), error)
            else:
                graphs.count("artifact")
                given.clear()
                return answer
        graphs.count("eager")
        return fx.Interpreter(self.graph).boxed_run(given)  # type: ignore[no-any-return]

    def _opened(self, given: Sequence[Any]) -> _Compiled | None:
        """Returns the program for inputs of these sizes, found or built; None if there is none."""
        try:
            with restored_generators():
                return self._found_or_built(given)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}", error)
            return None

    def _failed(self, reason: str, error: BaseException) -> None:
        if self.config.fail_policy == "raise":
            raise error
        self.log.note(f"a graph of `torch.compile` runs as it is: {reason}", error)
        line = reason.partition("\n")[0]
        self.log.warn(f"a graph of `torch.compile` runs without an artifact: {line}", line)

    def _found_or_built(self, given: Sequence[Any]) -> _Compiled:
        tensors = [one.detach() for one in given if isinstance(one, Tensor)]
        if not tensors:
            raise CompileFailed("the graph has no tensor among its inputs")
        check_build({f"input {at}": one for at, one in enumerate(tensors)})
        orders = [_order(one) for one in tensors]
        model, name = self.config.name or "compiled", self._name(given, orders)
        plan = _plan(self.config, model, name)
        if plan is None:
            if self._built >= SIZES:
                raise CompileFailed(
                    f"{SIZES} sizes of it have programs: pad the inputs, or `mark_dynamic` less of them"
                )
            self._built += 1
            self._build(model, name, given, orders)
            plan = _plan(self.config, model, name)
            assert plan is not None
            graphs.count("built")
        else:
            graphs.count("found")
        device = tensors[0].device
        release = load(self.config.store, f"{model}@{name}", device=device, check=self.config.check)
        return _Compiled(release[parts.called("")], plan["results"], orders, device)

    def _name(self, given: Sequence[Any], orders: Sequence[Any]) -> str:
        order = iter(orders)
        inputs = [
            [str(one.dtype), list(one.shape), next(order), one.device.type] if isinstance(one, Tensor) else one
            for one in given
        ]
        config = self.config
        asked = [config.mode, config.options, config.rtol, config.atol]
        request = {"format": _FORMAT, "inputs": inputs, "settings": asked, "modes": modes.of_process()}
        return contract.key(request) + contract.key(graphs.text(self.graph))

    def _build(self, model: str, name: str, given: Sequence[Any], orders: Sequence[Any]) -> None:
        tensors = [_turned(one.detach(), order) for one, order in zip(_tensors(given), orders, strict=True)]
        with torch.inference_mode(False), torch.no_grad(), quiet():
            static = graphs.static(self.graph, given, orders)
            masks = {key: draw.sample(tensors[0].device) for key, draw in static.masks.items()}
            inputs = {f"input.{at}": one.contiguous() for at, one in enumerate(tensors)} | masks
            exported = torch.export.export(static.module, tuple(inputs.values()), strict=False)
            half = joint.Function(inputs, [str(at) for at in range(static.count)], Program(tidied(exported), {}, []))
            at = parts.called("")
            function, module = pairs.function_of(at, half, {}, gate(self.config))
        module.mode, module.options = self.config.mode, {"freezing": False, **self.config.options}
        device = tensors[0].device.type
        part = parts.Part("", device, {}, {at: function}, [module], {"results": static.results}, pairs.IMPORTS)
        failed = parts.build(model, {name: part}, **build_settings(self.config))
        for error in failed.values():
            raise error


class _Compiled:
    """The program of a graph."""

    def __init__(self, run: Any, results: Sequence[Any], orders: Sequence[Any], device: torch.device) -> None:
        self._run, self._results, self._device = run, results, device
        self._moved = [(at, order) for at, order in enumerate(orders) if order is not None]
        self._draws = [draw for name in run.inputs if (draw := draws.Draw.of(name)) is not None]

    def __call__(self, given: list[Tensor]) -> list[Any]:
        given += [draw.sample(self._device) for draw in self._draws]
        inputs = [one.detach() for one in given]
        for at, order in self._moved:
            inputs[at] = inputs[at].permute(order)
        with refusals():
            found = list(self._run(*inputs).values())
        sources = {"output": found, "input": given}
        return [where if kind == "value" else sources[kind][where] for kind, where in self._results]


def _plan(config: CompileConfig, model: str, name: str) -> Any:
    """Returns what the results of a release are, if the store has it."""
    try:
        found = _native.assets(Path(config.store), model, name, parts.CALL)
    except (NotFound, LoadError):
        return None
    return next((json.loads(text) for _, text in found), None)


def _tensors(given: Sequence[Any]) -> list[Tensor]:
    return [one for one in given if isinstance(one, Tensor)]


def _order(tensor: Tensor) -> list[int] | None:
    """Returns the axes in the order of memory, for a tensor that is dense and not contiguous."""
    if tensor.is_contiguous():
        return None
    order = list(draws.axes_in_memory(tensor))
    return order if tensor.permute(order).is_contiguous() else None


def _turned(tensor: Tensor, order: list[int] | None) -> Tensor:
    return tensor if order is None else tensor.permute(order)
