"""The smallest sizes that a captured graph answers: those below the bounds of its capture.

torch.export captures dynamic dimensions from size 2, because a tensor with one element in an axis broadcasts. The
operators of the captured graph mostly give right results at size 1 too, and below other bounds of a capture. So the
graph is compared with the module there, on several inputs. A bound is lowered to the smallest size at which both agree.

A module with a branch for size 1 gets a second graph for it, and eager chooses between them by the size.

Only for eager: an operator checks the sizes of its arguments, which a compiled kernel does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import failures
from ..graph import structure
from ..torch_private import exported
from ..values import samples
from ..wire import Failure
from . import dynamic, padding

# The factors of floating inputs: a branch at one size may show only with large values.
_FACTORS = (1.0, 100.0)


@dataclass
class Lowered:
    """The sizes that eager answers."""

    held: dynamic.Bounds
    # The module's answers at the smallest sizes.
    ends: list[padding.Unpadded]
    # Graphs for size 1 of some dimensions, where the first graph does something else.
    ones: list[tuple[tuple[str, ...], Any]]


def lowered(
    traced: Any,
    asked: dynamic.Bounds,
    specs: list[dict[str, Any]],
    tables: list[int | None],
    device: str,
    capture: Callable[[dict[str, int]], Any],
) -> Lowered:
    """Returns the sizes that a captured graph answers. `capture` captures with some dimensions fixed."""
    trial = _Trial(traced, specs, tables, device)
    held, moved, stuck = trial.lowered(asked)
    ones = _ones(trial, held, asked, stuck, capture)
    if ones:
        for dim in stuck:
            held[dim]["min"] = 1
        moved += stuck
    points = [{dim: held[dim]["min"]} for dim in moved] + [{dim: held[dim]["min"] for dim in moved}]
    unique = [point for at, point in enumerate(points) if point and point not in points[:at]]
    return Lowered(held, [trial.answer(point) for point in unique], ones)


def _ones(
    trial: _Trial,
    held: dynamic.Bounds,
    asked: dynamic.Bounds,
    stuck: list[str],
    capture: Callable[[dict[str, int]], Any],
) -> list[tuple[tuple[str, ...], Any]]:
    """Returns a graph for each set of these dimensions at size 1; none if one of them can't be captured."""
    found = []
    for count in range(1, len(stuck) + 1):
        for dims in itertools.combinations(stuck, count):
            try:
                graph = capture(dict.fromkeys(dims, 1))
            except Failure:
                return []
            one = _Trial(graph, trial.specs, trial.tables, trial.device)
            free = {dim: bounds for dim, bounds in asked.items() if dim not in dims}
            reaches = one.lowered(free)[0]
            covers = all(
                reaches[dim]["min"] <= held[dim]["min"] and reaches[dim]["max"] >= held[dim]["max"] for dim in free
            )
            if not covers or not trial.replaced_by(one) or not one.agrees({}):
                return []
            found.append((dims, graph.graph))
    return found


def lowest(low: int, floor: int, agrees: Callable[[int], bool]) -> int:
    """Returns the smallest size from `floor` that agrees, below `low`, which does. Steps are halves, then ones."""
    bad = floor - 1
    size = low - 1
    while low > floor and size > bad:
        if agrees(size):
            low = size
            size = max(size // 2, floor) if bad < floor else (low + bad) // 2
        else:
            bad = size
            size = (low + bad) // 2
    return low


class _Trial:
    """Runs a graph and its module on the same inputs."""

    def __init__(self, traced: Any, specs: list[dict[str, Any]], tables: list[int | None], device: str) -> None:
        self.traced, self.specs, self.tables, self.device = traced, specs, tables, device
        self.module = exported.module_of(traced.graph.graph)

    def lowered(self, asked: dynamic.Bounds) -> tuple[dynamic.Bounds, list[str], list[str]]:
        """Returns the bounds of the graph, the dimensions that go lower, and those where it differs at size 1."""
        before = self.traced.held or {}
        held = {dim: dict(bounds) for dim, bounds in before.items()}
        moved, stuck = [], []
        for dim, bounds in held.items():
            low = lowest(bounds["min"], asked[dim]["min"], lambda size, dim=dim: self.agrees({dim: size}))
            if low < bounds["min"]:
                bounds["min"] = low
                moved.append(dim)
            elif bounds["min"] == dynamic.MIN_SIZE > asked[dim]["min"] and self.differs({dim: 1}):
                stuck.append(dim)
        # Sizes of single dimensions that agree can differ in combination.
        conflicts = {
            dim
            for count in range(2, len(moved) + 1)
            for dims in itertools.combinations(moved, count)
            if self.differs({dim: held[dim]["min"] for dim in dims})
            for dim in dims
        }
        for dim in conflicts:
            held[dim]["min"] = before[dim]["min"]
        stuck += [dim for dim in moved if dim in conflicts and held[dim]["min"] == dynamic.MIN_SIZE]
        return held, [dim for dim in moved if dim not in conflicts], stuck

    def replaced_by(self, other: _Trial) -> bool:
        """Returns whether another graph of the module takes and gives the same kinds of tensors."""

        def kinds(traced: Any) -> tuple[Any, ...]:
            values = [node.meta["val"] for node in traced.graph.outputs]
            checks = [check.text for check in traced.graph.checks]
            return [(value.dim(), value.dtype) for value in values], checks, traced.ranges

        return kinds(self.traced) == kinds(other.traced)

    def agrees(self, sizes: dict[str, int]) -> bool:
        """Returns whether the module runs at these sizes, and the graph gives the same."""
        return self._same(sizes) is True

    def differs(self, sizes: dict[str, int]) -> bool:
        """Returns whether the module runs at these sizes, and the graph does not give the same."""
        return self._same(sizes) is False

    def answer(self, sizes: dict[str, int]) -> padding.Unpadded:
        """Returns one run of the module."""
        inputs = self._inputs(sizes, 1.0)
        try:
            return padding.Unpadded({**self.traced.sizes, **sizes}, inputs, self._module(inputs), None)
        except Exception as error:  # it does not take this combination of sizes
            return padding.Unpadded({**self.traced.sizes, **sizes}, inputs, [], failures.one_line(error))

    def _same(self, sizes: dict[str, int]) -> bool | None:
        """Returns whether both give equal results; None if the module refuses these sizes for all values."""
        ran = False
        usual = samples.kinds(self.device, self.traced.graph.computed()) == samples.KINDS[:1]
        for factor in _FACTORS[:1] if usual else _FACTORS:
            inputs = self._inputs(sizes, factor)
            try:
                wanted = self._module(inputs)
            except Exception as error:
                if failures.is_out_of_memory(error):
                    raise
                continue  # an assertion of the module may refuse large values
            ran = True
            try:
                made = self._graph(inputs)
            except Exception:  # the graph does not take these sizes
                return False
            ranks = [node.meta["val"].dim() for node in self.traced.graph.outputs]
            if ranks != [one.dim() for one in wanted] or not all(map(_close, made, wanted)):
                return False
        return True if ran else None

    def _inputs(self, sizes: dict[str, int], factor: float) -> list[Any]:
        specs = samples.at_sizes(self.specs, {**self.traced.sizes, **sizes})
        drawn = samples.draw(specs, self.tables, self.device, f"smallest {factor}")
        return [value * factor if value.dtype.is_floating_point else value for value in drawn]

    def _module(self, inputs: list[Any]) -> list[Any]:
        with torch.inference_mode():
            return structure.tensors_of(self.traced.wrapped(*[value.clone() for value in inputs]))

    def _graph(self, inputs: list[Any]) -> list[Any]:
        graph = self.traced.graph
        given = dict(zip(graph.inputs, inputs, strict=True)) | graph.tensors
        placeholders = graph.graph.find_nodes(op="placeholder")
        with torch.inference_mode():
            # An unused weight has no value.
            made = torch.fx.Interpreter(self.module).run(*[given.get(node) for node in placeholders])
        return list(made[: len(graph.outputs)])


def _close(made: Any, wanted: Any) -> bool:
    return made.shape == wanted.shape and made.dtype == wanted.dtype and padding.close(made, wanted)
