"""Real builds of modules in hand: their answers against eager's, and the weights of the module itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import precast
import pytest
import torch
from conftest import command
from precast.capture import exported
from torch import nn
from transformers import BertConfig, BertModel

# Of the largest value.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported") / "artifacts"


def near(given: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
    limit = NEAR.get(wanted.dtype, 0) * wanted.abs().max().item()
    torch.testing.assert_close(given, wanted, rtol=0, atol=limit)


SCRIPT = """
    import sys
    import torch
    import precast
    from precast.capture import exported

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(40, 8)
            self.head = torch.nn.Linear(8, 40, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("position", torch.randn(16, 8))
            self.register_buffer("steps", torch.arange(16), persistent=False)

        def forward(self, ids, *, masks, scale):
            x = (self.embedding(ids) + self.position[: ids.shape[1]]) * scale * masks[0].unsqueeze(-1)
            return {"logits": self.head(x), "rest": (x.tanh(), [x + self.steps[: ids.shape[1], None]])}

    def sample(batch, seq):
        return {"ids": torch.randint(0, 40, (batch, seq)), "masks": [torch.ones(batch, seq)], "scale": 0.5}

    torch.manual_seed(int(sys.argv[2]))
    net = Net()
    request = {
        "shapes": {name: ["batch", "seq"] for name in ("ids", "masks.0")},
        "buckets": {"batch": [4], "seq": [8]},
        "options": {"freezing": False},
    }
    digest = "first"
    if len(sys.argv) > 3:
        built = precast.build(
            net, sample(2, 5), name="net", store=sys.argv[1], release=digest, progress=False, **request
        )
        print("compiled", built.compiled, [row.state for row in built.programs])
    assert net.training
    model = precast.load(sys.argv[1], f"net@{digest}", weights=exported.parameters(net))
    net.eval()
    for batch, seq in ((4, 8), (3, 5), (1, 1), (5, 12)):
        inputs = sample(batch, seq)
        tensors = {"ids": inputs["ids"], "masks": inputs["masks"]}
        given = model.forward(**tensors)
        with torch.no_grad():
            torch.testing.assert_close(given, net(**inputs), rtol=1e-4, atol=1e-5)
            net.head.weight.mul_(1.5)
            torch.testing.assert_close(model.forward(**tensors), net(**inputs), rtol=1e-4, atol=1e-5)
    assert [type(one).__name__ for one in (given, given["rest"], given["rest"][1])] == ["dict", "tuple", "list"]
    print("right")
"""


@pytest.mark.long
def test_a_class_of_main_is_built_once_and_found_by_a_second_process(artifacts: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT), "utf-8")

    def run(*arguments: str) -> list[str]:
        process = subprocess.run([sys.executable, script, artifacts, *arguments], stdout=subprocess.PIPE, text=True)
        assert process.returncode == 0
        return process.stdout.splitlines()

    assert run("0", "build") == ["compiled 1 ['built', 'built']", "right"]
    # Other weights, and no build.
    assert run("1") == ["right"]
    assert run("1", "build") == ["compiled 0 ['hit', 'hit']", "right"]


@pytest.mark.long
def test_an_encoder_of_transformers(artifacts: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    net = BertModel(BertConfig(vocab_size=100, max_position_embeddings=24, **sizes)).eval()

    def sample(batch: int, seq: int) -> dict[str, Any]:
        mask = torch.ones(batch, seq, dtype=torch.int64)
        mask[0, (seq + 1) // 2 :] = 0
        return {"input_ids": torch.randint(0, 100, (batch, seq)), "attention_mask": mask}

    shapes = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "attention_mask")}
    request = {"shapes": shapes, "buckets": {"batch": [4], "seq": [16]}, "regions": ["encoder.layer.*"]}
    request |= {"name": "bert", "store": artifacts, "options": {"freezing": False}, "progress": False}
    built = precast.build(net, sample(2, 6), **request)
    assert not built.failed and built.published
    # The layers share an artifact.
    assert built.compiled == 3
    program = precast.show("forward batch=4 seq=16", store=artifacts)
    bound = {name for step in program.json["steps"] for name in step["binding"].values()}
    assert {name for name in bound if not name.startswith("constant.")} <= exported.parameters(net).keys()
    with precast.load(artifacts, "bert", weights=exported.parameters(net)) as model:
        for batch, seq in ((4, 16), (3, 9), (1, 1), (2, 24), (7, 16)):
            inputs = sample(batch, seq)
            given = model.forward(**inputs)
            with torch.no_grad():
                wanted = net(**inputs)
            assert list(given) == list(wanted)
            for key in wanted:
                near(given[key], wanted[key])
        with pytest.raises(precast.NoFit):
            model.forward(**sample(1, 25))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        self.total += x
        return self.total * 2


@pytest.mark.long
def test_dynamic_sizes_and_states_are_built_as_from_a_spec(artifacts: Path) -> None:
    request = {
        "shapes": {"input": ["batch", 4]},
        "buckets": {"batch": [8]},
        "dynamic": {"batch": {"min": 2, "max": 64}},
    }
    request |= {"name": "dynamic", "store": artifacts, "progress": False}
    built = precast.build(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4), **request)
    names = [row.program for row in built.programs if row.state == "built"]
    assert names == ["forward batch=8", "forward dynamic", "forward eager"]
    net = Counter()
    precast.build(net, torch.randn(3), name="counter", store=artifacts, progress=False)
    assert not net.total.any()
    with precast.load(artifacts, "counter") as model, model.session() as session:
        for expected in (2.0, 4.0):
            assert session.run("forward", torch.ones(3)).tolist() == [expected] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_module_on_a_gpu(artifacts: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).cuda().eval()
    request: dict[str, Any] = {"shapes": {"input": ["batch", 8]}, "buckets": {"batch": [4]}}
    x = torch.randn(2, 8, device="cuda")
    built = precast.build(net, x, name="gpu", store=artifacts, progress=False, options={"freezing": False}, **request)
    assert not built.failed
    with precast.load(artifacts, "gpu", device="cuda", weights=exported.parameters(net)) as model:
        for batch in (4, 3, 9):
            x = torch.randn(batch, 8, device="cuda")
            with torch.no_grad():
                near(model.forward(x), net(x))
    with pytest.raises(precast.BadInput, match="one device"):
        precast.build(net, x.cpu(), name="gpu", store=artifacts, **request)


def test_a_kept_folder_is_a_project(artifacts: Path, tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    request = {"name": "dynamic", "store": artifacts, "progress": False, "mode": "unknown"}
    with pytest.raises(precast.BuildError, match="unknown"):
        precast.build(net, torch.randn(2, 4), folder=tmp_path / "kept", **request)
    spec = tmp_path / "kept" / "precast.toml"
    spec.write_text(spec.read_text().replace('mode = "unknown"', 'mode = "default"'))
    checked = subprocess.run([command(), "check", spec, "--python", sys.executable], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
