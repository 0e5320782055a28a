"""A region: a module, the compiled code of it, and the decision which of the two answers a call."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from . import batches, hooks, sharding
from .config import CompileConfig
from .engine import CompileFailed, Engine, Passed, Refused, TorchEngine
from .guard import Guard, Refusal, Tensors
from .logs import Log
from .regions import resized
from .smoke import CompileSmoketest, SmokeResult, inference, restored_buffers, restored_generators

FAILURES = 3
"""Calls that fail one after the other, after which the compiled code is no longer asked."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""
Opener = Callable[["Region", tuple[Any, ...], dict[str, Any]], Engine]
"""Returns the engine of a region for the inputs of a sample."""


class Shared(NamedTuple):
    """The release that equal regions share."""

    name: str
    digest: str
    part: str
    """The prefix of the names of its modules and tensors."""
    owner: str
    """The region that was captured for it."""
    built: bool
    """Whether this region's capture was built now."""
    seconds: float
    """The time of that."""


class Region:
    """A module that answers by compiled code, or by itself for a named reason."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        config: CompileConfig,
        log: Log,
        *,
        opener: Opener | None = None,
    ) -> None:
        self.name, self.module, self.config, self.log = name, module, config, log
        self.shapes: dict[str, Any] = dict(config.shapes)
        self.points: list[dict[str, int]] = config.points()
        self.names = positional(module)
        self.engine: Engine | None = None
        self.shared: Shared | None = None
        self.attempted: dict[str, Any] | None = None
        self._opener = opener or opened
        self._guard: Guard | None = None
        self._tensors: Tensors | None = None
        self._refusal: Refusal | None = None if config.enabled else Refusal("disabled", "`enabled` is false")
        if config.enabled and config.backend == "eager":
            self._refusal = Refusal("disabled", '`backend` is "eager"')
        self._unbound: Refusal | None = None
        self._failures = 0
        self._opening = threading.Lock()
        self._counting = threading.Lock()
        self._answered, self._rebound = 0, 0
        self._reasons: Counter[str] = Counter()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], original: Callable[..., Any]) -> Any:
        """Returns the answer of the compiled code, or of `original`."""
        error: BaseException | None = None
        try:
            refusal = self._check(args, kwargs)
        except Exception as failed:
            if self.config.fail_policy == "raise":
                raise
            error, refusal = failed, Refusal("failed", f"the check failed: {type(failed).__name__}: {failed}")
        if refusal is None:
            assert self.engine is not None
            try:
                answer = self.engine.answer(args, kwargs)
            except Refused as refused:
                refusal = refused.refusal
            except Passed as passed:
                assert passed.__cause__ is not None
                raise passed.__cause__ from None
            except Exception as failed:
                if self.config.fail_policy == "raise":
                    raise
                error, refusal = failed, Refusal("failed", f"{type(failed).__name__}: {failed}")
                self._failed(failed)
            else:
                with self._counting:
                    self._answered += 1
                self._failures = 0
                return answer
        self._fall_back(refusal, error)
        return original(*args, **kwargs)

    def sized(self, shapes: dict[str, Any], points: list[dict[str, int]]) -> None:
        """Takes the dimensions of the inputs, and the buckets."""
        self.shapes, self.points = shapes, points

    def passed(self, refusal: Refusal, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer of the module itself, for a reason."""
        self._fall_back(refusal, None)
        return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own answer. Hooks of a submodule run around it."""
        return hooks.forward(self.module) if self.name else self.module._call_impl

    def at(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Region | None:
        """Returns the region that has the programs of a call, if there is one."""
        return self

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compiles the region, or finds it compiled, for these inputs, and compares it with eager.

        A module with hooks inside waits for its first call without them, and one with sharded parameters for its first
        call with whole ones. Raises only with `fail_policy = "raise"`.
        """
        with self._opening:
            self._prepare(args, kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._refusal is not None or self.engine is not None:
            return
        if (delayed := self.delayed()) is not None and self.config.backend == "precast":
            self.log.fallback(self.name, delayed)
            return
        began, error = time.perf_counter(), None
        notes: dict[str, Any] = {}
        with restored_generators():
            try:
                self.engine, notes = self._opened(args, kwargs)
            except Exception as failed:
                error = failed
        before = self.shared.seconds if self.shared is not None else 0.0
        self._attempted(before + time.perf_counter() - began, error, **notes)

    def refuse(self, error: BaseException) -> None:
        """Leaves the region to the module itself, after a failure. Raises it with `fail_policy = "raise"`."""
        self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Notes that the programs can't be built. Raises the error with `fail_policy = "raise"`."""
        self._attempted(0.0, error)

    def _attempted(self, seconds: float, error: BaseException | None, **notes: Any) -> None:
        if error is not None:
            self._refusal = Refusal("not compiled", f"{type(error).__name__}: {error}")
        self.attempted = self.log.attempt(self.name, self.config, seconds, error, **notes)
        if error is not None and self.config.fail_policy == "raise":
            raise error

    def report(self) -> dict[str, Any]:
        """Returns counters, and the values of the attempt to compile."""
        with self._counting:
            reasons = dict(self._reasons)
            return {
                "answers": "artifact" if self.engine is not None and self._refusal is None else "original",
                "artifact": self._answered,
                "original": sum(reasons.values()),
                "reasons": reasons,
                "rebinds": self._rebound,
                "attempt": self.attempted,
            }

    def close(self) -> None:
        """Lets the compiled code go; the module itself answers from now on."""
        with self._opening:
            self._refusal = Refusal("closed", "it was closed")
            if self.engine is not None:
                self.engine.close()

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        if self._refusal is not None:
            return self._refusal
        if self.engine is None:
            refusal = self._open_at_first_call(args, kwargs)
            if refusal is not None:
                return refusal
        if self._guard is None or self._tensors is None:
            return None
        refusal = self._guard.refusal(args, kwargs)
        if refusal is not None:
            return refusal
        if self._tensors.moved():
            self._rebind()
        return self._unbound

    def _open_at_first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        refusal = self._guarded().refusal(args, kwargs) if self.config.backend == "precast" else None
        if refusal is not None:
            return refusal
        if not self._opening.acquire(blocking=False):
            return Refusal("compiling", "another thread compiles it")
        try:
            self._prepare(args, kwargs)
        finally:
            self._opening.release()
        return self._refusal if self.engine is not None or self._refusal is not None else self.delayed()

    def _guarded(self, ignored: Iterable[tuple[str, str]] = ()) -> Guard:
        """Returns a guard with the state of the module at this moment."""
        return Guard(self.module, ignored, hooked=bool(self.name))

    def _opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
        """Returns the engine, compared with eager, and values for the log; sets the guard."""
        guard = self._guarded()
        with self.state_of_programs():
            args, kwargs = self.taken(args, kwargs)
            engine = self._opener(self, args, kwargs)
            notes = dict(getattr(engine, "notes", {}))
            args, kwargs = self._at_bucket(engine, args, kwargs)

            def eager(*args: Any, **kwargs: Any) -> Any:
                answer = self.original(*args, **kwargs)
                engine.learn(answer)
                return answer

            if self.config.healthcheck and self.config.smoketest_steps:
                result = self._compared(
                    lambda *a, **k: engine.answer(a, k), eager, args, kwargs, notes.get("built", True)
                )
                notes |= {"smoketest_steps": result.steps, "max_error": result.max_error}
                if not result.ok:
                    engine.close()
                    raise CompileFailed(f"the smoke test failed: {result.reason}") from result.exception
            elif engine.guarded:
                with restored_buffers(self.module):
                    eager(*args, **kwargs)
            written = set(guard.changes())
        if engine.guarded:
            self._guard = self._guarded(written) if written else guard
            self._tensors = Tensors(self._guard)
        return engine, notes

    def delayed(self) -> Refusal | None:
        """Returns the reason for which the region can't be compiled now, if there is one."""
        if (hooked := self._guarded().hooked()) is not None:
            return hooked
        detail = sharding.shard(self.module.named_parameters())
        return Refusal("parameters", detail) if detail is not None else None

    @property
    def waits(self) -> bool:
        """Whether the region is neither compiled nor refused."""
        return self.engine is None and self._refusal is None

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns copies of the arguments as the programs are captured with them."""
        return self._taken(*self._covered(*batches.copied((args, kwargs))))

    @contextmanager
    def state_of_programs(self) -> Iterator[None]:
        """Runs a block in the modes that the programs are captured in."""
        with torch.inference_mode(False), inference(self.module), _without_autocast():
            yield

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments that the programs are captured with."""
        return args, kwargs

    def _at_bucket(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments of the comparison with eager."""
        return args, kwargs

    def _compared(
        self, compiled: Any, eager: Any, args: tuple[Any, ...], kwargs: dict[str, Any], built: bool
    ) -> SmokeResult:
        """Returns the result of the smoke test, of programs that were `built` now, or found in the store."""
        test = CompileSmoketest(self.config.smoketest_steps, rtol=self.config.rtol, atol=self.config.atol)
        return test.compare(compiled, eager, self.module, args, kwargs)

    def _covered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments, at the sizes of the last bucket if none covers them."""
        if not self.points:
            return args, kwargs
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        own = batches.sizes(named, {name: axes for name, axes in self.shapes.items() if name in named})
        for point in self.points:
            if point == own or (self.config.pad and all(own[dim] <= size for dim, size in point.items() if dim in own)):
                return args, kwargs
        return resized((args, kwargs), self.shapes, self.names, self.points[-1])

    def bare(self) -> nn.Module:
        """Returns the module for a capture: its calls do not come back to this region, and run no hooks of its own."""
        return hooks.bare(self.module) if self.name else self.module

    def _rebind(self) -> None:
        with self._opening:
            assert self.engine is not None and self._guard is not None and self._tensors is not None
            if not self._tensors.moved():
                return
            try:
                tensors = Tensors(self._guard)
                self.engine.bind()
            except Refused as refused:
                self._unbound = refused.refusal
            except Exception as failed:
                self._unbound = Refusal("parameters", f"{type(failed).__name__}: {failed}")
                return
            else:
                self._unbound = None
                self._rebound += 1
            self._tensors = tensors

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            detail = f"{FAILURES} calls failed, the last with {type(error).__name__}: {error}"
            self._refusal = Refusal("failed", detail)

    def _fall_back(self, refusal: Refusal, error: BaseException | None) -> None:
        with self._counting:
            self._reasons[refusal.code] += 1
            first = self._reasons[refusal.code] == 1
        if first or error is not None:
            self.log.fallback(self.name, refusal, error)


def opened(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
    """Returns the engine of a region's backend."""
    if region.config.backend != "precast":
        return TorchEngine(region.original, region.config)
    from .artifacts import ArtifactEngine

    return ArtifactEngine(region, args, kwargs)


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def positional(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters of a module's `forward` that may be given by position."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in by_position)
