"""First values of states that are outputs of another module of the model.

Outputs with names of states fill these; otherwise outputs fill the states of a module in their order.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import failures, tensors
from ..graph import call, structure
from ..values import samples
from ..wire import Failure


def first_values(opened: Any, filler: dict[str, Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first value of each state that `filler` fills. Fails where its outputs do not match the states."""
    what = call.describe(filler)
    outputs = [(name, value) for name, value in _outputs(opened, filler) if isinstance(value, torch.Tensor)]
    names = [name for name, _ in outputs]
    wanted = [spec["name"] for spec in states]
    missing = [name for name in wanted if name not in names]
    if len(missing) < len(wanted) and missing:
        hint = failures.nearest(missing[0], names, "its outputs are")
        raise Failure("bad_input", f"{what} has no output `{missing[0]}`, and fills that state", hint=hint)
    if missing and len(outputs) != len(wanted):
        raise Failure(
            "bad_input",
            f"{what} has {len(outputs)} outputs, and fills {len(wanted)} states: {', '.join(wanted)}",
            hint="return a dict with the names of the states",
        )
    firsts = []
    for at, spec in enumerate(states):
        index = at if missing else names.index(spec["name"])
        value = outputs[index][1]
        own, given = (spec["dtype"], spec["shape"]), (tensors.dtype_name(value.dtype), list(value.shape))
        if own != given:
            message = f"{what} gives state `{spec['name']}` {given[0]} {given[1]}, and it is {own[0]} {own[1]}"
            raise Failure("bad_input", message, spec=spec["name"])
        firsts.append({"output": {"module": filler["name"], "index": index}})
    return firsts


def value(opened: Any, first: dict[str, Any]) -> Any:
    """Returns an output of a module that `first_values` called, on sample inputs."""
    outputs = [leaf for _, leaf in opened.fillings[first["module"]] if isinstance(leaf, torch.Tensor)]
    return outputs[first["index"]]


def _outputs(opened: Any, filler: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the named outputs of a module on sample inputs. A worker calls it once."""
    name = filler["name"]
    if name not in opened.fillings:
        target, specs = call.find(opened.model, filler["path"]), filler["inputs"]
        function = call.method_of(target, filler["path"], filler["method"])
        names = [spec["name"] for spec in specs]
        call.check_inputs(target.forward if filler["method"] == "forward" else function, names, call.describe(filler))
        wrapped = call.wrap(target, filler["method"], names)
        lowest = samples.lowest(specs, opened.device)
        written = call.written_buffers(target, wrapped, lowest)
        if written:
            hint = "return new values as outputs, and write into no buffer"
            raise Failure("bad_input", f"{call.describe(filler)} fills states, and has one: `{written[0]}`", hint=hint)
        try:
            with torch.inference_mode():
                returned = wrapped(*samples.draw(specs, [None] * len(specs), opened.device))
        except Exception as error:
            hint = "an integer input needs its `range`"
            raise failures.on_samples(call.describe(filler), error, opened.root, hint) from error
        opened.fillings[name] = structure.named(returned)
    found: list[tuple[str, Any]] = opened.fillings[name]
    return found
