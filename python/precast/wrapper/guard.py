"""The decision of a call: whether what the artifacts depend on is as it was when they were captured.

| what | how it is checked |
|---|---|
| modes of torch: autocast, tracing, function and dispatch modes, determinism, precision | by their values |
| gradients | none are recorded, or nothing requires them; with `kind = "autograd"` they are the caller's |
| all that the traced call read: attributes, classes, functions, globals, hooks | by the native list (`record.watch`) |
| the tensors that the programs read | by their memory, sizes and strides; one that moved is bound again |

Where a read has changed, the facts of the record are evaluated again: an equal value is no change. Where one does not
hold, the original answers until that place changes again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._native import Watch
from ..compare import batches
from ..record import facts, watch
from ..record.record import Difference, Live
from ..torch_private import hooks, modes
from . import caches
from .refusal import Refusal, Refused

if TYPE_CHECKING:
    from .artifacts import ArtifactEngine
    from .subject import Subject


_TRAINING = Refusal(
    "training", 'the module is in training mode; artifacts answer in eval mode, and with `kind = "autograd"` in both'
)
_GRADIENTS = Refusal(
    "gradients",
    "gradients are recorded, and artifacts have none: call it under `torch.no_grad()` or `torch.inference_mode()`, "
    'switch gradients off with `requires_grad_(False)`, or set `kind = "autograd"`',
)


def before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, autocast: str | None = None
) -> Refusal | None:
    """Returns the reason for which a call can't be the first one of artifacts."""
    if kind == "inference" and module.training:
        return _TRAINING
    if (mode := modes.unusable()) is not None:
        return Refusal(*mode)
    if caches.given(args, kwargs):
        return caches.GIVEN
    if kind != "inference":
        return None
    device = next((tensor.device.type for tensor in [*module.parameters(), *module.buffers()]), "cpu")
    return _of_call([*module.parameters()], device, args, kwargs, autocast)


def autocast_of(device: str) -> str | None:
    """Returns the dtype of autocast, if it is on."""
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _of_call(
    tensors: list[torch.Tensor], device: str, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: str | None
) -> Refusal | None:
    """Returns the reason for which a call without gradients is none for artifacts."""
    if (now := autocast_of(device)) != autocast:
        return Refusal("autocast", f"autocast is {now or 'off'} for {device}, and was {autocast or 'off'} in the build")
    if torch.is_grad_enabled() and (
        any(tensor.requires_grad for tensor in tensors)
        or any(tensor.requires_grad for tensor in batches.tensors((args, kwargs)))
    ):
        return _GRADIENTS
    return None


class Guard:
    """What the artifacts of a region depend on, as it is when they are bound."""

    def __init__(self, region: Subject, engine: ArtifactEngine) -> None:
        self._region, self._engine = region, engine
        self._record = engine.contract.record
        self._inference = engine.kind == "inference"
        self._modes = modes.of_process()
        self._changing = threading.Lock()
        self._refused: Refusal | None = None
        self._unbound: Refusal | None = None
        self.rebound = 0
        self._take(self._live())

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        """Returns the reason for which a call can't be answered by an artifact, if there is one."""
        if (mode := modes.unusable()) is not None:
            return Refusal(*mode)
        if any(hooks.GLOBAL_FORWARD if self._inference else hooks.GLOBAL):
            return Refusal("hooks", "there are global hooks of modules, which run for each submodule")
        if not self._inference and hooks.has_old(self._region.module):
            return Refusal("hooks", "the module has backward hooks that are not full: they get those of one operation")
        if self._modes != (now := modes.of_process()):
            return Refusal("mode", f"the modes of torch are {_shown(now)}, and were {_shown(self._modes)} in the build")
        if self._inference and (refusal := self._of_call(args, kwargs)) is not None:
            return _TRAINING if self._region.module.training else refusal
        if self._watch.changed() >= 0:
            with self._changing:
                self._compare()
        return self._refused or self._unbound

    def _of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        return _of_call(self._tensors, self._device, args, kwargs, self._region.autocast)

    def forget(self) -> None:
        """Has the tensors bound again before the next call."""
        with self._changing:
            self._watch = Watch([("equal", [], None, [None])], facts.MISSING)

    def _live(self) -> Live:
        return self._record.live(self._region.roots(*self._engine.sample))

    def _take(self, live: Live) -> None:
        """Takes the reads of a record that holds."""
        self._reads = watch.reads(self._record, live)
        self._watch = Watch(self._reads, facts.MISSING)
        self._tensors = [live.value(node) for node in self._record.weights.values()]
        self._device = next((one.device.type for one in self._tensors), "cpu")
        self._refused = None

    def _compare(self) -> None:
        """Evaluates what has changed: by moved tensors alone, or by all facts."""
        if self._refused is None and self._only_moved():
            self._bind()
            return
        live = self._live()
        difference = self._record.differs(live, of_inputs=False)
        if difference is None:
            self._take(live)
            self._bind()
            return
        self._refused = _refusal(difference)
        # Until that place changes, each call has the same answer.
        self._watch = Watch(watch.reads_of(self._record, live, difference), facts.MISSING)

    def _only_moved(self) -> bool:
        """Takes tensors that have other memory, and nothing else; returns whether that is all that has changed."""
        at = self._watch.changed()
        while at >= 0:
            kind, held, _, layout = self._reads[at]
            if kind != "tensor" or facts.tensor(held) != layout:
                return False
            self._watch.retake(at)
            at = self._watch.changed(at + 1)
        return True

    def _bind(self) -> None:
        try:
            self._engine.bind()
        except Refused as refused:
            self._unbound = refused.refusal
        except Exception as failed:
            self._unbound = Refusal("parameters", f"{type(failed).__name__}: {failed}")
        else:
            self._unbound = None
            self.rebound += 1


def _refusal(difference: Difference) -> Refusal:
    place = difference.place
    if place.endswith("training"):
        where = place.removesuffix("training").rstrip(".")
        named = f"submodule `{where}`" if where else "the module"
        return Refusal("training", f"{named} is in another mode, of training or evaluation, than in the build")
    if "_hooks" in place:
        return Refusal("hooks", f"hooks were added or removed since the build: {difference}")
    code = "parameters" if difference.of_tensor else "attributes"
    return Refusal(code, str(difference))


def _shown(modes: tuple[Any, ...]) -> str:
    return ", ".join(str(one) for one in modes)
