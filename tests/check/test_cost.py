"""The minimum cost of a call: FLOPs and bytes by bucket, and their time on this machine."""

from __future__ import annotations

from typing import Any

from .support import Checks, evaluated

LAYERS = "self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)\nself.tied = self.second"
PLAIN = "return self.second(torch.relu(self.first(x)))"
X = [("x", "float32", [2, 16], ["batch", None])]
BUCKETS = [{"batch": 2}, {"batch": 64}]
WEIGHTS = 4 * (16 * 32 + 32 + 32 * 8 + 8)


class Costs(Checks):
    def looked_at(self, body: str = PLAIN) -> dict[str, Any]:
        opened = self.open(evaluated(body, LAYERS))
        return self.check(opened, X, sizes={"batch": 2}, buckets=BUCKETS, cost=True)

    def test_flops_and_bytes_of_each_bucket(self) -> None:
        cost = self.looked_at()["cost"]
        self.assertEqual(cost["weights"], WEIGHTS)
        self.assertEqual([one["sizes"] for one in cost["buckets"]], BUCKETS)
        for one in cost["buckets"]:
            batch = one["sizes"]["batch"]
            self.assertEqual(one["flops"], 2 * batch * (16 * 32 + 32 * 8))
            self.assertEqual(one["bytes"], WEIGHTS + 4 * batch * (16 + 8))
            floor = max(one["flops"] / cost["flops_per_second"], one["bytes"] / cost["bytes_per_second"])
            self.assertEqual(one["seconds"], floor)
        # No machine that runs this is slower or faster.
        self.assertTrue(1e8 < cost["flops_per_second"] < 1e15)
        self.assertTrue(1e8 < cost["bytes_per_second"] < 1e13)
        self.assertRegex(cost["measured"], r"^a product of 1024 by 1024 in float32, a copy of 256 MiB; \d+ threads$")
        self.assertIsNone(self.check(self.open(evaluated(PLAIN, LAYERS)), X)["cost"], "not asked for")

    def test_a_module_that_needs_values_is_run(self) -> None:
        cost = self.looked_at("return self.first(x) if x.sum() > -1e9 else x")["cost"]
        self.assertEqual([one["flops"] for one in cost["buckets"]], [2 * batch * 16 * 32 for batch in (2, 64)])

    def test_attention_counts_and_tables_do_not(self) -> None:
        body = "x = self.words(ids)[:, None]\nreturn torch.nn.functional.scaled_dot_product_attention(x, x, x)"
        text = evaluated(body, "self.words = nn.Embedding(100, 16)", inputs="ids")
        cost = self.check(self.open(text), [("ids", "int64", [2, 8])], cost=True)["cost"]
        self.assertEqual(cost["weights"], 0)
        (one,) = cost["buckets"]
        self.assertEqual((one["flops"], one["bytes"]), (2 * 2 * 2 * 8 * 8 * 16, 2 * 8 * 8 + 2 * 8 * 16 * 4))

    def test_what_fails_is_said(self) -> None:
        answer = self.looked_at("return self.second(torch.relu(self.first(x)[:2].reshape(2, 32) if len(x) < 9 else x))")
        self.assertEqual([one["sizes"] for one in answer["cost"]["buckets"]], BUCKETS[:1])
        self.assertIn("what a call costs at `batch` = 64: it fails with RuntimeError", " ".join(answer["unknown"]))
