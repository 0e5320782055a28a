"""Finds the submodule and method to capture, and wraps them in a module whose forward takes flat tensors."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import failures, structure
from .wire import Failure

# The attribute that holds the captured module; graph names start with it.
INNER = "m"


def find(model: Any, path: str) -> Any:
    """Returns the submodule with this FQN."""
    if not path:
        return model
    known = dict(model.named_modules(remove_duplicate=False))
    if path not in known:
        hint = failures.nearest(path, [name for name in known if name], "submodules")
        raise Failure("no_module", f"the model has no submodule `{path}`", hint=hint, spec=path)
    return known[path]


def method_of(module: Any, path: str, method: str) -> Any:
    """Returns the bound method to capture."""
    function = getattr(module, method, None)
    if not callable(function):
        own = [name for name, value in vars(type(module)).items() if callable(value) and not name.startswith("_")]
        where = f"`{path}` ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
        raise Failure(
            "no_method", f"{where} has no method `{method}`", hint=failures.nearest(method, own, "it has"), spec=method
        )
    return function


def by_name(function: Any, names: list[str]) -> bool:
    """Returns whether inputs are passed by keyword: every name is the name of a parameter."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return set(names) <= keywords


def check_inputs(function: Any, names: list[str], what: str) -> None:
    """Refuses inputs that the method does not take, by name or in their order."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict.fromkeys(names)) if by_name(function, names) else signature.bind(*names)
    except TypeError as error:
        own = ", ".join(f"`{name}`" for name in signature.parameters)
        given = ", ".join(f"`{name}`" for name in names)
        raise Failure(
            "bad_input", f"{what} can't be called with {given}: {error}", hint=f"its parameters are {own}"
        ) from error


def wrap(module: Any, method: str, names: list[str], nesting: dict[str, Any] | None = None) -> Any:
    """Returns a module that calls `method` of `module` with tensors in the order of `names`, nested as in `nesting`."""
    function = getattr(module, method)
    keyword = by_name(module.forward if method == "forward" else function, names)

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(INNER, module)

        def forward(self, *inputs: Any) -> Any:
            # `forward` is called through `__call__`, so that hooks run.
            inner = getattr(self, INNER)
            target = inner if method == "forward" else getattr(inner, method)
            if nesting is not None:
                args = [structure.unflatten(item, inputs) for item in nesting["args"]]
                return target(*args, **{k: structure.unflatten(v, inputs) for k, v in nesting["kwargs"].items()})
            return target(**dict(zip(names, inputs, strict=True))) if keyword else target(*inputs)

    return Call().eval()


def outer_name(path: str, name: str) -> str:
    """Returns the FQN, in the opened model, of a name inside the wrapper."""
    return joined(path, "" if name == INNER else name.removeprefix(f"{INNER}."))


def joined(path: str, name: str) -> str:
    """Returns the FQN, in the opened model, of a name inside the submodule at `path`."""
    return ".".join(part for part in (path, name) if part)
