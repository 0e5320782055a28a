"""Which regions are equal: those that share a release. Nothing is compiled here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import python
from precast import CompileConfig, maybe_compile
from precast.wrapper import parts, requests
from precast.wrapper.logs import Log
from torch import Tensor, nn
from torch.nn import functional as F

MAKE = Callable[[int], nn.Module]


class Layer(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.eps, self.kind = number, 2, 1e-5, "gelu"
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(F.gelu(self.linear(x)) * self.scale + self.table)


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def groups(monkeypatch: pytest.MonkeyPatch, net: nn.Module, kind: str = "inference", **settings: Any) -> list[str]:
    """Returns the numbers of the equal layers, as `["0 1", "2"]`."""
    return [
        " ".join(one.removeprefix("layers.") for one in names) for names in found(monkeypatch, net, kind, **settings)
    ]


def found(monkeypatch: pytest.MonkeyPatch, net: nn.Module, kind: str, **settings: Any) -> dict[tuple[str, ...], str]:
    """Returns the names of equal regions, with the name of their release."""
    seen: dict[str, list[str]] = {}

    def obtain(model: str, asked: Any, log: Log, without: Any = None) -> dict[Any, Any]:
        for region, release in real(model, asked, log, without).items():
            if isinstance(release, Exception):
                print(release)
            else:
                seen.setdefault(release.name, []).append(region.name)
        return dict.fromkeys(asked, RuntimeError("no build"))

    real = requests.obtain
    with monkeypatch.context() as patch:
        patch.setattr(requests, "obtain", obtain)
        patch.setattr(parts, "build", lambda *_, **__: {})
        net.train(kind == "autograd")
        config = CompileConfig(kind=kind, allowlist=["layers.*"], store="nowhere", **settings)
        maybe_compile(net, config, None, torch.ones(2, 4))
    return {tuple(names): name for name, names in seen.items()}


@pytest.mark.parametrize("kind", ["inference", "autograd"])
def test_layers_that_differ_in_an_unread_number_are_equal(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    net = Model([Layer(number) for number in range(4)])
    before = copy.deepcopy(net.state_dict()), [vars(layer).keys() for layer in net.layers]
    assert groups(monkeypatch, net, kind) == ["0 1 2 3"]
    assert "layer_idx" not in vars(Layer) and [vars(layer).keys() for layer in net.layers] == before[1]
    assert all(torch.equal(one, before[0][name]) for name, one in net.state_dict().items())


class Reads(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * self.layer_idx


class ReadsLate(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if getattr(copy.copy(self), "layer_idx", 0) < 9 else x


class ReadsTable(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self)["layer_idx"]


class Opaque:
    """An attribute whose text says nothing of its value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Holds(Layer):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.held = Opaque(value)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.held.value


class WhileCompiling(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return Layer.forward(self, x) * (self.held.value if torch.compiler.is_compiling() else 1)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.scale, None


class InBackward(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(Layer.forward(self, x), self.held.value)


class Hooked(Holds):
    def forward(self, x: Tensor) -> Tensor:
        y = Layer.forward(self, x)
        scale = self.held.value
        if y.requires_grad:
            y.register_hook(lambda grad: grad * scale)
        return y


def with_(change: Callable[[Layer, int], Any]) -> MAKE:
    def make(number: int) -> nn.Module:
        layer = Layer(number)
        change(layer, number)
        return layer

    return make


def closure(layer: Layer, number: int) -> None:
    own = layer.forward
    layer.forward = lambda x: own(x) * (number + 1.0)  # type: ignore[method-assign]


def constant(layer: Layer, number: int) -> None:
    own, held = layer.forward, torch.full((4,), float(number))
    layer.forward = lambda x: own(x) + held  # type: ignore[method-assign]


def tied(layer: Layer, number: int) -> None:
    layer.other = nn.Parameter(torch.ones(4))
    layer.linear.bias = layer.other if number else nn.Parameter(torch.ones(4))


def same_name(number: int) -> nn.Module:
    class Local(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return Local(number)


def strided(layer: Layer, number: int) -> None:
    if number:
        layer.linear.weight = nn.Parameter(torch.randn(4, 4).t())


def narrowed(layer: Layer, number: int) -> None:
    layer.scale = layer.scale.to(torch.float64 if number else torch.float32)


def untrained(layer: Layer, number: int) -> None:
    layer.drop.train = lambda mode: nn.Module.train(layer.drop, mode and not number)  # type: ignore[method-assign]


DIFFERENT: dict[str, MAKE] = {
    "a number that is read": Reads,
    "a number in the table of attributes": ReadsTable,
    "an object without text": lambda number: Holds(number + 1.0),
    "a probability of dropout": with_(lambda layer, number: setattr(layer.drop, "p", 0.1 + number / 10)),
    "the dtype of a buffer": with_(narrowed),
    "an absent parameter": with_(lambda layer, number: layer.linear.register_parameter("bias", None) if number else 0),
    "strides of a parameter": with_(strided),
    "a closure": with_(closure),
    "a subclass": lambda number: type("Sub", (Layer,), {})(number) if number else Layer(number),
}
EQUAL: dict[str, MAKE] = {
    "an attribute that nothing reads": with_(lambda layer, number: setattr(layer, "eps", number * 1.0)),
    "a flag that nothing reads": with_(lambda layer, number: setattr(layer, "flag", bool(number))),
    "the values of a buffer that no state dict has": with_(lambda layer, number: layer.table.add_(number)),
    "an object with equal values": lambda number: Holds(2.0),
    "an object with equal values in the backward call": lambda number: InBackward(2.0),
    "a hook of a gradient with an equal value": lambda number: Hooked(2.0),
    "weights that are tied to one that nothing reads": with_(tied),
    "a tensor in a closure": with_(constant),
    "a class of the same name and code": same_name,
}
TRAINED: dict[str, MAKE] = {
    "a training flag": with_(untrained),
    "a frozen parameter": with_(lambda layer, number: layer.linear.bias.requires_grad_(not number)),
    "a factor of the backward call": lambda number: InBackward(number + 1.0),
    "a hook of a gradient": lambda number: Hooked(number + 1.0),
}


BOTH = [(kind, what) for kind in ("inference", "autograd") for what in DIFFERENT | EQUAL]


@pytest.mark.parametrize(("kind", "what"), [*BOTH, *(("autograd", what) for what in TRAINED)])
def test_layers_are_equal_unless_they_differ_in_what_is_read(
    monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    make = (DIFFERENT | EQUAL | TRAINED)[what]
    expected = ["0 1"] if what in EQUAL else ["0", "1"]
    assert groups(monkeypatch, Model([make(0), make(1)]), kind) == expected


def test_layers_at_other_sizes_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Widens(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](torch.cat([self.layers[0](x)] * 2))

    assert groups(monkeypatch, Widens([Layer(), Layer()])) == ["0", "1"]


def test_declared_settings_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Declares(Layer):
        def get_torch_compile_config(self) -> Any:
            return {"options": {"max_fusion_size": self.layer_idx + 8}}

    assert groups(monkeypatch, Model([Declares(0), Declares(1), Declares(1)])) == ["0", "1 2"]


def test_a_branch_on_a_size_is_a_fact_at_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(Holds):
        def forward(self, x: Tensor) -> Tensor:
            return Layer.forward(self, x) if x.shape[0] < self.held.value else x * self.scale

    sizes = {"buckets": {"batch": [3, 8]}, "shapes": {"x": ["batch", 4]}}
    assert groups(monkeypatch, Model([Long(6), Long(6)]), **sizes) == ["0 1"]
    assert groups(monkeypatch, Model([Long(6), Long(9)]), **sizes) == ["0", "1"]


def test_a_hooked_layer_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Model([Layer(0), Layer(1), Layer(2)])
    net.layers[1].linear.register_forward_hook(lambda *given: given[-1] * 2)
    assert groups(monkeypatch, net) == ["0 2", "1"]


def test_a_layer_that_a_trace_cannot_follow_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert groups(monkeypatch, Model([ReadsLate(0), Layer(0)])) == ["1"]
    # It computes another value while it is compiled.
    assert groups(monkeypatch, Model([WhileCompiling(1.0), WhileCompiling(2.0)])) == ["0"]


def test_the_first_layer_shares_a_pair_with_gradients_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Through(Layer):
        """Its second result requires a gradient if its input does."""

        def forward(self, x: Any) -> Any:
            x = x if isinstance(x, Tensor) else x[0]
            return super().forward(x), x * 2

    assert groups(monkeypatch, Model([Layer(0), Layer(1), Layer(2)]), "autograd") == ["0 1 2"]

    class Pairs(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x, _ = layer(x)
            return x

    assert groups(monkeypatch, Pairs([Through(0), Through(1), Through(2)]), "autograd") == ["0", "1 2"]


def test_a_name_is_the_same_in_another_process() -> None:
    code = (
        "import sys, pytest, test_requests as t\n"
        "layers = [t.Layer(int(number)) for number in sys.argv[1:]]\n"
        "with pytest.MonkeyPatch.context() as patch:\n"
        "    print(t.found(patch, t.Model(layers), 'autograd'))\n"
    )
    first, second = python(code, 1, 2), python(code, 4, 7)
    assert first == second and "layers.1" in first


class Branches(nn.Module):
    """Can't be captured: a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_a_region_that_cannot_be_captured_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[str] = []

    def build(_: str, found: Any, **settings: Any) -> dict[str, Exception]:
        built.extend(found)
        return {}

    monkeypatch.setattr(parts, "build", build)
    net = Model([Layer(0), Branches(), Layer(1), Branches()]).eval()
    config = CompileConfig(store=tmp_path, allowlist=["layers.*"], name="some")
    regions = maybe_compile(net, config, None, torch.ones(2, 4)).precast_report()["regions"]
    errors = {name.removeprefix("layers."): one["attempt"]["exception"] for name, one in regions.items()}
    assert len(built) == 1
    assert "NotFound" in errors["0"] and "NotFound" in errors["2"]
    assert "can't be captured" in errors["1"] and "can't be captured" in errors["3"]


class WritesOnce(Layer):
    """Writes in its first call what it reads in all others."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.mode: str | None = None
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mode is None:
            self.mode = "of two" if x.dim() == 2 else "of others"
        if self.cached is None:
            self.cached = torch.arange(4.0)
        return super().forward(x) * (2 if self.mode == "of two" else 3) + self.cached


class WritesAlways(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.layer_idx += 1
        return super().forward(x) * self.layer_idx


@pytest.mark.parametrize("kind", ["inference", "autograd"])
def test_what_a_first_call_writes_is_as_in_all_later_ones(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert groups(monkeypatch, Model([WritesOnce(number) for number in range(3)]), kind) == ["0 1 2"]
    assert groups(monkeypatch, Model([WritesAlways(), Layer()]), kind) == ["1"]
