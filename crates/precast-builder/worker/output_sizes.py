"""Finds how output sizes depend on the bucketed dimensions, from the module's outputs at other sizes.

Each dimension is changed alone. An output size depends on it if all probes fit `scale * size + offset`. If a size fits
no such line, or depends on two dimensions, padded outputs can't be cut to their valid part, and the module is not
padded. The runs that the check of padding needs are the first probes; more are made only if those are too few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shapes = list[tuple[int, ...]]


class NotAffine(Exception):
    """A smaller request can't be padded into the bucket; the message says why."""


def probe_sizes(size: int) -> list[int]:
    """Returns other sizes to try, in order. Smaller ones come first: a bucket serves those."""
    candidates = [size - 1, size // 2, (size * 3) // 4, size // 4, size // 8, size + 1, size * 2]
    return list(dict.fromkeys(value for value in candidates if value >= 1 and value != size))


def solve(
    sizes: dict[str, int],
    base: Shapes,
    names: list[str],
    seen: list[tuple[dict[str, int], Shapes]],
    run: Callable[[dict[str, int]], Shapes],
) -> list[list[dict[str, Any] | None]]:
    """Returns for each output and axis how it depends on a dimension; raises `NotAffine`.

    `seen` are known shapes at other sizes, of one dimension or of several.
    """
    rules: list[list[dict[str, Any] | None]] = [[None] * len(shape) for shape in base]
    for dim, size in sizes.items():
        alone = [(at[dim], shapes) for at, shapes in seen if at[dim] != size and at == {**sizes, dim: at[dim]}]
        probes: list[tuple[int, Shapes]] = list(alone)
        failure = ""
        for other in probe_sizes(size):
            # Two more sizes show whether a line fits; one of them may come from a change of several dimensions.
            if len(probes) >= 2 or (alone and {at[dim] for at, _ in seen} - {size, *(value for value, _ in probes)}):
                break
            if other in [value for value, _ in probes]:
                continue
            try:
                probes.append((other, run({**sizes, dim: other})))
            except Exception as error:  # the module may take the other sizes
                failure = failure or f"{type(error).__name__}: {error}".splitlines()[0]
                continue
        if not probes:
            raise NotAffine(f"the module runs at no other size of `{dim}` than {size} ({failure})")
        _merge(rules, dim, size, base, names, probes)
    for at, shapes in seen:
        _check(rules, at, shapes, base, names)
    return rules


def _check(
    rules: list[list[dict[str, Any] | None]], at: dict[str, int], shapes: Shapes, base: Shapes, names: list[str]
) -> None:
    where = " ".join(f"{dim}={size}" for dim, size in at.items())
    if [len(shape) for shape in shapes] != [len(shape) for shape in base]:
        raise NotAffine(f"at {where} the outputs have other ranks or another count")
    for index, shape in enumerate(shapes):
        for axis, length in enumerate(shape):
            rule = rules[index][axis]
            wanted = rule["scale"] * at[rule["dim"]] + rule["offset"] if rule is not None else base[index][axis]
            if length != wanted:
                what = f"output `{names[index]}` axis {axis} is not a multiple of one size plus a constant"
                raise NotAffine(f"{what} ({length} at {where}, and not {wanted})")


def _merge(
    rules: list[list[dict[str, Any] | None]],
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
            rule = rules[index][axis]
            if rule is not None:
                raise NotAffine(f"{where} depends on `{rule['dim']}` and on `{dim}`")
            first, value = points[0]
            scale, rest = divmod(length - value, size - first)
            offset = length - scale * size
            if rest or any(value != scale * other + offset for other, value in points):
                shown = ", ".join(f"{value} at {other}" for other, value in [(size, length), *points])
                raise NotAffine(f"{where} is not a multiple of `{dim}` plus a constant ({shown})")
            rules[index][axis] = {"dim": dim, "scale": scale, "offset": offset}
