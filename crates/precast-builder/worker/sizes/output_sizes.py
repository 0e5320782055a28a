"""Finds how output sizes depend on the bucketed dimensions, from the module's outputs at other sizes.

Each dimension is changed separately. An output size depends on it if all probes fit `scale * size + offset`. If a size
fits no such line, or depends on another dimension too, padded outputs can't be cut to their valid part, and the
dimension is not padded. Earlier runs are the first probes; further runs follow only if those are too few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shapes = list[tuple[int, ...]]


Rules = list[list[dict[str, Any] | None]]


class NotAffine(Exception):
    """A smaller size of a dimension can't be padded into the bucket; the message has the reason."""


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
) -> tuple[Rules, dict[str, str]]:
    """Returns for each output and axis how it depends on a dimension, and why dimensions can't be padded.

    `seen` are known shapes at other sizes, of one dimension or of several.
    """
    rules: Rules = [[None] * len(shape) for shape in base]
    exact: dict[str, str] = {}
    for dim, size in sizes.items():
        probes = [(at[dim], shapes) for at, shapes in seen if at[dim] != size and at == {**sizes, dim: at[dim]}]
        failure = ""
        for other in probe_sizes(size):
            # Two more sizes show whether a line fits.
            if len(probes) >= 2:
                break
            if other in [value for value, _ in probes]:
                continue
            try:
                probes.append((other, run({**sizes, dim: other})))
            except Exception as error:  # the module may take the other sizes
                failure = failure or f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            if not probes:
                raise NotAffine(f"the module runs at no other size of `{dim}` than {size} ({failure})")
            rules = _merged(rules, dim, size, base, names, probes)
        except NotAffine as reason:
            exact[dim] = str(reason)
    for at, shapes in seen:
        changed = [dim for dim in sizes if at[dim] != sizes[dim]]
        if any(dim in exact for dim in changed):
            continue
        try:
            _check(rules, at, shapes, base, names)
        except NotAffine as reason:
            exact |= dict.fromkeys(changed, str(reason))
    return rules, exact


def _check(rules: Rules, at: dict[str, int], shapes: Shapes, base: Shapes, names: list[str]) -> None:
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


def _merged(
    rules: Rules, dim: str, size: int, base: Shapes, names: list[str], probes: list[tuple[int, Shapes]]
) -> Rules:
    """Returns the rules with those of one more dimension."""
    rules = [list(rule) for rule in rules]
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
    return rules
