"""Pairs: the forward and the backward program of a module that Python trains, `kind = "autograd"` in the spec.

`torch_private/partition.py` makes both and names their inputs and outputs. Eager's side of the comparison is the module
itself, in training mode with autograd: the results, the new values of buffers, and the gradients for random tangents.
Saved values are those of the uncompiled forward program; only the backward program reads them.

Dropout's masks are inputs. Those of the sample are the ones that eager draws after the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.func import functional_call

from .. import failures, tensors
from ..globs import matches
from ..graph import call, flat, structure
from ..model import entry
from ..torch_private import errors, partition
from ..wire import Failure


class Pair:
    """The programs of the model for one bucket, and eager's form of them."""

    def __init__(self, opened: Any, module: dict[str, Any]) -> None:
        self.pair, self.what, self.specs = module["pair"], call.describe(module), module["inputs"]
        self.model, self.device, self.root = opened.model, opened.device, opened.root
        self.names = [spec["name"] for spec in self.specs]
        call.check_inputs(self.model.forward, self.names, self.what)
        self.function = _Function(self.model, call.wrap(self.model, "forward", self.names))
        self.trained = [one for name, one in self.model.named_parameters() if name not in opened.frozen]
        if not self.trained and not self.pair["gradients"]:
            hint = "`requires_grad_(True)` in the entry, or `gradients` under [module.train] for inputs that need some"
            raise Failure("bad_input", f"{self.what} has no parameter that requires a gradient", hint=hint)
        self.given: list[Any] = []
        self.regions = module["regions"] if module.get("compiled", True) else []

    def halves(self, lowest: list[Any]) -> partition.Halves:
        """Captures both programs. `lowest` are inputs before their values are known."""
        self.given = lowest
        self._check_results()

        def region(name: str) -> bool:
            return any(matches(pattern, name) for pattern in self.regions)

        with self._training():
            try:
                return partition.partition(self.function, self.names, self._leaves(), region if self.regions else None)
            except partition.Unsupported as error:
                message = f"{self.what} can't be captured for training: {error}"
                raise Failure("capture", message, hint=error.hint or None) from error
            except Exception as error:
                raise self._failed(error) from error

    def fill(self, halves: partition.Halves, given: list[Any]) -> None:
        """Gives both programs the inputs of a call, with the masks and the results of the uncompiled programs."""
        self.given = given
        entry.seed()
        masks = {name: draw.sample(torch.device(self.device)) for name, draw in halves.masks.items()}
        with torch.inference_mode(False):
            halves.fill(dict(zip(self.names, given, strict=True)), masks)

    def specs_of(self, half: partition.Half) -> list[dict[str, Any]]:
        """Returns the inputs of a program, with the ranges that the spec gives to those of the module."""
        known = {spec["name"]: spec for spec in self.specs}
        return [known.get(name) or _spec(name, value) for name, value in half.inputs.items()]

    def export(self, half: partition.Half) -> Any:
        """Returns the exported program of one half."""
        return flat.export(half.module, list(half.inputs.values()), self.root, self.what)

    def forward(self, half: partition.Half, inputs: Sequence[Any]) -> dict[str, Any]:
        """Returns eager's outputs of the forward program for the sample, and the saved values that belong to them."""
        with torch.inference_mode(False), self._training() as written, torch.no_grad():
            own = [value.clone() for value in inputs]
            results = {f"output.{at}": one.detach() for at, one in enumerate(self._call())}
            results |= {f"buffer.{name}": one.clone() for name, one in written.items()}
        with torch.no_grad():
            saved = dict(zip(half.outputs, half.module(*own), strict=True))
        return {name: results.get(name, saved[name]) for name in half.outputs}

    def backward(self, half: partition.Half, inputs: Sequence[Any]) -> dict[str, Any]:
        """Returns eager's gradients for the tangents among these inputs, in the call of the sample."""
        with torch.inference_mode(False), self._training():
            given = dict(zip(half.inputs, (value.clone() for value in inputs), strict=True))
            leaves = self._leaves()
            named = self.model.named_parameters(remove_duplicate=False)
            # A tied parameter has a gradient under each of its names.
            own = {name: one.detach().requires_grad_(one.requires_grad) for name, one in named}
            entry.seed()
            held = {f"{partition.INNER}.{name}": one for name, one in own.items()}
            results = functional_call(self.function, held, tuple(leaves), tie_weights=False)
            known = {f"grad.input.{name}": leaf for name, leaf in zip(self.names, leaves, strict=True)}
            known |= {f"grad.parameter.{name}": one for name, one in own.items()}
            tangents = {int(name.removeprefix("tangent.")): one for name, one in given.items() if "tangent." in name}
            wanted = [known[name] for name in half.outputs]
            found = torch.autograd.grad([results[at] for at in tangents], wanted, list(tangents.values()))
        return dict(zip(half.outputs, found, strict=True))

    def _leaves(self) -> list[Any]:
        return [
            value.clone().requires_grad_(name in self.pair["gradients"])
            for name, value in zip(self.names, self.given, strict=True)
        ]

    def _call(self) -> tuple[Any, ...]:
        """Calls the module with the inputs of the sample, after the seed of its masks."""
        entry.seed()
        results: tuple[Any, ...] = self.function(*self._leaves())
        return results

    def _check_results(self) -> None:
        """Refuses a module whose results have no gradient."""
        try:
            with torch.inference_mode(False), self._training(), torch.enable_grad():
                results = self._call()
        except Exception as error:
            raise failures.on_samples(
                self.what, error, self.root, "check the dtypes and shapes of its inputs"
            ) from error
        if not any(one.requires_grad for one in results):
            message = f"no result of {self.what} depends on a parameter by operations that have a gradient"
            hint = "`detach`, `no_grad` and integer operations end a gradient; return a result of floating point"
            raise Failure("bad_input", message, hint=hint)

    @contextmanager
    def _training(self) -> Iterator[dict[str, Any]]:
        """Puts the model into training mode, with gradients and autocast; restores modes and buffers.

        Yields the buffers, under their names.
        """
        cast = self.pair["autocast"]
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            before = {name: buffer.clone() for name, buffer in buffers.items()}
        self.model.train()
        for one in self.trained:
            one.requires_grad_(True)
        try:
            with torch.enable_grad(), torch.autocast(self.device, getattr(torch, cast)) if cast else nullcontext():
                yield buffers
        finally:
            self.model.eval().requires_grad_(False)
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])

    def _failed(self, error: Exception) -> Failure:
        if errors.depends_on_data(error):
            message, hint = f"{self.what} can't be captured for training: it reads a value of a tensor", failures.BRANCH
        else:
            message, hint = f"{self.what} can't be captured for training: {failures.named(error)}", None
        return Failure("capture", message, location=failures.location(error, self.root), hint=hint)


class _Function(torch.nn.Module):
    """Calls the model with tensors in order; returns the tensors of its result in order."""

    def __init__(self, model: Any, called: Any) -> None:
        super().__init__()
        self.add_module(partition.INNER, model)
        # In a tuple: the model is a submodule once.
        self._called = (called,)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        model = getattr(self, partition.INNER)
        places = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
        before = [getattr(*place) for place in places]
        returned = self._called[0](*inputs)
        for place, buffer in zip(places, before, strict=True):
            # A tensor that replaces a buffer is its new value.
            if getattr(*place) is not buffer:
                buffer.copy_(getattr(*place))
                setattr(*place, buffer)
        return tuple(structure.tensors_of(returned))


def _spec(name: str, value: Any) -> dict[str, Any]:
    pad = False if value.dtype == torch.bool else 0
    return {"name": name, **tensors.layout(value.contiguous()), "dims": [None] * value.dim(), "pad": pad}
