"""What the module with more digits decides: where rounding alone moves gradients, and in half precision everywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from precast import CompileConfig, CompileSmoketest
from precast.compare import gradients, truth
from precast.compare.rounding import Kept
from torch import Tensor, nn
from torch.nn import functional as F


def normalized(y: Tensor) -> Tensor:
    return ((y - y.mean(0)) / y.std(0)).pow(3).sum()


class Amplifying(nn.Module):
    """Normalizes over rows that are nearly equal, so that what rounding left of their difference is all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 64, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return normalized(self.net(x))


@pytest.fixture
def module() -> Amplifying:
    torch.manual_seed(0)
    return Amplifying()


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(1, 64) + 1e-3 * torch.randn(4, 64)


def compare(module: Amplifying, compiled: Callable[..., Any], x: Tensor) -> Any:
    return gradients.compare(module, compiled, module.forward, (x,), {}, CompileConfig(kind="autograd"))


def exactly(module: Amplifying, times: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Returns a program that is nearer to the truth than eager."""
    net = module.net

    def compiled(x: Tensor) -> Tensor:
        return normalized(F.linear(x.double(), net.weight.double())).float() * times

    return compiled


def test_what_is_nearer_to_float64_than_eager_is_accepted(module: Amplifying, rows: Tensor) -> None:
    before = {name: (one, one.detach().clone()) for name, one in module.named_parameters()}
    got = compare(module, exactly(module), rows)
    assert got.ok, got.reason
    assert got.max_error > gradients.TOLERANCES[torch.float32]
    for name, one in module.named_parameters():
        assert one is before[name][0] and torch.equal(one, before[name][1]) and one.grad is None


def test_what_is_further_from_float64_than_eager_is_refused(module: Amplifying, rows: Tensor) -> None:
    got = compare(module, exactly(module, 1.2), rows)
    assert not got.ok and "from float64, eager" in got.reason, got.reason


def test_float64_runs_only_where_the_plain_comparison_fails(module: Amplifying) -> None:
    assert compare(module, module.forward, torch.randn(4, 64)).ok
    steps = CompileConfig().smoketest_steps
    assert module.calls == 2 * steps


def test_a_module_that_float64_can_not_run_is_refused_as_before(module: Amplifying, rows: Tensor) -> None:
    plain = module.forward

    def single(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 alone")
        return plain(x)

    module.forward = single  # type: ignore[method-assign]
    got = compare(module, exactly(module), rows)
    assert not got.ok and "float64 can't run it: TypeError: float32 alone" in got.reason


@pytest.mark.parametrize(("scale", "accepted"), [(1.0, True), (0.0, False), (10.0, False)])
def test_where_eager_is_noise_a_gradient_has_to_be_as_large(scale: float, accepted: bool) -> None:
    torch.manual_seed(0)
    blocks = (layer for _ in range(12) for layer in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()))
    deep, x = nn.Sequential(*blocks), torch.randn(8, 32)

    def first(function: Callable[..., Any], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            gradient = gradients._step(deep, function, (x,), {})[1]["0.weight"]
        assert gradient is not None
        return gradient

    def compiled(x: Tensor) -> Tensor:
        """Eager with its first layer in float32, and the gradient of that scaled."""
        weight = deep[0].weight
        weight = scale * weight + (1 - scale) * weight.detach()
        with torch.autocast("cpu", enabled=False):
            value = F.linear(x, weight)
        value = deep[1:](value)
        return value

    noise, exact = first(deep.forward, x), first(deep.double().forward, x.double())
    deep.float()
    assert 3 * (noise - exact).norm() > 0.9 * exact.norm(), "eager is no noise"
    with torch.autocast("cpu", torch.bfloat16):
        config = CompileConfig(kind="autograd")
        got = gradients.compare(deep, compiled, deep.forward, (x,), {}, config, "torch.bfloat16")
    assert got.ok == accepted, got.reason
    if not accepted:
        assert "the gradient of `0.weight`" in got.reason and "from float32" in got.reason, got.reason


def test_float64_decides_on_whole_steps_too(module: Amplifying, rows: Tensor) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def run(times: float) -> Any:
        class Compiled(Amplifying):
            def forward(self, x: Tensor) -> Tensor:
                return exactly(self, times)(x)

        compiled = Compiled()
        compiled.net = module.net
        return CompileSmoketest(2).run(compiled, rows, optimizer, lambda loss: loss, eager=module)

    before = module.net.weight.detach().clone()
    got = run(1.0)
    assert got.ok and got.steps == 2, got.reason
    assert got.max_error > gradients.TOLERANCES[torch.float32]
    assert torch.equal(module.net.weight, before) and module.net.weight.grad is None and not optimizer.state
    got = run(1.2)
    assert not got.ok and "from float64, eager" in got.reason, got.reason


def test_the_comparison_writes_neither_the_batch_nor_buffers() -> None:
    torch.manual_seed(0)

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)) * 2)
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * self.net(x.add_(1)).float().pow(2).sum()

    eager, wrong = Writing(), Writing()
    wrong.net, wrong.factor = eager.net, 1.5
    batch = torch.randn(4, 8)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    before, state = batch.clone(), {name: one.clone() for name, one in eager.state_dict().items()}
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            got = CompileSmoketest(1).run(wrong, batch, optimizer, lambda loss: loss, eager=eager)
        assert not got.ok and f"from float{32 if cast else 64}" in got.reason, got.reason
        assert torch.equal(batch, before)
        assert all(torch.equal(one, state[name]) for name, one in eager.state_dict().items())


def test_what_was_measured_is_kept_for_later_processes(module: Amplifying, rows: Tensor, tmp_path: Path) -> None:
    def again(times: float = 1.0) -> tuple[Any, int]:
        """Compares as a process that starts does; returns the result, and the calls of eager."""
        module.calls = 0
        config = CompileConfig(kind="autograd", smoketest_steps=1)
        kept = Kept(tmp_path, "encoder")
        got = gradients.compare(module, exactly(module, times), module.forward, (rows,), {}, config, None, kept)
        return got, module.calls

    (tmp_path / "cache").mkdir()
    refused, calls = again(1.2)
    assert not refused.ok and calls > 2
    assert not list((tmp_path / "cache").rglob("*.json")), "kept what belongs to a failure"
    first, calls = again()
    assert first.ok and calls > 2
    second, calls = again()
    assert second.ok and second.max_error == first.max_error and calls == 1
    refused, calls = again(1.2)
    assert not refused.ok and calls > 2 and "from float64, eager" in refused.reason
    refused, _ = again(float("nan"))
    assert not refused.ok

    (file,) = (tmp_path / "cache" / "rounding").iterdir()
    own = json.loads(file.read_text())
    infinite = dict.fromkeys(own, [float("inf")] * 2)
    for hostile in ("", "[]", "{", json.dumps(dict.fromkeys(own, "1")), json.dumps(infinite)):
        file.write_text(hostile)
        got, calls = again()
        assert got.ok and calls > 2, hostile
    file.write_text(json.dumps(own))
    file.chmod(0o666)
    got, calls = again()
    assert got.ok and calls > 2, "read what others could have written"


def test_steps_of_one_comparison_measure_once(module: Amplifying, rows: Tensor) -> None:
    got = compare(module, exactly(module), rows)
    assert got.ok and got.steps == 3
    assert module.calls == 3 + 1 + truth._MOVED


def test_distances_are_kept_in_a_store_alone_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(name: str) -> None:
        Kept(tmp_path, name).write({"loss": (0.5, 0.25)})

    keep("first")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("precast.compare.rounding._KEPT", 2)
    (tmp_path / "cache").mkdir()
    for at, name in enumerate(("first", "second", "third")):
        keep(name)
        for file in (tmp_path / "cache" / "rounding").iterdir():
            if file.stat().st_mtime > 1000:
                os.utime(file, (at, at))
    assert [Kept(tmp_path, name).read() for name in ("first", "second", "third")] == [{}, *[{"loss": (0.5, 0.25)}] * 2]


class Draws(nn.Module):
    """Its answer is another one at each place of the random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.rand_like(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_have_no_truth(dtype: torch.dtype) -> None:
    """With more digits they are others: eager is as far from those as anything is."""
    module = Draws().eval().to(dtype)

    def other(x: Tensor) -> Tensor:
        return module.linear(x) + torch.full_like(x, 0.5)

    with torch.no_grad():
        result = CompileSmoketest(1).compare(other, module, module, (torch.randn(8, 4).to(dtype),), {})
    assert not result.ok and "it draws random numbers" in str(result.reason)


class Skips(nn.Module):
    """It draws a number that only training uses, as wav2vec2 does for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        number = torch.rand([])
        return x if self.training and number < 0.1 else self.linear(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_number_that_no_result_has_is_none(dtype: torch.dtype) -> None:
    module = Skips().eval().to(dtype)
    with torch.no_grad():
        given = (torch.randn(8, 4).to(dtype),)
        assert CompileSmoketest(1).compare(lambda x: module.linear(x), module, module, given, {}).ok
        wrong = CompileSmoketest(1).compare(lambda x: module.linear(x) * 1.1, module, module, given, {})
    assert not wrong.ok and "random" not in str(wrong.reason)
