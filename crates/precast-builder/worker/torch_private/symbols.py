"""Symbolic sizes: sizes of torch.export that are not one number.

Private: `SymInt.node` with `maybe_as_int`, `hint` and `expr`. Without it: no module can be captured with dynamic
dimensions.
"""

from __future__ import annotations

from typing import Any

import torch

from .fake import mode_of


def fixed(size: Any) -> int | None:
    """Returns a size that is one number; None for a symbolic one."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def differ(one: Any, other: Any) -> bool:
    """Returns whether two sizes are known to be different expressions."""
    return _expression(one) != _expression(other)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def example(size: Any) -> int:
    """Returns a size at the time of the capture. `int()` of a symbolic size would fix it permanently."""
    return size if isinstance(size, int) else int(size.node.hint)


def bounds(size: Any, ranges: dict[Any, Any]) -> tuple[int, int]:
    """Returns the lowest and the highest value of a size; `ranges` are the bounds of the program's symbols.

    Private: `torch.utils._sympy.value_ranges.bound_sympy`. Without it: an index into a table of dynamic size is
    checked when it is used, even where it can't be out of bounds.
    """
    from torch.utils._sympy.value_ranges import bound_sympy

    number = fixed(size)
    if number is not None:
        return number, number
    held = bound_sympy(size.node.expr, ranges)
    low, high = ((int(end) if end.is_Integer else limit) for end, limit in [(held.lower, 0), (held.upper, 2**63 - 1)])
    return low, high


def depends_on_values(value: Any) -> bool:
    """Returns whether a size of a tensor depends on values, and not on the sizes of inputs alone.

    Private: `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`. Without it: such a program fails later, with
    a less specific message.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, torch.Tensor) and bool(free_unbacked_symbols(value))


def ranges(program: Any) -> dict[str, tuple[int, int]]:
    """Returns the bounds of every symbol, by its name.

    Private: the bounds in `range_constraints` are sympy's numbers. Without it: as for sizes.
    """

    def whole(value: Any, other: int) -> int:
        try:
            return int(value)
        except (AttributeError, TypeError, ValueError, OverflowError):  # infinity has no digits
            return other

    return {
        str(symbol): (whole(bounds.lower, 0), whole(bounds.upper, 2**63 - 1))
        for symbol, bounds in program.range_constraints.items()
    }


def specialisations(program: Any) -> list[tuple[str, int]]:
    """Returns file and line of every place that fixed a symbol, while exporting with `Dim.AUTO`.

    Private: `ShapeEnv.replacements_slocs`. Without it: errors about dynamic dimensions lack the line.
    """
    shapes = mode_of(program.graph).shape_env
    found = []
    for place in getattr(shapes, "replacements_slocs", {}).values():
        for frame in (getattr(place, "maybe_user_loc", None), getattr(place, "framework_loc", None)):
            if isinstance(frame, str):
                path, _, line = frame.partition(":")
                number = line.split()[:1]
                found += [(path, int(number[0]))] if number and number[0].isdigit() else []
            elif frame is not None:
                found.append((frame.filename, frame.lineno))
    return found
