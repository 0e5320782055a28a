"""A region: a module, the compiled code of it, and the decision which of the two answers a call."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..compare.result import SmokeResult
from ..compare.smoke import CompileSmoketest
from ..compare.undisturbed import restored_buffers, restored_generators, unpacked
from ..config import CompileConfig
from ..torch_private import modules as of_torch
from ..torch_private import sharding
from . import caches, guard, requests
from .artifacts import ArtifactEngine, Release
from .caches import CacheReturned
from .engine import CompileFailed, Engine, Passed, TorchEngine
from .guard import Guard
from .logs import Log
from .refusal import Refusal, Refused
from .subject import Arguments, Subject
from .uses import Row, padding, proposal

LOOK = 50
"""Calls after which the share of padding is looked at for the first time; each time after twice as many."""
SLOWER = "eager: slower"
"""The rung of calls that eager answers, because a program was slower in the build."""
FAILURES = 3
"""Calls that fail one after the other, after which the compiled code is no longer asked."""


class Region(Subject):
    """A module that answers by compiled code, or by itself for a named reason."""

    def __init__(self, name: str, module: nn.Module, config: CompileConfig, log: Log, model: str) -> None:
        """`model` is the name of the releases."""
        super().__init__(name, module, config, log, model)
        self.engine: Engine | None = None
        self.release: Release | Exception | None = None
        """What a build of several regions found or made for this one."""
        self.attempted: dict[str, Any] | None = None
        self._guard: Guard | None = None
        self._refusal: Refusal | None = None if config.enabled else Refusal("disabled", "`enabled` is false")
        if config.enabled and config.backend == "eager":
            self._refusal = Refusal("disabled", '`backend` is "eager"')
        # Settings with which a call returns a cache.
        self._caches: list[Any] = []
        self._failures = 0
        self._opening = threading.Lock()
        self._counting = threading.Lock()
        self._answered = 0
        self._look = LOOK
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
                    due = self._answered == self._look
                self._failures = 0
                if due:
                    self._look_at_padding()
                return answer
        self._fall_back(refusal, error)
        return original(*args, **kwargs)

    def passed(self, refusal: Refusal, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the answer of the module itself, for a reason."""
        self._fall_back(refusal, None)
        return of_torch.call(self.module)(*args, **kwargs)

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
        before = self.release.seconds if isinstance(self.release, tuple) else 0.0
        with restored_generators():
            try:
                self.engine, notes = self._opened(args, kwargs)
            except Exception as failed:
                error = failed
        if isinstance(error, CacheReturned) and self.config.fail_policy != "raise":
            self._caches.append(caches.asked(self.module, args, kwargs, self.names))
            self.release = None
            return
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
        rows = self.rows()
        answers = "artifact" if self.engine is not None and self._refusal is None else "original"
        if answers == "artifact" and self.uses is not None and self.uses.by_eager:
            answers = SLOWER
        with self._counting:
            reasons, answered = dict(self._reasons), self._answered
        eager = min(sum(count for (_, _, by_eager), count in rows.items() if by_eager), answered)
        return {
            "answers": answers,
            "artifact": answered - eager,
            "eager": eager,
            "original": sum(reasons.values()),
            "reasons": reasons,
            "rungs": rungs(answered - eager, eager, reasons),
            "padding": padding(rows),
            "rebinds": self._guard.rebound if self._guard is not None else 0,
            "attempt": self.attempted,
        }

    def rows(self) -> Counter[Row]:
        """Returns the calls by programs, for each kind of request."""
        return self.uses.rows() if self.uses is not None else Counter()

    def _look_at_padding(self) -> None:
        rows = self.rows()
        found = padding(rows)
        if found.get("share", 0) > 0.5:
            self.log.padding(self.name, found, proposal(rows), self._look)
            self._look = 0
        self._look *= 2

    def check(self) -> None:
        """Waits for the calls by programs, and raises the error of a value on the device that was out of bounds."""
        if self.engine is not None and self._refusal is None:
            self.engine.check()

    def close(self) -> None:
        """Lets the compiled code go; the module itself answers from now on."""
        with self._opening:
            self._refusal = Refusal("closed", "it was closed")
            if self.uses is not None:
                self.uses.end()
            if self.engine is not None:
                self.engine.close()

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        if self._refusal is not None:
            return self._refusal
        if self.engine is None:
            refusal = self._open_at_first_call(args, kwargs)
            if refusal is not None:
                return refusal
        return self._guard.refusal(args, kwargs) if self._guard is not None else None

    def _open_at_first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        refusal = None
        if self.config.backend == "precast":
            refusal = guard.before(self.module, args, kwargs, self.kind, self.autocast)
        if refusal is not None:
            return refusal
        if self._returns_cache(args, kwargs):
            return CacheReturned().refusal
        if not self._opening.acquire(blocking=False):
            return Refusal("compiling", "another thread compiles it")
        try:
            self._prepare(args, kwargs)
        finally:
            self._opening.release()
        if self.engine is not None or self._refusal is not None:
            return self._refusal
        return CacheReturned().refusal if self._returns_cache(args, kwargs) else self.delayed()

    def _returns_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(self._caches) and caches.asked(self.module, args, kwargs, self.names) in self._caches

    def _opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
        """Returns the engine, compared with eager, and values for the log; sets the guard."""
        with unpacked(), self.state_of_programs():
            args, kwargs = self.taken(args, kwargs)
            if self.config.backend != "precast":
                engine: Engine = TorchEngine(self.original, self.config)
                result = self._tested(engine, args, kwargs, built=True)
                if result is not None and not result.ok:
                    raise CompileFailed(f"the smoke test failed: {result.reason}") from result.exception
                return engine, _figures(result)
            return self._found_or_built(args, kwargs)

    def _found_or_built(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
        """Returns the engine of a release that agrees with eager.

        One that was found and does not is built again, once, under its own name.
        """
        failed: dict[str, str] = {}
        while True:
            release, self.release = self.release or self.obtained(args, kwargs, failed), None
            if isinstance(release, Exception):
                raise release
            engine = self.made(release, args, kwargs)
            at_bucket = self._at_bucket(engine, args, kwargs)
            result = self._tested(engine, *at_bucket, built=release.built)
            if result is None or result.ok:
                self._guard = Guard(self, engine)
                self.uses = engine.uses()
                return engine, {**engine.notes, "slower": self.uses.slower, **_figures(result)}
            engine.close()
            reason = f"the smoke test failed: {result.reason}"
            if release.built or failed:
                raise CompileFailed("; ".join([*failed.values(), reason])) from result.exception
            self.log.note(f"release `{release.model}@{release.name}` is built again: {reason}")
            failed[release.name] = reason

    def obtained(self, args: tuple[Any, ...], kwargs: dict[str, Any], failed: dict[str, str]) -> Release | Exception:
        """Returns the release for this call, found or built; none of those that failed."""
        (release,) = requests.obtain(self.model, {self: (args, kwargs)}, self.log, failed).values()
        return release

    def made(self, release: Release, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the engine of a release."""
        return ArtifactEngine(self, release, args, kwargs)

    def _tested(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any], built: bool) -> SmokeResult | None:
        """Returns the result of the smoke test; None without one."""

        def eager(*args: Any, **kwargs: Any) -> Any:
            answer = self.answer_itself(args, kwargs)
            engine.learn(answer, args, kwargs)
            return answer

        if self.config.healthcheck and self.config.smoketest_steps:
            return self._compared(engine, eager, args, kwargs, built)
        if engine.guarded:
            with restored_buffers(self.module):
                eager(*args, **kwargs)
        return None

    def delayed(self) -> Refusal | None:
        """Returns the reason for which the region can't be compiled now, if there is one."""
        detail = sharding.shard(self.module.named_parameters())
        return Refusal("parameters", detail) if detail is not None else None

    @property
    def waits(self) -> bool:
        """Whether the region is neither compiled nor refused."""
        return self.engine is None and self._refusal is None

    def _at_bucket(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the arguments of the comparison with eager."""
        return args, kwargs

    def _compared(
        self, engine: Any, eager: Any, args: tuple[Any, ...], kwargs: dict[str, Any], built: bool
    ) -> SmokeResult:
        """Returns the result of the smoke test, of programs that were `built` now, or found in the store."""
        test = CompileSmoketest(self.config.smoketest_steps, rtol=self.config.rtol, atol=self.config.atol)
        shares = dict(engine.contract.shares) if engine.guarded else None

        def compiled(*args: Any, **kwargs: Any) -> Any:
            return engine.answer(args, kwargs)

        return test.compare(compiled, eager, self.module, args, kwargs, shares)

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


def _figures(result: SmokeResult | None) -> dict[str, Any]:
    return {} if result is None else {"smoketest_steps": result.steps, "max_error": result.max_error}


def rungs(artifact: int, eager: int, reasons: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of calls by each rung that answered any."""
    found = {"artifact": artifact, SLOWER: eager, **{f"original: {code}": count for code, count in reasons.items()}}
    return {rung: count for rung, count in found.items() if count}
