"""Pairs: the uncompiled programs of kind `autograd` have the results and gradients of eager; refusals are named."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .support import Project, model, part, spec

SOURCE = model(
    """\
x = self.embed(ids) + self.places * self.scale + more
for layer in self.layers:
    x = layer(x)
return {"logits": self.head(self.norm(x.transpose(1, 2)).transpose(1, 2)), "best": x.argmax(-1)}""",
    """\
torch.manual_seed(0)
self.embed, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
self.layers = torch.nn.ModuleList(Block(at) for at in range(3))
self.norm = torch.nn.BatchNorm1d(8)
self.head.weight = self.embed.weight
self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
self.register_buffer("places", torch.randn(4, 8), persistent=False)""",
    extra="""\
from torch.nn import functional as F

class Block(torch.nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.norm, self.qkv, self.drop = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24), torch.nn.Dropout(0.2)
        self.layer_idx = layer_idx

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 4, 8)
        return x + self.drop(y)
""",
    inputs="ids, more",
)


def pair(part: str, autocast: str | None = None, gradients: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the protocol's `pair`."""
    return {"part": part, "autocast": autocast, "gradients": list(gradients)}


def inputs() -> list[dict[str, Any]]:
    return [{**spec("ids", "int64", [2, 4]), "range": [0, 11]}, spec("more", "float32", [2, 4, 8])]


class Pairs(Project):
    def check(self, opened: Any, tolerance: float = 1e-5, **module: Any) -> dict[str, Any]:
        """Captures a program, and compares its steps, and the runtime's eager, with eager's answers."""
        return self.check_near(opened, tolerance, None, specs=inputs(), **module)

    def test_both_programs_have_the_answers_of_eager(self) -> None:
        opened = self.open(SOURCE)
        asked = {"regions": ["layers.*"]}
        forward = self.check(opened, pair=pair("forward", gradients=("more",)), **asked)
        backward = self.check(opened, pair=pair("backward", gradients=("more",)), **asked)
        for captured in (forward, backward):
            # Regions cut both programs, and equal ones share a segment.
            steps = {step["name"]: step["segment"] for step in captured["steps"]}
            blocks = sorted(name for name in steps if not name.startswith("glue"))
            self.assertEqual(blocks, ["layers.0", "layers.1", "layers.2"])
            self.assertEqual(steps["layers.1"], steps["layers.2"])
        outputs, read = (
            [one["name"] for one in captured[key]] for captured, key in ((forward, "outputs"), (backward, "inputs"))
        )
        self.assertLess({"output.0", "output.1", "buffer.norm.running_mean"}, set(outputs))
        for name in read:
            known = [*outputs, "tangent.0", *(f"input.{one['name']}" for one in forward["inputs"])]
            self.assertIn(name, [*known, *(one["name"] for one in forward["inputs"])])
        self.assertEqual([name for name in read if name.startswith("tangent.")], ["tangent.0"])
        self.assertEqual(sum(one["name"].startswith("random.") for one in forward["inputs"]), 3)
        # A tied parameter has a gradient under each name, a frozen one none.
        named = opened.model.named_parameters(remove_duplicate=False)
        parameters = {name for name, _ in named if name != "scale"}
        got = {one["name"] for one in backward["outputs"]}
        self.assertEqual(got, {"grad.input.more", *(f"grad.parameter.{name}" for name in parameters)})
        self.assertIsNone(forward["largest"])
        self.assertGreater(backward["largest"], 0)
        self.assertFalse(any(module.training for module in opened.model.modules()))
        self.assertFalse(any(one.requires_grad for one in opened.model.parameters()))
        self.assertEqual(int(opened.model.norm.num_batches_tracked), 0)

    def test_autocast_is_captured(self) -> None:
        opened = self.open(SOURCE)
        captured = self.check(opened, 4e-2, pair=pair("forward", autocast="bfloat16"))
        self.assertEqual({one["name"]: one["dtype"] for one in captured["outputs"]}["output.0"], "bfloat16")

    def test_what_has_no_gradient_is_refused_by_name(self) -> None:
        x = [spec("x", "float32", [2, 4])]
        for body, code, text in (
            ("x * 2", "bad_input", "has no parameter that requires a gradient"),
            ("self.l(x).argmax(-1)", "bad_input", "no result of"),
            ("self.l(x).detach()", "bad_input", "no result of"),
            ("self.l(x) + torch.rand_like(x)", "capture", "draws random numbers"),
            ("self.l(x) if x.sum() > 0 else x", "capture", "reads a value of a tensor"),
            ("self.l(x), x", "capture", "shares memory with one of its inputs"),
        ):
            with self.subTest(body):
                init = "self.l = torch.nn.Linear(4, 4)" if "self.l" in body else "pass"
                source = model(f"return {body}", init, inputs="x")
                failure = self.refused(code, source, specs=x, pair=pair("forward"))
                self.assertIn(text, failure.message)
                self.assertTrue(failure.hint)

    def test_attention_on_a_gpu_saves_no_memory_that_it_does_not_write(self) -> None:
        aten = torch.ops.aten
        with FakeTensorMode():
            heads = [torch.empty(2, 4, 8, 16, device="cuda") for _ in range(3)]

            def attend(q: Any, k: Any, v: Any) -> Any:
                out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
                return (out, sums, seed + 1, offset + 1)

            graph = make_fx(attend)(*heads).graph
        self.assertEqual(part("torch_private.draws").replaced(graph), [])
        (last,) = graph.find_nodes(op="output")
        of = [node.all_input_nodes[0].target for node in last.args[0][2:]]
        self.assertEqual(of, [aten.full.default] * 2)
        self.assertEqual(last.args[0][0].target, operator.getitem)
