"""`maybe_compile` with real artifacts: answers, bound parameters, other processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import precast
import pytest
import torch
import wrapped_encoder
from conftest import HERE, in_threads, python
from fake_engine import counts
from precast import CompileConfig, CompiledModule, maybe_compile
from precast.compare.batches import difference
from torch import Tensor, nn
from wrapped_encoder import BUCKETS, SHAPES, batch, encoder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the encoder, compiled for one bucket."""
    store = tmp_path_factory.mktemp("store")
    module = wrapped(store)
    attempt = module.precast_report()["regions"][""]["attempt"]
    assert attempt["success"] and attempt["built"], attempt["stack"]
    return store


@pytest.fixture
def store(built: Path, no_build: None) -> Path:
    return built


def wrapped(store: Path, net: nn.Module | None = None, sample: Any = None, **settings: Any) -> CompiledModule:
    settings = {"name": "encoder", "buckets": BUCKETS, "shapes": SHAPES, **settings}
    return maybe_compile(net or encoder(), CompileConfig(store=store, **settings), None, sample or batch(2, 8))


def agrees(module: CompiledModule, *sizes: int, **more: Any) -> None:
    given = batch(*(sizes or (2, 8)))
    with torch.no_grad():
        problem, _ = difference(module(**given, **more), copy.deepcopy(module._orig_mod)(**given, **more))
    assert problem is None, problem


def test_every_size_is_answered_as_eager_does(store: Path) -> None:
    module = wrapped(store)
    for rows in (1, 2, 3):
        for tokens in (1, 2, 5, 7, 8, 9, 20):
            agrees(module, rows, tokens)
    assert counts(module) == (10, {"shape": 11})
    answer = module(**batch(1, 5))
    assert type(answer) is wrapped_encoder.Output and answer.extra is None and answer.pooled["pair"][1] == "text"


def test_any_sample_and_any_mode_will_do_at_the_start(store: Path) -> None:
    for sizes in [(1, 1), (2, 5), (3, 20)]:
        for pad in (True, False):
            module = wrapped(store, None, batch(*sizes), pad=pad)
            agrees(module, 2, 8)
            agrees(module, 1, 8)
            assert counts(module) == ((2, {}) if pad else (1, {"shape": 1}))
    with torch.autocast("cpu", torch.bfloat16):
        module = wrapped(store)
    agrees(module, 2, 8)
    with torch.inference_mode():
        later = maybe_compile(encoder(), module._precast.config)
        for each in (wrapped(store), later):
            agrees(each, 2, 8)
            assert counts(each) == (1, {})
    assert counts(module) == (1, {})


class Rows(nn.Module):
    """Adds to each row the mean of all: padding would change every answer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x - 0.5)).cumsum(0)) + x.mean()


@pytest.mark.parametrize("buckets", [pytest.param([1, 8], marks=pytest.mark.long), [1]])
def test_every_size_is_answered_without_padding(tmp_path: Path, buckets: list[int]) -> None:
    config = CompileConfig(
        store=tmp_path, buckets={"rows": buckets}, shapes={"x": ["rows", 4]}, pad=False, dynamic=True
    )
    module = maybe_compile(Rows().eval(), config, None, torch.randn(1, 4))
    with torch.no_grad():
        for size in (1, 2, 5, 8, 13):
            x = torch.randn(size, 4)
            torch.testing.assert_close(module(x), module._orig_mod(x))
    report = module.precast_report()
    assert report["original"] == 0 and report["padding"]["share"] == 0, report
    requests = module._precast.regions[""].engine._model.stats()["requests"]
    answered = {row["sizes"]["rows"]: row["rung"] for row in requests if row["rung"] != "eager"}
    assert all(answered.get(size, rung) == rung for size, rung in [(1, "exact"), (2, "dynamic"), (13, "dynamic")])
    assert answered.get(8, "exact") == ("exact" if 8 in buckets else "dynamic")


BERT = """
import sys, tempfile, torch, precast
from transformers import BertConfig, BertForSequenceClassification
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ids, labels = torch.randint(0, 50, (2, 8)), torch.tensor([0, 1])

def bert(name, *sample):
    torch.manual_seed(0)
    net = BertForSequenceClassification(BertConfig(**sizes, vocab_size=50, num_labels=3)).eval()
    return precast.maybe_compile(net, precast.CompileConfig(name=name, store=sys.argv[1]), None, sample[0])

plain, labelled = {"input_ids": ids}, {"input_ids": ids, "labels": labels}
with torch.no_grad():
    module = bert("plain", plain)
    module(**plain)
    module(**labelled)
    assert module.config.problem_type == "single_label_classification"
    module(**plain)
    module.save_pretrained(tempfile.mkdtemp())
    assert str(module.config.dtype).endswith("float32")
    module(**plain)
    print(module.precast_report()["rungs"])
    module = bert("labelled", labelled)
    loss, eager = module(**labelled).loss, module._orig_mod(**labelled).loss
    torch.testing.assert_close(loss, eager)
    print(module.precast_report()["rungs"], module.precast_report()["regions"][""]["attempt"]["built"])
"""


def test_what_a_call_or_a_library_writes_switches_nothing_off(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for built in (True, False):
        command = [sys.executable, "-c", BERT, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        lines = done.stdout.splitlines()
        assert lines == ["{'artifact': 3, 'original: inputs': 1}", f"{{'artifact': 1}} {built}"], done.stderr
        assert "input `labels` is a tensor, and is none in the sample batch" in done.stderr


def test_changes_in_place_are_seen(store: Path) -> None:
    module = wrapped(store)
    net = module._orig_mod
    with torch.no_grad():
        before = module(**batch(2, 8)).tokens
        net.first.weight.add_(torch.randn(16, 2) @ torch.randn(2, 16))
        assert not torch.allclose(before, module(**batch(2, 8)).tokens)
    agrees(module)
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})
    agrees(module)
    with torch.no_grad():
        net.offset.mul_(2)
        net.fixed.add_(1.0)  # a constant of the artifact
    agrees(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.train()
    for _ in range(3):
        optimizer.zero_grad()
        module(**batch(2, 8)).tokens.square().mean().backward()
        optimizer.step()
    module.eval()
    agrees(module)
    answered, reasons = counts(module)
    assert answered == 6 and reasons == {"training": 3}
    assert module.precast_report()["regions"][""]["rebinds"] == 0


def test_tensors_that_moved_are_bound_again(store: Path) -> None:
    module = wrapped(store)
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()}, assign=True)
    module.head.weight = module.embedding.weight
    agrees(module)
    module.first.weight = nn.Parameter(torch.randn(16, 16))
    agrees(module)
    module.second.weight.data = torch.randn(16, 16)
    agrees(module)
    module.to(torch.float64)
    agrees(module)
    module.to(torch.float32)
    agrees(module)
    module.second.weight.data = torch.randn(16, 16).t()
    agrees(module)
    assert counts(module) == (4, {"parameters": 2})
    assert module.precast_report()["regions"][""]["rebinds"] == 4


def test_an_untied_weight_is_seen(store: Path) -> None:
    module = wrapped(store)
    module.head.weight = nn.Parameter(module.embedding.weight.clone())
    agrees(module)
    module.head.weight.data.mul_(2)
    agrees(module)
    module.embedding.weight = module.head.weight
    agrees(module)
    assert counts(module) == (1, {"parameters": 2})


def test_other_inputs_are_the_originals(store: Path) -> None:
    module = wrapped(store)
    agrees(module, scale=1.0, flag=None)
    agrees(module, scale=2.0)
    agrees(module, flag=False)
    given = batch(2, 8)
    with torch.no_grad():
        ids, mask = given["ids"], given["mask"]
        module(ids.int(), mask)
        module(ids, mask)
        module(ids, mask=mask)
        module(mask=mask, ids=ids)
        wide = torch.stack([ids, ids], 2)[..., 0]
        assert not wide.is_contiguous()
        assert torch.equal(module(wide, mask).tokens, module(ids, mask).tokens)
        with pytest.raises(TypeError):
            module(ids)
        with pytest.raises(IndexError):
            module(ids + 100, mask)
    assert counts(module)[0] == 6 and counts(module)[1] == {"inputs": 5}


def test_threads_share_it(store: Path) -> None:
    module = wrapped(store)
    expected = {(rows, tokens): module._orig_mod(**batch(rows, tokens)) for rows in (1, 2) for tokens in (1, 4, 8)}
    wrong: list[Any] = []

    def call(_: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                for sizes, answer in expected.items():
                    problem, _ = difference(module(**batch(*sizes)), answer)
                    if problem is not None:
                        wrong.append((sizes, problem))

    in_threads(4, call)
    assert not wrong and counts(module) == (480, {})


SECOND = """
import json, sys
import torch
import precast.capture.exported
from precast.config import CompileConfig
from precast.wrapper.module import maybe_compile

def refused(*_, **__):
    raise RuntimeError("captured")

torch.export.export = torch.export.save = precast.capture.exported.build = refused
from wrapped_encoder import BUCKETS, SHAPES, batch, encoder

reports = []
for change in json.loads(sys.argv[2]):
    net, buckets = encoder(), dict(BUCKETS)
    exec(change)
    config = CompileConfig(name="encoder", store=sys.argv[1], buckets=buckets, shapes=SHAPES)
    module = maybe_compile(net, config, None, batch(2, 8))
    with torch.no_grad():
        assert torch.allclose(module(**batch(2, 5)).tokens, net(**batch(2, 5)).tokens, atol=1e-4), change
    reports.append(module.precast_report())
print(json.dumps(reports))
"""


def second(store: Path, changes: list[str], *folders: Path) -> list[dict[str, Any]]:
    """Runs the encoder in another process, changed in each of these ways; returns the reports."""
    path = os.pathsep.join([*map(str, folders), str(HERE), os.environ.get("PYTHONPATH", "")])
    return json.loads(python(SECOND, store, json.dumps(changes), PYTHONPATH=path))


def test_a_second_process_starts_without_a_capture(store: Path) -> None:
    found = second(store, ["", "for each in net.parameters(): torch.nn.init.normal_(each)"])
    for report in found:
        attempt = report["regions"][""]["attempt"]
        assert report["artifact"] == 1 and attempt["built"] is False and attempt["smoketest_steps"] == 3


def test_a_fresh_machine_takes_it_from_a_remote(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = f"file://{tmp_path}/there"
    for one in precast.releases(store=store)["releases"]:
        if one["model"] == "encoder":
            precast.push(f"encoder@{one['seq']}", remote, store=store)
    monkeypatch.setenv("PRECAST_REMOTE", remote)
    # Another machine has the sources elsewhere.
    (tmp_path / "wrapped_encoder.py").write_text(Path(wrapped_encoder.__file__).read_text())
    (report,) = second(tmp_path / "fresh", [""], tmp_path)
    assert report["artifact"] == 1 and report["regions"][""]["attempt"]["built"] is False
    # One that does not answer is said, and the module is built here: `second` has no capture.
    monkeypatch.setenv("PRECAST_REMOTE", "https://localhost:1/models")
    with pytest.warns(precast.PrecastWarning, match="nothing of `encoder` came from https://localhost:1/models"):
        wrapped(tmp_path / "other")
    # But not of a folder that the first push makes.
    with pytest.warns(precast.PrecastWarning) as said:
        wrapped(tmp_path / "other", remote=f"file://{tmp_path}/new", push=True)
    assert not [one for one in said if "came from" in str(one.message)]
    with pytest.raises(ValueError, match="`push` is given without `remote`"):
        monkeypatch.delenv("PRECAST_REMOTE")
        precast.CompileConfig(push=True)


def test_a_changed_module_is_another_release(store: Path, tmp_path: Path) -> None:
    changes = [
        "net.eps = 0.5",
        "net.first = torch.nn.Linear(16, 16, bias=False)",
        "net.head.weight = torch.nn.Parameter(torch.ones(50, 16))",
        "net.double()",
        "buckets['seq'] = [8, 16]",
    ]
    for change, report in zip(changes, second(store, changes), strict=True):
        assert report["reasons"] == {"not compiled": 1}, change
        assert "captured" in report["regions"][""]["attempt"]["exception"], change
    source = Path(wrapped_encoder.__file__).read_text()
    (tmp_path / "wrapped_encoder.py").write_text(source.replace("torch.relu", "torch.tanh"))
    (report,) = second(store, [""], tmp_path)
    assert report["reasons"] == {"not compiled": 1}


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int, float]:
        return self.linear(x) * x.shape[0], x.shape[0], 2.0 * x.shape[0]


def test_a_number_that_follows_a_size_is_no_constant_of_a_program(tmp_path: Path) -> None:
    net, sizes = Counts().eval(), {"buckets": {"batch": [1, 4]}, "shapes": {"x": ["batch", 4]}}
    module = maybe_compile(net, CompileConfig(store=tmp_path, **sizes), None, torch.ones(4, 4))
    with torch.no_grad():
        for rows in (1, 2, 4):
            answer, expected = module(torch.ones(rows, 4)), net(torch.ones(rows, 4))
            assert torch.equal(answer[0], expected[0]) and answer[1:] == expected[1:]
    assert counts(module) == (0, {"not compiled": 3})
    attempt = module.precast_report()["regions"][""]["attempt"]
    assert "a result that is no tensor follows the sizes: 1, 2.0 at these, 4, 8.0 at others" in attempt["exception"]
    one = maybe_compile(net, CompileConfig(store=tmp_path), None, torch.ones(4, 4))
    with torch.no_grad():
        assert one(torch.ones(4, 4))[1:] == (4, 8.0)
    assert counts(one) == (1, {})


def test_a_batch_norm_in_half_precision_is_built(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), nn.BatchNorm2d(5)).eval().bfloat16()
    x = torch.randn(2, 3, 4, 4).bfloat16()
    module = maybe_compile(net, CompileConfig(store=tmp_path, fail_policy="raise"), None, x)
    with torch.no_grad():
        assert difference(module(x), net(x))[0] is None
    assert counts(module) == (1, {})


def test_a_store_that_cannot_be_written_is_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    module = maybe_compile(net, CompileConfig(store=tmp_path / "file" / "store"), None, torch.ones(2, 4))
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 4)), net(torch.ones(2, 4)))
    assert counts(module) == (0, {"not compiled": 1})


@pytest.mark.long
def test_a_build_tries_option_sets(tmp_path: Path) -> None:
    config = CompileConfig(store=tmp_path / "store", name="tuned", tune=True)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4)
    module = maybe_compile(net, config, None, x)
    with torch.no_grad():
        assert torch.allclose(module(x), net(x))
    assert counts(module) == (1, {})
    (program,) = precast.ls(store=config.store).programs
    assert precast.show(program.id, store=config.store).request.tuned
    with pytest.raises(ValueError, match='`tune` is given with `backend = "inductor"`'):
        CompileConfig(backend="inductor", tune=True)
