"""Capture and regions: the composed program equals eager bit for bit, and every mistake reads well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .support import Project, model, part

STACK = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x, mask):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * mask

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, mask):
        x = self.embed(ids)
        wide = mask[:, :, None].to(x.dtype).expand(-1, -1, 8)
        for block in self.blocks:
            x = block(x, wide)
        return {"logits": self.head(x), "hidden": x, "nothing": None, "width": 8}

    def encode(self, ids):
        return self.embed(ids)

def load():
    return Model()
"""


def prenorm(end: str = "self.norm(x)", norm: str = "Norm = lambda: torch.nn.LayerNorm(6)\n") -> str:
    """Three blocks that begin with a norm, and an end."""
    block = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))
"""
    return model(
        f"for block in self.blocks:\n    x = block(x)\nreturn {end}",
        "self.blocks = torch.nn.ModuleList(Block() for _ in range(3))\n"
        "self.norm, self.other = Norm(), torch.nn.LayerNorm(6, eps=1e-2)\n"
        "self.head = torch.nn.Linear(6, 5)",
        extra=norm + block,
        inputs="x",
    )


X = ("x", "float32", [4, 6], ["n", None])
IDS = ("ids", "int64", [2, 6], ["batch", "seq"])
MASK = ("mask", "int64", [2, 6], ["batch", "seq"])
SIZES = {"batch": 2, "seq": 6}


class RegionsTest(Project):
    def test_equal_blocks_are_one_segment_and_the_whole_is_bit_equal(self) -> None:
        captured = self.checked(STACK, inputs=[IDS, MASK], sizes=SIZES, regions=["blocks.*"])
        self.assertEqual(
            [(step["name"], step["segment"]) for step in captured["steps"]],
            [("glue.0", 0), ("blocks.0", 1), ("blocks.1", 1), ("blocks.2", 1), ("blocks.3", 1), ("glue.1", 2)],
        )
        self.assertEqual(captured["steps"][2]["binding"]["c0"], "blocks.1.norm.weight")
        # The tied weight has one name, in the first step and in the last.
        self.assertEqual(captured["steps"][0]["binding"], {"c0": "embed.weight"})
        self.assertEqual(captured["steps"][5]["binding"], {"c0": "embed.weight"})
        self.assertEqual([output["name"] for output in captured["outputs"]], ["logits", "hidden"])
        nested = {"logits": {"tensor": 0}, "hidden": {"tensor": 1}, "nothing": {"value": None}, "width": {"value": 8}}
        self.assertEqual(captured["call_spec"]["outputs"], {"dict": nested})
        follows = [dims and (dims["dim"], dims["scale"], dims["offset"]) for dims in captured["outputs"][0]["dims"]]
        self.assertEqual(follows, [("batch", 1, 0), ("seq", 1, 0), None])
        self.assertEqual(captured["exact"], {})
        self.assertGreater(captured["receipt"]["eager_us"], 0)
        self.assertGreaterEqual(captured["receipt"]["eager_runs"], 1)

    def steps(self, text: str, regions: list[str] | None = None) -> list[tuple[str, int]]:
        """Returns the name and the segment of each step of a capture that is right."""
        captured = self.checked(text, inputs=[X], sizes={"n": 4}, regions=regions or ["blocks.*"])
        return [(step["name"], step["segment"]) for step in captured["steps"]]

    def test_a_region_begins_behind_its_norm_and_ends_with_that_of_the_next(self) -> None:
        blocks = [(f"blocks.{index}", 1) for index in range(3)]
        self.assertEqual(self.steps(prenorm()), [("glue.0", 0), *blocks])
        # A norm written out in operations, and a head.
        rms = "x.float().mul(torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)).to(x.dtype)"
        written = prenorm(norm=f"class Norm(torch.nn.Module):\n    def forward(self, x):\n        return {rms}\n")
        self.assertEqual(self.steps(written), [("glue.0", 0), *blocks])
        headed = prenorm(end="self.head(self.norm(x))")
        self.assertEqual(self.steps(headed), [("glue.0", 0), *blocks, ("glue.1", 2)])
        # A norm stays where moving it brings another segment, and where it is a region itself.
        blocks = [(f"blocks.{index}", 0) for index in range(3)]
        self.assertEqual(self.steps(prenorm(end="x")), blocks)
        self.assertEqual(self.steps(prenorm(end="self.other(x)")), [*blocks, ("glue.0", 1)])
        names = [name for name, _ in self.steps(prenorm(), ["blocks.*.norm", "norm"])]
        self.assertEqual((names[0], names[-1]), ("blocks.0.norm", "norm"))

    def test_a_region_may_be_called_glue(self) -> None:
        text = prenorm().replace("self.blocks", "self.glue")
        names = [name for name, _ in self.steps(text, ["glue.*"])]
        self.assertEqual(names, ["glue.0", "glue.0", "glue.1", "glue.2"])

    def test_the_calls_of_eager_take_their_weights_as_inputs(self) -> None:
        inputs = [IDS, ("unused", "float32", [3]), MASK]
        opened = self.open(STACK.replace("forward(self, ids, mask):", "forward(self, ids, unused, mask):"))
        captured = self.capture(opened, inputs=inputs, sizes=SIZES, regions=["blocks.*"])
        samples, weights = self.samples(captured), self.weights(opened)
        results = self.run_eager(captured, [samples[f"in.{index}"] for index in range(3)], weights)
        self.assertTrue(torch.equal(results[0], samples["out.0"]))
        self.assertTrue(torch.equal(results[1], samples["out.1"]))
        # The file holds the graph alone.
        self.assertEqual(set(captured["exported_weights"]), set(weights))
        self.assertLess(Path(captured["exported"]).stat().st_size, 100_000)

    def test_samples_are_realistic(self) -> None:
        captured = self.capture(self.open(STACK), inputs=[IDS, MASK], sizes=SIZES)
        samples = self.samples(captured)
        self.assertGreater(int(samples["in.0"].max()), 1)
        self.assertLess(int(samples["in.0"].max()), 50)
        for row in samples["in.1"].tolist():
            self.assertEqual(row, sorted(row, reverse=True))
            self.assertEqual(set(row), {0, 1})

    def test_samples_are_the_examples_of_a_captured_model(self) -> None:
        opened = self.open(STACK)
        ids, mask = torch.full((2, 5), 7), torch.ones(2, 5, dtype=torch.int64)
        opened.model.precast_examples = {"forward": [ids, mask]}
        specs = [("ids", "int64", [2, 5]), ("mask", "int64", [2, 5])]
        samples = self.samples(self.capture(opened, inputs=specs))
        self.assertTrue(torch.equal(samples["in.0"], ids) and torch.equal(samples["in.1"], mask))
        # Another function has none.
        captured = self.capture(opened, inputs=specs[:1], method="encode")
        self.assertFalse(torch.equal(self.samples(captured)["in.0"], ids))

    def test_a_method_and_a_submodule(self) -> None:
        opened = self.open(STACK)
        captured = self.checked(opened, inputs=[IDS], sizes=SIZES, method="encode")
        self.assertEqual(captured["steps"][0]["binding"], {"c0": "embed.weight"})
        wide = [("x", "float32", [2, 8]), ("mask", "float32", [2, 8])]
        captured = self.checked(opened, inputs=wide, path="blocks.2")
        self.assertEqual(captured["steps"][0]["binding"]["c0"], "blocks.2.norm.weight")

    def test_texts_have_no_names_and_no_weight_values(self) -> None:
        renamed = STACK.replace("blocks", "pieces").replace("Block", "Piece").replace("self.up", "self.widen")
        renamed = renamed.replace("def load():", "def load():\n    torch.manual_seed(99)")
        changed = STACK.replace("torch.relu", "torch.tanh")
        texts = []
        for text, region in ((STACK, "blocks.*"), (renamed, "pieces.*"), (changed, "blocks.*")):
            captured = self.capture(self.open(text), inputs=[IDS, MASK], sizes=SIZES, regions=[region])
            texts.append([segment["graph"] for segment in captured["segments"]])
        self.assertEqual(texts[0], texts[1])
        for text in texts[0]:
            for word in ("block", "norm_weight", "embed.", str(self.root), "Model", "project"):
                self.assertNotIn(word, text)
        self.assertEqual(texts[0][0], texts[2][0])
        self.assertNotEqual(texts[0][1], texts[2][1])


class GraphTest(Project):
    def composed_of(self, text: str, regions: list[str] | None = None, inputs: list | None = None) -> dict:
        return self.checked(text, inputs=inputs or [X], sizes={"n": 4}, regions=regions or [])

    def test_views_across_a_cut(self) -> None:
        # Transposed, sliced, expanded and buffer views all cross from one region to the next.
        text = model(
            "t, piece, wide, row = self.a(x)\nreturn self.b(t, piece, wide, row)",
            "self.a = A()\nself.b = B()",
            "class A(torch.nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('p', torch.arange(12.0))\n"
            "    def forward(self, x):\n"
            "        h = torch.sin(x)\n"
            "        return h.t(), h[:, 2:5], h[:, :1].expand(4, 6), self.p[6:]\n"
            "class B(torch.nn.Module):\n"
            "    def forward(self, t, piece, wide, row):\n"
            "        return t + 1, piece * 2, wide * row\n",
        )
        captured = self.composed_of(text, ["*"])
        self.assertEqual([step["name"] for step in captured["steps"]], ["a", "b"])
        # Tensors that cross are dense and start their memory; the views are made again in `b`.
        self.assertEqual(captured["segments"][1]["inputs"][0]["shape"], [6, 4])

    def test_tied_parameters_and_shared_buffers_inside_two_regions(self) -> None:
        text = model(
            "return self.b(torch.sin(self.a(x)))",
            "self.a = Piece()\nself.b = Piece()\n"
            "self.b.linear.weight = self.a.linear.weight\nself.b.table = self.a.table",
            "class Piece(torch.nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.linear = torch.nn.Linear(6, 6)\n"
            "        self.register_buffer('table', torch.randn(2, 6))\n"
            "    def forward(self, x):\n"
            "        return self.linear(x) * self.table[1] + self.table.t()[:, 0]\n",
        )
        captured = self.composed_of(text, ["*"])
        self.assertEqual([(s["name"], s["segment"]) for s in captured["steps"]], [("a", 0), ("glue.0", 1), ("b", 0)])
        first, second = (set(captured["steps"][index]["binding"].values()) for index in (0, 2))
        self.assertEqual(first, {"a.linear.weight", "a.linear.bias", "a.table"})
        self.assertEqual(second, {"a.linear.weight", "b.linear.bias", "a.table"})

    def test_inputs_weights_and_equal_outputs_are_copied(self) -> None:
        text = model(
            "h = x + 1\nreturn x, h, h, h[:, 1:], self.w, x.view(-1)", "self.w = torch.nn.Parameter(torch.ones(3))"
        )
        captured = self.composed_of(text)
        self.assertEqual(len(set(captured["results"])), 6)
        self.assertEqual(captured["outputs"][3]["stride"], [5, 1])

    def test_constants_of_the_code(self) -> None:
        text = model(
            "big = torch.tensor([float(i) for i in range(40)])\n"
            "return x * torch.tensor(0.1) + torch.tensor([1.0, 2, 3, 4, 5, 6]), x.sum() + big, x * self.attribute",
            "self.attribute = torch.full((6,), 3.0)",
        )
        captured = self.composed_of(text)
        self.assertIn("attribute", captured["steps"][0]["binding"].values())
        self.assertIsNotNone(captured["extra_weights"])
        self.assertIn(f"float:{(0.1).hex()[:6]}", captured["segments"][0]["graph"])

    def test_writing_in_place_is_fine_unless_it_is_kept(self) -> None:
        self.composed_of(model("h = x * 2\nh.add_(1)\nh[:, 0] = 5\nreturn torch.relu_(h)"))
        init = "self.seen = torch.nn.Parameter(torch.zeros(1), False)"
        for body, what in (
            ("self.seen.add_(1)\nreturn x + self.seen", "its own parameter `seen`"),
            ("x.add_(1)\nreturn x * 2", "its input `x`"),
        ):
            failure = self.refused("capture", model(body, init), inputs=[X])
            self.assertEqual(failure.message, f"the module writes into {what}")
            self.assertRegex(failure.location, r"^project_\d+\.py:8$")
        self.assertIn("[module.state]", failure.hint)

    def test_integer_constants_count_and_float_ones_do_not(self) -> None:
        def text(integers: str, floats: str) -> str:
            return model(
                "return x[:, self.i] * self.f",
                f"self.register_buffer('i', torch.tensor({integers}))\n"
                f"self.register_buffer('f', torch.tensor({floats}))",
            )

        one = self.composed_of(text("[0, 1, 2]", "[1.0, 1.0, 1.0]"))["segments"][0]["graph"]
        two = self.composed_of(text("[0, 1, 2]", "[4.0, 0.0, 2.0]"))["segments"][0]["graph"]
        three = self.composed_of(text("[2, 1, 0]", "[1.0, 1.0, 1.0]"))["segments"][0]["graph"]
        self.assertEqual(one, two)
        self.assertNotEqual(one, three)

    def test_a_module_called_twice_is_two_steps(self) -> None:
        text = model("return self.a(torch.sin(self.a(x)))", "self.a = torch.nn.Linear(6, 6)")
        captured = self.composed_of(text, ["a"])
        self.assertEqual([step["name"] for step in captured["steps"]], ["a", "glue.0", "a#2"])
        self.assertEqual(captured["steps"][0]["binding"], captured["steps"][2]["binding"])
        self.assertEqual(len(captured["segments"]), 2)

    def test_copies_that_protect_nothing_are_left_out(self) -> None:
        text = model(
            "h = torch.sin(x.clone()).clone()\n"
            "return h, h.clone(), h[1:].clone(), x.t().clone(memory_format=torch.contiguous_format)",
        )
        captured = self.composed_of(text)
        graph = captured["segments"][0]["graph"]
        # The remaining copies give a second output memory of its own, and the other two another layout.
        self.assertEqual(graph.count("aten.clone"), 3, graph)
        self.composed_of(model("return x.clone(), self.w.clone()", "self.w = torch.nn.Parameter(torch.ones(3))"))

    def test_several_outputs_of_one_operation_and_subgraphs_are_captured(self) -> None:
        text = model(
            "a, b = self.split(x)\nreturn torch.sin(a) + b",
            "self.split = Split()",
            "class Split(torch.nn.Module):\n    def forward(self, x):\n        return torch.split(x * 2, 3, dim=1)\n",
        )
        self.composed_of(text, ["split"])
        self.composed_of(model("return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))"))

    def test_what_is_inside_autocast_is_part_of_the_graph(self) -> None:
        text = model(
            "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
            "    h = self.a(x)\n"
            "    with torch.autocast('cpu', enabled=False):\n"
            "        h = h.float() * 3\n"
            "    h = self.b(h)\n"
            "with torch.enable_grad():\n"
            "    plain = x * 2\n"
            "return h.float(), plain, h, h.argmax(-1)",
            "self.a = torch.nn.Linear(6, 6)\nself.b = torch.nn.Linear(6, 6)",
        )
        captured = self.composed_of(text, ["a", "b"])
        self.assertEqual([step["name"] for step in captured["steps"]], ["a", "glue.0", "b", "glue.1"])
        dtypes = [output["dtype"] for output in captured["outputs"]]
        self.assertEqual(dtypes, ["float32", "float32", "bfloat16", "int64"])
        # How near to eager an artifact must be: a float32 answer may be rounded on its way.
        self.assertEqual(captured["compute_dtypes"], ["bfloat16", None, "bfloat16", None])

    def test_only_what_is_rounded_on_the_way_counts_as_a_compute_dtype(self) -> None:
        text = model(
            "rounded = x.bfloat16().float()\n"
            "tenth = torch.full((6,), 0.1, dtype=torch.bfloat16)\n"
            "low = torch.full((6,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)\n"
            "mask = (x > 0).bfloat16().reshape(-1).view(x.shape)\n"
            "chosen = torch.where(x.bfloat16() > 0, x, -x)\n"
            "table = self.table.clone()[1:].t().contiguous().float().sum()\n"
            "return rounded * 2, x + tenth, x.abs() + low, x * mask, chosen, x + table, x.half().float() + 1",
            "self.table = torch.nn.Parameter(torch.ones(3, 6).bfloat16(), requires_grad=False)",
        )
        captured = self.composed_of(text)
        exact = [None] * 4
        self.assertEqual(captured["compute_dtypes"], ["bfloat16", "bfloat16", *exact, "float16"])


class FollowTest(Project):
    def follow(self, body: str, size: int = 8) -> dict:
        opened = self.open(model(body))
        inputs = [("x", "float32", [size, 6], ["n", None]), ("y", "float32", [4, 6], ["m", None])]
        return self.capture(opened, inputs=inputs, sizes={"n": size, "m": 4})

    def test_affine_outputs(self) -> None:
        captured = self.follow("return torch.cat([x, x, x[:1]]), y + 0, y.mean(), x[:, 0]")
        dims = [output["dims"] for output in captured["outputs"]]
        self.assertEqual(dims[0], [{"dim": "n", "scale": 2, "offset": 1}, None])
        self.assertEqual(dims[2], [])
        self.assertEqual(dims[3], [{"dim": "n", "scale": 1, "offset": 0}])

    def test_what_cannot_be_cut_back_is_refused_with_its_reason(self) -> None:
        captured = self.follow("return torch.cat([x, y])")
        self.assertEqual(captured["exact"]["m"], "output `output` axis 0 depends on `n` and on `m`")
        captured = self.follow("return x[::2], y")
        self.assertEqual(
            captured["exact"],
            {"n": "output `0` axis 0 is not a multiple of `n` plus a constant (4 at 8, 4 at 7, 2 at 4)"},
        )
        captured = self.follow("return x.new_zeros(x.shape[0] ** 2), y")
        self.assertIn("output `0` axis 0 is not a multiple of ", captured["exact"]["n"])
        captured = self.follow("assert x.shape[0] == 8\nreturn x + 1, y")
        self.assertIn("runs at no other size of `n` than 8", captured["exact"]["n"])
        self.assertEqual(list(captured["exact"]), ["n"])

    def test_a_bucket_of_one(self) -> None:
        captured = self.follow("return x + 1, y", 1)
        self.assertEqual(captured["outputs"][0]["dims"], [{"dim": "n", "scale": 1, "offset": 0}, None])


class MistakesTest(Project):
    def test_an_input_goes_to_the_parameter_of_its_name(self) -> None:
        def both(parameters: str, *names: str) -> tuple[Any, Any]:
            """Captures `query - key` with these inputs; returns the inputs and the answer."""
            opened = self.open(model("return query - 2 * key", inputs=parameters))
            captured = self.capture(opened, inputs=[(name, "float32", [3]) for name in names])
            held = self.samples(captured)
            given = {name: held[f"in.{at}"] for at, name in enumerate(names)}
            return given, held["out.0"]

        for parameters in ("query, key", "query, *, key", "query, /, key", "query, key, /"):
            with self.subTest(parameters):
                given, out = both(parameters, "key", "query")
                self.assertTrue(torch.equal(out, given["query"] - 2 * given["key"]))
        for parameters in ("query, key", "query, *, key", "query, key, /", "query, key=None, **more"):
            with self.subTest(parameters):
                failure = self.fails("bad_input", both, parameters, "key", "querry")
                self.assertEqual(failure.message, "module `m` has no parameter `querry`")
                self.assertEqual(failure.hint, "did you mean `query`?")
        failure = self.fails("bad_input", both, "query, key", "query", "values")
        self.assertEqual(failure.hint, "its parameters are `query`, `key`")

    def test_inputs_without_a_parameter_keep_their_order(self) -> None:
        text = model("key, mask = more\nreturn query - 2 * key + 3 * mask", inputs="query, *more")
        named = [(name, "float32", [3]) for name in ("query", "a", "b")]
        held = self.samples(self.capture(self.open(text), inputs=named))
        query, a, b = (held[f"in.{at}"] for at in range(3))
        self.assertTrue(torch.equal(held["out.0"], query - 2 * a + 3 * b))
        failure = self.refused("bad_input", text, inputs=[named[1], named[0], named[2]])
        self.assertEqual(failure.message, "module `m` has no parameter `a`")

    def test_names_that_are_not_there(self) -> None:
        opened = self.open(STACK)
        for code, request, spec, hint in (
            ("no_module", {"path": "block.1"}, "block.1", "blocks.1"),
            ("no_module", {"regions": ["block.*"]}, "block.*", "blocks.*"),
            # A list is not called, its members are.
            ("no_module", {"regions": ["blocks.*", "blocks"]}, "blocks", "blocks.*"),
            ("no_method", {"method": "encoed"}, "encoed", "encode"),
        ):
            failure = self.refused(code, opened, inputs=[IDS, MASK], **request)
            self.assertEqual((failure.spec, failure.hint), (spec, f"did you mean `{hint}`?"))

    def test_a_branch_on_values_names_the_line(self) -> None:
        failure = self.refused("capture", model("if x.sum() > 0:\n    return x + 1\nreturn x - 1"), inputs=[X])
        description = part("failures").describe(failure, self.root)
        self.assertRegex(description["location"], r"^project_\d+\.py:8$")
        self.assertEqual(failure.message, "can't capture module `m`: a branch or a loop depends on values of a tensor")
        # Eager has the same graph: it is no way out.
        self.assertEqual(
            description["hint"],
            "use `torch.where` or `torch.cond`, or let the caller decide which of two modules to call; "
            "eager runs the captured graph too, so `enabled = false` does not help",
        )
        self.assertIn("Traceback", description["trace"])

    def test_a_size_from_values_names_the_line(self) -> None:
        for code in [
            "return x[x > 0]",
            "return x[x > 0].sum()",
            "return torch.zeros(int(x.sum()), 4) + x.mean()",
            "return x.expand(3, -1, -1)[: x.sum().long().item()]",
            "return [x[:n] for n in x.long().sum(0).tolist()]",
        ]:
            with self.subTest(code):
                failure = self.refused("capture", model(code), inputs=[X])
                why = "a size depends on values of a tensor, and not on the inputs' sizes alone"
                self.assertEqual(failure.message, why)
                self.assertRegex(failure.location, r"^project_\d+\.py:8$")
                hint = "compute at the largest size with a mask, or take the size from an input's shape; "
                self.assertTrue(failure.hint.startswith(hint), failure.hint)
        # A number from values is none.
        self.checked(model("return x * x.sum().item() + int(x.sum())"), inputs=[X])

    def test_what_torch_will_not_follow_is_no_bug(self) -> None:
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        failures = part("failures")
        described = failures.describe(GuardOnDataDependentSymNode(None, "Could not guard on data-dependent"), None)
        self.assertEqual((described["code"], described["hint"]), ("capture", failures.BRANCH))
        self.assertEqual(
            described["message"],
            "a branch or a size depends on values of a tensor, which no captured graph can follow",
        )

    def test_a_dataclass_is_named_with_what_makes_it_known(self) -> None:
        answer = "@dataclass\nclass Answer:\n    logits: torch.Tensor\n    note: str = 'fine'\n"
        text = model("return Answer(x + 1)", extra=f"from dataclasses import dataclass\n{answer}")
        failure = self.refused("capture", text, inputs=[X])
        why = "module `m` returns a `Answer`, which can't be taken apart into tensors"
        self.assertEqual((failure.message, failure.location), (why, None))
        hint = "`torch.export.register_dataclass(Answer)` after its definition, or return a dict of its tensors"
        self.assertEqual(failure.hint, hint)
        known = text.replace("class Model", "torch.export.register_dataclass(Answer)\nclass Model")
        captured = self.capture(self.open(known), inputs=[X])
        self.assertEqual([output["name"] for output in captured["outputs"]], ["logits"])

    def test_outputs_that_are_no_tensors_are_reported_as_left_out(self) -> None:
        opened = self.open(model('return {"y": x + 1, "note": "hello", "more": (3, None)}'))
        captured = self.capture(opened, inputs=[X])
        self.assertEqual([output["name"] for output in captured["outputs"]], ["y"])
        left = [f"output `{name}` of module `m` is a {kind}" for name, kind in (("note", "str"), ("more.0", "int"))]
        self.assertEqual(captured["notes"], [f"{one}: only tensors are returned, it is left out" for one in left])
        failure = self.refused("capture", model("return 3"), inputs=[X])
        self.assertEqual(failure.message, "module `m` returns no tensor")

    def test_wrong_shapes_name_the_line(self) -> None:
        failure = self.refused("capture", model("return self.a(x)", "self.a = torch.nn.Linear(5, 5)"), inputs=[X])
        self.assertRegex(failure.location, r"^project_\d+\.py:8$")

    def test_short_memory_says_nothing_of_the_model(self) -> None:
        text = model('raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")')
        description = part("failures").describe(self.refused("capture", text, inputs=[X]), self.root)
        self.assertEqual((description["code"], description["hint"]), ("out_of_memory", None))
        self.assertIn("Tried to allocate 9 GiB", description["message"])
        # The compiler keeps it beside its own exception.
        wrapped = RuntimeError("backend failed")
        wrapped.inner_exception = MemoryError()
        short = part("failures").is_out_of_memory
        self.assertEqual((short(wrapped), short(RuntimeError("size mismatch"))), (True, False))
        # A compiler that can't be started, and a library that no memory helps.
        self.assertTrue(short(OSError(12, "Cannot allocate memory")))
        self.assertFalse(short(OSError("a.so: cannot allocate memory in static TLS block")))
