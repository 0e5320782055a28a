"""The requests of a model's regions, grouped by equality, and their build.

Regions that may be equal have equal structure (`digests`), but for integers such as the number of a layer. Each of them
runs its calls once: `operations` has the text of these, and `reads` the integers that they read. Regions are equal if
their digests with both are. One of them is captured, and all bind their own tensors to its release, whose name has that
digest: a second process finds it in the same way, without a capture.

An input that requires a gradient in one of the equal regions is captured so for all: the first layer of a model then
shares the pair of the others. Its results must require gradients as they do without.

Operations are those at the sizes of the calls. For `dynamic`, which is for other sizes too, regions are equal only if
the digest covers all of their attributes.

All releases that the store lacks are built by one build (`parts`). A region that can't be described here compiles by
itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from . import batches, digests, exported, operations, parts, reads
from .artifacts import ArtifactEngine, build_settings, device_of_load
from .autograd import PairEngine
from .capture import held_under
from .config import CompileConfig
from .errors import LoadError, NotFound
from .loading import load
from .logs import Log
from .region import Arguments, Region, Shared
from .smoke import restored_buffers, restored_generators
from .training import PairRegion

_FORMAT = 1
"""The version of the texts in a digest, and of the names in a release."""


class Request:
    """The request of a region: a release for its calls."""

    def __init__(self, region: Region, calls: Sequence[Arguments]) -> None:
        self.region = region
        by_sizes: dict[Any, Arguments] = {}
        for call in calls:
            by_sizes.setdefault(tuple(tensor.shape for tensor in batches.tensors(call)), call)
        self.calls = list(by_sizes.values())
        self.pair = region if isinstance(region, PairRegion) else None
        self.engine: type[ArtifactEngine] = ArtifactEngine if self.pair is None else PairEngine
        self.ignored: set[reads.Place] = set()
        self.text = ""
        self.given: Arguments = region.taken(*self.calls[0])

    @property
    def net(self) -> torch.nn.Module:
        """The module for a capture, in its modes of this moment."""
        return self.region.bare()

    def structure(self) -> tuple[Any, ...]:
        """Returns a value that is the same for equal regions, and may be for others."""
        self.ignored = reads.integers(self.net)
        try:
            return (*map(type, self.net.modules()), self.digest(()))
        finally:
            self.ignored = set()

    def digest(self, inputs: tuple[bool, ...] | None = None) -> str:
        """Returns the digest of the region as it is described now; `inputs` replaces those that require gradients."""
        with self._undisturbed():
            further = self.engine.request(self.region, *self.given)
            if self.pair is not None and inputs is not None:
                further["state"] = self.pair.captured._replace(inputs=inputs)
            further |= {"operations": self.text, "regions": _FORMAT}
            return exported.digest(self.net, self.given, without=self.ignored, **further)

    def widen(self, inputs: tuple[bool, ...]) -> None:
        """Has the pair captured with gradients of these inputs, if its results require gradients as without."""
        if self.pair is None or inputs == self.pair.state.inputs:
            return
        own = self._required()
        self.pair.captured = self.pair.state._replace(inputs=inputs)
        if self._required() != own:
            self.pair.captured = self.pair.state

    def describe(self) -> None:
        """Runs the calls. The digest then has their operations, and lacks the integers that they do not read."""
        with self._undisturbed() as net, reads.recorded(net) as read:
            if self.region.config.dynamic and not digests.described(net):
                raise operations.Unknown("an attribute has no text")
            texts = [operations.text(net, *self._leaves(*call), self.pair is not None) for call in self.calls]
        self.text = "\n".join(texts)
        self.ignored = reads.integers(self.net) - read

    def there(self, release: str, part: str) -> bool:
        """Returns whether the store has a release."""
        store, tensors = self.region.config.store, batches.flat(*self.given, self.region.names)[0]
        weights = exported.parameters(held_under(self.net, part))
        try:
            load(store, release, device=str(device_of_load(self.net, tensors)), weights=weights).close()
        except (NotFound, LoadError):
            return False
        return True

    def part(self, name: str) -> parts.Part:
        """Captures the region. Raises `_Read` if the capture reads an integer that the digest lacks."""
        none: set[reads.Place] = set()
        with self._undisturbed(), reads.recorded(self.net) if self.ignored else nullcontext(none) as read:
            part = self.engine.part(self.region, name, *self.given)
        if read & self.ignored:
            raise _Read
        return part

    def alone(self) -> None:
        """Has the region captured for its own state."""
        if self.pair is not None:
            self.pair.captured = self.pair.state

    def _required(self) -> list[bool]:
        """Returns whether each result requires a gradient."""
        with self._undisturbed() as net:
            args, kwargs = self._leaves(*self.calls[0])
            answer = net._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        return [one.requires_grad for one in batches.tensors(answer)]

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns copies of arguments, with gradients as in the capture."""
        flags = iter(self.pair.captured.inputs) if self.pair is not None else None

        def leaf(_: str, tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.detach().clone()
            return made if flags is None else made.requires_grad_(next(flags))

        return batches.mapped((args, kwargs), leaf)  # type: ignore[no-any-return]

    @contextmanager
    def _undisturbed(self) -> Iterator[torch.nn.Module]:
        region = self.region
        with restored_generators(), restored_buffers(region.module), region.state_of_programs():
            yield region.bare()


class _Read(Exception):
    """A capture reads an attribute that the calls did not."""


def grouped(regions: Mapping[Region, Sequence[Arguments]]) -> dict[str, list[Request]]:
    """Returns the requests of regions for their calls: the equal ones of each digest."""
    alike: dict[Any, list[Request]] = {}
    for region, calls in regions.items():
        with suppress(Exception):  # the region says by itself why no artifact takes its inputs
            request = Request(region, calls)
            alike.setdefault(request.structure(), []).append(request)
    found: dict[str, list[Request]] = {}
    for some in alike.values():
        inputs = [one.pair.state.inputs for one in some if one.pair is not None]
        for one in some:
            if len(some) > 1:
                try:
                    one.widen(tuple(map(any, zip(*inputs, strict=True))))
                    one.describe()
                except Exception:  # a call that is no plain list of operations: no other region is equal to it
                    one.alone()
                    one.text = f"region {one.region.name}"
            found.setdefault(one.digest(), []).append(one)
    return found


def prepare(model: str, regions: Mapping[Region, Sequence[Arguments]], log: Log) -> dict[Region, Exception]:
    """Builds the releases that the store lacks, at once; returns the errors of regions without one.

    A region gets its release as `shared`. Without one it compiles by itself.
    """
    began = time.perf_counter()
    name, failed = f"{model}.regions", {}
    groups = grouped(regions)
    captured: dict[str, parts.Part] = {}
    for digest, some in list(groups.items()):
        try:
            if not some[0].there(f"{name}@{digest}", _part(digest)):
                captured[digest] = some[0].part(_part(digest))
        except _Read:
            del groups[digest]
            for one in some:
                one.alone()
        except Exception as error:
            failed[digest] = error
    if captured:
        failed |= _built(name, captured, [groups[digest][0].region.config for digest in captured])
        count = sum(len(groups[digest]) for digest in captured)
        seconds = round(time.perf_counter() - began, 3)
        log.note(f"a build for {count} regions, of which {len(captured)} differ", seconds=seconds)
    for digest, some in groups.items():
        for one in some:
            built = digest in captured and one is some[0]
            spent = (time.perf_counter() - began) / len(captured) if built else 0.0
            one.region.shared = Shared(name, digest, _part(digest), some[0].region.name, built, spent)
    return {one.region: error for digest, error in failed.items() for one in groups[digest]}


def _built(name: str, captured: dict[str, parts.Part], configs: Sequence[CompileConfig]) -> dict[str, Exception]:
    """Builds parts; returns the errors of those without a release."""
    settings = max((build_settings(config) for config in configs), key=lambda one: one["compile"].smoketest_steps)
    failed: dict[str, Exception] = {}
    for device in sorted({part.device for part in captured.values()}):
        some = {digest: part for digest, part in captured.items() if part.device == device}
        try:
            failed |= parts.build(name, some, **settings)
        except Exception as error:
            failed |= dict.fromkeys(some, error)
    return failed


def _part(digest: str) -> str:
    return f"r{digest[:12]}"
