"""Finds how output sizes follow the bucketed dimensions, by what the module gives at other sizes.

Each dimension is changed alone. A size that fits `scale * size + offset` through all probes follows it; one that fits
nothing, or moves with two dimensions, means that outputs can't be cut back, and the module is not padded. What padding
needs is run anyway, and seen here first: further runs are only made where that says too little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shapes = list[tuple[int, ...]]


class NotAffine(Exception):
    """Why a smaller request can't be padded into the bucket."""


def probe_sizes(size: int) -> list[int]:
    """Returns other sizes to try, the most telling first: smaller ones are what a bucket serves."""
    wanted = [size - 1, size // 2, (size * 3) // 4, size // 4, size // 8, size + 1, size * 2]
    return list(dict.fromkeys(value for value in wanted if value >= 1 and value != size))


def solve(
    sizes: dict[str, int],
    base: Shapes,
    names: list[str],
    seen: list[tuple[dict[str, int], Shapes]],
    run: Callable[[dict[str, int]], Shapes],
) -> list[list[dict[str, Any] | None]]:
    """Returns for each output and axis how it follows a dimension; raises `NotAffine` with a sentence.

    `seen` are shapes at other sizes that are known already, of one dimension or of several.
    """
    follows: list[list[dict[str, Any] | None]] = [[None] * len(shape) for shape in base]
    for dim, size in sizes.items():
        alone = [(at[dim], shapes) for at, shapes in seen if at[dim] != size and at == {**sizes, dim: at[dim]}]
        probes: list[tuple[int, Shapes]] = list(alone)
        trouble = ""
        for other in probe_sizes(size):
            # Two further sizes show whether a line goes through them; one of them may be seen beside other changes.
            if len(probes) >= 2 or (alone and {at[dim] for at, _ in seen} - {size, *(value for value, _ in probes)}):
                break
            if other in [value for value, _ in probes]:
                continue
            try:
                probes.append((other, run({**sizes, dim: other})))
            except Exception as error:  # a size the module does not take says nothing about the others
                trouble = trouble or f"{type(error).__name__}: {error}".splitlines()[0]
                continue
        if not probes:
            raise NotAffine(f"the module runs at no other size of `{dim}` than {size} ({trouble})")
        _merge(follows, dim, size, base, names, probes)
    for at, shapes in seen:
        _check(follows, at, shapes, base, names)
    return follows


def _check(
    follows: list[list[dict[str, Any] | None]], at: dict[str, int], shapes: Shapes, base: Shapes, names: list[str]
) -> None:
    where = " ".join(f"{dim}={size}" for dim, size in at.items())
    if [len(shape) for shape in shapes] != [len(shape) for shape in base]:
        raise NotAffine(f"at {where} the outputs have other ranks or another count")
    for index, shape in enumerate(shapes):
        for axis, length in enumerate(shape):
            held = follows[index][axis]
            wanted = held["scale"] * at[held["dim"]] + held["offset"] if held is not None else base[index][axis]
            if length != wanted:
                rule = f"output `{names[index]}` axis {axis} is not a multiple of one size plus a constant"
                raise NotAffine(f"{rule} ({length} at {where}, and not {wanted})")


def _merge(
    follows: list[list[dict[str, Any] | None]],
    dim: str,
    size: int,
    base: Shapes,
    names: list[str],
    probes: list[tuple[int, Shapes]],
) -> None:
    for other, shapes in probes:
        if [len(shape) for shape in shapes] != [len(shape) for shape in base]:
            raise NotAffine(f"at `{dim}` = {other} the outputs have other ranks or another count than at {size}")
    for index, shape in enumerate(base):
        for axis, length in enumerate(shape):
            points = [(other, shapes[index][axis]) for other, shapes in probes]
            if all(value == length for _, value in points):
                continue
            where = f"output `{names[index]}` axis {axis}"
            held = follows[index][axis]
            if held is not None:
                raise NotAffine(f"{where} depends on `{held['dim']}` and on `{dim}`")
            first, value = points[0]
            scale, rest = divmod(length - value, size - first)
            offset = length - scale * size
            if rest or any(value != scale * other + offset for other, value in points):
                shown = ", ".join(f"{value} at {other}" for other, value in [(size, length), *points])
                raise NotAffine(f"{where} is not a multiple of `{dim}` plus a constant ({shown})")
            follows[index][axis] = {"dim": dim, "scale": scale, "offset": offset}
