"""A module with more digits, and the distance of eager from it: the truth, by which a gate judges rounding.

`src/gate/truth.rs` of the command has the rule, and says what it buys. Here the module itself runs, from the inputs and
states of the gate's samples: a training step or a half of a pair with `backward()` and torch's optimizer. So it knows
nothing of the captured graph, except that the values which a pair saves are those of its uncompiled graph.

**More digits.** Inputs and states are in float32 or float64, and an operator that names a smaller dtype of floating
point, as `x.float()` does, gets that dtype. Without gradients parameters are widened where an operator reads them, so
that a model has not to fit twice; all at once where that fails, as in code that compares their dtype with an input's
(`nn.LSTM`). In training they are in double, the default dtype is float64, and autocast is off. All of it fails where
an operator has no kernel for the dtype.

**Eager's distance** comes from several runs: one with the samples as they are, and others whose inputs and parameters
or states are moved by one unit in the last place, or by autocast by as much as a cast rounds. One number may be right
by chance in one run; the runs together say what rounding does to it.

| | of a value, over the runs |
|---|---|
| without gradients | the largest shares, of its norm and of its largest element. Each run has a truth of its own |
| in training | the root of the mean square |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import capture, failures, tensors
from .graph import structure
from .model import entry, states
from .torch_private.widening import Widening, precise, without_draws
from .train import training
from .values import samples
from .wire import Failure, Wire


def run(
    opened: Any,
    module: dict[str, Any],
    sizes: dict[str, int],
    given: Path,
    dtype: str,
    runs: int,
    out: Path,
    wire: Wire,
) -> dict[str, Any]:
    """Returns the protocol's `Truth` for the samples that a capture of this module wrote."""
    needed = {name: value for name, value in tensors.read(given).items() if not name.startswith("after.")}
    held = {name: value.to(opened.device) for name, value in needed.items()}
    try:
        if module.get("pair"):
            found = _of_training(_Pair(capture.trace(opened, module, sizes, wire), opened, held), runs)
        elif module.get("train"):
            found = _of_training(_Step(opened, module, held), runs)
        else:
            found = _Call(opened, module, held, getattr(torch, dtype)).values(runs)
    except Exception as error:
        why = f"{dtype} can't run it: {failures.named(error)}"
        raise Failure("truth", why, location=failures.location(error, opened.root)) from error
    return {"file": str(tensors.write(out.resolve() / "truth.safetensors", found))}


def _of_training(form: _Pair | _Step, runs: int) -> dict[str, Any]:
    exact = form.exact()
    floats = [name for name, value in exact.items() if value.is_floating_point()]
    squares = dict.fromkeys(floats, 0.0)
    for salt in range(runs):
        got = form.eager(salt)
        for name in floats:
            squares[name] += float((got[name].double() - exact[name]).square().mean())
        del got  # as large as parameters and moments
    return exact | {f"eager.{name}": torch.tensor([squares[name] / runs]).double().sqrt() for name in floats}


class _Call:
    """A call without gradients, at the sizes of the bucket and at smaller ones."""

    def __init__(self, opened: Any, module: dict[str, Any], held: dict[str, Any], dtype: torch.dtype) -> None:
        self._run, specs, self._kept = capture.run_of(opened, module)
        self._order = sorted(range(len(specs)), key=lambda at: at in self._kept)
        self._of, self._samples, self._dtype = opened, held, dtype
        self._held = [*opened.model.parameters(), *opened.model.buffers()]
        self._whole = False  # all parameters have to be widened before the run
        half = any(one.dtype.itemsize == 2 for one in (*self._held, *held.values()) if one.is_floating_point())
        # Autocast rounds where no tensor outside of the graph is in half precision.
        self._cast = "bfloat16" if dtype == torch.float32 and not half else None

    def values(self, runs: int) -> dict[str, Any]:
        """Returns values with more digits, and eager's distances."""
        inputs = self._inputs("")
        found = self._wide("", inputs)
        floats = [name for name, value in found.items() if value.is_floating_point()]
        shares: dict[str, list[float]] = {name: [0.0, 0.0] for name in floats}
        for salt in range(1, runs):
            with _in_place_of(self._held, _moved([one.data for one in self._held], salt, self._cast)):
                moved = _moved(inputs, salt, self._cast)
                exact = self._wide("", moved)
                eager = self._eager(moved)
            for name in floats:
                shares[name] = list(map(max, shares[name], _shares(eager[name], exact[name])))
        found |= {f"eager.{name}": torch.tensor(both, dtype=torch.float64) for name, both in shares.items()}
        number = 0
        while f"smaller.{number}.out.0" in self._samples:
            prefix = f"smaller.{number}."
            found |= self._wide(prefix, self._inputs(prefix))
            number += 1
        return found

    def _inputs(self, prefix: str) -> list[Any]:
        given: list[Any] = [None] * len(self._order)
        count = len(self._order) - len(self._kept)
        for index, at in enumerate(self._order):
            kind, number = ("in", index) if index < count else ("state", index - count)
            given[at] = self._samples[f"{prefix}{kind}.{number}"]
        return given

    def _wide(self, prefix: str, inputs: list[Any]) -> dict[str, Any]:
        def once() -> dict[str, Any]:
            # A run may write into what it is given.
            given = [one.to(self._dtype) if one.is_floating_point() else one.clone() for one in inputs]
            return self._named(prefix, *self._run(given))

        def run() -> dict[str, Any]:
            entry.seed()
            with torch.no_grad(), precise(), Widening(self._dtype, tensors=True):
                return without_draws(once)

        if not self._whole:
            try:
                return run()
            except Exception:
                self._whole = True
        wide = [one.data.to(self._dtype) if one.is_floating_point() else one.data for one in self._held]
        with _in_place_of(self._held, wide):
            return run()

    def _eager(self, inputs: list[Any]) -> dict[str, Any]:
        entry.seed()
        with torch.inference_mode():
            return self._named("", *self._run(inputs))

    def _named(self, prefix: str, returned: Any, after: list[Any]) -> dict[str, Any]:
        found = {f"{prefix}out.{index}": value for index, value in enumerate(structure.tensors_of(returned))}
        if not prefix:
            found |= {f"after.{index}": after[at] for index, at in enumerate(self._kept)}
        return found


def _shares(one: Any, exact: Any) -> tuple[float, float]:
    """Returns how far a value is from another, as shares of the other's norm and of its largest element."""
    if not exact.numel():
        return 0.0, 0.0
    exact, difference = exact.double(), one.double() - exact.double()
    norm, largest = float(exact.norm()), float(exact.abs().max())
    least = torch.finfo(torch.float64).tiny
    return float(difference.norm()) / max(norm, least), float(difference.abs().max()) / max(largest, least)


class _Step:
    """A part of a training step: its states are inputs."""

    def __init__(self, opened: Any, module: dict[str, Any], held: dict[str, Any]) -> None:
        self.part, self.cast = training.Training(opened, module), module["train"].get("autocast")
        self.double = training.Training(opened, {**module, "train": {**module["train"], "autocast": None}})
        count = len(self.part.specs) - len(self.part.states)

        def called(prefix: str) -> list[Any]:
            return [held[f"{prefix}in.{at}"] for at in range(count)]

        self.sample = [*called(""), *(held[f"state.{at}"] for at in range(len(self.part.states)))]
        self.first = states.first(self.sample, self.part.states, opened)[count:]
        self.calls: list[list[Any]] = []
        while f"sequence.{len(self.calls)}.out.0" in held:
            self.calls.append(called(f"sequence.{len(self.calls)}."))

    def exact(self) -> dict[str, Any]:
        """Returns the values in float64."""
        named = [*self.part.target.named_parameters(), *self.part.target.named_buffers()]
        # States take the place of the others.
        kept = [one for name, one in named if name not in self.part.params and name not in self.part.buffers]
        with _double(kept):
            return _answers(self.double, _wide(self.sample), map(_wide, self.calls), lambda: _wide(self.first))

    def eager(self, salt: int) -> dict[str, Any]:
        """Returns eager's values."""
        calls = (self._moved(each, salt) for each in self.calls)
        return _answers(self.part, self._moved(self.sample, salt), calls, lambda: self._moved(self.first, salt))

    def _moved(self, values: Sequence[Any], salt: int) -> list[Any]:
        return _moved(values, salt, self.cast)


class _Pair:
    """A program of a pair. Its parameters are the module's; only the graph has the values that it saves."""

    def __init__(self, traced: capture.Traced, opened: Any, held: dict[str, Any]) -> None:
        self.pair, self.half, self.run = traced.pair
        self.inputs = [held[f"in.{at}"] for at in range(len(self.half.inputs))]
        self.given, self.cast = self.pair.given, self.pair.pair["autocast"]
        self.held = [*opened.model.parameters(), *opened.model.buffers()]

    def exact(self) -> dict[str, Any]:
        """Returns the values in float64."""
        with _double(self.held):
            return self._answers(_wide(self.inputs), _wide(self.given), None)

    def eager(self, salt: int) -> dict[str, Any]:
        """Returns eager's values."""
        cast = self.cast
        with _in_place_of(self.held, _moved([one.data for one in self.held], salt, cast)):
            return self._answers(_moved(self.inputs, salt, cast), _moved(self.given, salt, cast), cast)

    def _answers(self, inputs: list[Any], given: list[Any], cast: str | None) -> dict[str, Any]:
        self.pair.given, self.pair.pair = given, {**self.pair.pair, "autocast": cast}
        values = self.run(self.half, inputs).values()
        return {f"out.{index}": value for index, value in enumerate(values)}


def _answers(
    part: training.Training, sample: list[Any], calls: Iterable[Sequence[Any]], first: Callable[[], Sequence[Any]]
) -> dict[str, Any]:
    """Returns the results of the sample and its states after the call, and the results of the calls of a session.

    The states of the sample, and those that `first` makes for the session, are as large as parameters and moments: the
    sample is emptied before the session begins.
    """
    found: dict[str, Any] = {}
    count = len(part.specs) - len(part.states)

    def keep(kind: str, values: Iterable[Any]) -> None:
        found.update({f"{kind}.{index}": value for index, value in enumerate(values)})

    returned, after = part.run(sample)
    sample.clear()
    keep("out", returned.values())
    keep("after", after[count:])
    del after
    states: Sequence[Any] | None = None
    for number, inputs in enumerate(calls):
        returned, after = part.run([*inputs, *(first() if states is None else states)])
        keep(f"sequence.{number}.out", returned.values())
        states = after[count:]
    return found


def _wide(values: Sequence[Any]) -> list[Any]:
    return [one.double() if one.is_floating_point() else one for one in values]


def _moved(values: Sequence[Any], salt: int, autocast: str | None) -> list[Any]:
    """Returns floats that are moved up or down, by as much as rounding moves them; for salt 0 as they are."""
    generator = torch.Generator().manual_seed(samples.seed("moved", salt))
    # Most casts to few digits would be the same after a move by a float's last digit.
    least = torch.finfo(getattr(torch, autocast)).eps / 4 if autocast else 0.0

    def one(value: Any) -> Any:
        if salt == 0 or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        by = max(torch.finfo(value.dtype).eps, least)
        return (value * (1 + signs.to(value) * by)).to(value.dtype)

    return [one(value) for value in values]


@contextmanager
def _double(held: Sequence[Any]) -> Iterator[None]:
    """Puts these tensors of a model into double, and what its code makes meanwhile."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with _in_place_of(held, _wide([one.data for one in held])), Widening():
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _in_place_of(held: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Gives tensors of a model other values, also of another dtype."""
    before = [one.data for one in held]

    def put(values: Sequence[Any]) -> None:
        with torch.inference_mode(False):
            for one, value in zip(held, values, strict=True):
                one.data = value

    try:
        put(values)
        yield
    finally:
        put(before)
