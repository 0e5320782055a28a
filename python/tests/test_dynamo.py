"""`torch.compile(net, backend="precast")`: answers and gradients beside eager's, in one process and the next."""

from __future__ import annotations

import json
import os
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import precast.dynamo
import pytest
import torch
from conftest import python
from precast import dynamo
from precast.torch_private import graphs
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

# A process that never imports the package by itself: torch finds the entry point.
PROCESS = """
import copy, json, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 5)

    def forward(self, x):
        return {"logits": self.head(self.drop(torch.relu(self.norm(self.filter(x)))).mean((2, 3)))}

torch.manual_seed(0)
eager = Net()
net = copy.deepcopy(eager)
compiled = torch.compile(net, backend="precast")
x = torch.randn(4, 3, 8, 8)
for training in (True, True, False):
    answers = []
    for one in (eager.train(training), compiled.train(training)):
        torch.manual_seed(1)  # of the dropout
        with torch.set_grad_enabled(training):
            answers.append(one(x)["logits"])
            if training:
                answers[-1].square().sum().backward()
    torch.testing.assert_close(*answers)
for one, other in zip(eager.parameters(), net.parameters(), strict=True):
    torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)
for one, other in zip(eager.buffers(), net.buffers(), strict=True):
    torch.testing.assert_close(one, other)
from torch._dynamo.utils import counters
print(json.dumps(counters["precast"]))
"""


def test_a_second_process_traces_and_builds_nothing(tmp_path: Path) -> None:
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    (group, points) = next(iter(pyproject["project"]["entry-points"].items()))
    installed = tmp_path / "site" / "precast-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: precast\nVersion: 0\n")
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(installed.parent), str(Path(precast.__file__).parent.parent)])
    for counted in ({"built": 3, "artifact": 5}, {"found": 3, "artifact": 5}):
        assert json.loads(python(PROCESS, PYTHONPATH=path, PRECAST_STORE=str(tmp_path / "store"))) == counted


def compiled(function: Any, store: Path, **options: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend="precast", options={"store": store, **options})


def test_symbolic_sizes_and_graph_breaks(tmp_path: Path) -> None:
    head = nn.Linear(3, 2)

    def function(x: Tensor) -> tuple[Tensor, int]:
        x = head(x)
        torch._dynamo.graph_break()
        return x.t() * x.shape[0], x.shape[0] + 1

    fast = compiled(function, tmp_path)
    for rows in (4, 5, 5):
        x = torch.randn(rows, 3)
        with torch.no_grad():
            answer, wanted = fast(x), function(x)
        torch.testing.assert_close(answer, wanted)
        assert answer[0].stride() == wanted[0].stride()
    assert counters["precast"] == {"built": 4, "artifact": 6}


@pytest.mark.long
def test_dropout_inside_a_checkpoint(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)

    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: dropout(layer(x).tanh(), 0.4), x, use_reentrant=False).square().sum()

    gradients = []
    for one in (function, compiled(function, tmp_path)):
        x = torch.ones(4, 8, requires_grad=True)
        torch.manual_seed(0)
        one(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert counters["precast"] == {"built": 2, "artifact": 2}


def test_a_program_has_no_operator_that_a_worker_lacks() -> None:
    from torch._inductor.inductor_prims import fma

    x = torch.ones(2, 3)
    made = graphs.static(make_fx(lambda a: (fma(a, a, a),))(x), [x], [None])
    assert torch.equal(made.module(x)[0], x + x)
    assert "fma" not in str(made.module._graph[0].graph)


def test_inputs_of_other_strides(tmp_path: Path) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.flatten() + y.reshape(-1)).cumsum(0)

    x, y = torch.randn(4, 3).t(), torch.randn(3, 1).expand(3, 4)
    torch.testing.assert_close(compiled(function, tmp_path)(x, y), function(x, y))
    assert counters["precast"] == {"built": 1, "artifact": 1}


def test_a_graph_without_a_program_runs_as_it_is(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    x = torch.ones(3)
    fast = compiled(function, tmp_path)
    torch.manual_seed(0)
    wanted = function(x)
    for warned in (pytest.warns(UserWarning, match="draws random numbers with `aten.rand"), nullcontext()):
        torch.manual_seed(0)
        with warned:
            assert torch.equal(fast(x), wanted)
    assert counters["precast"] == {"eager": 2}
    with pytest.raises(Exception, match="draws random numbers"):
        compiled(function, tmp_path, fail_policy="raise")(x)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRECAST_STORE", raising=False)
    found = dynamo.settings("max-autotune", {"name": "net", "epilogue_fusion": False})
    assert (found.store, found.name, found.mode) == ("artifacts", "net", "max-autotune")
    assert found.options == {"epilogue_fusion": False}
    monkeypatch.setenv("PRECAST_STORE", "/kept")
    assert dynamo.settings(None, {}).store == "/kept"
    with pytest.raises(ValueError, match="`buckets` is no option"):
        dynamo.settings(None, {"buckets": {"batch": [1]}})
