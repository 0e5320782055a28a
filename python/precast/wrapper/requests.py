"""The releases of regions: those that the store has, and one build for all that it lacks.

Regions are equal if one contract holds for both: a trace of one of them has read nothing in which they differ. So the
regions of one key, which have the same class and inputs, are traced one after the other, and each is first tried with
the contracts of those before it. One of the equal ones is captured, and all bind their own tensors to its release.

An input that requires a gradient in one of the regions of a key is captured so for all: the first layer of a model then
shares the pair of the others. Its results must require gradients as they do without.

All releases that the store lacks are built by one build (`parts`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from ..client.progress import Told
from ..compare import batches
from ..compare.undisturbed import restored_buffers, restored_generators, unpacked
from ..config import CompileConfig
from ..record import values
from ..torch_private import modes
from . import contract, parts
from .artifacts import ArtifactEngine, Captured, Release, build_settings, causes
from .autograd import PairEngine
from .engine import CompileFailed
from .logs import Log
from .subject import Arguments, Subject

_Subject = TypeVar("_Subject", bound=Subject)


class Request:
    """The request of a region: a release for its call."""

    def __init__(self, region: Subject, call: Arguments) -> None:
        self.region, self.call = region, call
        self.engine: type[ArtifactEngine] = ArtifactEngine if region.captured is None else PairEngine

    @property
    def given(self) -> Arguments:
        """The arguments as the programs are captured with them."""
        return self.region.taken(*self.call)

    def key(self) -> str:
        """Returns the first half of the name of its release."""
        given = self.given
        tensors, _ = batches.flat(*given, self.region.names)
        described = [[name, str(one.dtype), self._shape(name, one), one.device.type] for name, one in tensors.items()]
        request = {
            "class": values.named(type(self.region.net)),
            "inputs": described,
            "modes": list(modes.of_process()),
            "settings": self.engine.request(self.region, *given),
            "kind": self.engine.kind,
            "state": self.region.captured or self.region.autocast,
        }
        return contract.key(request)

    def model(self, name: str) -> str:
        """Returns the model of its release, for a module that is called `name`."""
        if self.region.name:
            return f"{name}.regions"
        return name if self.region.captured is None else f"{name}.training"

    def _shape(self, name: str, tensor: torch.Tensor) -> list[Any]:
        axes = self.region.shapes.get(name, ())
        return [
            axes[at] if at < len(axes) and isinstance(axes[at], str) else size for at, size in enumerate(tensor.shape)
        ]

    @property
    def roots(self) -> dict[str, Any]:
        """The values that the paths of a contract begin with."""
        return self.region.roots(*self.given)

    def widen(self, inputs: tuple[bool, ...]) -> None:
        """Has the pair captured with gradients of these inputs, if its results require gradients as without."""
        state = self.region.state
        if state is None or inputs == state.inputs:
            return
        own = self._required()
        self.region.captured = state._replace(inputs=inputs)
        if self._required() != own:
            self.region.captured = state

    def part(self, under: str) -> Captured:
        """Captures the region."""
        with self._undisturbed():
            return self.engine.part(self.region, *self.given, under)

    def holds(self, found: contract.Contract) -> bool:
        """Returns whether a contract holds for the region."""
        with self._undisturbed():
            return found.record.differs(found.record.live(self.roots)) is None

    def answer_itself(self) -> None:
        """Calls the module once: what it writes in its first call alone is then as in all later ones."""
        with self._undisturbed():
            args, kwargs = self._leaves(*self.given)
            self.region.answer_itself(args, kwargs)

    def _required(self) -> list[bool]:
        """Returns whether each result requires a gradient."""
        with self._undisturbed():
            args, kwargs = self._leaves(*self.call)
            answer = self.region.answer_itself(args, kwargs)
        return [one.requires_grad for one in batches.tensors(answer)]

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns copies of arguments, with gradients as in the capture."""
        captured = self.region.captured
        flags = iter(captured.inputs) if captured is not None else None

        copied = batches.once(lambda tensor: tensor.detach().clone())

        def leaf(path: str, tensor: torch.Tensor) -> torch.Tensor:
            made = copied(path, tensor)
            return made if flags is None else made.requires_grad_(next(flags))

        return batches.mapped((args, kwargs), leaf)  # type: ignore[no-any-return]

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        region = self.region
        with unpacked(), restored_generators(), restored_buffers(region.module), region.state_of_programs():
            yield


class _Group:
    """Regions that share a release: found in the store, or captured for one of them."""

    def __init__(self, model: str, name: str, found: contract.Contract, captured: Captured | None) -> None:
        self.model, self.name, self.contract, self.captured = model, name, found, captured
        self.requests: list[Request] = []


def obtain(
    model: str, regions: Mapping[_Subject, Arguments], log: Log, without: Mapping[str, str] | None = None
) -> dict[_Subject, Release | Exception]:
    """Returns the release of each region for its call, or the error of one that has none.

    `without` are names of releases that are not taken, with the reasons.
    """
    began, found = time.perf_counter(), contract.Candidates(log)
    outcome: dict[Any, Release | Exception] = {}
    by_key: dict[str, list[_Group]] = {}
    several = len(regions) > 1
    for key, some in _keyed(regions, outcome).items():
        groups = by_key.setdefault(key, [])
        for one in some:
            try:
                _join(model, key, one, groups, found, without or {}, several)
            except Exception as error:
                outcome[one.region] = error
    groups = [group for some in by_key.values() for group in some]
    failed = _built([group for group in groups if group.captured is not None], log)
    count = sum(len(group.requests) for group in groups if group.captured is not None)
    built = sum(group.captured is not None for group in groups)
    seconds = time.perf_counter() - began
    if several and built:
        log.note(f"a build for {count} regions, of which {built} differ", seconds=round(seconds, 3))
    for group in groups:
        for one in group.requests:
            first = one is group.requests[0]
            now = group.captured is not None and first
            spent = seconds / max(built, 1) if now else 0.0
            owner = group.requests[0].region.name
            release = Release(group.model, group.name, group.contract, now, owner, spent)
            outcome[one.region] = failed.get(group.name, release)
    return outcome


def _keyed(regions: Mapping[Any, Arguments], outcome: dict[Any, Release | Exception]) -> dict[str, list[Request]]:
    """Returns requests by their keys; of pairs, with gradients of the same inputs."""
    alike: dict[Any, list[Request]] = {}
    for region, call in regions.items():
        try:
            request = Request(region, call)
            state = _without_inputs(request)
            alike.setdefault((values.named(type(region.net)), state), []).append(request)
        except Exception as error:
            outcome[region] = error
    found: dict[str, list[Request]] = {}
    for some in alike.values():
        inputs = [one.region.state.inputs for one in some if one.region.state is not None]
        for one in some:
            try:
                if inputs and len({len(each) for each in inputs}) == 1:
                    one.widen(tuple(map(any, zip(*inputs, strict=True))))
                found.setdefault(one.key(), []).append(one)
            except Exception as error:
                outcome[one.region] = error
    return found


def _without_inputs(request: Request) -> Any:
    """Returns the state of a pair without the gradients of its inputs."""
    state = request.region.state
    return None if state is None else state._replace(inputs=())


def _join(
    model: str,
    key: str,
    request: Request,
    groups: list[_Group],
    candidates: contract.Candidates,
    without: Mapping[str, str],
    several: bool,
) -> None:
    """Puts a request into the group of a release that holds; captures the region if there is none."""
    config = request.region.config
    name = request.model(model)
    for called in (False, True):
        if called:
            with suppress(Exception):  # the capture says why
                request.answer_itself()
        for group in groups:
            if request.holds(group.contract):
                group.requests.append(request)
                return
        for found, one in candidates.of(config, name, key):
            if found not in without and request.holds(one):
                groups.append(_Group(name, found, one, None))
                groups[-1].requests.append(request)
                return
    captured = request.part(f"r{len(groups)}{key[:11]}" if several else "")
    label = contract.name(key, captured.contract, captured.code)
    if label in without:
        raise CompileFailed(f"{without[label]}; built again, it is the same")
    groups.append(_Group(name, label, captured.contract, captured))
    groups[-1].requests.append(request)


def _built(groups: Sequence[_Group], log: Log) -> dict[str, Exception]:
    """Builds the releases of groups; returns the errors of those without one."""
    failed: dict[str, Exception] = {}
    by_place: dict[tuple[str, str], list[_Group]] = {}
    for group in groups:
        assert group.captured is not None
        by_place.setdefault((group.model, group.captured.part.device), []).append(group)
    for (name, _), some in by_place.items():
        configs: list[CompileConfig] = [one.region.config for group in some for one in group.requests]
        settings = max((build_settings(config) for config in configs), key=lambda one: one["compile"].smoketest_steps)
        captured = {group.name: group.captured.part for group in some if group.captured is not None}
        try:
            with causes():
                failed |= parts.build(name, captured, **(settings | {"progress": Told(partial(log.building, name))}))
        except Exception as error:
            failed |= dict.fromkeys(captured, error)
    return failed
