"""Padding: the module itself says whether a smaller request may be padded."""

from __future__ import annotations

import math
from typing import Any

from .support import Project, model, part, spec
from .test_capture import IDS, MASK, SIZES, STACK

ATTENTION = model(
    "x, keep = self.embed(ids), mask[:, None, :].bool()\n"
    "out = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep)\n"
    "return out, (out * mask[:, :, None]).sum(1)",
    "self.embed = torch.nn.Embedding(30, 8)",
    inputs="ids, mask",
)


class PaddingTest(Project):
    def found(self, text: str, **request: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """Returns the exact dimensions with their reasons, and the report."""
        captured = self.capture(self.open(text), **request)
        return captured["exact"], captured["receipt"].get("padding", {})

    def test_a_mask_makes_padding_invisible(self) -> None:
        refused, report = self.found(ATTENTION, inputs=[IDS, MASK], sizes=SIZES)
        self.assertEqual(refused, {})
        points = [point["sizes"] for point in report["points"]]
        for dim, tried in (("batch", {1}), ("seq", {1, 3, 5})):
            alone = [
                point[dim] for point in points if all(point[other] == SIZES[other] for other in SIZES if other != dim)
            ]
            self.assertEqual((len(alone), set(alone)), (len(part("values.samples").KINDS), tried))
        self.assertEqual(points[-3:], [{"batch": 1, "seq": 3}, {"batch": 1, "seq": 1}, {"batch": 1, "seq": 1}])
        self.assertLess(report["max_abs"], 1e-5)
        self.assertTrue(report["sensitive"])
        samples = part("tensors").read(self.out / "samples.safetensors")
        for index, point in enumerate(report["points"]):
            rows, columns = point["sizes"]["batch"], point["sizes"]["seq"]
            self.assertEqual(list(samples[f"smaller.{index}.in.1"].shape), [rows, columns])
            self.assertEqual(list(samples[f"smaller.{index}.out.0"].shape), [rows, columns, 8])
        refused, report = self.found(STACK, inputs=[IDS, MASK], sizes=SIZES)
        self.assertEqual(refused, {})
        self.assertFalse(report["sensitive"])

    def test_what_a_smaller_size_changes_is_refused_and_nothing_else(self) -> None:
        last, first = ("x", "float32", [4, 6], [None, "n"]), ("x", "float32", [6, 4], ["n", None])
        for x, body, said in (
            # A size as a number, and rows that are not at the front.
            (last, "x.sum(1) / x.shape[1]", r"^padded from n=5, output `output` differs .* its own size by 0\.\d+$"),
            (first, "torch.cat([x, x + 1])", "padded from n=5"),
            # A sum does not mind zeros, and minds any other value. What happens to padded rows does not matter.
            (last, "x.sum(1)", None),
            (first, "1 / x", None),
        ):
            refused, report = self.found(model(f"return {body}"), inputs=[x], sizes={"n": 6})
            if said is None:
                self.assertEqual((refused, math.isfinite(report["max_abs"])), ({}, True), body)
                self.assertEqual(report["sensitive"], x is last)
            else:
                self.assertRegex(refused["n"], said)

    def test_each_dimension_is_judged_alone(self) -> None:
        x = ("x", "float32", [4, 6, 2], ["batch", "seq", None])
        for body in ("x.mean(1)", "x.sum(1) / x.shape[1]", "x[:, ::2]", "x.sum() / x.shape[1]"):
            refused, report = self.found(model(f"return {body}"), inputs=[x], sizes={"batch": 4, "seq": 6})
            self.assertEqual(list(refused), ["seq"], body)
            if body != "x.sum() / x.shape[1]":
                self.assertIn({"batch": 1, "seq": 6}, [point["sizes"] for point in report["points"]])

    def test_values_of_every_kind_are_tried(self) -> None:
        """An operator that the graph says nothing of is right for usual values and wrong for others."""
        x = ("x", "float32", [4, 6], [None, "n"])
        hidden = "torch.gather(x.new_zeros(4, 1) + {}, 1, torch.zeros(4, 1, dtype=torch.int64))"
        for seen in (
            "(x + 0.05).amax(1, True).sign()",
            "(x - 0.05).amin(1, True).sign()",
            "x.abs().amin(1, True).sign()",
            "(x.amax(1, True) > -0.1).float()",
        ):
            body = f"x = x[:, torch.arange(x.shape[1])]\nreturn {hidden.format(seen)}"
            refused, _ = self.found(model(body), inputs=[x], sizes={"n": 6})
            self.assertIn("padded from", refused.get("n", ""), seen)

    def test_a_check_on_a_gpu_meets_usual_values_only(self) -> None:
        samples, padding = part("values.samples"), part("sizes.padding")
        self.assertEqual(samples.kinds("cuda", ["check"]), ("usual",))
        self.assertEqual(samples.kinds("cuda", []), samples.KINDS)
        self.assertEqual(samples.kinds("cpu", ["check"]), samples.KINDS)
        usual, every = (list(padding.single({"n": 8}, "n", kinds)) for kinds in (("usual",), samples.KINDS))
        self.assertEqual([sizes for sizes, _ in usual], [sizes for sizes, _ in every])
        self.assertEqual(({kind for _, kind in usual}, {kind for _, kind in every}), ({"usual"}, set(samples.KINDS)))

    def test_trusted_padding_is_not_judged(self) -> None:
        x = ("x", "float32", [4, 6], ["batch", "n"])
        request = {"inputs": [x], "sizes": {"batch": 4, "n": 6}, "padding": "trusted"}
        refused, report = self.found(model("return x.amax(1)"), **request)
        self.assertEqual((refused, report), ({}, {}))
        self.assertEqual(set(part("tensors").read(self.out / "samples.safetensors")), {"in.0", "out.0"})
        # Where it can't be cut back it can't be trusted.
        refused, _ = self.found(model("return x[:, ::2]"), **request)
        self.assertEqual(list(refused), ["n"])

    def test_a_bucket_of_one_has_nothing_to_pad(self) -> None:
        refused, report = self.found(model("return x + 1"), inputs=[("x", "float32", [1], ["n"])], sizes={"n": 1})
        self.assertEqual(refused, {})
        self.assertEqual(report["points"], [])
        self.assertEqual(spec("x", "float32", [1])["pad"], 0)
