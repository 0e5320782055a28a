"""What stops a capture, and which sizes it decides on: torch's draft mode, and its shape environment.

Private: `ExportedProgram._report` with `failures` and `str_to_filename`, `ShapeEnv.evaluate_expr` and
`source_to_var`. Without them: `check` knows the first thing that stops a capture and not the others, and no line that
decides on a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .exported import silenced


def breaks(call: Any, inputs: list[Any], shapes: Any = None) -> list[list[tuple[str, int]]]:
    """Captures with real values in place of what can't be followed; returns a stack of files and lines for each.

    Raises what stops even that.
    """
    import torch
    from torch.export import draft_export

    with torch.no_grad(), silenced("torch.export"), silenced("torch._subclasses.fake_tensor"):
        report = draft_export(call, tuple(inputs), dynamic_shapes=shapes)._report
    found = []
    for failure in report.failures:
        frames = failure.data.get("user_stack") or failure.data.get("stack") or []
        names = report.str_to_filename
        found.append([(str(names.get(one["filename"], "")), int(one["line"])) for one in frames])
    return found


@contextmanager
def size_decisions(note: Callable[[Any, Any, dict[str, str]], None]) -> Iterator[None]:
    """Tells `note` each expression of sizes that the code asks the value of, its value, and the symbols' sources."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv.evaluate_expr

    def evaluate(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, expression, *args, **kwargs)
        note(expression, answer, {str(symbol): source for source, symbol in self.source_to_var.items()})
        return answer

    ShapeEnv.evaluate_expr = evaluate
    try:
        yield
    finally:
        ShapeEnv.evaluate_expr = original
