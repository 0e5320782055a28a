"""Convolutions that add their bias, what is added to them, and the ReLU after it, in one kernel."""

from __future__ import annotations

import copy
import json
import unittest
from pathlib import Path
from typing import Any

from .support import Project, Quiet, part
from .test_compile import follow

RESIDUAL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        conv = torch.nn.Conv2d
        self.first, self.norm = conv(3, 8, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(8)
        self.second, self.third, self.aside = conv(8, 16, 3, padding=1), conv(16, 24, 1), conv(8, 24, 1)
        self.fourth, self.bare = conv(24, 24, 3, padding=(2,), dilation=(2,)), conv(24, 24, 1, bias=False)
        self.groups, self.few, self.twice = conv(24, 24, 1, groups=2), conv(24, 4, 1), conv(24, 8, 1)

    def forward(self, x):
        relu = torch.nn.functional.relu
        made = relu(self.norm(self.first(x)))
        made = relu(self.third(relu(self.second(made))) + self.aside(made))
        made = relu(made + self.fourth(made))
        # Of these only that of four channels: no bias, groups, a result read twice, a row added to all, no ReLU.
        made = relu(self.groups(relu(self.bare(made))))
        few, twice = relu(self.few(made)), self.twice(made)
        return few, relu(twice) * twice, relu(self.fourth(made) + made[:, :, :1]), self.twice(made).clamp(0, 6)

def load():
    torch.manual_seed(0)
    net = Net().half()
    for one in net.modules():
        if isinstance(one, torch.nn.Conv2d) and one.bias is not None:
            one.bias.data.normal_()
    net.norm.running_mean.normal_()
    return net.eval()
"""


def reference(rows: Any, filters: Any, bias: Any, *where: Any) -> Any:
    import torch

    stride, padding, dilation, groups = where
    return torch.conv2d(rows, filters, bias, stride, padding, dilation, groups).relu()


def reference_added(rows: Any, filters: Any, added: Any, alpha: Any, bias: Any, *where: Any) -> Any:
    import torch

    assert alpha is None
    stride, padding, dilation, groups = where
    return (torch.conv2d(rows, filters, bias, stride, padding, dilation, groups) + added).relu()


class EpiloguesTest(Project):
    def test_a_relu_and_what_is_added_before_it_are_the_convolutions_own(self) -> None:
        import torch

        module, weights, inputs = self.load_segment(RESIDUAL, [2, 3, 16, 16], "float16")
        inputs[0].normal_()
        wanted = module(*inputs)
        known, made, seen = set(weights), {}, []
        part("laid_out").fold(module, made)
        lay_out = part("laid_out").channels_last(known, made)

        def passes(graph: Any) -> None:
            lay_out(graph)
            seen.append(copy.deepcopy(graph.owning_module))

        inductor, compiler = part("inductor_private"), part("compiler")
        options = dict(compiler._FIXED) | {"freezing": False, "compile_threads": 1}
        options["post_grad_custom_post_pass"] = passes
        # These operators are CUDA's; the artifact calls them by name.
        library = torch.library.Library("aten", "IMPL", "CPU")
        self.addCleanup(library._destroy)
        library.impl("cudnn_convolution_relu", reference)
        library.impl("cudnn_convolution_add_relu", reference_added)
        files, _ = inductor.compile_aot(module, inputs, options, "native", self.out, inductor.Clock(Quiet().event))

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
        sums = [name for name, one in made.items() if one["call"]["operator"] == "aten::add.Tensor"]
        self.assertEqual(sums, [first.args[4].target])
        found = 0
        for name in made:
            weights[name] = follow(made[name]["call"], weights)
            if hasattr(lowered, name):
                self.assertTrue(torch.equal(weights[name], getattr(lowered, name)), name)
                found += 1
        # Of each of the four operators that have one the bias, and the filters that are turned.
        self.assertGreaterEqual(found, 5)

        with torch.no_grad():
            answers = torch.fx.Interpreter(lowered).run(*inputs)
        for got, want in zip(answers, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        called = json.loads(Path(compiler._files(files, self.out)["proxy"]).read_text())["nodes"]
        targets = [node["node"]["target"].split("::")[1].split(".")[0] for node in called]
        self.assertEqual(targets.count("cudnn_convolution_relu"), 3)
        self.assertEqual(targets.count("cudnn_convolution_add_relu"), 2)

    def test_what_has_no_such_kernel_stays_as_it_is(self) -> None:
        import torch

        aten = torch.ops.aten

        def lowered(shape: list[int]) -> Any:
            graph = torch.fx.Graph()
            x = graph.placeholder("x")
            x.meta["val"] = torch.ones(2, shape[1], 5, 5, dtype=torch.float16)
            filters, bias = graph.get_attr("w"), graph.get_attr("b")
            held = {"w": torch.ones(shape, dtype=torch.float16), "b": torch.ones(shape[0], dtype=torch.float16)}
            for node in (filters, bias):
                node.meta["val"] = held[node.target]
            args = (x, filters, bias, [1], [0], [1], False, [0], 1)
            node = graph.call_function(aten.convolution.default, args)
            relu = graph.call_function(aten.relu.default, (node,))
            node.meta["val"] = relu.meta["val"] = aten.convolution(x.meta["val"], *held.values(), *args[3:])
            graph.output((relu,))
            root = torch.nn.Module()
            for name, value in held.items():
                root.register_buffer(name, value)
            module = torch.fx.GraphModule(root, graph)
            part("epilogues").take(module, set(held), {})
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


if __name__ == "__main__":
    unittest.main()
