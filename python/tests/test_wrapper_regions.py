"""Which submodules are compiled, and with which settings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import SEEDS, counts, fake_engine  # noqa: F401
from precast.compare.smoke import CompileSmoketest
from precast.config import CompileConfig
from precast.wrapper.regions import chosen, dimensions, resized
from test_wrapper_fallbacks import wrapped
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fake_engine")


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.mlp(self.attention(x)) * scale + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x.mean(1))


class Declares(Layer):
    settings: Any = None

    def get_torch_compile_config(self) -> Any:
        return self.settings


class Disabled(Layer):
    @torch.compiler.disable
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale)


SAMPLE = ((torch.ones(2, 5, 3),), {})


def names(model: nn.Module, **settings: Any) -> list[str]:
    return sorted(chosen(model, CompileConfig(**settings)))


def with_layer(layer: nn.Module, settings: Any = None) -> Model:
    model = Model()
    layer.settings = settings
    model.layers[1] = layer
    return model


LISTS: list[tuple[dict[str, list[str]], list[str]]] = [
    ({}, [""]),
    # The largest submodules that are named.
    ({"allowlist": ["layers.*"]}, ["layers.0", "layers.1"]),
    ({"allowlist": ["layers.0", "layers.0.mlp", "head"]}, ["head", "layers.0"]),
    ({"allowlist": ["*.mlp"]}, ["layers.0.mlp", "layers.1.mlp"]),
    ({"allowlist": ["nothing"]}, []),
    # The blocklist is stronger.
    ({"blocklist": ["head"]}, ["embedding", "layers.0", "layers.1"]),
    ({"allowlist": ["layers.*"], "blocklist": ["layers.1.mlp"]}, ["layers.0", "layers.1.attention"]),
    ({"blocklist": ["*"]}, []),
]


@pytest.mark.parametrize(("lists", "found"), LISTS)
def test_lists_choose_the_regions(lists: dict[str, list[str]], found: list[str]) -> None:
    assert names(Model(), **lists) == found


def test_disabled_submodules_are_left_out() -> None:
    assert names(with_layer(Disabled())) == ["embedding", "head", "layers.0"]
    for settings in ({"enabled": False}, {"forward": {"enabled": False}}):
        assert names(with_layer(Declares(), settings)) == ["embedding", "head", "layers.0"]
    model = Model()
    model.layers[0].forward = torch.compiler.disable(model.layers[0].forward)
    assert names(model) == ["embedding", "head", "layers.1"]


@pytest.mark.parametrize("settings", [{"mode": "max-autotune"}, {"forward": {"mode": "max-autotune"}}])
def test_a_submodule_declares_its_settings(settings: Any) -> None:
    found = chosen(with_layer(Declares(), settings), CompileConfig(options={"max_fusion_size": 8}))
    assert sorted(found) == ["embedding", "head", "layers.0", "layers.1"]
    assert found["layers.1"].mode == "max-autotune" and found["layers.0"].mode == "default"
    assert found["layers.1"].options == {"max_fusion_size": 8}
    model = with_layer(Declares(), {"options": {"epilogue_fusion": False}})
    merged = chosen(model, CompileConfig(options={"max_fusion_size": 8}))["layers.1"].options
    assert merged == {"max_fusion_size": 8, "epilogue_fusion": False}
    # Settings equal to the configuration split nothing.
    for same in ({"mode": "default"}, None):
        assert names(with_layer(Declares(), same)) == [""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speed": 3}, "returns `speed`"),
        ({"mode": "fast"}, "`mode` is 'fast'"),
        ([1], "returned list, not a dict"),
    ],
)
def test_a_wrong_declaration_is_named(settings: Any, message: str) -> None:
    module, _, records = wrapped(with_layer(Declares(), settings).eval(), sample=SAMPLE)
    with torch.no_grad():
        module(torch.ones(2, 5, 3))
    assert message in records.records[0].precast["exception"]  # type: ignore[attr-defined]
    assert counts(module) == (0, {"not compiled": 1})
    with pytest.raises((TypeError, ValueError), match=message):
        wrapped(with_layer(Declares(), settings).eval(), fail_policy="raise")


def test_a_module_that_is_left_out_as_a_whole_is_the_original() -> None:
    for net, settings in [(Disabled().eval(), {}), (Layer().eval(), {"allowlist": ["other"]})]:
        module, seeds, _ = wrapped(net, sample=((torch.ones(2, 4),), {}), **settings)
        with torch.no_grad():
            assert torch.equal(module(torch.ones(2, 4)), net(torch.ones(2, 4)))
        assert counts(module) == (0, {"disabled": 1}) and "opened" not in seeds


def test_regions_answer_inside_the_wrapper_alone() -> None:
    net = Model().eval()
    plain = copy.deepcopy(net)
    module, seeds, _ = wrapped(net, sample=SAMPLE, allowlist=["layers.*"])
    assert seeds["opened"] == ["layers.0", "layers.1"]
    x, seeds["answered"] = torch.randn(2, 5, 3), 0
    with torch.no_grad():
        assert torch.equal(module(x), plain(x)) and seeds["answered"] == 2
        assert torch.equal(net(x), plain(x)) and seeds["answered"] == 2, "the original is as it was"
    assert counts(module) == (2, {})
    assert set(module.precast_report()["regions"]) == {"layers.0", "layers.1"}
    assert CompileSmoketest().run(module, (x,), eager=plain).ok
    module.layers[1].train()
    with torch.no_grad():
        module(x)
    assert counts(module) == (10, {})
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.layers[0].mlp[0].weight.zero_()
        copied.eval()
        assert torch.equal(copied(x), copy.deepcopy(copied._orig_mod)(x))
    assert counts(copied)[0] == 2
    module.precast_close()
    assert net.layers[0]._compiled_call_impl is None
    assert module.state_dict().keys() == plain.state_dict().keys()


def test_regions_see_the_sizes_of_every_bucket() -> None:
    sizes = {"shapes": {"x": ["batch", "seq", 3]}, "buckets": {"batch": [1, 4], "seq": [8]}}
    module, _, _ = wrapped(Model().eval(), sample=SAMPLE, allowlist=["layers.*", "head"], **sizes)
    layer, head = module._precast.regions["layers.0"], module._precast.regions["head"]
    assert layer.shapes == {"x": ["d0", "d1", 4]} and head.shapes == {"input": ["d0", 4]}
    assert layer.points == [{"d0": 2, "d1": 5}, {"d0": 1, "d1": 8}, {"d0": 4, "d1": 8}]
    assert head.points == [{"d0": 2}, {"d0": 1}, {"d0": 4}]


def test_a_region_that_is_never_called_is_compiled_at_its_first_call() -> None:
    class Branches(Model):
        both = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.both else self.head(self.embedding(x).mean(1))

    net = Branches().eval()
    module, seeds, _ = wrapped(net, sample=SAMPLE, allowlist=["layers.*", "head"])
    assert seeds["opened"] == ["head"]
    net.both = True
    with torch.no_grad():
        module(torch.ones(2, 5, 3))
    assert seeds["opened"] == ["head", "layers.0", "layers.1"]
    assert counts(module) == (3, {})


def test_a_sample_that_fails_leaves_all_to_the_original() -> None:
    module, _, records = wrapped(Model().eval(), sample=((torch.ones(2, 5, 9),), {}), allowlist=["layers.*"])
    with torch.no_grad():
        module(torch.ones(2, 5, 3))
    assert counts(module) == (0, {"not compiled": 2})
    assert "RuntimeError" in records.records[0].precast["exception"]  # type: ignore[attr-defined]


def test_batches_are_made_at_other_sizes() -> None:
    x, mask = torch.arange(6).reshape(2, 3), torch.ones(3)
    shapes = {"x": ["batch", "seq"], "mask": ["seq"]}
    (made,), named = resized(((x,), {"mask": mask, "flag": None}), shapes, ["x"], {"batch": 1, "seq": 5})
    assert made.tolist() == [[0, 1, 2, 0, 1]] and named["mask"].shape == (5,) and named["flag"] is None


def test_axes_that_move_together_are_one_dimension() -> None:
    def call(batch: int, seq: int) -> Any:
        return (torch.ones(batch * 2, seq), (torch.ones(batch, seq, 7),)), {"scale": 2.0}

    axes, points = dimensions([call(1, 3), call(2, 3), call(1, 5)], ["a", "b"])
    assert axes == {"a": ["d0", "d1"], "b.0": ["d2", "d1", 7]}
    assert points == [{"d0": 2, "d1": 3, "d2": 1}, {"d0": 4, "d1": 3, "d2": 2}, {"d0": 2, "d1": 5, "d2": 1}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, "`mode` is 'fast'; it must be one of 'default'"),
        ({"fail_policy": "panic"}, "`fail_policy` is 'panic'"),
        ({"backend": ""}, "`backend` is ''"),
        ({"smoketest_steps": -1}, "`smoketest_steps` is -1"),
        ({"allowlist": "layers.*"}, "`allowlist` is 'layers"),
        ({"buckets": {"batch": [0]}, "shapes": {"x": ["batch"]}}, "`buckets` has \\[0\\] for `batch`"),
        ({"buckets": {"batch": [1]}}, "`buckets` has `batch`, which `shapes` names for no input"),
        ({"pad": {"x": 1}}, "`pad` has a value for `x`"),
        ({"shapes": {"x": ["batch"]}}, "`shapes` names `batch` for `x`"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompileConfig(**settings)


def test_the_code_of_the_guide_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 4)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.embedding(input_ids) * attention_mask[..., None]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SEEDS, "encoder", {"open": RuntimeError("no build")})
    page = Path(__file__).resolve().parents[2] / "docs" / "src" / "guide" / "maybe-compile.md"
    first, second, third = [block.partition("```")[0] for block in page.read_text().split("```python\n")[1:]]
    net, ids, mask = Encoder().eval(), torch.randint(0, 50, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    names: dict[str, Any] = {"net": net, "ids": ids, "mask": mask, "torch": torch, "logger": None}
    exec(first, names)
    assert torch.equal(names["answer"], net(ids, mask))
    assert "no build" in names["wrapped"].precast_report()["regions"][""]["attempt"]["exception"]
    names |= {"compiled": lambda ids, mask: net(ids, mask), "batch": (ids, mask)}
    exec(second, names)
    assert torch.equal(names["answer"], net(ids, mask)) and names["result"].ok
    exec(third, names)
    assert names["net"]._orig_mod is net  # what it does is in test_dynamo.py
