"""Calls through `torch.compile`: graphs, breaks between them, and guards that fail. Nothing is compiled.

Private: `torch._logging.set_logs`, `getArtifactLogger` and the texts of the logs `graph_breaks` and `recompiles`,
`torch._dynamo.config`. Without them: `check --recompiles` knows how many graphs there are, and not why.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Broken:
    """A place where torch.compile ends a graph."""

    why: str
    # Files and lines from the outermost call to the innermost.
    stack: list[tuple[str, int]]


@dataclass
class Guard:
    """A guard that did not hold, so that a function was compiled again."""

    text: str
    # The lines that rely on it; empty for a guard of torch's own.
    places: list[tuple[str, int]]


@dataclass
class Compiled:
    """The result of compiling one call."""

    graphs: int = 0
    breaks: list[Broken] = field(default_factory=list)
    # For each function that was compiled again, the guards of its versions that did not hold, newest version first.
    guards: list[list[Guard]] = field(default_factory=list)


@contextmanager
def compiled(function: Callable[..., Any]) -> Iterator[tuple[Callable[..., Compiled], int]]:
    """Yields a function that calls through torch.compile, and the maximum of recompilations of a function."""
    import torch._dynamo

    now = Compiled()

    def backend(graph: Any, inputs: Any) -> Any:
        now.graphs += 1
        return graph.forward

    def call(*inputs: Any) -> Compiled:
        nonlocal now
        now = Compiled()
        with torch.no_grad():
            compiled(*inputs)
        return now

    def broken(text: str) -> None:
        reason, _, stack = text.partition("User code traceback:")
        now.breaks.append(Broken(_reason(reason), _files(stack)))

    def recompiled(text: str) -> None:
        reasons = re.split(r"^\s*- \d+/\d+(?:_\d+)?: ", text, flags=re.MULTILINE)[1:]
        now.guards.append([_guard(reason) for reason in reasons])

    config = torch._dynamo.config
    limit = config.recompile_limit
    torch._dynamo.reset()
    try:
        # By default some calls more would end it, and eager would answer.
        with config.patch(recompile_limit=256, accumulated_recompile_limit=256), _logged(broken, recompiled):
            compiled = torch.compile(function, backend=backend)
            yield call, limit
    finally:
        torch._dynamo.reset()


def _reason(text: str) -> str:
    """Returns the explanation in a text about a graph break."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explained = next((line.partition(":")[2] for line in lines if line.startswith("Explanation:")), "")
    reason = next((line.partition("Reason:")[2] for line in lines if "Graph Break Reason:" in line), "")
    index = next((i for i, line in enumerate(lines) if line.startswith("Explanation:")), 0)
    title = lines[index - 1] if index > 0 else reason
    return ": ".join(part.strip().rstrip(".") for part in (title, explained) if part.strip())


def _files(text: str) -> list[tuple[str, int]]:
    return [(path, int(line)) for path, line in re.findall(r'File "([^"]+)", line (\d+)', text)]


def _guard(text: str) -> Guard:
    """Reads one reason: the guard, and after a comment sign the lines that rely on it."""
    text, _, stack = text.partition("User stack trace:")
    first = " ".join(text.split())
    expression, _, comment = first.partition("  # " if "  # " in first else " # ")
    places = [(_whole(path), int(line)) for path, line in re.findall(r"# (\S+\.py):(\d+) in ", comment)]
    # Submodules as the code names them.
    expression = re.sub(r"\._modules\['(\w+)'\]", r".\1", expression.strip())
    return Guard(expression, places + _files(stack))


def _whole(path: str) -> str:
    """Returns the whole path of a file that torch has shortened by the part in common with its own folder."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return next((file for file in files if file and file.endswith(path)), path)


@contextmanager
def _logged(broken: Callable[[str], None], recompiled: Callable[[str], None]) -> Iterator[None]:
    """Passes on torch's log messages about graph breaks and failed guards, and prints none of them."""
    import torch._logging

    class Noting(logging.Handler):
        def __init__(self, note: Callable[[str], None]) -> None:
            super().__init__()
            self.note = note

        def emit(self, record: logging.LogRecord) -> None:
            self.note(record.getMessage())

    # Torch prefers this variable to `set_logs`.
    asked = os.environ.pop("TORCH_LOGS", None)
    loggers = logging.getLogger("torch._dynamo"), logging.getLogger("torch.fx.experimental.symbolic_shapes")
    try:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        for module, name, note in (
            ("torch._dynamo.symbolic_convert", "graph_breaks", broken),
            ("torch._dynamo.guards", "recompiles", recompiled),
        ):
            logger = torch._logging.getArtifactLogger(module, name)
            logger.handlers, logger.propagate = [Noting(note)], False
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    finally:
        torch._logging.set_logs()
        if asked is not None:
            os.environ["TORCH_LOGS"] = asked
