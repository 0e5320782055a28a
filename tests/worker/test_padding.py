"""Padding: the module itself says whether a smaller request may be padded."""

from __future__ import annotations

import math
import unittest
from typing import Any

from .support import Project, part, spec
from .test_capture import IDS, MASK, SIZES, STACK, model

ATTENTION = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(30, 8)

    def forward(self, ids, mask):
        x = self.embed(ids)
        keep = mask[:, None, :].bool()
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep)
        return out, (out * mask[:, :, None]).sum(1)

def load():
    return Model()
"""


class PaddingTest(Project):
    def found(self, text: str, **request: Any) -> tuple[str | None, dict[str, Any]]:
        captured = self.capture(self.open(text), **request)
        return captured["padding_refused"], captured["receipt"].get("padding", {})

    def test_a_mask_makes_padding_invisible(self) -> None:
        refused, report = self.found(ATTENTION, inputs=[IDS, MASK], sizes=SIZES)
        self.assertIsNone(refused)
        self.assertEqual(
            [point["sizes"] for point in report["points"]],
            [{"batch": 1, "seq": 6}, {"batch": 2, "seq": 5}, {"batch": 1, "seq": 3}, {"batch": 1, "seq": 1}],
        )
        self.assertLess(report["max_abs"], 1e-5)
        self.assertTrue(report["sensitive"])
        samples = part("tensors").read(self.out / "samples.safetensors")
        for index, point in enumerate(report["points"]):
            rows, columns = point["sizes"]["batch"], point["sizes"]["seq"]
            self.assertEqual(list(samples[f"smaller.{index}.in.1"].shape), [rows, columns])
            self.assertEqual(list(samples[f"smaller.{index}.out.0"].shape), [rows, columns, 8])
        refused, report = self.found(STACK, inputs=[IDS, MASK], sizes=SIZES)
        self.assertIsNone(refused)
        self.assertFalse(report["sensitive"])

    def test_a_mean_over_a_padded_axis_is_refused(self) -> None:
        x = ("x", "float32", [4, 6], [None, "n"])
        refused, _ = self.found(model("return x.mean(1)"), inputs=[x], sizes={"n": 6})
        self.assertRegex(refused, r"^padded from n=5, output `output` differs from the one at its own size by 0\.\d+$")
        # A sum does not mind zeros, and minds any other value.
        refused, report = self.found(model("return x.sum(1)"), inputs=[x], sizes={"n": 6})
        self.assertIsNone(refused)
        self.assertTrue(report["sensitive"])

    def test_rows_that_are_not_at_the_front_are_refused(self) -> None:
        x = ("x", "float32", [4, 6], ["n", None])
        refused, _ = self.found(model("return torch.cat([x, x + 1])"), inputs=[x], sizes={"n": 4})
        self.assertIn("padded from n=3", refused)

    def test_what_padding_does_to_padded_rows_does_not_matter(self) -> None:
        x = ("x", "float32", [4, 6], ["n", None])
        refused, report = self.found(model("return 1 / x"), inputs=[x], sizes={"n": 4})
        self.assertIsNone(refused)
        self.assertTrue(math.isfinite(report["max_abs"]))

    def test_a_bucket_of_one_has_nothing_to_pad(self) -> None:
        refused, report = self.found(model("return x + 1"), inputs=[("x", "float32", [1], ["n"])], sizes={"n": 1})
        self.assertIsNone(refused)
        self.assertEqual(report["points"], [])
        self.assertEqual(spec("x", "float32", [1])["pad"], 0)


if __name__ == "__main__":
    unittest.main()
