"""Reasons that keep a program out of a CUDA graph: by line, from its graph or from its eager run."""

from __future__ import annotations

from typing import Any

from .support import Checks, evaluated, found

X = [("x", "float32", [2, 4])]
HOST = "waits for a value and reads it on the host"
SIZE = "takes or returns is known on the host only, when it has run"


class Graphs(Checks):
    def looked_at(self, body: str, inputs: Any = X, **request: Any) -> dict[str, Any]:
        text = evaluated(body, 'self.register_buffer("total", torch.zeros(()))')
        self.line = 1 + next(i for i, one in enumerate(text.splitlines()) if "# here" in one) if "# here" in body else 0
        return self.check(self.open(text), inputs, **request)

    def test_what_a_captured_program_does_on_the_host(self) -> None:
        cond = "return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))  # here"
        for body, why in (
            ("return x * x.sum().item()  # here", f"`item` {HOST}"),
            (cond, "`cond` chooses on the host what runs"),
        ):
            with self.subTest(body):
                answer = self.looked_at(body)
                self.assertTrue(answer["captured"])
                (reason,) = answer["graph"]
                self.assertEqual(reason["why"], why)
                self.assertTrue(reason["location"].endswith(f".py:{self.line}"))
                (one,) = found(answer, "cuda-graph")
                # The model is built for the CPU.
                self.assertEqual((one["severity"], one["location"]), ("low", reason["location"]))
                self.assertEqual([one for one in answer["findings"] if one["severity"] != "low"], [])
        # What can't be watched is no fault.
        self.assertEqual(found(answer, "inputs"), [])
        self.assertIn(f".py:{self.line}, which can't be watched", " ".join(answer["unknown"]))

    def test_what_eager_does_on_the_host_where_nothing_can_be_captured(self) -> None:
        stop = "\nreturn x if x.sum() > 0 else -x"
        for body, why in (
            ("n = x[0, 0].item()  # here", f"`.item()` {HOST}"),
            ("n = x.tolist()  # here", f"`.tolist()` {HOST}"),
            ("n = (x > 0).nonzero()  # here", f"the size of what `nonzero` {SIZE}"),
            ("n = x[x > 0]  # here", f"the size of what `x[…]` {SIZE}"),
            ("n = x.numpy()  # here", "`numpy` copies to the CPU"),
            ("n = x.cpu()  # here", "`cpu` copies to the CPU"),
            ("x += 1  # here", "`add_` changes the input `x` in place"),
            ("self.total += 1  # here", "`add_` changes the buffer `total` in place"),
        ):
            with self.subTest(body):
                answer = self.looked_at(body + stop)
                self.assertFalse(answer["captured"])
                here = [one["why"] for one in answer["graph"] if one["location"].endswith(f".py:{self.line}")]
                self.assertEqual(here, [why])
                self.assertIn(f"`bool()` {HOST}", [one["why"] for one in answer["graph"]])

    def test_dynamic_sizes(self) -> None:
        inputs = [("x", "float32", [2, 4], ["batch", None])]
        asked = {"batch": {"min": 2, "max": 8}}
        answer = self.looked_at("return x + 1", inputs, sizes={"batch": 2}, dynamic=asked)
        self.assertEqual(answer["graph"], [{"why": "`batch` is dynamic: a graph is of one size", "location": None}])
        self.assertEqual(self.looked_at("return torch.where(x > 0, x, -x)")["graph"], [])
