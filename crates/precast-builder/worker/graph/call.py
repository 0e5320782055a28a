"""Finds the submodule and method to capture, and wraps them in a module whose forward takes flat tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import failures
from ..torch_private import overloads
from ..wire import Failure
from . import structure

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


def arguments(function: Any, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns inputs as arguments of a function: by name, or in their order where it has no parameter of a name."""
    known = _parameters(function)
    if any(name not in known for name in given):
        return list(given.values()), {}
    positional = [name for name, one in known.items() if one.kind == one.POSITIONAL_ONLY and name in given]
    return [given[name] for name in positional], {name: given[name] for name in given if name not in positional}


def check_inputs(function: Any, names: list[str], what: str) -> None:
    """Refuses inputs that a function does not take. Each reaches the parameter of its name, or is one of `*args`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    known = _parameters(function)
    own = ", ".join(f"`{name}`" for name in signature.parameters)
    args, kwargs = arguments(function, {name: name for name in names})
    reason: TypeError | None = None
    try:
        bound = signature.bind(*args, **kwargs).arguments
        if all(name == value for name, value in bound.items() if name in known):
            return
    except TypeError as error:
        reason = error
    wrong = next((name for name in names if name not in known), None)
    if wrong is None:
        given = ", ".join(f"`{name}`" for name in names)
        why = reason or "a parameter that has no name for callers needs the ones before it"
        raise Failure("bad_input", f"{what} can't be called with {given}: {why}", hint=f"its parameters are {own}")
    close = failures.similar(wrong, [name for name in known if name not in names])
    hint = f"did you mean `{close}`?" if close else f"its parameters are {own}"
    raise Failure("bad_input", f"{what} has no parameter `{wrong}`", hint=hint) from reason


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters that have a name for one argument."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: one for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}


def wrap(
    module: Any, method: str, names: list[str], nesting: dict[str, Any] | None = None, buffers: Sequence[str] = ()
) -> Any:
    """Returns a module that calls `method` of `module` with tensors in the order of `names`, nested as in `nesting`.

    Further tensors take the place of these buffers, and have their new values after the call.
    """
    function = getattr(module, method)
    called = module.forward if method == "forward" else function
    # The position of each argument among the inputs.
    positional, by_name = arguments(called, {name: at for at, name in enumerate(names)})

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(INNER, module)

        def forward(self, *inputs: Any) -> Any:
            if not buffers:
                return self.called(inputs)
            given = inputs[: len(inputs) - len(buffers)]
            with _in_place_of(getattr(self, INNER), buffers, inputs[len(given) :]):
                return self.called(given)

        def called(self, given: Any) -> Any:
            """Calls the method. `forward` is called through `__call__`, so that hooks run."""
            inner = getattr(self, INNER)
            target = inner if method == "forward" else getattr(inner, method)
            if nesting is not None:
                args = [structure.unflatten(item, given) for item in nesting["args"]]
                return target(*args, **{k: structure.unflatten(v, given) for k, v in nesting["kwargs"].items()})
            return target(*[given[at] for at in positional], **{name: given[at] for name, at in by_name.items()})

    return Call().eval()


@contextmanager
def _in_place_of(module: Any, buffers: Sequence[str], states: Sequence[Any]) -> Iterator[None]:
    """Puts tensors in the place of buffers. A buffer that gets another tensor meanwhile is copied into the state."""
    places = [_place(module, name) for name in buffers]
    before = [getattr(*place) for place in places]
    for place, state in zip(places, states, strict=True):
        setattr(*place, state)
    try:
        yield
        for place, state in zip(places, states, strict=True):
            if getattr(*place) is not state:
                state.copy_(getattr(*place))
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(*place, value)


def _place(module: Any, name: str) -> tuple[Any, str]:
    """Returns the submodule that has a buffer, and the buffer's name in it."""
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf


def written_buffers(module: Any, call: Any, inputs: Sequence[Any]) -> list[str]:
    """Returns the buffers of a module that a call writes into or replaces, and restores them.

    Empty where the call fails: the capture finds out.
    """
    before = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_inference()}
    held = {name: (buffer, overloads.writes_into(buffer), buffer.clone()) for name, buffer in before.items()}
    try:
        with torch.no_grad():
            call(*inputs)
    except Exception:
        return []
    found = []
    for name, (buffer, writes, value) in held.items():
        place = _place(module, name)
        if getattr(*place) is not buffer or overloads.writes_into(buffer) != writes:
            found.append(name)
            setattr(*place, buffer)
            with torch.no_grad():
                buffer.copy_(value)
    return found


def outer_name(path: str, name: str) -> str:
    """Returns the FQN, in the opened model, of a name inside the wrapper."""
    return joined(path, "" if name == INNER else name.removeprefix(f"{INNER}."))


def joined(path: str, name: str) -> str:
    """Returns the FQN, in the opened model, of a name inside the submodule at `path`."""
    return ".".join(part for part in (path, name) if part)


def describe(module: dict[str, Any]) -> str:
    """Returns a module's name in the spec, and its method where it is a submodule."""
    where = f" ({module['path']}.{module['method']})" if module["path"] else ""
    return f"module `{module['name']}`{where}"
