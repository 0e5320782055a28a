"""`CompileSmoketest`: faults that it finds, and the state that it leaves."""

from __future__ import annotations

import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from precast.compare import gradients
from precast.compare.smoke import CompileSmoketest
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.drop(self.linear(x)) + self.offset
        return {"y": y, "parts": (y.sum(0), y.argmax(1)), "name": "net"}


BATCH = {"x": torch.arange(8.0).reshape(2, 4)}


def run(change: Callable[[Any, dict[str, Any]], Any], **settings: Any) -> Any:
    torch.manual_seed(0)
    net = Net()

    def compiled(x: Tensor) -> Any:
        answer = net(x)
        return change(x, answer) or answer

    return CompileSmoketest(**settings).run(compiled, BATCH, eager=net)


def test_equal_answers_and_an_error_within_the_tolerance_agree() -> None:
    result = run(lambda x, answer: None, steps=5)
    assert result.ok and result.steps == 5 and result.max_error == 0.0 and result.seconds > 0 and result.reason is None

    def off(size: float) -> Callable[[Any, Any], Any]:
        return lambda x, answer: answer | {"y": answer["y"] * (1 + size)}

    result = run(off(1e-5))
    assert result.ok and 0 < result.max_error < 1e-4
    assert not run(off(1e-2)).ok
    assert run(off(1e-2), rtol=0.1).ok
    assert not run(off(1e-5), rtol=0.0, atol=0.0).ok


@dataclass
class Other:
    y: Tensor


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, answer: answer | {"y": answer["y"] + 1}, r"output `y` differs from eager in 6 of 6 elements"),
        (lambda x, answer: answer | {"y": answer["y"].double()}, "output `y` has dtype torch.float64"),
        (lambda x, answer: answer | {"y": answer["y"][:1]}, r"output `y` has shape \[1, 3\]"),
        (lambda x, answer: answer | {"y": answer["y"] * float("nan")}, "in NaN or infinity"),
        (lambda x, answer: answer | {"parts": list(answer["parts"])}, "the structure is"),
        (lambda x, answer: OrderedDict(answer), "the structure is OrderedDict"),
        (lambda x, answer: Other(answer["y"]), r"the structure is Other\(y: Tensor\)"),
        (lambda x, answer: answer | {"name": "other"}, "output `name` is 'other', eager's is 'net'"),
        (lambda x, answer: answer | {"parts": (answer["parts"][0], answer["parts"][1] + 1)}, r"`parts\[1\]` differs"),
        (lambda x, answer: (x.zero_(), None)[1], r"input, after the call, `\[0\]` differs"),
        (lambda x, answer: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_fault_is_named(change: Callable[[Any, Any], Any], reason: str) -> None:
    result = run(change)
    assert not result.ok and result.steps == 0 and re.search(reason, result.reason), result.reason


def test_nan_and_infinity_of_eager_agree() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x / 0, -x / 0, x * float("nan"), x])

    assert CompileSmoketest().run(Odd(), (torch.ones(3),), eager=Odd()).ok
    wrong = CompileSmoketest().run(lambda x: -Odd()(x), (torch.ones(3),), eager=Odd())
    assert not wrong.ok and "NaN or infinity" in wrong.reason


def test_dropout_is_off_and_flags_come_back() -> None:
    net = Net().train()
    net.linear.eval()
    assert CompileSmoketest().run(lambda x: net(x), BATCH, eager=net).ok
    assert net.training and net.drop.training and not net.linear.training


def test_random_modules_get_the_same_numbers() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(3) + random.random() + float(numpy.random.rand())

    net = Noise()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    assert CompileSmoketest(4).run(lambda x: net(x), (torch.ones(3),), eager=net).ok
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), states[2], strict=True))


def test_buffers_come_back_and_a_change_is_a_fault() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    net = Counts()
    result = CompileSmoketest().run(lambda x: x, (torch.ones(3),), eager=net)
    assert not result.ok and "changes its buffer `calls`" in result.reason and net.calls == 0


def test_an_error_of_eager_is_named() -> None:
    result = CompileSmoketest().run(lambda x: x, (torch.ones(2, 9),), eager=Net())
    assert not result.ok and result.reason.startswith("eager fails: RuntimeError") and result.exception is not None


def test_the_module_of_a_wrapper_is_found() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    assert CompileSmoketest(1).run(compiled, BATCH).ok
    with pytest.raises(ValueError, match="pass `eager`"):
        CompileSmoketest(1).run(lambda x: x, BATCH)


@pytest.mark.parametrize("absent", ["optimizer", "loss_fn"])
def test_a_step_needs_an_optimizer_and_a_loss(absent: str) -> None:
    given = {"optimizer": torch.optim.SGD(Net().parameters()), "loss_fn": torch.sum}
    del given[absent]
    with pytest.raises(ValueError, match=f"pass `{absent}` too"):
        CompileSmoketest().run(Net(), BATCH, **given)


def test_gradients_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_PIECE", 4)
    eager = {"a.weight": torch.arange(10.0).view(5, 2), "b.bias": torch.ones(0)}
    assert gradients.difference(eager, eager) == (None, 0.0)
    wrong = {**eager, "a.weight": eager["a.weight"].clone()}
    wrong["a.weight"][4, 1] += 1.0
    problem, error = gradients.difference(wrong, eager)
    assert problem is not None and "`a.weight` differs from eager by 5.9e-02" in problem
    assert error == pytest.approx(1 / float(eager["a.weight"].norm()))
    wrong["a.weight"][4, 1] = float("nan")
    assert "NaN or infinity" in str(gradients.difference(wrong, eager)[0])


def test_steps_have_figures_beside_eager(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = CompileSmoketest(3).run(net, BATCH, optimizer, lambda answer: answer["y"].sum(), eager=net)
    assert result.ok and result.training is not None
    result.training.save(tmp_path / "train.json")
    document = json.loads((tmp_path / "train.json").read_text())
    assert (document["schema"], document["model"], document["kind"]) == (1, "Net", "autograd")
    for way in ("artifact", "eager"):
        assert document[way]["first_step_seconds"] > 0 and document[way]["steps_per_second"] > 0
        assert document[way]["peak_bytes"] is None or document[way]["peak_bytes"] >= 0
