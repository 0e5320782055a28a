"""An engine that computes by the traced graph, with real traces, contracts and guards, and without a build.

The graph has everything inside that a program has: a change that the guard misses is a wrong answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from precast.config import CompileConfig
from precast.wrapper import region as regions
from precast.wrapper import requests
from precast.wrapper.artifacts import ArtifactEngine, Release
from precast.wrapper.contract import Contract
from precast.wrapper.logs import Log
from precast.wrapper.module import Compilation, CompiledModule, compiled
from precast.wrapper.region import Region
from precast.wrapper.traced import Traced, register
from torch import nn

GRAPHS: dict[str, Traced] = {}
"""The traces of modules, by the name of the release."""
SEEDS: dict[str, dict[str, Any]] = {}
"""What the engines of a model do, by the model's name."""


class Model:
    """A loaded release that has no programs."""

    def __init__(self, seeds: dict[str, Any]) -> None:
        self.seeds, self.bound = seeds, 0
        self.requests: list[dict[str, Any]] = []

    def stats(self) -> dict[str, Any]:
        slower = self.seeds.get("slower", [])
        runner = "eager" if slower else "artifact"
        modules = [{"module": "forward", "buckets": [{"runner": runner}]}]
        return {"modules": modules, "requests": self.requests, "slower": slower}

    def swap(self, weights: dict[str, Any]) -> None:
        if (failure := self.seeds.get("bind")) is not None:
            raise failure
        self.bound += 1
        self.weights = weights

    def close(self) -> None:
        self.seeds["closed"] = True


class Seeded(ArtifactEngine):
    """Answers by the graph of the trace."""

    def _loaded(self, tensors: Any) -> Any:
        self.seeds = SEEDS[self._region.model]
        self.seeds["opened"] = [*self.seeds.get("opened", []), self._region.name]
        model = Model(self.seeds)
        model.swap(self._weights())
        model.bound = 0
        return model

    @property
    def bound(self) -> int:
        return int(self._model.bound)

    def _open(self) -> None:
        self._inputs = tuple(self.contract.inputs)

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (failure := self.seeds.get("answer")) is not None:
            raise failure
        given = self._in_order(args, kwargs)
        row = {"module": "forward", "sizes": {"rows": len(given[0]) if given[0].dim() else 1}, "count": 1}
        rung = "eager" if self.seeds.get("slower") else "exact"
        self._model.requests.append({**row, "bucket": self.seeds.get("bucket", row["sizes"]), "rung": rung})
        self.seeds["answered"] = self.seeds.get("answered", 0) + 1
        graph = GRAPHS[self._release.name].at(given, [[] for _ in given])
        graph.m = nn.Module()
        for name, tensor in self._model.weights.items():
            register(graph.m, name, tensor)
        answer = self._nested(graph(*given), args, kwargs)
        error = self.seeds.get("error", 0.0)
        return answer + error if error else answer


def obtained(model: str, regions: Any, log: Log, without: Any = None) -> dict[Region, Any]:
    """Returns the releases of regions: each has the contract of a trace."""
    outcome: dict[Region, Any] = {}
    seeds = SEEDS[model]
    for region, call in regions.items():
        if callable(wait := seeds.get("wait")):
            wait()
        if (failure := seeds.get("open")) is not None:
            outcome[region] = failure
            continue
        try:
            with region.state_of_programs():
                args, kwargs = region.taken(*call)
                source = Traced(region.net, region.own, args, kwargs, region.names)
                assert source.names is not None
            name = f"fake{len(GRAPHS)}"
            GRAPHS[name] = source
            outcome[region] = Release(model, name, Contract.of(source), True, region.name, 0.0)
        except Exception as error:
            outcome[region] = error
    return outcome


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has all regions answered by the module itself."""
    monkeypatch.setattr(requests, "obtain", obtained)
    monkeypatch.setattr(regions, "ArtifactEngine", Seeded)
    yield
    SEEDS.clear()
    GRAPHS.clear()


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def wrapped(
    net: nn.Module, seeds: dict[str, Any] | None = None, sample: Any = None, **settings: Any
) -> tuple[Any, dict[str, Any], Records]:
    """Returns a wrapper of a module, what its engine does, and the records of its log."""
    seeds = seeds if seeds is not None else {}
    name = f"model{len(SEEDS)}"
    SEEDS[name] = seeds
    records = Records()
    logger = logging.Logger("test")
    logger.addHandler(records)
    config = CompileConfig(**{"name": name, **settings})
    SEEDS.setdefault(config.name or "", seeds)
    sample = ((torch.ones(2, 4),), {}) if sample is None else sample
    return compiled(net, Compilation(net, config, Log(logger), sample if sample != () else None)), seeds, records


def counts(module: CompiledModule) -> tuple[int, dict[str, int]]:
    """Returns how many calls artifacts answered, and the reasons of the others."""
    report = module.precast_report()
    return report["artifact"], report["reasons"]
