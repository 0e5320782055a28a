"""Products of the same rows become one, with the same results and with recipes for its weights."""

from __future__ import annotations

from typing import Any

import precast_kernels
import torch

from tests.worker.support import Project, long, model, part
from tests.worker.test_compile import follow

from .support import context_of, graph_of, recipes, tidy

PRODUCTS = model(
    """\
query = self.query(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
key, value = (part(x).view(*x.shape[:2], 1, 8).transpose(1, 2) for part in (self.key, self.value))
made = torch.nn.functional.scaled_dot_product_attention(query, key.expand_as(query), value.expand_as(query))
made = made.transpose(1, 2).reshape(x.shape)
return self.out(made + x), torch.nn.functional.silu(self.gate(made)) * self.up(made), self.tied(x)""",
    """\
torch.manual_seed(0)
self.query, self.key, self.value = (torch.nn.Linear(16, width) for width in (16, 8, 8))
self.gate, self.up, self.tied = (torch.nn.Linear(16, 24, bias=False) for _ in range(3))
self.tied.weight = self.up.weight
self.out = torch.nn.Linear(16, 4)""",
)

ATTENTION_INPUTS = model(
    "return self.query(x).sin(), self.key(x).sin(), self.value(x).sin()",
    """\
torch.manual_seed(0)
self.query, self.key, self.value = (torch.nn.Linear(384, width) for width in (384, 96, 96))""",
)


class FusedLinearTest(Project):
    def test_products_of_the_same_rows_are_one(self) -> None:
        module, weights, _ = self.load_segment(PRODUCTS, [2, 5, 16])
        x = torch.randn(2, 5, 16)
        wanted = module(x)
        context = context_of(module)
        tidy(module, context, [precast_kernels.fused_linear])
        # A query, a key and a value, their biases, and a gate with its values.
        self.assertEqual([recipe["shape"] for recipe in recipes(context).values()], [[32, 16], [32], [48, 16]])
        held = dict(module.named_buffers())
        for name, recipe in recipes(context).items():
            self.assertTrue(torch.equal(follow(recipe["call"], weights), held[name]))
        products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        self.assertEqual(len(products), 4)
        for got, want in zip(module(x), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        tidy(module, context, [precast_kernels.fused_linear])
        self.assertEqual(len(recipes(context)), 3)

    def test_what_must_lie_as_it_was_is_left_apart(self) -> None:
        functional = torch.nn.functional

        def later(x: Any, operations: int) -> Any:
            for _ in range(operations):
                x = x.cos()
            return x

        reads = {
            "a result": lambda x, a, b: (functional.linear(x, a), functional.linear(x, b)),
            "a view of a result": lambda x, a, b: [
                functional.dropout(functional.linear(x, w).view(2, 3, 2, 4).transpose(1, 2), training=False)
                for w in (a, b)
            ],
            "memory": lambda x, a, b: [functional.linear(x, w).as_strided((2, 3), (24, 8)) + 1 for w in (a, b)],
            "a slice": lambda x, a, b: [one + 1 for w in (a, b) for one in functional.linear(x, w).split(4, -1)],
            "a row": lambda x, a, b: [functional.linear(x, w).unsqueeze(0).view(6, 8) + 1 for w in (a, b)],
            "the same": lambda x, a, _: [functional.linear(x, a) * 2, functional.linear(x, a) * 3],
            "a vector": lambda x, a, b: [functional.linear(x, w[0]) + 1 for w in (a, b)],
            "near": lambda x, a, b: (later(functional.linear(x, a), 4), functional.linear(x, b).sin()),
            "much later": lambda x, a, b: (later(functional.linear(x, a), 40), functional.linear(x, b).sin()),
            "other rows": lambda x, a, b: (functional.linear(x, a).cos(), functional.linear(x + 0, b).sin()),
        }
        joined = {"a slice": 1, "a row": 1, "near": 1}
        for name, read in reads.items():
            with self.subTest(name):
                x, matrices = torch.randn(2, 3, 8), {name: torch.randn(8, 8) for name in "ab"}
                module = graph_of(lambda m, x, read=read: read(x, m.a, m.b), matrices, x, pre_dispatch=True)
                wanted = module(x)
                context = context_of(module)
                tidy(module, context, [precast_kernels.fused_linear])
                self.assertEqual(len(recipes(context)), joined.get(name, 0))
                for got, want in zip(module(x), wanted, strict=True):
                    torch.testing.assert_close(got, want)
                    self.assertEqual(got.stride(), want.stride())

    @long
    def test_on_a_cpu_matrices_of_other_widths_are_one_call_too(self) -> None:
        opened = self.open(ATTENTION_INPUTS)
        captured = self.capture(opened, inputs=[("x", "float32", [64, 384])])
        held = self.weights(opened)
        weights = self.bound(captured, held)
        x = torch.randn(64, 384)
        with torch.inference_mode():
            wanted = opened.model(x)
        # Without the pass, an older compiler fuses matrices of one shape only, a newer one these as well.
        alone = [] if part("torch_private.versions").in_use() >= (2, 12) else [([], 3)]
        for passes, calls in (*alone, (["precast_kernels:fuse"], 1)):
            described = part("passes.segments").described(passes, self.root)
            answer = self.compile(captured, f"calls{calls}", options={"freezing": True}, passes=described)
            self.assertEqual(self.wrapper(f"calls{calls}").count("(aoti_torch_cpu__linear_pointwise("), calls)
            shapes = sorted(one["shape"] for one in answer["prepared"])
            self.assertEqual(shapes, [[576], [576, 384]] if calls == 1 else [[96, 384], [96, 384], [384, 384]])
            prepacked = {one["name"]: follow(one["call"], weights) for one in answer["prepared"]}
            if calls == 1:
                whole, bias = (next(value for value in prepacked.values() if value.dim() == dims) for dims in (2, 1))
                got = torch.nn.functional.linear(x, whole.to_dense(), bias).sin().split((384, 96, 96), 1)
                for one, other in zip(got, wanted, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
