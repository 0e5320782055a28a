"""Recompilations and graph breaks of torch.compile, by guard and by line."""

from __future__ import annotations

from typing import Any

from .support import Checks, evaluated, found

X = [("x", "float32", [2, 4], ["batch", None])]


class Recompiles(Checks):
    def looked_at(self, *body: str) -> dict[str, Any]:
        text = evaluated("\n".join(body), "self.linear, self.calls, self.scale = nn.Linear(4, 4), 0, 2.0")
        return self.check(self.open(text), X, sizes={"batch": 2}, buckets=[{"batch": 2}, {"batch": 8}], recompiles=True)

    def one(self, answer: dict[str, Any], severity: str, source: str) -> dict[str, Any]:
        """Returns the one finding about recompiles with a severity at a line."""
        here = [one for one in found(answer, "recompile") if (one["severity"], one["source"]) == (severity, source)]
        self.assertEqual(len(here), 1, answer["findings"])
        return here[0]

    def test_a_clean_module_is_compiled_again_once_for_each_dimension(self) -> None:
        answer = self.looked_at("return self.linear(x)")
        second = [one for one in found(answer, "recompile") if "second size of `batch`" in one["why"]]
        self.assertEqual(second[0]["fix"]["lines"], ["torch._dynamo.mark_dynamic(x, 0)"])
        self.assertEqual({one["severity"] for one in answer["findings"]}, {"low"})
        graphs = [(call["sizes"]["batch"], call["graphs"]) for call in answer["recompiles"]["calls"]]
        # The same sizes again need nothing new; nor does a third size.
        self.assertEqual(graphs[:4], [(2, 1), (2, 0), (8, 1), (4, 0)])
        self.assertEqual(answer["recompiles"]["calls"][2]["guards"], ["batch == 2"])
        answer = self.check(self.open(evaluated("return x")), X, sizes={"batch": 2})
        self.assertIsNone(answer["recompiles"], "not asked for")

    def test_a_number_that_changes_with_every_call(self) -> None:
        answer = self.looked_at("self.calls = self.calls + 1", "return x * self.calls")
        one = self.one(answer, "medium", "self.calls = self.calls + 1")
        self.assertIn("at every call", one["why"])
        self.assertIn("`self.calls ==", one["why"])

    def test_a_size_that_is_read(self) -> None:
        answer = self.looked_at("rows = x.shape[0]", "return x.view(int(str(rows)), 2, 2)")
        here = [one for one in found(answer, "recompile") if one["severity"] == "medium"]
        self.assertEqual(len(here), 1, answer["findings"])
        self.assertIn("every size of `batch`, and after 8 runs eager", here[0]["why"])

    def test_a_comparison_of_sizes(self) -> None:
        answer = self.looked_at("if x.shape[0] > 5:", "    return x + 1", "return self.linear(x)")
        self.assertIn("`6 <= batch`", self.one(answer, "low", "if x.shape[0] > 5:")["why"])

    def test_a_break_that_has_no_other_finding(self) -> None:
        answer = self.looked_at("y = self.linear(x)", "torch._dynamo.graph_break()", "return y + 1")
        (one,) = found(answer, "graph-break")
        self.assertEqual((one["severity"], one["source"]), ("medium", "torch._dynamo.graph_break()"))
        self.assertEqual(answer["recompiles"]["calls"][0]["graphs"], 2)
