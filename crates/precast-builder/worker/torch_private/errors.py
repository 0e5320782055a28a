"""Errors of torch.export and of the compiler, recognised by their types and their texts.

Without the private names here: errors keep their code, and lose their location, their hint or their cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any


def inner(error: BaseException) -> BaseException | None:
    """Returns the error that an error of the compiler wraps. Private: the attribute `inner_exception`."""
    found = getattr(error, "inner_exception", None)
    return found if isinstance(found, BaseException) else None


def unwrap(error: BaseException) -> BaseException:
    """Returns the error that the compiler met, without the errors around it that name the compiler only."""
    while (cause := inner(error)) is not None:
        error = cause
    return error


def is_cpp_error(error: BaseException) -> bool:
    """Returns whether the C++ compiler failed. Private: `torch._inductor.exc.CppCompileError`."""
    from torch._inductor import exc

    return isinstance(error, exc.CppCompileError)


def depends_on_data(error: BaseException) -> bool:
    """Returns whether torch.export refused a branch or a size that depends on values of a tensor.

    Private: the names of its errors (`GuardOnDataDependentSymNode`, …) and their text.
    """
    return "DataDependent" in type(error).__name__ or "data-dependent" in str(error).lower()


def no_attention_kernel(error: BaseException) -> bool:
    """Returns whether no kernel of the chosen kind can do an attention. Private: the texts of torch and of inductor."""
    pattern = r"No (available kernel|viable backend for scaled_dot_product_attention)"
    return re.match(pattern, str(error)) is not None


def failed_operator(error: BaseException) -> str | None:
    """Returns the operator that the compiler was lowering. Private: the line `target:` of its errors."""
    found = re.search(r"^\s*target: (\S+)", str(error), re.MULTILINE)
    return found.group(1) if found else None


def violated_constraints(error: BaseException) -> bool:
    """Returns whether a requested dynamic dimension can't be dynamic. Private: the text."""
    return "Constraints violated" in str(error)


def unproven_guard(error: BaseException) -> bool:
    """Returns whether torch.export could not prove that a condition holds for all sizes. Private: the text."""
    return "Not all values" in str(error)


def constraint(error: BaseException, inputs: list[str]) -> str:
    """Returns the first reason of violated constraints, with the names of the inputs in it; empty if there is none.

    Private: the list in the text, and `L['inputs'][0]` in it for the first input.
    """
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("- ")]
    return re.sub(r"L\['inputs'\]\[(\d+)\]", lambda match: f"`{inputs[int(match.group(1))]}`", " ".join(lines[:1]))


def stacks_in(variables: dict[str, Any]) -> Iterator[str]:
    """Yields the stack traces of the graph nodes that a frame of the compiler works on. Private: the names of its local
    variables."""
    for name in ("n", "node", "fx_node"):
        node = variables.get(name)
        if type(node).__name__ == "Node" and (stack := getattr(node, "stack_trace", None)):
            yield stack
