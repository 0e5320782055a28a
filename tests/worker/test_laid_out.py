"""Weights as a device's kernels want them: joined matrices, filters channels last, and how they are made."""

from __future__ import annotations

import textwrap
import unittest
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


NORMS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 8, 3, groups=2)
        self.plain = torch.nn.BatchNorm2d(8, affine=False, eps=0.1)
        self.twice, self.late = torch.nn.Conv2d(8, 4, 1), torch.nn.BatchNorm2d(4)

    def forward(self, x):
        made = self.plain(self.second(torch.relu(self.norm(self.first(x)))))
        twice = self.twice(torch.relu(made))
        return self.late(twice) + twice

def load():
    torch.manual_seed(0)
    net = Net()
    for norm in (net.norm, net.plain, net.late):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
    return net.eval()
"""


def graph_of(model: Any, x: Any) -> Any:
    """Returns a model's graph with its weights as buffers, as a segment has them."""
    import torch

    program = torch.export.export(model, (x,))
    graph = torch.fx.Graph()
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    new: dict[Any, Any] = {}
    weights = program.graph_signature.inputs_to_parameters
    for node in program.graph.nodes:
        if node.name in weights:
            name = f"c{len(new)}"
            module.register_buffer(name, program.state_dict[weights[node.name]].detach())
            new[node] = graph.get_attr(name)
        else:
            new[node] = graph.node_copy(node, lambda value: new[value])
        new[node].meta = dict(node.meta)
    module.recompile()
    return module


class LaidOutTest(Project):
    def test_products_of_the_same_rows_are_one(self) -> None:
        import torch

        module, weights, _ = self.load_segment(PRODUCTS, [2, 5, 16])
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

    def test_what_must_lie_as_it_was_is_left_apart(self) -> None:
        import torch

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

                class Model(torch.nn.Module):
                    def __init__(self) -> None:
                        super().__init__()
                        self.a, self.b = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))

                    def forward(self, x: Any, read: Any = read) -> Any:
                        return read(x, self.a, self.b)

                module = graph_of(Model(), torch.randn(2, 3, 8))
                x = torch.randn(2, 3, 8)
                wanted = module(x)
                self.assertEqual(len(part("laid_out").join(module)), joined.get(name, 0))
                for got, want in zip(module(x), wanted, strict=True):
                    torch.testing.assert_close(got, want)
                    self.assertEqual(got.stride(), want.stride())

    def test_batch_norms_are_multiplied_into_the_filters_before_them(self) -> None:
        for name, text in {
            "as written": NORMS,
            "made functional": NORMS.replace("torch.relu(", "torch.relu_("),
        }.items():
            with self.subTest(name):
                self.fold(text)

    def fold(self, text: str) -> None:
        import torch

        module, weights, _ = self.load_segment(text, [2, 3, 9, 9])
        x = torch.randn(2, 3, 9, 9)
        wanted = module(x)
        made = part("laid_out").join(module)
        part("laid_out").fold(module, made)
        # One after a convolution that something else reads too stays.
        norms = [node for node in module.graph.nodes if "batch_norm" in str(node.target)]
        self.assertEqual(len(norms), 1)
        self.assertEqual([recipe["shape"] for recipe in made.values()], [[8, 3, 3, 3], [8], [8, 4, 3, 3], [8]])
        held = dict(module.named_buffers())
        for name, recipe in made.items():
            self.assertTrue(torch.equal(follow(recipe["call"], weights), held[name]))
        for got, want in zip(module(x), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def test_a_norm_along_another_axis_is_no_channels(self) -> None:
        text = """
            import torch

            class Net(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first, self.norm = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm1d(6)

                def forward(self, x):
                    return self.norm(self.first(x))

            def load():
                return Net().eval()
        """
        module, _, _ = self.load_segment(textwrap.dedent(text), [3, 8, 8])
        made: dict[str, Any] = {}
        part("laid_out").fold(module, made)
        self.assertEqual(made, {})

    def test_folded_filters_are_laid_out_too(self) -> None:
        module, weights, inputs = self.load_segment(NORMS, [2, 3, 9, 9])
        inputs[0].normal_()
        wanted = module(*inputs)
        known = set(weights)
        made: dict[str, Any] = {}
        part("laid_out").fold(module, made)
        self.assertEqual(len(made), 4)
        inductor, compiler = part("inductor_private"), part("compiler")
        options = dict(compiler._FIXED) | {"freezing": False, "compile_threads": 1}
        options["post_grad_custom_post_pass"] = part("laid_out").channels_last(known, made)
        files, _ = inductor.compile_aot(module, inputs, options, "native", self.out, inductor.Clock(Quiet().event))
        constants = compiler._constants(files, module, made)
        self.assertIn(([8, 3, 3, 3], [27, 1, 9, 3]), [(one["shape"], one["stride"]) for one in constants])
        for one in constants:
            weights[one["name"]] = follow(one["call"], weights)
        library = compiler._files(files, self.out)["library"]
        for got, want in zip(run(library, "cpu", weights, inputs, 1), wanted, strict=True):
            self.assertTrue(got.allclose(want, rtol=1e-4, atol=1e-5))

    def test_filters_are_laid_out_once_where_the_compiler_works_channels_last(self) -> None:
        import torch

        module, weights, inputs = self.load_segment(FILTERS, [2, 3, 9, 9])
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
