"""`maybe_compile`: a module that answers from compiled artifacts, and from the original module in every other case.

The wrapper has the original's attributes, parameters and `state_dict` keys, without a prefix. Each call is answered by
an artifact if all of this holds, and else by the original, with a counter and a reason in the log:

| counter | the original answers because |
|---|---|
| `disabled` | `enabled` is false, `backend` is `"eager"`, or the lists leave all submodules out |
| `not compiled` | capture, build, load or the smoke test failed |
| `compiling` | another thread compiles |
| `training` | a submodule is in training mode; with `kind = "autograd"`: nothing requires a gradient |
| `gradients` | gradients are recorded, and an input or a parameter requires them; with `kind = "autograd"`: none are \
recorded, and no pair is there yet |
| `release` | with `release`: a call without training, which a release of pairs has no program for |
| `slower` | in training: a step of the pair takes longer than eager's, and `prefer` is `"fastest"` |
| `states` | there are pairs for eight other states already: modes, gradients, autocast |
| `hooks` | a submodule inside a region has forward hooks, in training also backward hooks; or there are global ones; \
or the wrapped module itself has some, and is one region |
| `attributes` | an attribute of a submodule, or the tree of submodules, is not as it was when the module was compiled |
| `parameters` | a parameter has another dtype, shape or device, or is a shard |
| `inputs` | other inputs, dtypes, devices or constants than those of the sample batch |
| `cache` | the call has or returns a key-value cache: `precast init` writes a spec with sessions |
| `shape` | no bucket covers the sizes; in training: has them exactly |
| `autocast`, `mode`, `tracing` | a mode of torch changes the computation, or records it; \
under autocast `kind = "autograd"` has programs |
| `failed` | the artifact failed |
| `closed` | `close` was called |

Parameters and buffers stay the module's own: artifacts read them by pointer, so that changes in place, as by
`load_state_dict`, an optimizer or a merge, are seen. A tensor at another address is bound again at the next call.

Hooks of a submodule that is a region run around the artifact (`hooks`). So do those of FSDP2 (`sharding`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..compare import batches
from ..compare.bypass import bypassed
from ..compare.undisturbed import inference, restored_buffers, restored_generators, unpacked
from ..config import CompileConfig
from ..torch_private import hooks, modes, sharding, tracing
from ..torch_private import modules as of_torch
from . import regions
from .logs import Log
from .refusal import Refusal
from .region import Region, rungs
from .subject import Arguments, positional
from .training import TrainingRegion
from .uses import padding


def maybe_compile(
    model: nn.Module,
    config: CompileConfig | None = None,
    logger: Any = None,
    sample_batch: Any = None,
) -> Any:
    """Returns the module as an object that answers from artifacts, and from the original in every other case.

    It has the attributes, the parameters and the hooks of `model`, and a class that derives from the model's, with its
    name and its signature.

    `sample_batch` has the inputs of one call: a mapping of names, a tuple of positions, or a single tensor. Without it
    the first call compiles, as with `torch.compile`. With `config.name` a second process finds the release of the
    first by the digest of its sources, settings and shapes, and captures nothing. With `config.release` it takes the
    pairs that `precast build` made of a spec.

    Failures are logged to `logger`, and never raised unless `config.fail_policy` is `"raise"`. Errors of the original
    itself are raised as ever.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` is {type(model).__name__}, not a `torch.nn.Module`")
    model = original(model)
    sample = None if sample_batch is None else batches.arguments(sample_batch)
    return compiled(model, Compilation(model, config or CompileConfig(), Log(logger), sample))


class Compilation:
    """The regions of a module, and the call that goes through them."""

    def __init__(
        self,
        module: nn.Module,
        config: CompileConfig,
        log: Log,
        sample: Arguments | None = None,
        *,
        now: bool = True,
    ) -> None:
        self.module, self.config, self.log = module, config, log
        self.sample, self.own = sample, hooks.own_forward(module)
        self._inside = threading.local()
        self._opening = threading.Lock()
        # Whether gradients are recorded, and whether the module trains, in calls that regions were opened for.
        self._opened: set[tuple[bool, bool]] = set()
        self.regions: dict[str, Region] = {}
        failure: Exception | None = None
        chosen = {"": config}
        if not config.enabled or config.backend == "eager":
            log.attempt("", config, 0.0, None)
        else:
            try:
                chosen = regions.chosen(module, config)
            except Exception as error:
                failure = error
            if not chosen:
                chosen = {"": replace(config, enabled=False)}
                log.note("no submodule is compiled: the allowlist names none, or all are left out")
        for name, settings in chosen.items():
            each = module.get_submodule(name)
            kind = TrainingRegion if settings.kind == "autograd" and settings.backend == "precast" else Region
            self.regions[name] = kind(name, each, settings, log, config.name or type(module).__name__)
            if name:
                of_torch.enter(each, self._entry(self.regions[name]))
        whole = self.regions.get("")
        # The sample of a copy, until its first call.
        self._later = None if now or failure is not None or whole is None else sample
        if failure is not None:
            self.regions[""].refuse(failure)
        elif sample is not None and now and whole is not None:
            whole.prepare(*sample)
        elif sample is not None and now and (detail := sharding.shard(module.named_parameters())) is not None:
            # A call without a backward call would leave whole parameters in the module.
            log.note(f"each region compiles at its first call: {detail}")
        elif sample is not None and now:
            training = config.kind == "autograd" and module.training
            self._opened.add((training, training))
            try:
                with torch.set_grad_enabled(training):
                    observed = self._observed(sample, training)
            except Exception as error:
                for region in self.regions.values():
                    region.refuse(error)
            else:
                self._open(observed)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer to one call."""
        if torch.compiler.is_compiling() or bypassed():
            return self.original(*args, **kwargs)
        if self._later is not None and (self.config.kind == "autograd" or not self.module.training):
            sample, self._later = self._later, None
            self.regions[""].prepare(*sample)
        whole = self.regions.get("")
        if whole is not None:
            return whole.call(args, kwargs, self.original)
        if (torch.is_grad_enabled(), self.module.training) not in self._opened:
            self._open_at_first_call(args, kwargs)
        outer = getattr(self._inside, "active", False)
        self._inside.active = True
        try:
            return self.original(*args, **kwargs)
        finally:
            self._inside.active = outer

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the answer of the module's own `forward`; hooks run around it."""
        return tracing.forward(self.module, self.own, args, kwargs)

    def check(self) -> None:
        """Waits for the calls of all regions. Raises the error of a value on the device that was out of bounds."""
        for region in self.regions.values():
            region.check()

    def close(self) -> None:
        """Lets all compiled code go."""
        for name, region in self.regions.items():
            region.close()
            if name:
                of_torch.enter(region.module, None)

    def copied(self, module: nn.Module) -> Compilation:
        """Returns the same for a copy of the module; it finds its release at its first call."""
        return Compilation(module, self.config, self.log, self.sample, now=False)

    def report(self) -> dict[str, Any]:
        """Returns the counters of all regions, and of each."""
        each = {name: region.report() for name, region in self.regions.items()}
        reasons: Counter[str] = Counter()
        for counts in each.values():
            reasons.update(counts["reasons"])
        artifact, eager = (sum(counts[key] for counts in each.values()) for key in ("artifact", "eager"))
        rows = sum((region.rows() for region in self.regions.values()), Counter())
        return {
            "name": self.config.name,
            "backend": self.config.backend,
            "artifact": artifact,
            "eager": eager,
            "original": sum(reasons.values()),
            "reasons": dict(reasons),
            "rungs": rungs(artifact, eager, reasons),
            "padding": padding(rows),
            "regions": each,
        }

    def _entry(self, region: Region) -> Callable[..., Any]:
        """Returns the call of a submodule: compiled inside a call of the wrapper, else the submodule's own."""
        module, inside = region.module, self._inside
        itself = of_torch.call(module)
        within = hooks.StandIn(module, lambda args, kwargs: region.call(args, kwargs, region.original))

        def call(*args: Any, **kwargs: Any) -> Any:
            if not getattr(inside, "active", False) or torch.compiler.is_compiling():
                return itself(*args, **kwargs)
            if self._opening.locked():
                return region.passed(Refusal("compiling", "another thread compiles it"), args, kwargs)
            if any(hooks.tables(module)):
                return within.call(args, kwargs)
            return region.call(args, kwargs, itself)

        return call

    def _open_at_first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Opens all regions before the first call with or without gradients, in training or in eval mode."""
        key, autograd = (torch.is_grad_enabled(), self.module.training), self.config.kind == "autograd"
        if modes.unusable() is not None or not self._opening.acquire(blocking=False):
            return
        try:
            if key in self._opened:
                return
            self._opened.add(key)
            inside = (each for each in self.module.modules() if each is not self.module)
            if any(map(hooks.any_of, inside)) or not (self.sample or batches.plain((args, kwargs))):
                return
            tensors = itertools.chain(self.module.parameters(), batches.tensors((args, kwargs)))
            training = key[0] and any(each.requires_grad for each in tensors)
            autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
            if autograd if training else not (key[1] or autocast):
                try:
                    observed = self._observed(self.sample or (args, kwargs), training)
                except Exception:  # each region opens at its own first call, if the call gets there
                    return
                self._open(observed)
        finally:
            self._opening.release()

    def _open(self, observed: Mapping[Region, Sequence[Arguments]]) -> None:
        """Compiles the regions for the inputs that they get in calls of the whole module."""
        for region, calls in observed.items():
            region.sized(*regions.dimensions(calls, region.names))
        asked = {
            region: calls[0]
            for region, calls in observed.items()
            if region.config.backend == "precast"
            and region.config.release is None
            and region.waits
            and region.delayed() is None
        }
        if asked:
            from . import requests

            model = self.config.name or type(self.module).__name__
            try:
                for region, release in requests.obtain(model, asked, self.log).items():
                    region.release = release
            except Exception as error:
                for region in asked:
                    region.release = error
        for region, calls in observed.items():
            region.prepare(*calls[0])

    def _observed(self, sample: Arguments, training: bool) -> dict[Region, list[Arguments]]:
        """Returns the inputs of each region in calls of the module: with the sample, and for each bucket.

        In training a region is the pair for its first call.
        """
        seen: dict[Region, list[Arguments]] = {}
        first: dict[str, Region] = {}
        handles, thread = [], threading.get_ident()
        for name, region in self.regions.items():

            def note(_: nn.Module, args: Any, kwargs: Any, region: Region = region, name: str = name) -> None:
                if threading.get_ident() != thread:
                    return
                one = region.at(args, kwargs, training)
                if one is not None and first.setdefault(name, one) is one:
                    seen.setdefault(one, []).append(batches.copied((args, kwargs)))

            handles.append(region.module.register_forward_pre_hook(note, with_kwargs=True))
        modes = torch.enable_grad() if training else inference(self.module)
        try:
            with unpacked(), modes, restored_generators(), restored_buffers(self.module):
                for batch in [sample, *self._at_buckets(sample)]:
                    args, kwargs = batches.mapped(batch, batches.once(_leaf))
                    self.module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def _at_buckets(self, sample: Arguments) -> Iterator[Arguments]:
        names = positional(self.module)
        for point in self.config.points():
            yield regions.resized(sample, self.config.shapes, names, point)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class CompiledModule:
    """The class that a wrapped module has beside its own."""

    _precast: Compilation

    def precast_report(self) -> dict[str, Any]:
        """Returns how many calls each rung answered, the reasons, and the padding: in all and for each region."""
        return type(self)._precast.report()

    def precast_check(self) -> None:
        """Waits for all calls, and raises the error of a value on a GPU that was out of bounds in one of them."""
        type(self)._precast.check()

    def precast_close(self) -> None:
        """Lets the artifacts go; the original answers from now on."""
        type(self)._precast.close()

    @property
    def _orig_mod(self) -> nn.Module:
        return type(self)._precast.module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = copy.deepcopy(self._orig_mod, memo)
        return compiled(module, type(self)._precast.copied(module))

    def __copy__(self) -> Any:
        module = copy.copy(self._orig_mod)
        return compiled(module, type(self)._precast.copied(module))

    def __reduce_ex__(self, _: Any) -> Any:
        type(self)._precast.log.note("pickled as the original module: a wrapper holds loaded code")
        return _itself, (self._orig_mod,)


def compiled(module: nn.Module, compilation: Compilation) -> Any:
    """Returns an object with the attributes of a module, whose class derives from the module's.

    Its `forward` calls `compilation`. One that was set on the module itself is replaced there, for both objects.
    """
    own = type(module)

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compilation.call(args, kwargs)

    if compilation.own is not None:
        module.__dict__["forward"] = functools.wraps(compilation.own)(lambda *a, **k: compilation.call(a, k))
    members = {"forward": forward, "_precast": compilation, "__module__": own.__module__, "__doc__": own.__doc__}
    of: Any = type(own)
    kind = of(own.__name__, (CompiledModule, own), members)
    kind.__qualname__ = own.__qualname__
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", module.__dict__)
    return made


def original(module: Any) -> Any:
    """Returns the module that a wrapper was made of; another module as it is."""
    return of_torch.original(module) if isinstance(module, CompiledModule) else module


def _itself(module: nn.Module) -> nn.Module:
    return module
