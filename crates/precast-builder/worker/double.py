"""A training step in float64, and the distance of eager from it, for a gate whose plain comparison failed.

`src/gate/float64.rs` of the command has the rule, and says what it buys. Both are the module itself, with `backward()`
and torch's optimizer, from the inputs and states of the gate's samples. So they know nothing of the captured graph.

**The step in float64.** Parameters, buffers, states and inputs of floating point are in double, and autocast is off.
What the code makes is in double too: the default dtype is float64, and an operator that names a smaller dtype of
floating point, as `x.float()` does, gets float64. It fails where an operator has no kernel for double.

**Eager's distance** from it is the root of the mean square over the elements of a value, and over some runs: one with
the samples as they are, and others whose inputs and states are moved by one unit in the last place. The loss is one
number, which may be right by chance in one run; the runs together say what rounding does to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import failures, samples, states, tensors, training
from .torch_private import tracing
from .wire import Failure

# Runs of eager: the samples as they are, and moved ones.
_RUNS = 5


def run(opened: Any, module: dict[str, Any], given: Path, out: Path) -> dict[str, Any]:
    """Returns the protocol's `InDouble` for the samples that a capture of this module wrote."""
    eager = training.Training(opened, module)
    double = training.Training(opened, {**module, "train": {**module["train"], "autocast": None}})
    held = {name: value.to(opened.device) for name, value in tensors.read(given).items()}
    count = len(eager.specs) - len(eager.states)

    def called(prefix: str) -> list[Any]:
        return [held[f"{prefix}in.{at}"] for at in range(count)]

    sample = [*called(""), *(held[f"state.{at}"] for at in range(len(eager.states)))]
    first = states.first(sample, eager.states, opened)[count:]
    calls = []
    while f"sequence.{len(calls)}.out.0" in held:
        calls.append(called(f"sequence.{len(calls)}."))
    try:
        with _double(double):
            exact = _answers(double, _wide(sample), list(map(_wide, calls)), _wide(first))
    except Exception as error:
        why = f"float64 can't run it: {failures.named(error)}"
        raise Failure("float64", why, location=failures.location(error, opened.root)) from error
    floats = [name for name, value in exact.items() if value.is_floating_point()]
    squares = dict.fromkeys(floats, 0.0)
    for salt in range(_RUNS):
        moved = [_moved(each, salt) for each in (sample, *calls, first)]
        got = _answers(eager, moved[0], moved[1:-1], moved[-1])
        for name in floats:
            squares[name] += float((got[name].double() - exact[name]).square().mean())
    distances = {f"eager.{name}": torch.tensor(squares[name] / _RUNS).double().sqrt() for name in floats}
    return {"file": str(tensors.write(out.resolve() / "double.safetensors", exact | distances))}


def _answers(
    part: training.Training, sample: Sequence[Any], calls: Sequence[Sequence[Any]], first: Sequence[Any]
) -> dict[str, Any]:
    """Returns the results of the sample and its states after the call, and the results of the calls of a session."""
    found: dict[str, Any] = {}
    count = len(part.specs) - len(part.states)

    def keep(kind: str, values: Sequence[Any]) -> None:
        found.update({f"{kind}.{index}": value for index, value in enumerate(values)})

    returned, after = part.run(sample)
    keep("out", list(returned.values()))
    keep("after", after[count:])
    for number, inputs in enumerate(calls):
        returned, after = part.run([*inputs, *first])
        keep(f"sequence.{number}.out", list(returned.values()))
        first = after[count:]
    return found


def _wide(values: Sequence[Any]) -> list[Any]:
    return [one.double() if one.is_floating_point() else one for one in values]


def _moved(values: Sequence[Any], salt: int) -> list[Any]:
    """Returns floats that are moved by one unit in the last place, up or down; for salt 0 as they are."""
    generator = torch.Generator().manual_seed(samples.seed("moved", salt))

    def one(value: Any) -> Any:
        if salt == 0 or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        return (value * (1 + signs.to(value) * torch.finfo(value.dtype).eps)).to(value.dtype)

    return [one(value) for value in values]


@contextmanager
def _double(part: training.Training) -> Iterator[None]:
    """Puts what a part does not take as a state into double, and what its code makes meanwhile."""
    model, default = part.target, torch.get_default_dtype()
    named = [*model.named_parameters(), *model.named_buffers()]
    # States take the place of the others.
    kept = [one for name, one in named if name not in part.params and name not in part.buffers]
    before = [(one, one.data) for one in kept if one.is_floating_point()]

    def put(values: Sequence[Any]) -> None:
        with torch.inference_mode(False):
            for (one, _), value in zip(before, values, strict=True):
                one.data = value

    try:
        put([value.double() for _, value in before])
        torch.set_default_dtype(torch.float64)
        with tracing.widening():
            yield
    finally:
        torch.set_default_dtype(default)
        put([value for _, value in before])
