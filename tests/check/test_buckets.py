"""Findings at the smallest and the largest bucket of each dimension."""

from __future__ import annotations

from typing import Any

from .support import Checks, evaluated, found, part

TABLES = "self.words, self.places = nn.Embedding(50, 4), nn.Embedding(256, 4)"
INPUTS = [("ids", "int64", [1, 32], ["batch", "seq"])]


class BucketTest(Checks):
    def findings(self, buckets: list[dict[str, int]], body: str = "") -> list[dict[str, Any]]:
        body += "\nat = torch.arange(ids.shape[1])\nreturn self.words(ids) + self.places(at)  # here"
        opened = self.open(evaluated(body, TABLES, inputs="ids"))
        answer = self.check(opened, INPUTS, sizes=buckets[0], buckets=buckets)
        return [one for category in ("inputs", "unsupported") for one in found(answer, category)]

    def test_a_bucket_beyond_the_positions_of_the_model(self) -> None:
        grid = [{"batch": batch, "seq": seq} for batch in (1, 8) for seq in (32, 256, 300)]
        (one,) = self.findings(grid)
        self.assertEqual((one["severity"], one["category"]), ("high", "inputs"))
        self.assertEqual(one["source"], "return self.words(ids) + self.places(at)  # here")
        self.assertTrue(one["why"].startswith("it fails at the bucket `batch=8 seq=300`: IndexError:"), one["why"])
        self.assertEqual(self.findings([bucket for bucket in grid if bucket["seq"] < 300]), [])

    def test_a_bucket_that_can_not_be_captured(self) -> None:
        body = "if ids.shape[1] < 16 and ids.sum() > 0: return ids"
        (one,) = self.findings([{"batch": 1, "seq": 32}, {"batch": 1, "seq": 8}], body)
        self.assertEqual((one["severity"], one["category"]), ("high", "unsupported"))
        self.assertTrue(one["why"].startswith("it fails at the bucket `batch=1 seq=8`: "), one["why"])

    def test_points_of_which_none_is_the_largest_in_all(self) -> None:
        points = [{"batch": 2, "seq": 32}, {"batch": 1, "seq": 300}, {"batch": 64, "seq": 8}, {"batch": 64, "seq": 16}]
        subject = part("check.subject").Subject
        inputs = [{"dims": ["batch", "seq"]}]
        asked = subject(None, {"inputs": inputs}, points[0], points, None, None, "m", None, None)
        self.assertEqual(part("check.buckets").ends(asked), [points[1], points[3], points[2]])
