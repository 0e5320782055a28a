"""A region of a module that trains: programs for inference, and autograd pairs.

A pair holds for one state of a module: the modes of its submodules, the parameters and inputs that require gradients,
and autocast. The first call in another state compiles another pair, or loads it.
"""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .._native import Watch
from ..compare import batches, gradients
from ..compare.result import SmokeResult
from ..compare.rounding import Kept
from ..config import CompileConfig
from ..record import facts
from ..torch_private import hooks
from ..torch_private import modules as of_torch
from . import released
from .artifacts import Release
from .autograd import PairEngine
from .guard import autocast_of
from .logs import Log
from .refusal import Refusal
from .region import SLOWER, Region, rungs
from .subject import Arguments, State
from .uses import Row, padding

_mode = attrgetter("training")
_requires_grad = attrgetter("requires_grad")
_values = dict.values
STATES = 8
"""States of a module that have a pair."""


class TrainingRegion(Region):
    """A region with programs for inference and with pairs for training."""

    def __init__(self, name: str, module: nn.Module, config: CompileConfig, log: Log, model: str) -> None:
        super().__init__(name, module, config, log, model)
        self._trained = self._refusal is None
        if config.release is not None and self._refusal is None:
            self._refusal = Refusal("release", "the release has programs for training alone")
        self._pairs: dict[State, PairRegion] = {}
        self._casted: dict[str, Region] = {}
        self._adding = threading.Lock()
        self._list()
        self.device = next((tensor.device.type for tensor in chain(module.parameters(), module.buffers())), "cpu")

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], original: Callable[..., Any]) -> Any:
        """Returns the answer of a pair, of the program for inference, or of `original`."""
        if self._trained and self.trains(args, kwargs):
            pair = self.pair(args, kwargs)
            if isinstance(pair, Refusal):
                self._fall_back(pair, None)
                return original(*args, **kwargs)
            return pair.call(args, kwargs, original)
        if self._trained and self.config.release is None and (autocast := autocast_of(self.device)) is not None:
            with self._adding:
                region = self._casted.setdefault(autocast, CastRegion(self, autocast))
            return region.call(args, kwargs, original)
        return super().call(args, kwargs, original)

    def at(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Region | None:
        """Returns the pair for a call in training, if there may be one; else the region."""
        if not training:
            return self
        pair = self.pair(args, kwargs) if self._trained and self.trains(args, kwargs) else None
        return pair if isinstance(pair, PairRegion) else None

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compiles the pair of the module's present state in training mode, and the program for inference in eval mode.

        A submodule in training mode waits for its first call: it says which inputs require gradients.
        """
        if not self.module.training:
            super().prepare(args, kwargs)
        elif not self.name and self._trained:
            with torch.enable_grad():
                pair = self.pair(args, kwargs)
            if isinstance(pair, PairRegion):
                pair.prepare(args, kwargs)

    def refuse(self, error: BaseException) -> None:
        """Leaves the region to the module itself, after a failure. Raises it with `fail_policy = "raise"`."""
        self._trained = False
        super().refuse(error)

    @property
    def waits(self) -> bool:
        """Whether its program for inference can be compiled now."""
        return super().waits and not self.module.training

    def report(self) -> dict[str, Any]:
        """Returns counters of all programs, and the attempts to compile pairs."""
        own = super().report()
        others = [one.report() for one in self._others]
        reasons = Counter(own["reasons"])
        for one in others:
            reasons.update(one["reasons"])
        artifact, eager = (sum(one[key] for one in [own, *others]) for key in ("artifact", "eager"))
        attempts = [made for pair in self._pairs.values() if (made := pair.attempted) is not None]
        built = sum(bool(attempt.get("built")) for attempt in attempts)
        return {
            **own,
            "answers": min((one["answers"] for one in [own, *others]), key=("artifact", SLOWER, "original").index),
            "artifact": artifact,
            "eager": eager,
            "original": sum(reasons.values()),
            "reasons": dict(reasons),
            "rungs": rungs(artifact, eager, reasons),
            "padding": padding(self.rows()),
            "rebinds": own["rebinds"] + sum(one["rebinds"] for one in others),
            "attempt": own["attempt"] or next(iter(attempts), None),
            "pairs": attempts,
            "recompiles": max(built - 1, 0),
        }

    def rows(self) -> Counter[Row]:
        """Returns the calls by all programs, for each kind of request."""
        return sum((one.rows() for one in self._others), super().rows())

    @property
    def _others(self) -> list[Region]:
        return [*self._pairs.values(), *self._casted.values()]

    def check(self) -> None:
        """Waits for the calls by all programs, and raises the error of a value that was out of bounds."""
        super().check()
        for one in self._others:
            one.check()

    def close(self) -> None:
        """Lets the compiled code go; the module itself answers from now on."""
        super().close()
        self._trained = False
        for one in self._others:
            one.close()

    def trains(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.module.training:
            return True
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in chain(self._parameters(), batches.tensors((args, kwargs)))
        )

    def _list(self) -> None:
        """Takes the tree of submodules. Another library may put others into it, as adapters."""
        self._modules = list(self.module.modules())
        self._tables = [of_torch.parameters(each) for each in self._modules]
        inside = [of_torch.submodules(each) for each in self._modules]
        read: list[tuple[str, Any, Any, Any]] = [("length", table, None, len(table)) for table in inside]
        read += [("item", table, name, one) for table in inside for name, one in table.items()]
        self._tree = Watch(read, facts.MISSING)

    def _parameters(self) -> list[Tensor]:
        if self._tree.changed() >= 0:
            self._list()
        own = chain.from_iterable(map(_values, self._tables))
        return [tensor for tensor in own if tensor is not None]

    def pair(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PairRegion | Refusal:
        """Returns the pair for a call, or the reason for which there is none."""
        inputs = tuple(tensor.requires_grad for tensor in batches.tensors((args, kwargs)))
        autocast = autocast_of(self.device)
        parameters = tuple(map(_requires_grad, self._parameters()))
        state = State(tuple(map(_mode, self._modules)), parameters, inputs, autocast)
        found = self._pairs.get(state)
        if found is not None:
            return found
        if not torch.is_grad_enabled():
            same = (pair for own, pair in self._pairs.items() if own._replace(inputs=inputs) == state)
            none = "no gradients are recorded, and the first call with gradients compiles the pair"
            return next(same, None) or Refusal("gradients", none)
        if not any(state.parameters) and not any(inputs):
            return Refusal("training", "no parameter and no input requires a gradient")
        with self._adding:
            if len(self._pairs) >= STATES and state not in self._pairs:
                return Refusal("states", f"{STATES} pairs are compiled, for other modes, gradients and autocast")
            return self._pairs.setdefault(state, PairRegion(self, state))


class CastRegion(Region):
    """The programs of a module for inference under autocast, as in the validation of a mixed-precision training."""

    def __init__(self, owner: TrainingRegion, autocast: str) -> None:
        super().__init__(owner.name, owner.module, owner.config, owner.log, owner.model)
        self.own, self.autocast, self.device = owner.own, autocast, owner.device
        self.shapes, self.points = owner.shapes, owner.points

    @contextmanager
    def state_of_programs(self) -> Iterator[None]:
        """Runs a block in the modes that the programs are captured in."""
        with super().state_of_programs(), torch.autocast(self.device, dtype=_dtype(self.autocast)):
            yield


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name.removeprefix("torch.")) if name else None


class PairRegion(Region):
    """The pair of a module for one state."""

    kind = "autograd"
    state: State
    captured: State

    def __init__(self, owner: TrainingRegion, state: State) -> None:
        super().__init__(owner.name, owner.module, owner.config, owner.log, owner.model)
        self.owner, self.state, self.captured = owner, state, state
        self._times = 1.0
        self.own = owner.own  # another library may have set a `forward` since, which calls this one
        self.shapes, self.points = owner.shapes, owner.points

    def sized(self, shapes: dict[str, Any], points: list[dict[str, int]]) -> None:
        """Takes the dimensions of the inputs, and the buckets, of all pairs of the module."""
        super().sized(shapes, points)
        self.owner.sized(shapes, points)

    def delayed(self) -> Refusal | None:
        """Returns the reason for which the pair can't be compiled now, if there is one."""
        if (name := hooks.backward(self.module)) is not None:
            return Refusal("hooks", f"submodule `{name}` has backward hooks")
        return super().delayed()

    def unbind(self) -> None:
        """Lets the next call bind the module's tensors again."""
        if self._guard is not None:
            self._guard.forget()

    def made(self, release: Release, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the engine of a release."""
        if self.config.release is not None:
            return released.ReleasedPairs(self, release, args, kwargs)
        return PairEngine(self, release, args, kwargs)

    def obtained(self, args: tuple[Any, ...], kwargs: dict[str, Any], failed: dict[str, str]) -> Release | Exception:
        """Returns the named release, or the one for this call."""
        if self.config.release is None:
            return super().obtained(args, kwargs, failed)
        return released.of(self, args, kwargs)

    @contextmanager
    def state_of_programs(self) -> Iterator[None]:
        dtype, device = _dtype(self.state.autocast), self.owner.device
        with torch.inference_mode(False), torch.enable_grad():
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                yield

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        grads = iter(self.captured.inputs)

        detached = batches.once(Tensor.detach)

        def leaf(path: str, tensor: Tensor) -> Tensor:
            return detached(path, tensor).requires_grad_(next(grads))

        return batches.mapped((args, kwargs), leaf)  # type: ignore[no-any-return]

    def _at_bucket(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if self.config.release is None:
            return args, kwargs
        return engine.at_bucket(args, kwargs)  # type: ignore[no-any-return]

    def _compared(
        self, engine: Any, eager: Any, args: tuple[Any, ...], kwargs: dict[str, Any], built: bool
    ) -> SmokeResult:
        # The process that built a release compared all steps.
        config = self.config if built else replace(self.config, smoketest_steps=1)
        device = torch.cuda.get_device_name() if self.owner.device == "cuda" else platform.machine()
        sizes = [list(one.shape) for one in batches.tensors((args, kwargs))]
        key = [engine.notes["release"], self.name, self.state, sizes, device, torch.get_float32_matmul_precision()]

        def compiled(*args: Any, **kwargs: Any) -> Any:
            return engine.answer(args, kwargs)

        kept = Kept(config.store, repr(key))
        result = gradients.compare(self.module, compiled, eager, args, kwargs, config, self.state.autocast, kept)
        if result.ok and config.prefer == "fastest":
            self._times = gradients.slower(self.module, compiled, eager, args, kwargs, kept)
        return result

    def _opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        engine, notes = super()._opened(args, kwargs)
        if self._times > 1:
            detail = f'a step of the pair takes {self._times:.2f} times eager\'s; `prefer = "artifact"` uses it'
            self._refusal = Refusal("slower", detail)
            engine.close()
        return engine, notes
