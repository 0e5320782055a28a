"""Checks whether a smaller request may be padded into a bucket, by running the module at several sizes.

Inputs of a smaller size are run unpadded, and again padded with the values of the spec. The valid part of the padded
outputs must equal the unpadded outputs. Each dimension is tried separately, at several sizes and with values of every
kind. A dimension that changes an output is exact: a request has the bucket's size in it. The others are then tried at
once. One more run, with other values as padding, shows whether outputs depend on the padding value. It is reported, and
is not a failure.

`padding_graph` finds wrong answers for values beyond these samples. The gate gets inputs and outputs at smaller sizes
too: the artifact, padded by the runtime, must give the same outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import failures, tensors
from ..graph import structure
from ..values import samples

# Relative and absolute tolerance by dtype; the absolute one is scaled by the largest magnitude of the output.
TOLERANCES = {"float64": (1e-7, 1e-8), "float32": (1e-4, 1e-5), "float16": (1e-2, 4e-3), "bfloat16": (4e-2, 2e-2)}

# The protocol's JSON has no infinity.
_UNBOUNDED = 1e308

# Bytes of inputs and outputs that the gate gets; more than these only where a dimension has none yet.
_FOR_GATE = 1 << 28

Sizes = dict[str, int]


def points(sizes: Sizes) -> list[Sizes]:
    """Returns sizes inside a bucket to find the sizes of outputs: each dimension separately, and all at once."""
    found = [{**sizes, dim: size - 1} for dim, size in sizes.items() if size > 1]
    if sizes:
        found.append({dim: (size + 1) // 2 for dim, size in sizes.items()})
        found.append({dim: max(1, size // 4) for dim, size in sizes.items()})
    unique = {tuple(sorted(point.items())): point for point in found}
    return [point for point in unique.values() if point != sizes]


def single(sizes: Sizes, dim: str, kinds: tuple[str, ...]) -> Iterator[tuple[Sizes, str]]:
    """Yields sizes of one dimension, with values of all kinds."""
    size = sizes[dim]
    steps = list(dict.fromkeys(step for step in (size - 1, size // 2, size // 4, 1) if 0 < step < size))
    for index, kind in enumerate(samples.KINDS if steps else ()):
        yield {**sizes, dim: steps[index % len(steps)]}, kind if kind in kinds else "usual"


def combined(sizes: Sizes, dims: list[str], kinds: tuple[str, ...]) -> Iterator[tuple[Sizes, str]]:
    """Yields sizes of several dimensions at once."""
    if len(dims) > 1:
        for part, kind in ((2, "usual"), (4, "negative"), (1 << 40, "large")):
            yield {**sizes, **{dim: max(1, sizes[dim] // part) for dim in dims}}, kind if kind in kinds else "usual"


@dataclass
class Unpadded:
    """One run of the module at a smaller size, without padding."""

    sizes: Sizes
    inputs: list[Any]
    outputs: list[Any]
    # The error, if the module does not accept the size.
    error: str | None = None


def run_unpadded(
    wrapped: Any, sizes: Sizes, specs: list[dict[str, Any]], bounds: list[int | None], device: str, kind: str = "usual"
) -> Unpadded:
    """Runs the module at sizes inside its bucket, with values of a kind."""
    inputs = samples.draw(samples.at_sizes(specs, sizes), bounds, device, "padding", kind)
    try:
        return Unpadded(sizes, inputs, _run(wrapped, inputs))
    except Exception as error:  # the module does not take this size, so there is nothing to compare with
        if failures.is_out_of_memory(error):
            raise
        return Unpadded(sizes, inputs, [], failures.one_line(error))


@dataclass
class Check:
    """The module's answers to padded requests."""

    wrapped: Any
    specs: list[dict[str, Any]]
    # The same, with the ranges to draw values from, and sizes of the tables that they index.
    drawn: list[dict[str, Any]]
    bounds: list[int | None]
    device: str
    outputs: list[dict[str, Any]]
    # Dimension -> why requests must have the bucket's size in it.
    exact: dict[str, str]
    # Of values.
    kinds: tuple[str, ...]

    def run(self, sizes: Sizes) -> tuple[dict[str, Any], list[Unpadded]]:
        """Tries every dimension that is not exact yet; returns a report, and samples for the gate."""
        report: dict[str, Any] = {"points": [], "max_abs": 0.0, "sensitive": False}
        kept: list[Unpadded] = []
        room, last = _FOR_GATE, None
        tried = [([dim], single(sizes, dim, self.kinds)) for dim in sizes if dim not in self.exact]
        for dims, points_ in (*tried, (None, None)):
            # Without dimensions: all at once, after each one separately.
            dims = dims or [dim for dim in sizes if sizes[dim] > 1 and dim not in self.exact]
            own: list[Unpadded] = []
            for at, kind in points_ or combined(sizes, dims, self.kinds):
                one = run_unpadded(self.wrapped, at, self.drawn, self.bounds, self.device, kind)
                if one.error is not None:
                    report["points"].append({"sizes": at, "skipped": one.error})
                    continue
                why, gap = self._compare(one)
                report["points"].append({"sizes": at})
                if why is not None:
                    self.exact |= dict.fromkeys(dims, why)
                    own = []
                    break
                report["max_abs"] = max(report["max_abs"], gap)
                needed = sum(value.numel() * value.element_size() for value in (*one.inputs, *one.outputs))
                if needed <= room or not own:
                    room -= needed
                    own.append(one)
                last = one
            kept += own
        if last is not None:
            report["sensitive"] = self._sensitive(last)
        return report, kept

    def _compare(self, one: Unpadded) -> tuple[str | None, float]:
        """Returns why a padded request is wrong, if it is, and its largest difference."""
        where = " ".join(f"{dim}={size}" for dim, size in one.sizes.items())
        try:
            returned = _run(self.wrapped, self._padded(one, [spec["pad"] for spec in self.specs]))
        except Exception as error:
            if failures.is_out_of_memory(error):
                raise
            return f"padded from {where}, the module fails: {failures.one_line(error)}", 0.0
        gap, name = _difference(returned, one.outputs, self.outputs, one.sizes)
        if name is None:
            return None, gap
        return f"padded from {where}, output `{name}` differs from the one at its own size by {gap:.3g}", gap

    def _padded(self, one: Unpadded, fills: list[Any]) -> list[Any]:
        return [_pad(*each) for each in zip(one.inputs, self.specs, fills, strict=True)]

    def _sensitive(self, one: Unpadded) -> bool:
        """Returns whether other values in the padding change an output."""
        try:
            returned = _run(self.wrapped, self._padded(one, [_other(spec) for spec in self.specs]))
            return _difference(returned, one.outputs, self.outputs, one.sizes)[1] is not None
        except Exception:  # the module may not take the value, as one that is no index
            return True


def _pad(value: Any, spec: dict[str, Any], fill: Any) -> Any:
    whole = torch.full(spec["shape"], fill, dtype=value.dtype, device=value.device)
    whole[tuple(slice(size) for size in value.shape)] = value
    return whole


def _other(spec: dict[str, Any]) -> Any:
    """Returns a value that is not the padding, and an index into any table of two rows."""
    if isinstance(spec["pad"], bool):
        return not spec["pad"]
    return 1 if spec["pad"] != 1 else 0


def _run(wrapped: Any, inputs: list[Any]) -> list[Any]:
    with torch.inference_mode():
        return structure.tensors_of(wrapped(*inputs))


def _difference(
    padded: list[Any], expected: list[Any], outputs: list[dict[str, Any]], at: dict[str, int]
) -> tuple[float, str | None]:
    """Returns the largest difference of the valid parts, and the name of the first output out of tolerance."""
    worst, name = 0.0, None
    for value, wanted, output in zip(padded, expected, outputs, strict=True):
        cut = value
        for axis, rule in enumerate(output["dims"]):
            if rule is not None:
                cut = cut.narrow(axis, 0, rule["scale"] * at[rule["dim"]] + rule["offset"])
        if cut.shape != wanted.shape:
            return _UNBOUNDED, output["name"]
        if not wanted.numel():
            continue
        gap = torch.nan_to_num((cut.double() - wanted.double()).abs(), nan=0.0, posinf=0.0)
        worst = max(worst, float(gap.max()))
        if name is None and not close(cut, wanted):
            name = output["name"]
    return worst, name


def close(value: Any, wanted: Any) -> bool:
    """Returns whether a tensor is within the tolerances of its dtype."""
    rtol, atol = TOLERANCES.get(tensors.dtype_name(wanted.dtype), (0.0, 0.0))
    value, wanted = value.double(), wanted.double()
    finite = wanted[torch.isfinite(wanted)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(value, wanted, rtol=rtol, atol=atol * max(scale, 1e-30), equal_nan=True)
