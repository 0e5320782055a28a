"""Checks whether a smaller request may be padded into a bucket, by running the module at several sizes.

Inputs of a smaller size are run unpadded, and again padded as the spec says. The valid part of the padded outputs must
equal the unpadded outputs; otherwise the module is never padded. One more run, with other values as padding, shows
whether outputs depend on the padding value. It is reported, and no failure.

The gate gets inputs and outputs at smaller sizes too: the artifact, padded by the runtime, must give the same outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import failures, samples, structure, tensors

# Relative and absolute tolerance by dtype; the absolute one is scaled by the largest magnitude of the output.
TOLERANCES = {"float64": (1e-7, 1e-8), "float32": (1e-4, 1e-5), "float16": (1e-2, 4e-3), "bfloat16": (4e-2, 2e-2)}

# The protocol's JSON has no infinity.
_UNBOUNDED = 1e308


def points(sizes: dict[str, int]) -> list[dict[str, int]]:
    """Returns sizes inside a bucket to try: each dimension alone, and all of them together."""
    found = [{**sizes, dim: size - 1} for dim, size in sizes.items() if size > 1]
    if sizes:
        found.append({dim: (size + 1) // 2 for dim, size in sizes.items()})
        found.append({dim: max(1, size // 4) for dim, size in sizes.items()})
    unique = {tuple(sorted(point.items())): point for point in found}
    return [point for point in unique.values() if point != sizes]


@dataclass
class Unpadded:
    """One run of the module at a smaller size, without padding."""

    sizes: dict[str, int]
    inputs: list[Any]
    outputs: list[Any]
    # Why it failed, if the module does not take the size.
    error: str | None


def run_unpadded(
    wrapped: Any, specs: list[dict[str, Any]], sizes: dict[str, int], bounds: list[int | None], device: str
) -> list[Unpadded]:
    """Runs the module at sizes inside its bucket."""
    found = []
    for point in points(sizes):
        inputs = _inputs(specs, point, bounds, device)
        try:
            found.append(Unpadded(point, inputs, _run(wrapped, inputs), None))
        except Exception as error:  # the module does not take this size, so there is nothing to compare with
            if failures.is_out_of_memory(error):
                raise
            found.append(Unpadded(point, inputs, [], failures.one_line(error)))
    return found


def check(
    wrapped: Any, specs: list[dict[str, Any]], smaller: list[Unpadded], outputs: list[dict[str, Any]]
) -> tuple[str | None, dict[str, Any]]:
    """Returns why the module can't be padded, if it can't, and a report."""
    report: dict[str, Any] = {"points": [], "max_abs": 0.0, "sensitive": False}
    last = None
    for one in smaller:
        if one.error is not None:
            report["points"].append({"sizes": one.sizes, "skipped": one.error})
            continue
        padded = [_pad(value, spec, spec["pad"]) for value, spec in zip(one.inputs, specs, strict=True)]
        where = " ".join(f"{dim}={size}" for dim, size in one.sizes.items())
        try:
            returned = _run(wrapped, padded)
        except Exception as error:
            if failures.is_out_of_memory(error):
                raise
            return f"padded from {where}, the module fails: {failures.one_line(error)}", report
        gap, name = _difference(returned, one.outputs, outputs, one.sizes)
        report["points"].append({"sizes": one.sizes})
        report["max_abs"] = max(report["max_abs"], gap)
        if name is not None:
            return f"padded from {where}, output `{name}` differs from the one at its own size by {gap:.3g}", report
        last = one
    # The last point is the smallest, with the most padding.
    if last is not None:
        other = [_pad(value, spec, _other(spec)) for value, spec in zip(last.inputs, specs, strict=True)]
        try:
            report["sensitive"] = _difference(_run(wrapped, other), last.outputs, outputs, last.sizes)[1] is not None
        except Exception:  # the module may not take the value, as one that is no index
            report["sensitive"] = True
    return None, report


def _inputs(specs: list[dict[str, Any]], at: dict[str, int], bounds: list[int | None], device: str) -> list[Any]:
    values = []
    for spec, bound in zip(specs, bounds, strict=True):
        axes = zip(spec["dims"], spec["shape"], strict=True)
        shape = [at.get(dim, size) if dim is not None else size for dim, size in axes]
        values.append(samples.make(spec, shape, bound, device, "padding"))
    return values


def _pad(value: Any, spec: dict[str, Any], fill: Any) -> Any:
    import torch

    whole = torch.full(spec["shape"], fill, dtype=value.dtype, device=value.device)
    whole[tuple(slice(size) for size in value.shape)] = value
    return whole


def _other(spec: dict[str, Any]) -> Any:
    """Returns a value that is not the padding, and an index into any table of two rows."""
    if isinstance(spec["pad"], bool):
        return not spec["pad"]
    return 1 if spec["pad"] != 1 else 0


def _run(wrapped: Any, inputs: list[Any]) -> list[Any]:
    import torch

    with torch.inference_mode():
        return structure.tensors_of(wrapped(*inputs))


def _difference(
    padded: list[Any], expected: list[Any], outputs: list[dict[str, Any]], at: dict[str, int]
) -> tuple[float, str | None]:
    """Returns the largest difference of the valid parts, and the name of the first output out of tolerance."""
    import torch

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
        rtol, atol = TOLERANCES.get(tensors.dtype_name(wanted.dtype), (0.0, 0.0))
        cut, wanted = cut.double(), wanted.double()
        finite = wanted[torch.isfinite(wanted)]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        close = torch.allclose(cut, wanted, rtol=rtol, atol=atol * max(scale, 1e-30), equal_nan=True)
        gap = torch.nan_to_num((cut - wanted).abs(), nan=0.0, posinf=0.0)
        worst = max(worst, float(gap.max()))
        if not close and name is None:
            name = output["name"]
    return worst, name
