"""The truth of a gate: the values of a module with more digits. Nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .support import Project, Quiet, part, spec
from .test_training import ADAM, train

truth = part("truth")

SGD = {"momentum": 0.9, "weight_decay": 0.0}

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(12) for _ in range(2))
        self.frozen = nn.Parameter(torch.rand(12) + 1, requires_grad=False)
        self.register_buffer("shift", torch.rand(12))

    def forward(self, x, targets):
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.relu(norm(layer(x * self.frozen + self.shift)))
        x = x + torch.zeros(12, dtype=torch.float32)
        return F.cross_entropy(x.float(), targets)

    def dropped(self, x, targets):
        return self(F.dropout(x, 0.5, self.training), targets)

    def single(self, x, targets):
        return self(x.numpy() if x.dtype == torch.float64 else x, targets)

def load():
    torch.manual_seed(0)
    return Net()
"""


def batch() -> list[dict[str, Any]]:
    targets = {**spec("targets", "int64", [4]), "range": [0, 12]}
    return [spec("x", "float32", [4, 12]), targets, spec("lr", "float32", [])]


class Truth(Project):
    def run_double(self, opened: Any, method: str = "forward", **more: Any) -> Any:
        """Returns the names of the states, the samples, and the values in double."""
        more = {"optimizer": "sgd", "options": SGD, **more}
        request = {"specs": batch(), "train": train(**more), "method": method}
        captured, values = self.truth_of(opened, "float64", 5, **request)
        names = [one["name"] for one in captured["states"]]
        return names, self.samples(captured), values

    def truth_of(self, opened: Any, dtype: str, number: int, **request: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Captures; returns that, and the values with more digits."""
        captured = self.capture(opened, **request)
        module = {"name": "m", "path": "", "method": "forward", "regions": [], **request}
        module["inputs"] = module.pop("specs")
        answer = truth.run(opened, module, {}, Path(captured["samples"]), dtype, number, self.out, Quiet())
        # A later call writes the same file.
        values = part("tensors").read(Path(answer["file"])).items()
        return captured, {name: one.clone() for name, one in values}

    def share(self, values: dict[str, Any], name: str) -> float:
        """Returns eager's distance as a share of the value."""
        return float(values[f"eager.{name}"] / values[name].square().mean().sqrt())

    def test_the_values_are_those_of_the_model_in_double(self) -> None:
        opened = self.open(SOURCE)
        names, samples, values = self.run_double(opened, optimizer="adamw", options=ADAM)
        self.assertEqual({one.dtype for one in values.values()}, {torch.float64, torch.int64})
        # The first call of a session, with a model that was made in double.
        model = self.open(SOURCE).model.double().train()
        for name, one in model.named_parameters():
            one.requires_grad_(name != "frozen")
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], **ADAM)
        for number in range(2):
            inputs = [samples[f"sequence.{number}.in.{at}"] for at in range(3)]
            optimizer.param_groups[0]["lr"] = float(inputs[2])
            with torch.inference_mode(False), torch.enable_grad(), part("torch_private.widening").Widening():
                loss = model(inputs[0].double(), inputs[1].clone())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(values[f"sequence.{number}.out.0"], loss.detach(), rtol=1e-12, atol=0)
        # Eager is near, in the usual distance of float32.
        for index, name in enumerate(names):
            if values[f"after.{index}"].is_floating_point():
                self.assertLess(self.share(values, f"after.{index}"), 1e-4, name)
                torch.testing.assert_close(
                    samples[f"after.{index}"].double(), values[f"after.{index}"], rtol=1e-3, atol=1e-5
                )

    def test_distances_show_what_rounding_does(self) -> None:
        opened = self.open(SOURCE)
        before = {name: one.clone() for name, one in opened.model.state_dict().items()}
        names, _, usual = self.run_double(opened)
        self.unchanged(opened, before)
        at = f"after.{names.index('optimizer.momentum_buffer.layers.1.weight')}"
        cast = self.run_double(opened, autocast="bfloat16")[2]
        self.assertGreater(self.share(cast, at), 1e3 * self.share(usual, at))
        self.assertLess(abs(float(cast["out.0"] - usual["out.0"])), 0.1)

    def test_masks_of_dropout_are_those_of_eager(self) -> None:
        _, samples, values = self.run_double(self.open(SOURCE), method="dropped")
        torch.testing.assert_close(samples["out.0"].double(), values["out.0"], rtol=1e-5, atol=0)

    def test_parts_of_an_accumulated_step_have_values_too(self) -> None:
        opened = self.open(SOURCE)
        names, _, values = self.run_double(opened, part="gradients")
        self.assertIn(f"eager.after.{names.index('optimizer.gradient.layers.0.weight')}", values)

    def test_halves_of_a_pair_have_values_too(self) -> None:
        opened = self.open(SOURCE)
        for half in ("forward", "backward"):
            request = {"pair": {"part": half, "autocast": None, "gradients": []}, "specs": batch()[:2]}
            captured, values = self.truth_of(opened, "float64", 5, **request)
            samples = self.samples(captured)
            for index, output in enumerate(captured["outputs"]):
                name = f"out.{index}"
                if values[name].is_floating_point():
                    self.assertEqual(values[name].dtype, torch.float64, output["name"])
                    self.assertLess(float(values[f"eager.{name}"]), 1e-4, output["name"])
                    torch.testing.assert_close(samples[name].double(), values[name], rtol=1e-3, atol=1e-5)
            self.assertEqual(opened.model.layers[0].weight.dtype, torch.float32)

    def test_code_that_double_breaks_is_refused_and_leaves_nothing_behind(self) -> None:
        opened = self.open(SOURCE)
        failure = self.fails("truth", self.run_double, opened, method="single")
        self.assertTrue(failure.message.startswith("float64 can't run it: "), failure.message)
        self.assertRegex(failure.location or "", r"project_\d+\.py:")
        self.assertEqual((opened.model.frozen.dtype, torch.get_default_dtype()), (torch.float32, torch.float32))

    def unchanged(self, opened: Any, before: dict[str, Any]) -> None:
        for name, one in opened.model.state_dict().items():
            self.assertTrue(one.dtype == before[name].dtype and torch.equal(one, before[name]), name)
        self.assertEqual(torch.get_default_dtype(), torch.float32)

    def values_of(self, source: str, specs: list[dict[str, Any]], dtype: str = "float32", **more: Any) -> Any:
        """Returns the samples of a call without gradients, and its values with more digits."""
        opened = self.open(source)
        before = {name: one.clone() for name, one in opened.model.state_dict().items()}
        captured, values = self.truth_of(opened, dtype, 4, specs=specs, dynamic={}, **more)
        self.unchanged(opened, before)
        return self.samples(captured), values

    def test_a_call_in_half_precision_has_the_values_of_float32(self) -> None:
        samples, values = self.values_of(HALF, [spec("x", "bfloat16", [4, 12])])
        model = self.open(HALF).model.float()
        with torch.inference_mode():
            exact = model.wide(samples["in.0"].float())
        torch.testing.assert_close(values["out.0"], exact, rtol=1e-5, atol=1e-6)
        eager = (samples["out.0"].float() - exact).norm() / exact.norm()
        norm, worst = values["eager.out.0"].tolist()
        self.assertTrue(eager / 3 < norm < eager * 3 and norm / 3 < worst, (float(eager), norm, worst))

    def test_a_call_in_float32_has_the_values_of_float64(self) -> None:
        samples, values = self.values_of(
            HALF.replace("bfloat16", "float32"), [spec("x", "float32", [4, 12])], "float64"
        )
        self.assertEqual(values["out.0"].dtype, torch.float64)
        torch.testing.assert_close(values["out.0"].float(), samples["out.0"], rtol=1e-5, atol=1e-6)
        self.assertTrue(0 < float(values["eager.out.0"][0]) < 1e-5)

    def test_operators_that_compare_dtypes_are_wide_whole(self) -> None:
        nn, functional = torch.nn, torch.nn.functional
        rows: list[tuple[Any, list[int]]] = [
            (nn.Conv1d(4, 6, 3), [2, 4, 9]),
            (nn.Conv2d(4, 6, 3), [2, 4, 9, 9]),
            (nn.Conv3d(4, 6, 3), [2, 4, 5, 5, 5]),
            (nn.ConvTranspose2d(4, 6, 3), [2, 4, 5, 5]),
            (nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, padding="same"), nn.GroupNorm(2, 4)), [2, 4, 5, 5]),
            (nn.Sequential(nn.LayerNorm(8), nn.InstanceNorm1d(4, affine=True), nn.PReLU()), [2, 4, 8]),
            (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [2, 4, 8]),
            (Called(lambda own, x: functional.bilinear(x, x, own.expand(3, 8, 8)), [8, 8]), [4, 8]),
            (Called(lambda own, x: functional.scaled_dot_product_attention(x, x, x, attn_mask=own), [4, 4]), [2, 4, 8]),
            (Called(lambda own, x: torch.einsum("bi,ij->bj", x, own) + own.mean(), [8, 8]), [4, 8]),
        ]
        widening = part("torch_private.widening")
        for net, shape in rows:
            half, x = net.eval().bfloat16(), torch.randn(shape).bfloat16()
            with self.subTest(net=str(net)):
                with torch.no_grad(), widening.Widening(torch.float32, tensors=True):
                    wide = half(x.float())
                with torch.inference_mode():
                    exact = half.float()(x.float())
                torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-5)
                self.assertTrue(torch.is_grad_enabled())

    def test_code_that_compares_dtypes_has_wide_parameters(self) -> None:
        layer = "nn.Linear(12, 12)"
        source = HALF.replace(layer, "nn.LSTM(12, 12)").replace("self.layer(x)", "self.layer(x)[0]")
        samples, values = self.values_of(source, [spec("x", "bfloat16", [4, 12])])
        model = self.open(source).model.float()
        with torch.inference_mode():
            exact = model.wide(samples["in.0"].float())
        torch.testing.assert_close(values["out.0"], exact, rtol=1e-5, atol=1e-6)

    def test_states_and_smaller_sizes_have_values_too(self) -> None:
        source = HALF.replace("return self.wide(x)", "self.seen.add_(x.mean(0))\n        return self.wide(x)")
        samples, values = self.values_of(source, [{**spec("x", "bfloat16", [4, 12]), "dims": ["batch", None]}])
        torch.testing.assert_close(values["after.0"].bfloat16(), samples["after.0"], rtol=0.02, atol=0.02)
        self.assertEqual(values["after.0"].dtype, torch.float32)
        smaller = [name for name in samples if name.startswith("smaller.") and ".out." in name]
        self.assertEqual({name for name in values if name.startswith("smaller.")}, set(smaller))


class Called(torch.nn.Module):
    """A function of a parameter and an input."""

    def __init__(self, function: Callable[[Any, Any], Any], shape: list[int]) -> None:
        super().__init__()
        self.own, self.function = torch.nn.Parameter(torch.randn(shape)), function

    def forward(self, x: Any) -> Any:
        return self.function(self.own, x)


HALF = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.first = nn.Parameter(torch.rand(1, 12))
        self.register_buffer("seen", torch.zeros(12))
        self.scale = torch.rand(12).to(torch.bfloat16)

    def wide(self, x):
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        x = self.norm(self.layer(x)).float().softmax(-1).to(x.dtype)
        # A view of a parameter.
        return torch.cat([x * self.scale, x.tanh(), self.first.expand(len(x), -1)], 1)

    def forward(self, x):
        return self.wide(x)

def load():
    torch.manual_seed(0)
    return Net().eval().to(torch.bfloat16)
"""
