"""Describes exceptions as the protocol's errors: code, one line, the user's file and line, hint, the whole trace."""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .torch_private import errors
from .wire import Failure

_MAX_MESSAGE = 400

# The code of a task that ran out of memory. The model may be fine: the task is retried with no other running.
OUT_OF_MEMORY = "out_of_memory"

# Hints. Eager runs the captured graph too, so leaving the module to eager does not help.
_NO_EAGER = "; eager runs the captured graph too, so `enabled = false` does not help"
BRANCH = "use `torch.where` or `torch.cond`, or let the caller decide which of two modules to call" + _NO_EAGER
SIZE = "compute at the largest size with a mask, or take the size from an input's shape" + _NO_EAGER

# The same texts as in Rust (`out_of_memory.rs`), where a test compares them.
_SHORT = ("out of memory", "OUT_OF_MEMORY", "STATUS_ALLOC_FAILED", "allocate memory", "std::bad_alloc")
_OTHER = "static TLS block"


def describe(error: BaseException, root: Path | None) -> dict[str, Any]:
    """Returns the protocol's `error` for an exception."""
    failure = error if isinstance(error, Failure) else _unexpected(error)
    no_memory = is_out_of_memory(error)
    return {
        "code": OUT_OF_MEMORY if no_memory else failure.code,
        "message": failure.message,
        "location": failure.location or (place_of(error, root) if root is not None else None),
        "hint": None if no_memory else failure.hint,
        "spec": failure.spec,
        "trace": "".join(traceback.format_exception(error)),
    }


def _unexpected(error: BaseException) -> Failure:
    if errors.depends_on_data(error):
        return Failure(
            "capture",
            "a branch or a size depends on values of a tensor, which no captured graph can follow",
            hint=BRANCH,
        )
    return Failure("internal", named(error))


def raised(code: str, who: str, error: BaseException, root: Path) -> Failure:
    """Returns the failure of the project's code that raised an exception; `who` names the code."""
    return Failure(code, f"{who} raised {named(error)}", location=location(error, root))


def on_samples(what: str, error: BaseException, root: Path, hint: str) -> Failure:
    """Returns the failure of a module that raised an exception on sample inputs."""
    message = f"{what} fails on sample inputs: {named(error)}"
    return Failure("bad_input", message, location=location(error, root), hint=hint)


def cause_of(error: BaseException) -> BaseException:
    """Returns the exception that a failure reports; any other exception itself."""
    return error.__cause__ if isinstance(error, Failure) and error.__cause__ is not None else error


def place_of(error: BaseException, root: Path) -> str | None:
    """Returns the `file:line` of the project that an exception is about."""
    own = error.location if isinstance(error, Failure) else None
    return own or location(cause_of(error), root)


def text_of(error: BaseException) -> str:
    """Returns the message of a failure; type and first line of any other exception."""
    return error.message if isinstance(error, Failure) else named(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception, or one of its causes, reports too little memory of device or host."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        # torch.OutOfMemoryError is a RuntimeError, as are errors of the driver and of cuBLAS; a process that can't be
        # started is an OSError.
        if isinstance(one, MemoryError) or (isinstance(one, (RuntimeError, OSError)) and _names_memory(str(one))):
            return True
        causes = (one.__cause__, one.__context__, errors.inner(one))
        pending += [cause for cause in causes if cause is not None]
    return False


def _names_memory(text: str) -> bool:
    return any(words in text for words in _SHORT) and _OTHER not in text


def named(error: BaseException) -> str:
    """Returns the type and the first line of an exception."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, without a final period; the first two after a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return text[:_MAX_MESSAGE].rstrip(". ")


def location(error: BaseException, root: Path) -> str | None:
    """Returns the innermost `file:line` of the project in the traceback of an exception or of its causes."""
    for one in causes_of(error):
        if isinstance(one, SyntaxError) and (place := inside(one.filename, one.lineno, root)):
            return place
        found = None
        for frame, line in traceback.walk_tb(one.__traceback__):
            found = inside(frame.f_code.co_filename, line, root) or found
            places = (from_stack_trace(stack, root) for stack in errors.stacks_in(frame.f_locals))
            found = next(filter(None, places), found)
        if found := found or from_stack_trace(str(one), root):
            return found
    return None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, its cause or context, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def from_stack_trace(text: str | None, root: Path) -> str | None:
    """Returns the last `file:line` of the project in a formatted stack trace, as graph nodes have it."""
    found = None
    for path, line in re.findall(r'File "([^"]+)", line (\d+)', text or ""):
        found = inside(path, int(line), root) or found
    return found


def line_of(node: Any, root: Path) -> str | None:
    """Returns the `file:line` of the project that a graph node comes from."""
    return from_stack_trace(getattr(node, "stack_trace", None), root)


def nearest(name: str, known: Iterable[str], what: str) -> str | None:
    """Returns `did you mean …` for a misspelt name; the known names if none is similar."""
    known = list(known)
    close = similar(name, known)
    if close:
        return f"did you mean `{close}`?"
    if known:
        shown = ", ".join(f"`{item}`" for item in known[:8])
        return f"{what}: {shown}{', …' if len(known) > 8 else ''}"
    return None


def similar(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelt one is most similar to."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def inside(path: str | None, line: int | None, root: Path) -> str | None:
    """Returns `file:line`, relative to the root, for a file of the project; None for any other."""
    if not path or path.startswith("<"):
        return None
    real = os.path.realpath(path)
    if not own_file(real, root):
        return None
    return f"{os.path.relpath(real, root)}:{line}"


def own_file(real: str, root: Path) -> bool:
    """Returns whether a real path is a file of the project: under its root, and not in an environment inside it."""
    base = str(root)
    if not real.startswith(base.rstrip(os.sep) + os.sep):
        return False
    parts = Path(os.path.relpath(real, base)).parts
    if {"site-packages", "dist-packages", "__pycache__", ".git"}.intersection(parts):
        return False
    folder = Path(base)
    for part in parts[:-1]:
        folder = folder / part
        if (folder / "pyvenv.cfg").exists():
            return False
    return True
