"""Equal regions of a model share a release: one build of real artifacts for all regions, in both kinds."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import folder, gradients, in_threads
from precast import CompileConfig, CompiledModule, maybe_compile
from precast.client import building
from precast.compare.gradients import difference
from precast.torch_private import tracing
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Has its number, dropout, a buffer that a call writes, and a table that no state dict has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.norm, self.linear, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.25)
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(F.gelu(self.linear(self.norm(x)))) * self.table


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList([Layer(number) for number in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def config(store: Path) -> CompileConfig:
    settings = {"name": "shared", "allowlist": ["layers.*", "head"], "fail_policy": "raise"}
    return CompileConfig(kind="autograd", prefer="artifact", store=store, **settings)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, list[str]]]]:
    """A store with the releases for inference and for training, and the specs that each of the two builds read."""
    store = folder(tmp_path_factory, "shared")
    builds: dict[str, list[str]] = {"inference": [], "autograd": []}
    real = building.build_spec
    with pytest.MonkeyPatch.context() as patch:
        module = wrapped(net().eval(), store)
        for kind in builds:

            def build(spec: Any, *arguments: Any, kind: str = kind, **options: Any) -> Any:
                builds[kind].append(Path(spec).name)
                return real(spec, *arguments, **options)

            patch.setattr(building, "build_spec", build)
            module.train(kind == "autograd")
            with torch.set_grad_enabled(kind == "autograd"):
                module(X)
    yield store, builds


def wrapped(module: nn.Module, store: Path, sample: Any = None) -> CompiledModule:
    return maybe_compile(module, config(store), None, sample)


def attempts(module: CompiledModule, kind: str) -> dict[str, dict[str, Any]]:
    regions = module.precast_report()["regions"]
    return {name: one["pairs"][0] if kind == "autograd" else one["attempt"] for name, one in regions.items()}


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a build")

    monkeypatch.setattr(building, "build_spec", refused)
    monkeypatch.setattr(tracing, "trace", refused)


def test_one_build_makes_all_regions(built: tuple[Path, dict[str, list[str]]]) -> None:
    _, builds = built
    if os.environ.get("PRECAST_TEST_STORE") is None:
        for specs in builds.values():
            assert specs[0] == "precast.toml" and len(specs) == 3 and len(set(specs)) == 3


@pytest.mark.parametrize("kind", ["inference", "autograd"])
def test_a_second_process_finds_the_releases(built: Any, nothing_built: None, kind: str) -> None:
    module = wrapped(net().train(kind == "autograd"), built[0], X)
    found = attempts(module, kind)
    assert len({one["release"] for one in found.values()}) == 2 and not any(one["built"] for one in found.values())
    shares = {name: one["shares"] for name, one in found.items()}
    assert shares == {**{f"layers.{at}": "layers.0" for at in range(3)}, "head": "head"}


def test_each_region_answers_with_its_own_tensors(built: Any, nothing_built: None) -> None:
    module = wrapped(net().eval(), built[0], X)
    plain = net().eval()
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for one in other.state_dict().values():
            one.copy_(torch.rand_like(one.double()).to(one.dtype) + 0.5)
        torch.testing.assert_close(module(X), plain(X))
        module.load_state_dict(other.state_dict())
        torch.testing.assert_close(module(X), other(X))
        module.load_state_dict(plain.state_dict(), assign=True)
        torch.testing.assert_close(module(X), plain(X))
        copied = copy.deepcopy(module)
        copied.layers[1].linear.weight.zero_()
        torch.testing.assert_close(copied(X), copy.deepcopy(copied._orig_mod)(X))
        torch.testing.assert_close(module(X), plain(X))
    assert module.precast_report()["reasons"] == {} and module.precast_report()["artifact"] == 16


def test_each_region_trains_with_its_own_tensors(built: Any, nothing_built: None) -> None:
    module, plain = wrapped(net().train(), built[0], X), net().train()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, plain)]
    for step in range(2):
        for each, optimizer in zip((module, plain), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            each(X).square().sum().backward()
        assert difference(gradients(module), gradients(plain))[0] is None
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
    report = module.precast_report()
    assert report["reasons"] == {} and report["artifact"] == 8
    module.layers[1].layer_idx = 9  # nothing reads it
    module(X)
    assert module.precast_report()["regions"]["layers.1"]["reasons"] == {}


def test_calls_of_other_threads_are_not_taken_meanwhile(built: Any, nothing_built: None) -> None:
    module = wrapped(net().eval(), built[0])

    def call(_: int) -> Tensor:
        with torch.no_grad():
            return module(X)

    for answer in in_threads(4, call):
        torch.testing.assert_close(answer, net().eval()(X))
    report = module.precast_report()
    assert report["artifact"] >= 4
    assert report["reasons"].keys() <= {"compiling", "tracing"}
    assert all(len(region.points) == 0 for region in module._precast.regions.values())


def test_a_sample_that_fails_in_training_leaves_inference(built: Any, nothing_built: None) -> None:
    class Strict(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("no label")
            return super().forward(x)

    torch.manual_seed(0)
    module = wrapped(Strict().eval(), built[0], X)
    module.train()
    with pytest.raises(ValueError, match="no label"):
        module(X)
    module.eval()
    with torch.no_grad():
        module(X)
    assert module.precast_report()["artifact"] == 4 and module.precast_report()["reasons"] == {}


def test_a_program_that_cannot_be_built_leaves_the_other_regions(tmp_path: Path) -> None:
    class Refused(nn.Linear):
        def get_torch_compile_config(self) -> Any:
            return {"options": {"no_such_option": True}}

    module = net().eval()
    module.head = Refused(8, 2)
    settings = CompileConfig(name="some", store=tmp_path, allowlist=["layers.*", "head"])
    regions = maybe_compile(module, settings, None, X).precast_report()["regions"]
    assert "no_such_option" in regions["head"]["attempt"]["exception"]
    assert all(regions[f"layers.{at}"]["attempt"]["success"] for at in range(3))
