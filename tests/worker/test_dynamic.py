"""Dynamic dimensions: one graph for every size, and the line that stands in the way of one."""

from __future__ import annotations

import torch

from .artifact import agrees
from .support import Project, model
from .test_capture import IDS, MASK, SIZES, STACK

BOTH = {"batch": {"min": 1, "max": 16}, "seq": {"min": 2, "max": 64}}
TWO = [("x", "float32", [4, 6], ["n", None]), ("y", "float32", [3, 6], ["m", None])]


class DynamicTest(Project):
    def test_one_graph_serves_every_size(self) -> None:
        opened, sizes = self.open(STACK), {**SIZES, "batch": 1}
        captured = self.checked(opened, inputs=[IDS, MASK], sizes=sizes, dynamic=BOTH, regions=["blocks.*"])
        self.assertEqual(captured["dynamic"], {"batch": {"min": 2, "max": 16}, "seq": {"min": 2, "max": 64}})
        self.assertEqual([input["shape"] for input in captured["inputs"]], [[2, 6], [2, 6]])
        self.assertEqual([step["name"] for step in captured["steps"]], ["main"])
        self.assertIn("d0 in [2, 16]", captured["segments"][0]["graph"])
        weights = self.weights(opened)
        ids, mask = torch.randint(0, 50, (5, 17)), torch.ones(5, 17, dtype=torch.int64)
        with torch.inference_mode():
            expected = opened.model(ids, mask)
        results = self.run_eager(captured, [ids, mask], weights)
        self.assertTrue(torch.equal(results[0], expected["logits"]))
        # The compiled artifact too, at two sizes it has not seen.
        answer = self.compile(captured)
        for inputs in ([ids, mask], [ids[:3, :2].contiguous(), mask[:3, :2].contiguous()]):
            agrees(self, opened, captured, answer, inputs, (1e-5, 1e-5))

    def test_texts_do_not_depend_on_what_symbols_are_called(self) -> None:
        one = self.capture(self.open(STACK), inputs=[IDS, MASK], sizes=SIZES, dynamic=BOTH)
        renamed = STACK.replace("ids", "tokens")
        tokens = ("tokens", "int64", [2, 6], ["rows", "columns"])
        mask = ("mask", "int64", [2, 6], ["rows", "columns"])
        bounds = {"rows": BOTH["batch"], "columns": BOTH["seq"]}
        two = self.capture(self.open(renamed), inputs=[tokens, mask], sizes={"rows": 2, "columns": 6}, dynamic=bounds)
        self.assertEqual(one["segments"][0]["graph"], two["segments"][0]["graph"])
        wider = {**BOTH, "seq": {"min": 2, "max": 65}}
        three = self.capture(self.open(STACK), inputs=[IDS, MASK], sizes=SIZES, dynamic=wider)
        self.assertNotEqual(one["segments"][0]["graph"], three["segments"][0]["graph"])

    def test_what_can_not_be_dynamic_is_named(self) -> None:
        request = {"inputs": TWO, "sizes": {"n": 4, "m": 3}}
        bounds = {"n": {"min": 2, "max": 9}, "m": {"min": 2, "max": 9}}
        branch = model("h = x * 2\nif x.shape[0] == 4:\n    h = h + 1\nreturn h, y")
        failure = self.refused("capture", branch, dynamic=bounds, **request)
        self.assertEqual(failure.message, "dimension `n` can't be dynamic: the code of module `m` needs it to be 4")
        self.assertRegex(failure.location, r"^project_\d+\.py:9$")
        failure = self.refused("capture", model("return x[:3] + y"), dynamic=bounds, **request)
        self.assertIn("`m`", failure.message)
        failure = self.refused("capture", model("return x + 1, y"), dynamic={"n": {"min": 1, "max": 2}}, **request)
        self.assertEqual(failure.message, "dimension `n` goes from 1 to 2: too few sizes to be dynamic")
