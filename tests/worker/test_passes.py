"""Graph passes that run on segments: their interface to the worker, and their digests in a key."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

from .artifact import run
from .support import Project, model, part
from .test_compile import follow

MODEL = model("return torch.relu(self.linear(x)) + 1", "self.linear = torch.nn.Linear(8, 4)")

# One for each stage: a weight that is doubled at load, and changes of the graph before and after fusions.
PASSES = """
import torch
import {helper}
aten = torch.ops.aten

class Doubled:
    def segment(self, module, context):
        assert context.device == "cpu" and context.processors > 0 and context.options["freezing"] in (True, False)
        for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
            assert context.is_constant(node.args[1]) and not context.is_constant(node.args[0])
            with module.graph.inserting_before(node):
                copy = module.graph.node_copy(node.args[1])
                made = context.prepack(module.graph.call_function(aten.mul.Tensor, (copy, {helper}.FACTOR)))
            if made is not None:
                assert context.is_constant(made)
                node.update_arg(1, made)

class Fusions:
    def post_grad_pre(self, module, context):
        for node in module.graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target = aten.tanh.default

    def post_grad_post(self, module, context):
        for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.update_arg(1, 3)

class Both(Fusions):
    def graph(self, module):
        for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.target = aten.sub.Tensor

class Bad:
    def segment(self, module, context):
        raise KeyError("nothing")

class Adds:
    def segment(self, module, context):
        module.register_buffer("more", torch.ones(4))
        (node,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        with module.graph.inserting_before(node):
            node.update_arg(1, module.graph.get_attr("more"))

class Drops:
    def segment(self, module, context):
        (end,) = module.graph.find_nodes(op="output")
        end.args = ((*end.args[0], end.args[0][0]),)

def plain(module):
    pass

doubled, fusions, both, bad, adds, drops = Doubled(), Fusions(), Both(), Bad(), Adds(), Drops()
"""

OFFERS = """
import torch

class Nothing:
    def segment(self, module, context):
        pass

nothing = Nothing()

def offers(device, graphs):
    names = [node.target for graph in graphs for node in graph.find_nodes(op="placeholder")]
    assert names == ["in0", "c0", "c1"], names
    return [{{"passes": ["{name}:nothing"], "options": {{"max_autotune": True}}}}] if device == "cpu" else []

def broken(device, graphs):
    raise OSError("no such kernel")
"""


class SegmentPassTest(Project):
    def setUp(self) -> None:
        super().setUp()
        self.helper = self.write("FACTOR = 2\n")
        self.passes = self.write(PASSES.replace("{helper}", self.helper))

    def made(self, captured: dict[str, Any], **options: Any) -> dict[str, Any]:
        name = f"made{len(list(self.out.iterdir()))}"
        return self.compile(captured, name, options=options, passes=captured["passes"]["own"])

    def captured(self, *passes: str) -> tuple[Any, dict[str, Any]]:
        names = [f"{self.passes}:{name}" for name in passes]
        opened = self.open(MODEL, also=names)
        return opened, self.capture(opened, inputs=[("x", "float32", [2, 8])], passes=names)

    def test_each_stage_changes_the_artifact_and_a_prepacked_weight_has_a_recipe(self) -> None:
        opened, captured = self.captured("doubled", "fusions", "plain")
        own = captured["passes"]["own"]
        self.assertEqual([one["callable"] for one in own], [f"{self.passes}:doubled", f"{self.passes}:fusions"])
        answer = self.made(captured, freezing=True)
        held = self.weights(opened)
        weights = self.bound(captured, held)
        made = {one["name"]: follow(one["call"], weights) for one in answer["prepared"]}
        self.assertIn("aten::mul.Tensor", json.dumps(answer["prepared"]))
        x = torch.randn(2, 8)
        (result,) = run(answer["library"], "cpu", weights | made, [x], 1)
        wanted = torch.nn.functional.linear(x, 2 * held["linear.weight"], held["linear.bias"]).tanh() + 3
        torch.testing.assert_close(result, wanted)
        # Without freezing, a request for a prepacked weight returns none.
        answer = self.made(captured, freezing=False)
        self.assertEqual(answer["prepared"], [])
        (result,) = run(answer["library"], "cpu", weights, [x], 1)
        wanted = torch.nn.functional.linear(x, held["linear.weight"], held["linear.bias"]).tanh() + 3
        torch.testing.assert_close(result, wanted)

    def test_a_pass_may_have_a_stage_for_the_whole_graph_too(self) -> None:
        _, captured = self.captured("both")
        self.assertIn("aten.sub.Tensor", captured["segments"][0]["graph"])
        self.assertEqual(len(captured["passes"]["own"]), 1)

    def test_passes_that_cannot_be_fail_by_name(self) -> None:
        for name, message in (
            ("bad", f"pass `{self.passes}:bad` raised KeyError at `segment`: 'nothing'"),
            ("adds", f"pass `{self.passes}:adds` added the tensor `more`"),
            ("drops", f"pass `{self.passes}:drops` changed the inputs or outputs of a segment"),
        ):
            _, captured = self.captured(name)
            for freezing in (True, False):
                failure = self.fails("pass", self.made, captured, freezing=freezing)
                self.assertEqual(failure.message, message)

    def test_the_source_of_a_pass_and_of_what_it_imports_is_in_its_digest(self) -> None:
        _, captured = self.captured("doubled")
        (before,) = captured["passes"]["own"]
        described = part("passes.segments").described
        self.assertEqual(described([before["callable"]], self.root), [before])
        helper = self.root / f"{self.helper}.py"
        helper.write_text("FACTOR = 3\n")
        (after,) = described([before["callable"]], self.root)
        self.assertNotEqual(after["source"], before["source"])
        failure = self.fails("pass", self.made, captured)
        self.assertEqual(failure.message, f"the source of pass `{before['callable']}` changed")

    def package(self) -> tuple[Path, str]:
        """Writes a package that offers a pass; returns the folder that it lies in, and its name."""
        site = self.root / "site"
        name = f"offering_{self.write('')}"
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(OFFERS.format(name=name))
        sys.path.append(str(site))
        return site, name

    def offered(self, opened: Any, site: Path, name: str, version: str, function: str = "offers") -> list[Any]:
        """Returns the offers of a package that is installed in this version."""
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")
        (info / "top_level.txt").write_text(f"{name}\n")
        (info / "entry_points.txt").write_text(f"[precast.passes]\n{name} = {name}:{function}\n")
        part("passes.segments")._entry_points.cache_clear()
        self.addCleanup(part("passes.segments")._entry_points.cache_clear)
        captured = self.capture(opened, inputs=[("x", "float32", [2, 8])])
        return [offer for offer in captured["passes"]["offered"] if name in offer["passes"][0]["callable"]]

    def test_a_package_offers_passes_by_version_and_source(self) -> None:
        site, name = self.package()
        self.root = self.root / "project"
        self.root.mkdir()
        opened = self.open(MODEL)
        (offer,) = self.offered(opened, site, name, "1.0")
        self.assertEqual(offer["options"], {"max_autotune": True})
        self.assertEqual([one["callable"] for one in offer["passes"]], [f"{name}:nothing"])
        (site / name / "more.py").write_text("more = 1\n")
        (edited,) = self.offered(opened, site, name, "1.0")
        self.assertNotEqual(edited["passes"], offer["passes"])
        (site / f"{name}-1.0.dist-info").rename(site / f"{name}-2.0.dist-info")
        (newer,) = self.offered(opened, site, name, "2.0")
        self.assertNotEqual(newer["passes"], edited["passes"])
        # A package that fails is named in the log; the program does not fail with it.
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            self.assertEqual(self.offered(opened, site, name, "2.0", "broken"), [])
        self.assertIn(f"`{name}:broken` offers nothing: OSError: no such kernel\n", stderr.getvalue())

    def test_a_package_that_lies_in_the_project_may_offer_too(self) -> None:
        opened = self.open(MODEL)
        (offer,) = self.offered(opened, *self.package(), "1.0")
        self.assertEqual(len(offer["passes"]), 1)
        self.assertEqual(len(opened.offering), 1)
