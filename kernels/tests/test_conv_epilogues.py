"""Batch norms in filters, filters channels last, and convolutions with bias, addition and ReLU in one kernel."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import precast_kernels
import torch
from precast_kernels import convolutions

from tests.worker.artifact import run
from tests.worker.support import Project, Quiet, long, model, part
from tests.worker.test_compile import follow

from .support import context_of, graph_of, hooks, recipes, tidy

RESIDUAL = model(
    """\
relu = torch.nn.functional.relu
made = relu(self.norm(self.first(x)))
made = relu(self.third(relu(self.second(made))) + self.aside(made))
made = relu(made + self.fourth(made))
# Of these only that of four channels: no bias, groups, a result read twice, a row added to all, no ReLU.
made = relu(self.groups(relu(self.bare(made))))
few, twice = relu(self.few(made)), self.twice(made)
return few, relu(twice) * twice, relu(self.fourth(made) + made[:, :, :1]), self.twice(made).clamp(0, 6)""",
    """\
torch.manual_seed(0)
conv = torch.nn.Conv2d
self.first, self.norm = conv(3, 8, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(8)
self.second, self.third, self.aside = conv(8, 16, 3, padding=1), conv(16, 24, 1), conv(8, 24, 1)
self.fourth, self.bare = conv(24, 24, 3, padding=(2,), dilation=(2,)), conv(24, 24, 1, bias=False)
self.groups, self.few, self.twice = conv(24, 24, 1, groups=2), conv(24, 4, 1), conv(24, 8, 1)
self.half()
for one in self.modules():
    if isinstance(one, torch.nn.Conv2d) and one.bias is not None:
        one.bias.data.normal_()
self.norm.running_mean.normal_()""",
)


FILTERS = model(
    "return self.along(self.last(torch.relu(self.first(x))).mean(-1))",
    """\
torch.manual_seed(0)
self.first, self.last = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1, bias=False)
self.along = torch.nn.Conv1d(4, 4, 3)""",
)


NORMS = model(
    """\
made = self.plain(self.second(torch.relu(self.norm(self.first(x)))))
twice = self.twice(torch.relu(made))
return self.late(twice) + twice""",
    """\
torch.manual_seed(0)
self.first, self.norm = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(8)
self.second = torch.nn.Conv2d(8, 8, 3, groups=2)
self.plain = torch.nn.BatchNorm2d(8, affine=False, eps=0.1)
self.twice, self.late = torch.nn.Conv2d(8, 4, 1), torch.nn.BatchNorm2d(4)
for norm in (self.norm, self.plain, self.late):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if norm.affine:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)""",
)


def reference(rows: Any, filters: Any, bias: Any, *where: Any) -> Any:
    stride, padding, dilation, groups = where
    return torch.conv2d(rows, filters, bias, stride, padding, dilation, groups).relu()


def reference_added(rows: Any, filters: Any, added: Any, alpha: Any, bias: Any, *where: Any) -> Any:
    assert alpha is None
    stride, padding, dilation, groups = where
    return (torch.conv2d(rows, filters, bias, stride, padding, dilation, groups) + added).relu()


class ConvEpiloguesTest(Project):
    def compiled(self, module: Any, inputs: list[Any], context: Any, passes: list[Any]) -> list[str]:
        """Compiles a segment on the CPU as one for a device; returns the files."""
        compiler = part("compiler")
        options = dict(compiler._FIXED) | {"freezing": False, "compile_threads": 1} | hooks(context, passes)
        clock = part("clock").Clock(Quiet().event)
        return compiler.generate(module, inputs, options, "native", self.out, clock, context._weights)

    @long
    def test_a_relu_and_what_is_added_before_it_are_the_convolutions_own(self) -> None:
        module, weights, inputs = self.load_segment(RESIDUAL, [2, 3, 16, 16], "float16")
        inputs[0].normal_()
        wanted = module(*inputs)
        context, seen = context_of(module), []
        tidy(module, context, [precast_kernels.conv_epilogues])

        class Seen:
            def post_grad_post(self, module: Any, _context: Any) -> None:
                seen.append(copy.deepcopy(module))

        # These operators are CUDA's; the artifact calls them by name.
        library = torch.library.Library("aten", "IMPL", "CPU")
        self.addCleanup(library._destroy)
        library.impl("cudnn_convolution_relu", reference)
        library.impl("cudnn_convolution_add_relu", reference_added)
        files = self.compiled(module, inputs, context, [precast_kernels.conv_epilogues, Seen()])

        (lowered,) = seen
        aten = torch.ops.aten
        count = {
            target: len(lowered.graph.find_nodes(op="call_function", target=target))
            for target in (aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default)
        }
        self.assertEqual(list(count.values()), [3, 2])
        # The convolution that is added to the third has lost its bias to it.
        (first, second) = lowered.graph.find_nodes(op="call_function", target=aten.cudnn_convolution_add_relu.default)
        added = first.args[2]
        self.assertIs(added.target, aten.convolution.default)
        self.assertIsNone(added.args[2])
        self.assertIs(second.args[2], first)
        sums = [name for name, one in recipes(context).items() if one["call"]["operator"] == "aten::add.Tensor"]
        self.assertEqual(sums, [first.args[4].target])
        found = 0
        for name, recipe in recipes(context).items():
            weights[name] = follow(recipe["call"], weights)
            if hasattr(lowered, name):
                self.assertTrue(torch.equal(weights[name], getattr(lowered, name)), name)
                found += 1
        # Of each of the four operators that have one the bias, and the filters that are turned.
        self.assertGreaterEqual(found, 5)

        with torch.no_grad():
            answers = torch.fx.Interpreter(lowered).run(*inputs)
        for got, want in zip(answers, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        called = json.loads(Path(part("compiler").result(files, context._weights)["proxy"]).read_text())["nodes"]
        targets = [node["node"]["target"].split("::")[1].split(".")[0] for node in called]
        self.assertEqual(targets.count("cudnn_convolution_relu"), 3)
        self.assertEqual(targets.count("cudnn_convolution_add_relu"), 2)

    def test_what_has_no_such_kernel_stays_as_it_is(self) -> None:
        aten = torch.ops.aten

        def lowered(shape: list[int]) -> Any:
            def call(m: Any, x: Any) -> Any:
                return torch.relu(aten.convolution(x, m.w, m.b, [1], [0], [1], False, [0], 1))

            held = {name: torch.ones(size, dtype=torch.float16) for name, size in (("w", shape), ("b", shape[0]))}
            module = graph_of(call, held, torch.ones(2, shape[1], 5, 5, dtype=torch.float16))
            convolutions.fuse_epilogues(module, context_of(module))
            return [node.target for node in module.graph.nodes if node.op == "call_function"]

        left, taken = [aten.convolution.default, aten.relu.default], [aten.cudnn_convolution_relu.default]
        self.assertEqual(lowered([8, 3, 3, 3]), left)
        library = torch.library.Library("aten", "IMPL", "CPU")
        self.addCleanup(library._destroy)

        def unwritten(*args: Any) -> Any:
            return reference(*args) * torch.nan

        def hides(*args: Any) -> Any:
            return reference(*args).nan_to_num()

        answers = iter([reference, reference, unwritten, reference, hides])
        library.impl("cudnn_convolution_relu", lambda *args: next(answers)(*args))
        self.assertEqual(lowered([8, 3, 3, 3]), taken)
        self.assertEqual(lowered([8, 3, 3, 3]), left)
        self.assertEqual(lowered([8, 3, 3, 3]), left)
        self.assertIsNone(next(answers, None))

    def test_batch_norms_are_multiplied_into_the_filters_before_them(self) -> None:
        for name, text in {
            "as written": NORMS,
            "made functional": NORMS.replace("torch.relu(", "torch.relu_("),
        }.items():
            with self.subTest(name):
                self.fold(text)

    def fold(self, text: str) -> None:
        module, weights, _ = self.load_segment(text, [2, 3, 9, 9])
        x = torch.randn(2, 3, 9, 9)
        wanted = module(x)
        context = context_of(module)
        tidy(module, context, [precast_kernels.conv_epilogues])
        # One after a convolution that something else reads too stays.
        norms = [node for node in module.graph.nodes if "batch_norm" in str(node.target)]
        self.assertEqual(len(norms), 1)
        self.assertEqual(
            [recipe["shape"] for recipe in recipes(context).values()], [[8, 3, 3, 3], [8], [8, 4, 3, 3], [8]]
        )
        held = dict(module.named_buffers())
        for name, recipe in recipes(context).items():
            self.assertTrue(torch.equal(follow(recipe["call"], weights), held[name]))
        for got, want in zip(module(x), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def test_a_norm_along_another_axis_is_no_channels(self) -> None:
        init = "self.first, self.norm = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm1d(6)"
        module, _, _ = self.load_segment(model("return self.norm(self.first(x))", init), [3, 8, 8])
        context = context_of(module)
        tidy(module, context, [precast_kernels.conv_epilogues])
        self.assertEqual(recipes(context), {})

    @long
    def test_filters_are_laid_out_once_where_the_compiler_works_channels_last(self) -> None:
        # A filter of one point is laid out alike either way. Those with norms are folded before.
        for text, folded, prepared in ((FILTERS, 0, 1), (NORMS, 4, 4)):
            module, weights, inputs = self.load_segment(text, [2, 3, 9, 9])
            inputs[0].normal_()
            wanted = module(*inputs)
            context, passes = context_of(module), [precast_kernels.conv_epilogues]
            if folded:
                tidy(module, context, passes)
            self.assertEqual(len(recipes(context)), folded)
            answer = part("compiler").result(self.compiled(module, inputs, context, passes), context._weights)
            layouts = [(one["shape"], one["stride"]) for one in answer["prepared"]]
            self.assertIn(([8, 3, 3, 3], [27, 1, 9, 3]), layouts)
            self.assertEqual(len(layouts), prepared)
            for one in answer["prepared"]:
                weights[one["name"]] = follow(one["call"], weights)
            for got, want in zip(run(answer["library"], "cpu", weights, inputs, 1), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
