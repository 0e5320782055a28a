"""`maybe_compile` with `kind = "autograd"`: gradients of real artifacts against eager's."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import folder, gradients, python
from fake_engine import counts
from precast import BadInput, CompileConfig, CompiledModule, CompileSmoketest, maybe_compile
from precast.compare import truth
from precast.compare.batches import difference
from precast.compare.gradients import TOLERANCES
from precast.compare.gradients import difference as gradients_differ
from precast.wrapper import autograd
from torch import Tensor, nn
from trained_net import BUCKETS, SHAPES, batch, loss, net


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the pairs of the module for two sizes."""
    store = folder(tmp_path_factory, "training")
    module = wrapped(store)
    attempt = module.precast_report()["regions"][""]["attempt"]
    assert attempt["success"], attempt["stack"]
    assert attempt["smoketest_steps"] == (3 if attempt["built"] else 1)
    return store


@pytest.fixture
def trained(built: Path, no_build: None) -> Path:
    return built


def wrapped(store: Path, module: nn.Module | None = None, sample: Any = None, **settings: Any) -> CompiledModule:
    settings = {"name": "trained", "buckets": BUCKETS, "shapes": SHAPES, **settings}
    config = CompileConfig(kind="autograd", prefer="artifact", store=store, **settings)
    return maybe_compile(module or net(), config, None, batch() if sample is None else sample)


def twins(store: Path, **settings: Any) -> tuple[CompiledModule, nn.Module]:
    """Returns a wrapped module, and an eager one with equal parameters."""
    module = wrapped(store, **settings)
    return module, copy.deepcopy(module._orig_mod)


def same(module: CompiledModule, plain: nn.Module, call: Callable[[nn.Module], Any]) -> None:
    """Runs a call with both, and compares results, gradients, buffers and torch's generator afterwards."""
    answers, states = [], []
    for each in (plain, module):
        torch.manual_seed(7)
        answers.append(call(each))
        states.append(torch.get_rng_state())
    problem, _ = difference(answers[1], answers[0])
    assert problem is None, problem
    problem, _ = gradients_differ(gradients(module), gradients(plain))
    assert problem is None, problem
    problem, _ = difference(dict(module.named_buffers()), dict(plain.named_buffers()), noun="buffer")
    assert problem is None, problem
    assert torch.equal(states[0], states[1])


def backward(module: nn.Module, rows: int = 4, seed: int = 0) -> Any:
    answer = module(**batch(rows, seed))
    loss(answer).backward()
    return answer


def test_gradients_land_where_autograd_puts_them(trained: Path) -> None:
    module, plain = twins(trained)
    same(module, plain, backward)
    assert module.second.weight.grad is None and module.unused.weight.grad is None
    assert module.tied.weight.grad is module.first.weight.grad is not None
    # Gradients accumulate, at another bucket too.
    same(module, plain, lambda each: backward(each, 6, 1))
    assert counts(module) == (2, {})


def test_an_optimizer_trains_to_the_same_losses(trained: Path) -> None:
    module, plain = twins(trained)
    losses: list[list[float]] = []
    for each in (plain, module):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        losses.append([])
        for step in range(6):
            for part in range(2):
                value = loss(each(**batch(4 + 2 * part, step))) / 2
                value.backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(value.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] != losses[0][-1]
    assert counts(module) == (12, {})


SECOND = """
import json, sys
import torch
from precast import CompileConfig, maybe_compile
from precast.capture import joint
from precast.wrapper import parts
from precast.torch_private import tracing
from trained_net import BUCKETS, SHAPES, batch, loss, net

def refused(*_, **__):
    raise RuntimeError("captured")

joint.capture = parts.build = torch.export.export = tracing.trace = refused
settings = {"kind": "autograd", "prefer": "artifact", "name": "trained", "buckets": BUCKETS, "shapes": SHAPES}
config = CompileConfig(store=sys.argv[1], **settings)
module = maybe_compile(net(), config, None, batch())
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for rows in (4, 6, 4, 6):
    loss(module(**batch(rows))).backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(module.precast_report()))
"""


def test_a_second_process_captures_nothing(trained: Path) -> None:
    report = json.loads(python(SECOND, trained))
    region = report["regions"][""]
    assert report["artifact"] == 4 and report["reasons"] == {} and region["recompiles"] == 0
    assert region["attempt"]["built"] is False and region["attempt"]["smoketest_steps"] == 1


def test_a_later_start_measures_no_noise(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    measure = truth.Truth.measure
    monkeypatch.setattr(truth.Truth, "measure", lambda self, *runs: (measured.append(1), measure(self, *runs)))
    for limit in ("TIMES_OF_TRAINING", "SIZES"):
        monkeypatch.setattr(truth, limit, 100.0)  # of values that are zero but for rounding
    monkeypatch.setitem(TOLERANCES, torch.float32, 0.0)
    kept = trained / "cache" / "rounding"
    shutil.rmtree(kept, ignore_errors=True)
    for files in (0, 1, 1):
        assert len(list(kept.iterdir()) if kept.exists() else []) == files
        assert wrapped(trained).precast_report()["regions"][""]["attempt"]["success"]
        assert len(measured) == 1
    wrapped(trained, sample=batch(6))
    assert len(list(kept.iterdir())) == len(measured) == 2, "other sizes have other noise"


def test_whole_steps_agree_and_leave_no_trace(trained: Path) -> None:
    module, _ = twins(trained)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    backward(module)
    optimizer.step()
    before = copy.deepcopy([module.state_dict(), optimizer.state_dict(), gradients(module)])
    state = torch.get_rng_state()
    result = CompileSmoketest(3).run(module, batch(), optimizer, loss)
    assert result.ok and result.steps == 3, result.reason
    after = [module.state_dict(), optimizer.state_dict(), gradients(module)]
    assert difference(after, before, 0, 0)[0] is None and torch.equal(torch.get_rng_state(), state)
    assert counts(module) == (4, {})
    result = CompileSmoketest(1).run(module, batch(), optimizer, lambda answer: answer["y"])
    assert not result.ok and "`loss_fn` returns [4, 8], not a tensor with one value" in str(result.reason)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda grad: grad * 1.1, "the gradient of `second.bias` differs from eager by"),
        (lambda grad: None, "the gradient of `second.bias` is missing, and eager has one"),
        (lambda grad: grad.index_fill(0, torch.tensor(0), float("nan")), "`second.bias` differs from eager in NaN"),
    ],
)
def test_a_wrong_gradient_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, reason: str) -> None:
    honest = autograd._Function.backward

    def wrong(ctx: Any, *tangents: Tensor) -> Any:
        found = list(honest(ctx, *tangents))
        at = len(found) - len(ctx.pair.parameters) + ctx.pair.parameters.index("second.bias")
        found[at] = fault(found[at])
        return tuple(found)

    monkeypatch.setattr(autograd._Function, "backward", staticmethod(wrong))
    module = wrapped(trained)
    attempt = module.precast_report()["regions"][""]["attempt"]
    assert not attempt["success"] and reason in attempt["exception"]
    backward(module)
    assert counts(module) == (0, {"not compiled": 1})
    with pytest.raises(Exception, match="the smoke test failed"):
        wrapped(trained, fail_policy="raise")
    unchecked = wrapped(trained, healthcheck=False)
    optimizer = torch.optim.SGD(unchecked.parameters(), lr=0.1)
    result = CompileSmoketest(2).run(unchecked, batch(), optimizer, loss)
    assert not result.ok and result.steps == 0 and reason in str(result.reason)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: self.linear(x) + torch.rand_like(x), "draws random numbers"),
        (lambda self, x: (x.add_(1), self.linear(x))[1], "writes into its input `x`"),
        (lambda self, x: (self.linear(x), x.t()), "shares memory with one of its inputs"),
        (lambda self, x: self.linear(x) if x.sum() > 0 else x, "can't be captured"),
        (lambda self, x: (self.linear.weight.data.add_(1), self.linear(x))[1], "linear.weight"),
    ],
)
def test_what_no_pair_can_do_is_named(tmp_path: Path, forward: Any, reason: str) -> None:
    kind = type("Odd", (Small,), {"forward": forward})
    module = wrapped(tmp_path, kind().train(), torch.ones(2, 4), buckets={}, shapes={})
    attempt = module.precast_report()["regions"][""]["attempt"]
    assert not attempt["success"] and reason in attempt["exception"], attempt["exception"]


def test_autocast_is_part_of_the_pair(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, plain = twins(
        tmp_path, module=Small().train(), sample=torch.ones(2, 4), name="small", buckets={}, shapes={}
    )

    def call(each: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = each(torch.ones(2, 4))
        y.float().sum().backward()
        return y.detach()

    answers = call(plain), call(module)
    assert difference(answers[1], answers[0])[0] is None and answers[0].dtype == torch.bfloat16
    assert gradients_differ(gradients(module), gradients(plain), None, "bfloat16")[0] is None
    same(module, plain, lambda each: (each.zero_grad(), each(torch.ones(2, 4)).sum().backward())[1])
    assert counts(module) == (2, {}) and len(module.precast_report()["regions"][""]["pairs"]) == 2


def test_a_check_of_the_module_reaches_its_pairs(trained: Path) -> None:
    module = wrapped(trained)
    loss(module(**batch())).backward()

    class Bad:
        def check(self) -> None:
            raise BadInput("7 is out of bounds")

    (pair,) = type(module)._precast.regions[""]._pairs.values()
    pair.engine.deferred.add(Bad())
    with pytest.raises(BadInput, match="7 is out of bounds"):
        module.precast_check()
    module.precast_check()
    module.precast_close()
    module.precast_check()
