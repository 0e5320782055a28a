"""Breaks of a capture, and the sizes that it decides on: torch's draft mode, and its shape environment.

Private: `ExportedProgram._report` with `failures` and `str_to_filename`, `ShapeEnv.evaluate_expr` and
`source_to_var`. Without them: `check` knows the first break of a capture and not the others, and no line that decides
on a size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.export import draft_export

from .exported import silenced
from .patches import replaced


def breaks(call: Any, inputs: list[Any], shapes: Any = None) -> list[list[tuple[str, int]]]:
    """Captures with real values where a symbolic capture fails; returns a stack of files and lines for each place.

    Raises the error of a module that draft mode can't capture either.
    """
    with torch.no_grad(), silenced("torch.export"), silenced("torch._subclasses.fake_tensor"):
        report = draft_export(call, tuple(inputs), dynamic_shapes=shapes)._report
    found = []
    for failure in report.failures:
        frames = failure.data.get("user_stack") or failure.data.get("stack") or []
        names = report.str_to_filename
        found.append([(str(names.get(one["filename"], "")), int(one["line"])) for one in frames])
    return found


def size_decisions(note: Callable[[Any, Any, dict[str, str]], None]) -> AbstractContextManager[None]:
    """Calls `note` with each expression of sizes that the code evaluates, its value, and the symbols' sources."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv.evaluate_expr

    def evaluate(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, expression, *args, **kwargs)
        note(expression, answer, {str(symbol): source for source, symbol in self.source_to_var.items()})
        return answer

    return replaced((ShapeEnv, "evaluate_expr", evaluate))
