"""Weights as a device's kernels want them: joined matrices, filters channels last, and how they are made."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

from .artifact import run
from .support import Project, Quiet, part
from .test_compile import follow

PRODUCTS = """
import torch

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(16, width) for width in (16, 8, 8))
        self.gate, self.up, self.tied = (torch.nn.Linear(16, 24, bias=False) for _ in range(3))
        self.tied.weight = self.up.weight
        self.out = torch.nn.Linear(16, 4)

    def forward(self, x):
        query = self.query(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
        key, value = (part(x).view(*x.shape[:2], 1, 8).transpose(1, 2) for part in (self.key, self.value))
        made = torch.nn.functional.scaled_dot_product_attention(query, key.expand_as(query), value.expand_as(query))
        made = made.transpose(1, 2).reshape(x.shape)
        return self.out(made + x), torch.nn.functional.silu(self.gate(made)) * self.up(made), self.tied(x)

def load():
    torch.manual_seed(0)
    return Attention()
"""

FILTERS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1, bias=False)
        self.along = torch.nn.Conv1d(4, 4, 3)

    def forward(self, x):
        made = self.last(torch.relu(self.first(x)))
        return self.along(made.mean(-1))

def load():
    torch.manual_seed(0)
    return Net()
"""


class LaidOutTest(Project):
    def segment(self, text: str, shape: list[int]) -> tuple[Any, dict[str, Any], list[Any]]:
        """Returns the one segment of a model, loaded, with the model's own weights by constant."""
        opened = self.open(text)
        captured = self.capture(opened, inputs=[("x", "float32", shape)])
        module, inputs, _ = part("segment").load(Path(captured["segments"][0]["file"]), "cpu")
        held = self.weights(opened)
        weights = {name: held[tensor] for name, tensor in captured["steps"][0]["binding"].items()}
        for name, buffer in module.named_buffers():
            buffer.copy_(weights[name])
        return module, weights, inputs

    def test_products_of_the_same_rows_are_one(self) -> None:
        import torch

        module, weights, _ = self.segment(PRODUCTS, [2, 5, 16])
        x = torch.randn(2, 5, 16)
        wanted = module(x)
        made = part("laid_out").join(module)
        # A query, a key and a value, their biases, and a gate with what it gates.
        self.assertEqual([recipe["shape"] for recipe in made.values()], [[32, 16], [32], [48, 16]])
        held = dict(module.named_buffers())
        for name, recipe in made.items():
            self.assertTrue(torch.equal(follow(recipe["call"], weights), held[name]))
        products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        self.assertEqual(len(products), 4)
        for got, want in zip(module(x), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        self.assertEqual(part("laid_out").join(module), {})

    def test_filters_are_laid_out_once_where_the_compiler_works_channels_last(self) -> None:
        import torch

        module, weights, inputs = self.segment(FILTERS, [2, 3, 9, 9])
        inputs[0].copy_(torch.randn(2, 3, 9, 9))
        wanted = module(*inputs)
        made: dict[str, Any] = {}
        inductor, compiler = part("inductor_private"), part("compiler")
        options = dict(compiler._FIXED) | {"freezing": False, "compile_threads": 1}
        options["post_grad_custom_post_pass"] = part("laid_out").channels_last(set(weights), made)
        files, _ = inductor.compile_aot(module, inputs, options, "native", self.out, inductor.Clock(Quiet().event))
        # A filter of one point is laid out alike either way.
        ((name, recipe),) = made.items()
        self.assertEqual((recipe["shape"], recipe["stride"]), ([8, 3, 3, 3], [27, 1, 9, 3]))
        weights[name] = follow(recipe["call"], weights)
        self.assertEqual([one["name"] for one in compiler._constants(files, module, made)], [name])
        library = compiler._files(files, self.out)["library"]
        for got, want in zip(run(library, "cpu", weights, inputs, 1), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
