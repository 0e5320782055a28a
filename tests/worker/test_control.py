"""Compile control: options that submodules declare, graph passes, ranges of inputs."""

from __future__ import annotations

from pathlib import Path

import torch

from .support import Project, model, part
from .test_capture import IDS, MASK, SIZES, STACK, X

DECLARING = """
import torch

class Inner(torch.nn.Module):
    def get_torch_compile_config(self):
        return {"forward": {"mode": "max-autotune"}, "encode": {"options": {"epilogue_fusion": False}}}

    def forward(self, x):
        return x + 1

    def encode(self, x):
        return x * 2

    @torch.compiler.disable
    def decode(self, x):
        return x

class Flat(Inner):
    def get_torch_compile_config(self):
        return {"mode": "reduce-overhead"}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Inner(), Flat(), torch.nn.ReLU()

    def forward(self, x):
        return self.a(x)

def load():
    return Model()
"""

PASSES = """
import torch
aten = torch.ops.aten

def double_relu(module):
    for node in module.graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.tanh.default

def rebuild(module):
    return torch.fx.GraphModule(module, module.graph)

def fails(module):
    raise KeyError("nothing")

def adds(module):
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("more").meta["val"] = None

def wrong(module):
    return 3
"""


class DeclaredTest(Project):
    def test_submodules_declare_by_method(self) -> None:
        off = {"decode": {"enabled": False}}
        a = {"forward": {"mode": "max-autotune"}, "encode": {"options": {"epilogue_fusion": False}}, **off}
        b = {"forward": {"mode": "reduce-overhead"}, **off}
        self.assertEqual(self.open(DECLARING).answer()["declared"], {"a": a, "b": b})
        failure = self.fails("entry_call", self.open, DECLARING.replace('return {"mode"', 'return {1 / 0: 1, "mode"'))
        self.assertRegex(failure.location, r"^project_\d+\.py:20$")
        self.assertIn("`get_torch_compile_config` of `b`", failure.message)
        failure = self.fails("entry_call", self.open, DECLARING.replace('{"mode": "reduce-overhead"}', "[1]"))
        self.assertIn("returned list, not a dict", failure.message)


class PassTest(Project):
    def test_a_pass_changes_the_graph_and_not_what_it_is_measured_against(self) -> None:
        name = self.write(PASSES)
        opened = self.open(STACK, also=[f"{name}:rebuild"])
        self.assertIn(f"{name}.py", [source["path"] for source in opened.sources])
        request = {"inputs": [IDS, MASK], "sizes": SIZES, "regions": ["blocks.*"]}
        plain = self.capture(opened, **request)
        changed = self.capture(opened, **request, passes=[f"{name}:rebuild", f"{name}:double_relu"])
        self.assertEqual(plain["segments"][0]["graph"], changed["segments"][0]["graph"])
        self.assertIn("aten.relu.default", plain["segments"][1]["graph"])
        self.assertIn("aten.tanh.default", changed["segments"][1]["graph"])
        self.assertNotIn("aten.relu.default", changed["segments"][1]["graph"])
        self.assertEqual(len(changed["segments"]), 3)
        self.assertEqual([step["name"] for step in changed["steps"]], [step["name"] for step in plain["steps"]])
        samples = part("tensors").read(Path(changed["samples"]))
        results = self.composed(changed, self.weights(opened))
        self.assertFalse(torch.equal(results[0], samples["out.0"]))
        with torch.inference_mode():
            expected = opened.model(samples["in.0"], samples["in.1"])
        self.assertTrue(torch.equal(expected["logits"], samples["out.0"]))

    def test_bad_passes(self) -> None:
        name = self.write(PASSES)
        opened = self.open(model("return torch.relu(x)"))

        def failure(passes: str) -> tuple[str, str | None]:
            caught = self.fails("pass", self.capture, opened, inputs=[X], passes=[f"{name}:{passes}"])
            return caught.message, caught.location

        self.assertEqual(failure("fails"), (f"pass `{name}:fails` raised KeyError: 'nothing'", f"{name}.py:14"))
        self.assertEqual(failure("adds")[0], f"pass `{name}:adds` added the input `more`")
        self.assertEqual(failure("wrong")[0], f"pass `{name}:wrong` returned int, not a torch.fx.GraphModule or None")
        caught = self.fails("entry_call", self.capture, opened, inputs=[X], passes=[f"{name}:rebiuld"])
        self.assertEqual(caught.hint, "did you mean `rebuild`?")


class RangeTest(Project):
    def test_a_range_decides(self) -> None:
        spec = part("values.samples").make
        entry = {"name": "x", "dtype": "int64", "shape": [100], "range": [5, 9], "pad": 0}
        self.assertEqual(set(spec(entry, [100], 3, "cpu").tolist()), {5, 6, 7, 8})
        self.assertEqual(part("values.samples").lowest([{**entry, "shape": [2]}], "cpu")[0].tolist(), [5, 5])
