"""Training: the graph of a step equals backward() and torch.optim; what can't be trained is refused by name."""

from __future__ import annotations

import math
from typing import Any

import torch

from .support import Project, Quiet, long, model, part, spec

optimizers = part("train.optimizers")

SOURCE = """
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(11, 8), torch.nn.BatchNorm1d(8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("places", torch.randn(4, 8))

    def logits(self, ids):
        x = self.norm((self.embed(ids) + self.places * self.scale).transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 4, 8)
        return self.head(x)

    def forward(self, ids, targets):
        logits = self.logits(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, {"accuracy": (logits.argmax(-1) == targets).float().mean()}

def update(param, grad, state, lr, step):
    state["kept"].mul_(0.9).add_(grad)
    param.sub_(lr * state["kept"].sign())

update.state = ("kept",)

def reads(param, grad, state, lr, step):
    if float(grad.sum()) > 0:
        param.sub_(lr * grad)

def load():
    torch.manual_seed(0)
    return Net()
"""

DROPOUT = "lambda x: self.head(F.dropout(x, 0.5, self.training))"

# Floating-point operations of the loss: 8 rows from 8 to 24 and to 11 columns; two products in each of 4 heads.
PRODUCTS, ATTENTION = 2 * 8 * 8 * (24 + 11), 2 * (2 * 4 * 4 * 4 * 4)

ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
OPTIMIZERS: list[tuple[str, dict[str, Any], float | None]] = [
    ("adamw", ADAM, None),
    ("adamw", ADAM, 0.05),
    ("adam", ADAM, None),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}, 0.05),
    ("sgd", {"momentum": 0.0, "weight_decay": 0.0}, None),
]


def train(part: str = "step", optimizer: str = "adamw", options: dict[str, Any] | None = None, **more: Any) -> Any:
    """Returns the protocol's `train`."""
    options = (ADAM if options is None else options) if ":" not in optimizer else {}
    return {"part": part, "optimizer": optimizer, "options": options, "clip": None, "autocast": None, **more}


def batch(part: str = "step") -> list[dict[str, Any]]:
    """Returns the inputs of a part."""
    both = [{**spec(name, "int64", [2, 4]), "range": [0, 11]} for name in ("ids", "targets")]
    rate = [spec("lr", "float32", [])]
    return {"step": both + rate, "update": rate}.get(part, both)


class Training(Project):
    def check(self, opened: Any, **module: Any) -> dict[str, Any]:
        """Captures, and compares the captured steps and eager's calls with backward() and torch.optim."""
        return self.check_near(opened, 1e-4, 1e-5, **module)

    def test_a_step_is_that_of_torch_optim(self) -> None:
        opened = self.open(SOURCE)
        for optimizer, options, clip in OPTIMIZERS:
            with self.subTest(optimizer=optimizer, options=options, clip=clip):
                request = train(optimizer=optimizer, options=options, clip=clip)
                captured = self.check(opened, specs=batch(), train=request)
                self.assertEqual([one["name"] for one in captured["outputs"]], ["loss", "accuracy", "grad_norm"])
        names = [one["name"] for one in self.capture(opened, specs=batch(), train=train())["states"]]
        # A tied parameter is one state, a frozen one none, and a buffer that is only read is a weight.
        own = ["embed.weight", "norm.weight", "norm.bias", "qkv.weight", "qkv.bias"]
        buffers = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
        moments = [f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in own]
        self.assertEqual(names, [*own, *buffers, *moments, "optimizer.step"])
        self.assertFalse(any(module.training for module in opened.model.modules()))

    def test_the_samples_notice_a_wrong_update(self) -> None:
        opened = self.open(SOURCE)
        captured = self.capture(opened, specs=batch(), train=train())
        samples = {name: one.clone() for name, one in self.samples(captured).items()}
        wrong = {**ADAM, "weight_decay": 0.0}
        captured = self.capture(opened, specs=batch(), train=train(options=wrong))
        other = self.samples(captured)
        first = [one["name"] for one in captured["states"]].index("qkv.weight")
        differs = (samples[f"after.{first}"] - other[f"after.{first}"]).abs().max()
        self.assertGreater(float(differs), 1e-4)

    def test_the_norm_of_a_large_gradient_is_exact_in_eager(self) -> None:
        # The gradient of an output layer: the rows of the right words are much larger than those of all others.
        torch.manual_seed(0)
        grad = torch.randn(8000, 384) * 1e-4
        grad[:128] = torch.randn(128, 384) * 1e-2
        exact = torch.linalg.vector_norm(grad.double())
        self.assertGreater(abs(float(torch.linalg.vector_norm(grad) / exact) - 1), 1e-4)  # torch's own, in float32
        for clip in (None, 0.5):
            norm, (clipped,) = optimizers.clipped([grad.clone()], clip, eager=True)
            self.assertAlmostEqual(float(norm / exact), 1.0, places=6)
            expected = grad.double() * min(1.0, (clip or math.inf) / float(exact + 1e-6))
            torch.testing.assert_close(clipped, expected.float(), rtol=1e-6, atol=0)

    def test_samples_have_no_average_that_is_zero_but_for_rounding(self) -> None:
        source = model(
            "x = self.first(ids)\nreturn self.last((x - x.mean(0)).sin()).square().mean()",
            "torch.manual_seed(0)\nself.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)",
            inputs="ids",
        )
        for cast in (None, "bfloat16"):
            opened = self.open(source)
            specs = [spec("ids", "float32", [4, 8]), spec("lr", "float32", [])]
            captured = self.check(opened, specs=specs, train=train(autocast=cast))
            names, samples = [one["name"] for one in captured["states"]], self.samples(captured)
            for name, share in (("exp_avg", 0.05), ("exp_avg_sq", 1e-3)):
                tiny, other = (
                    float(samples[f"state.{names.index(f'optimizer.{name}.{part}')}"].abs().max())
                    for part in ("first.bias", "last.bias")
                )
                self.assertGreater(tiny, share * other, (name, cast))

    def test_an_optimizer_of_the_project(self) -> None:
        name = self.write(SOURCE)
        opened = part("model.entry").open_model(self.root, f"{name}:load", "cpu", [f"{name}:update"])
        captured = self.check(opened, specs=batch(), train=train(optimizer=f"{name}:update"))
        self.assertIn("optimizer.kept.qkv.bias", [one["name"] for one in captured["states"]])
        failure = self.refused("capture", opened, specs=batch(), train=train(optimizer=f"{name}:reads"))
        self.assertIn("reads a value of a tensor", failure.message)
        self.assertIn(f"{name}.py:", failure.location)
        failure = self.refused("entry_call", opened, specs=batch(), train=train(optimizer=f"{name}:load"))
        self.assertIn("can't be called as an optimizer", failure.message)

    def test_gradients_are_accumulated_and_the_update_takes_their_mean(self) -> None:
        opened = self.open(SOURCE)
        captured = self.check(opened, specs=batch("gradients"), train=train("gradients"))
        self.assertEqual([one["name"] for one in captured["outputs"]], ["loss", "accuracy"])
        captured = self.check(opened, specs=batch("update"), train=train("update", clip=0.05))
        self.assertEqual(captured["receipt"]["flops"], {})
        self.assertEqual([one["name"] for one in captured["outputs"]], ["grad_norm"])
        after = {one["name"]: self.states[at] for at, one in enumerate(captured["states"])}
        self.assertEqual(int(after["optimizer.batches"]), 0)
        self.assertEqual(float(after["optimizer.gradient.qkv.bias"].abs().max()), 0.0)

    def test_eval_has_the_loss_and_changes_nothing(self) -> None:
        opened = self.open(SOURCE)
        captured = self.check(opened, specs=batch("eval"), train=train("eval"))
        self.assertEqual(captured["receipt"]["flops"], {"float32": PRODUCTS + ATTENTION})
        samples = self.samples(captured)
        for index in range(len(captured["states"])):
            self.assertTrue(torch.equal(samples[f"state.{index}"], samples[f"after.{index}"]))

    @long
    def test_dropout_draws_from_a_seed_and_a_counter(self) -> None:
        source = SOURCE.replace("self.head(x)", f"({DROPOUT})(x * (torch.rand(4, 8) if self.training else 0.5))")
        source = source.replace("is_causal=True", "is_causal=True, dropout_p=0.3 if self.training else 0.0")
        opened = self.open(source)
        for kind in ("step", "gradients"):
            captured = self.check(opened, specs=batch(kind), train=train(kind))
            self.assertEqual([one["name"] for one in captured["states"]][-2:], ["random.seed", "random.calls"])
        captured = self.check(opened, specs=batch(), train=train())
        weights, samples = self.weights(opened, captured), self.samples(captured)
        self.assertEqual(int(samples[f"after.{len(self.states) - 1}"] - samples[f"state.{len(self.states) - 1}"]), 1)

        def loss(seed: int, calls: int) -> float:
            given = self.given(captured, samples)
            given[-2:] = torch.tensor(seed), torch.tensor(calls)
            return float(self.run_eager(captured, given, weights)[0])

        self.assertEqual(loss(3, 0), loss(3, 0))
        self.assertEqual(len({loss(seed, calls) for seed in (3, -(2**63), 2**40) for calls in (0, 1)}), 6)
        names = [one["name"] for one in self.capture(opened, specs=batch("eval"), train=train("eval"))["states"]]
        self.assertNotIn("random.seed", names)

    def test_draws_are_as_frequent_as_their_probability_and_independent(self) -> None:
        seeded, count = part("train.seeded"), 1 << 18
        made = [seeded.Draws(torch.tensor(seed), torch.tensor(calls)) for seed in (0, 1, 2**32) for calls in (0, 1, 2)]
        like = torch.empty(count)
        for probability in (0.1, 0.5, 0.9):
            # Five standard deviations of a mean, in 27 masks and in the agreement of each pair.
            bound = 5 * 0.5 / count**0.5
            masks = [drawn.kept(like, probability).double() for drawn in made for _ in range(3)]
            for index, mask in enumerate(masks):
                self.assertLess(abs(float(mask.mean()) - probability), bound)
                self.assertLess(abs(float((mask[1:] * mask[:-1]).mean()) - probability**2), bound)
                for other in masks[:index]:
                    self.assertLess(abs(float((mask * other).mean()) - probability**2), bound)
        x = torch.ones(count)
        with made[0].replacing():
            dropped, rates = torch.nn.functional.dropout(x, 0.25), torch.bernoulli(x * 0.3)
            numbers = torch.rand(count)
        self.assertEqual(set(dropped.tolist()), {0.0, float(torch.tensor(1 / 0.75))})
        self.assertLess(abs(float(dropped.mean()) - 1), bound * 2)
        self.assertLess(abs(float(rates.mean()) - 0.3), bound)
        for power, mean in ((1, 1 / 2), (2, 1 / 3)):
            self.assertLess(abs(float((numbers.double() ** power).mean()) - mean), bound)
        self.assertTrue(bool((numbers >= 0).all() and (numbers < 1).all()))

    def test_autocast(self) -> None:
        opened = self.open(SOURCE)
        captured = self.capture(opened, specs=batch(), train=train(autocast="bfloat16"))
        weights, samples = self.weights(opened, captured), self.samples(captured)
        results = self.composed(captured, weights)
        torch.testing.assert_close(results[0], samples["out.0"], rtol=2e-2, atol=2e-2)
        of_states = captured["compute_dtypes"][len(captured["outputs"]) :]
        moved = {one["name"] for one, dtype in zip(captured["states"], of_states, strict=True) if dtype == "bfloat16"}
        self.assertEqual(captured["compute_dtypes"][0], "bfloat16")
        # The norm reads the batch as it is.
        of_norm = {f"norm.{one}" for one in ("running_mean", "running_var", "num_batches_tracked")}
        self.assertEqual(moved, {one["name"] for one in captured["states"]} - of_norm - {"optimizer.step"})
        # A backward pass has two products for one; that of attention five for two, as it computes the scores again.
        both = 3 * PRODUCTS + ATTENTION + ATTENTION * 5 // 2
        self.assertEqual(captured["receipt"]["flops"], {"bfloat16": both})

    def test_what_stops_training_is_named(self) -> None:
        cut = "@torch.library.custom_op('training::cut', mutates_args=())\n"
        cut += "def cut(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        cut += "cut.register_fake(lambda x: torch.empty_like(x))\n\nclass Net("
        branch = "        if float(self.qkv.bias.sum()) > 0: ids = ids + 0\n        logits = "
        unused = "self.unused = torch.nn.Linear(2, 2)\n        self.scale = "
        for code, old, new, message in (
            ("bad_input", "targets.flatten())", 'targets.flatten(), reduction="none")', "float32[8], not one number"),
            ("bad_input", "self.scale = ", unused, "parameter `unused.weight` and 1 more has no gradient"),
            ("bad_input", "loss = F.", "with torch.no_grad():\n          loss = F.", "depends on no parameter"),
            ("capture", "self.head(x)", "self.head(x + torch.randn_like(x))", "draws random numbers"),
            ("capture", "self.head(x)", f"checkpoint({DROPOUT}, x, use_reentrant=False)", "draws random numbers"),
            ("capture", "        logits = ", branch, "reads a value of a tensor"),
            ("capture", "self.head(x)", "self.head(cut(x))", "training.cut"),
        ):
            source = SOURCE.replace(old, new).replace("class Net(", cut if "cut" in message else "class Net(")
            self.assertIn(message, self.refused(code, source, specs=batch(), train=train()).message)

    def test_a_check_names_what_stops_training(self) -> None:
        def findings(change: tuple[str, str] | None = None) -> list[Any]:
            opened = self.open(SOURCE.replace(*change) if change else SOURCE)
            module = {"name": "m", "path": "", "method": "forward", "regions": [], "inputs": batch(), "train": train()}
            checked = part("check").check(opened, {"module": module, "sizes": {}}, Quiet())
            self.assertEqual(checked["captured"], not checked["findings"])
            return [(one["category"], one["severity"]) for one in checked["findings"]]

        self.assertEqual(findings(), [])
        self.assertEqual(findings(("self.head(x)", f"({DROPOUT})(x)")), [])
        self.assertEqual(findings(("self.head(x)", "self.head(x + torch.randn_like(x))")), [("random", "high")])
        self.assertEqual(findings(("targets.flatten())", 'targets.flatten(), reduction="none")')), [("step", "high")])
