"""States of a module: inputs and buffers that the spec names, and buffers that a call writes into or replaces.

They are inputs of the capture, behind those of a call. A capture writes into them in place (`flat.py`, `cut.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .. import failures, globs, tensors
from ..graph import call
from ..values import samples
from ..wire import Failure
from . import fillings


def of_module(opened: Any, module: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Returns the inputs of a module with its states among them; the positions of states, and their first values."""
    specs, path = list(module["inputs"]), module["path"]
    named = {one["name"]: one for one in module.get("state") or ()}
    asks = {at: named.pop(spec["name"])["first"] for at, spec in enumerate(specs) if spec["name"] in named}
    buffers = {name: call.find(opened.model, path).get_buffer(name) for name in module.get("buffers") or ()}
    for name, buffer in buffers.items():
        whole = call.joined(path, name)
        spec = {"name": whole, **tensors.layout(buffer.contiguous()), "dims": [None] * buffer.dim(), "pad": 0}
        patterns = [pattern for pattern in named if _names(pattern, path, name)]
        asked = named[patterns[0]] if patterns else {"first": "own"}
        if asked.get("shape") is not None:
            spec |= _reshaped(whole, buffer, asked)
        asks[len(specs)] = asked["first"] if asked["first"] != "own" else _own(opened, whole, buffer)
        specs.append(spec)
    return specs, _filled(opened, specs, asks)


def _own(opened: Any, name: str, buffer: Any) -> Any:
    """Returns the first value of a buffer that begins with its own values."""
    named = opened.named()
    if named.name_of(name) in named.tensors:
        return {"tensor": named.name_of(name)}
    if not buffer.any():
        return "zeros"
    hint = 'a state of another module with `first = "zeros"` has this buffer, or the file of weights lacks it'
    raise Failure("bad_input", f"state `{name}` begins with values that the weight set lacks", hint=hint, spec=name)


def _filled(opened: Any, specs: list[dict[str, Any]], asks: dict[int, Any]) -> dict[int, Any]:
    """Returns the first values of states, with the outputs of the modules that fill some of them."""
    fillers = {first["module"]["name"]: first["module"] for first in asks.values() if "module" in first}
    for name, filler in fillers.items():
        own = [at for at, first in asks.items() if "module" in first and first["module"]["name"] == name]
        asks |= zip(own, fillings.first_values(opened, filler, [specs[at] for at in own]), strict=True)
    return asks


def _reshaped(name: str, buffer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the shape that the spec gives a buffer: smaller in bucketed dimensions, else its own."""
    shape, dims = asked["shape"], asked["dims"]
    fits = len(shape) == buffer.dim() and all(
        size <= own if dim is not None else size == own
        for size, own, dim in zip(shape, buffer.shape, dims, strict=True)
    )
    if not fits:
        own = list(buffer.shape)
        hint = "the buffer has the largest bucket's size in bucketed dimensions, and the same sizes in the others"
        raise Failure("bad_input", f"state `{name}` is {own}, in the spec {shape}", hint=hint, spec=name)
    if asked["first"] == "own" and list(buffer.shape) != shape:
        raise Failure("bad_input", f"state `{name}` has other sizes than its buffer", hint='set `first = "zeros"`')
    return {"shape": shape, "stride": tensors.dense(shape), "dims": dims}


def only_read(opened: Any, module: dict[str, Any], written: list[str]) -> list[str]:
    """Returns the buffers of patterns in the spec that match no written buffer: states that other modules write."""
    path = module["path"]
    patterns = [one["name"] for one in module.get("state") or ()]
    patterns = [one for one in patterns if not any(_names(one, path, buffer) for buffer in written)]
    buffers = [name for name, _ in call.find(opened.model, path).named_buffers()]
    return [buffer for buffer in buffers if any(_names(pattern, path, buffer) for pattern in patterns)]


def _names(pattern: str, path: str, buffer: str) -> bool:
    """Returns whether a pattern names a buffer of the submodule at `path`, from there or from the model."""
    return globs.matches(pattern, buffer) or globs.matches(pattern, call.joined(path, buffer))


def refuse_unknown(module: dict[str, Any], known: list[str]) -> None:
    """Fails where the spec names a state that is neither an input nor a buffer."""
    prefix = module["path"] + "." if module["path"] else ""
    for pattern in (one["name"] for one in module.get("state") or ()):
        if not any(globs.matches(pattern, name) or globs.matches(pattern, name.removeprefix(prefix)) for name in known):
            hint = failures.nearest(pattern, known, "its inputs and states are")
            what = f"`{pattern}` is no input and no buffer of {call.describe(module)}"
            raise Failure("bad_input", what, hint=hint, spec=pattern)


def run(wrapped: Any, states: Collection[int], inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Runs a module on copies of its states. Returns its result, and the inputs after the call."""
    given = [value.clone() if at in states else value for at, value in enumerate(inputs)]
    return wrapped(*given), given


def first(inputs: Sequence[Any], states: dict[int, Any], opened: Any) -> list[Any]:
    """Returns inputs with the first values of states among them."""
    given = list(inputs)
    for at, value in states.items():
        if value == "zeros":
            given[at] = torch.zeros_like(given[at])
        elif "output" in value:
            given[at] = fillings.value(opened, value["output"]).clone()
        else:
            given[at] = opened.named().tensors[value["tensor"]].detach().clone()
    return given


def fill(
    inputs: list[Any],
    states: dict[int, Any],
    opened: Any,
    after: Callable[[list[Any]], list[Any]],
    draw: Callable[[int], list[Any]],
) -> None:
    """Gives the states among inputs the values that calls of the module itself leave, from first values on.

    `after` calls the module and returns the inputs after the call; `draw` returns the inputs of such a call.
    """
    inputs[:] = first(inputs, states, opened)
    for salt in range(1, samples.FILLING + 1) if states else ():
        given = after([inputs[at] if at in states else one for at, one in enumerate(draw(salt))])
        for at in states:
            inputs[at] = given[at]
