"""Indices that a program computes are clamped, and the program says which were out of bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .support import Project, interpret, long, model, part, spec

USES = """
import torch
from torch import nn

ROWS = 7

class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(ROWS, 3)
        self.register_buffer("places", torch.arange(16))
        self.register_buffer("order", torch.tensor([3, 1, 6, 0]))

    def forward(self, x):
        return USES[self.kind](self, x)

def asserts(model, x):
    torch._assert_async((x > -100).all(), "x is far too small")
    return x * 1 + 1

def pooled(model, x):
    made, places = nn.functional.max_pool2d(x[None, None].float(), 2, 2, return_indices=True)
    return nn.functional.max_unpool2d(made, places, 2, 2)

USES = {
    "embedding": lambda m, x: m.table(x * 1 + 1),
    "index": lambda m, x: m.table.weight[x * 1 + 1],
    "index_select": lambda m, x: torch.index_select(m.table.weight, 0, (x * 1 + 1).flatten()),
    "gather": lambda m, x: m.table.weight.gather(0, (x * 1 + 1)[:, :3]),
    "take": lambda m, x: m.table.weight.take(x * 1 + 1),
    "take_along_dim": lambda m, x: torch.take_along_dim(m.table.weight, (x * 1 + 1)[:, :3], dim=0),
    "scatter": lambda m, x: m.table.weight.scatter(0, (x * 1 + 1)[:, :3], 1.5),
    "scatter_add": lambda m, x: m.table.weight.scatter_add(0, (x * 1 + 1)[:, :3], x[:, :3].float()),
    "index_put": lambda m, x: m.table.weight.index_put((x * 1 + 1,), torch.ones(3), accumulate=True),
    "index_add": lambda m, x: m.table.weight.index_add(0, (x * 1 + 1)[0], torch.ones(4, 3)),
    "index_copy": lambda m, x: m.table.weight.index_copy(0, (x * 1 + 1)[0], torch.ones(4, 3)),
    "index_fill": lambda m, x: m.table.weight.index_fill(0, (x * 1 + 1)[0], 2.0),
    "one_hot": lambda m, x: nn.functional.one_hot(x * 1 + 1, ROWS),
    "nll_loss": lambda m, x: nn.functional.nll_loss(m.table.weight.t()[:2].exp(), (x * 1 + 1)[:, 0]),
    "cross_entropy": lambda m, x: nn.functional.cross_entropy(m.table.weight.t()[:2], (x * 1 + 1)[:, 0]),
    "two": lambda m, x: m.table.weight[x * 1 + 1, torch.div(x, 4, rounding_mode="floor")],
    "int32": lambda m, x: m.table((x * 1 + 1).int()),
    "assert": asserts,
    "unpool": lambda m, x: nn.functional.max_unpool2d(x[None, None].float(), (x * 1 + 1).abs()[None, None] % 64, 2, 2),
    # Known to be in bounds.
    "places": lambda m, x: m.table(m.places[: x.shape[1]]) + x[..., None],
    "argmax": lambda m, x: x.float()[torch.arange(2), x.argmax(-1)],
    "topk": lambda m, x: m.table.weight[x.float().topk(2).indices],
    "sorted": lambda m, x: nn.functional.one_hot(torch.sort(x, dim=1)[1], 4),
    "clamped": lambda m, x: m.table(x.clamp(0, ROWS - 1)),
    "rows": lambda m, x: m.table(x % ROWS),
    "true": lambda m, x: m.table((x > 2).long() * 3 + (x < 1).long().cumsum(1).clamp(max=3)),
    "ordered": lambda m, x: m.table(m.order[x.argmax(-1)]),
    "where": lambda m, x: m.table(torch.where((x >= 0) & (x < ROWS), 2, 6)),
    "pooled": pooled,
    "halved": lambda m, x: m.table(torch.div(x.remainder(2 * ROWS), 2, rounding_mode="floor")),
}

def load():
    return Model(KIND)
"""

LAYERS = model(
    """\
h = torch.zeros(*x.shape, 4)
for layer in self.layers:
    h = layer(h, x)
return h""",
    "self.layers = nn.ModuleList(Layer() for _ in range(3))",
    extra="""\
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, h, x):
        return h + self.table(x * 1 + 1)
""",
)

LARGEST, LEAST = 2**63 - 1, -(2**63)


class ChecksTest(Project):
    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(part("values.checks"), "DEVICES", ("cpu",))
        patch.start()
        self.addCleanup(patch.stop)

    def use(self, kind: str, **request: Any) -> tuple[Any, dict[str, Any]]:
        opened = self.open(USES.replace("KIND", repr(kind)))
        return opened, self.checked(opened, inputs=[("x", "int64", [2, 4])], **request)

    def run_on(self, opened: Any, captured: dict[str, Any], x: Any) -> tuple[list[Any], list[bool]]:
        """Returns the outputs and the outcomes of the checks."""
        values = self.values(captured, self.weights(opened), [x])
        outcomes = [bool(values[check["value"]]) for check in captured["checks"]]
        return [values[number] for number in captured["results"]], outcomes

    @long
    def test_a_computed_index_is_clamped_and_reported(self) -> None:
        wraps = {"index": 7, "take": 21, "index_put": 7, "index_fill": 7, "two": 7}
        plain = ["embedding", "index_select", "gather", "take_along_dim", "scatter", "scatter_add", "index_add"]
        plain += ["index_copy", "one_hot", "int32", *wraps]
        for kind in plain:
            with self.subTest(kind):
                opened, captured = self.use(kind)
                self.assertEqual(len(captured["checks"]), 2 if kind == "two" else 1, captured["checks"])
                check = captured["checks"][0]
                rows = 21 if kind == "take" else 7
                self.assertIn(f"index in {-wraps.get(kind, 0)}..{rows} of aten.", check["text"])
                self.assertRegex(check["location"], r"project_\d+\.py:\d+")
                good = torch.tensor([[0, 1, 2, 3], [5, 0, 1, 2]])
                outputs, outcomes = self.run_on(opened, captured, good)
                self.assertFalse(any(outcomes))
                with torch.no_grad():
                    torch.testing.assert_close(outputs[0], opened.model(good), rtol=0, atol=0)
                low = -wraps.get(kind, 0)
                for bad in (rows - 1, rows, low - 2, 2**31, -(2**31) - 5, LARGEST, LEAST):
                    value = good.clone()
                    value[0, 1] = bad
                    _, outcomes = self.run_on(opened, captured, value)
                    # The index is one more, and may wrap around when it is computed: then it is out of bounds too.
                    index = (value + 1).int().long() if kind == "int32" else value + 1
                    if kind != "int32" or abs(bad) < 2**31:
                        self.assertEqual(outcomes[0], not low <= int(index[0, 1]) < rows, (kind, bad))
                for edge in (low - 1, rows - 2):
                    value = good.clone()
                    value[0, 1] = edge
                    _, outcomes = self.run_on(opened, captured, value)
                    self.assertFalse(outcomes[0], (kind, edge))

    def test_a_class_may_be_the_one_to_ignore(self) -> None:
        for kind in ("nll_loss", "cross_entropy"):
            opened, captured = self.use(kind)
            for first, failed in ((0, False), (5, False), (6, True), (-2, True), (-101, False), (LARGEST, True)):
                x = torch.tensor([[first, 0, 0, 0], [1, 0, 0, 0]])
                outputs, outcomes = self.run_on(opened, captured, x)
                self.assertEqual(outcomes, [failed], (kind, first))
                if not failed:
                    with torch.no_grad():
                        torch.testing.assert_close(outputs[0], opened.model(x))

    def test_a_place_of_a_plane_is_one_of_all_its_axes(self) -> None:
        opened, captured = self.use("unpool")
        (check,) = captured["checks"]
        self.assertIn("index in 0..32 of aten.max_unpool2d", check["text"])
        x = torch.arange(8).view(2, 4)
        self.assertEqual(self.run_on(opened, captured, x)[1], [False])
        for bad in (31, 32, 62):
            x[1, 2] = bad
            self.assertEqual(self.run_on(opened, captured, x)[1], [True])

    def test_an_assertion_becomes_an_outcome(self) -> None:
        opened, captured = self.use("assert")
        self.assertEqual([check["text"] for check in captured["checks"]], ["x is far too small"])
        self.assertNotIn("_assert_async", captured["segments"][0]["graph"])
        x = torch.zeros(2, 4, dtype=torch.int64)
        self.assertEqual(self.run_on(opened, captured, x)[1], [False])
        self.assertEqual(self.run_on(opened, captured, x - 100)[1], [True])

    def test_what_is_known_to_be_in_bounds_is_left_alone(self) -> None:
        kinds = ("places", "argmax", "topk", "sorted", "clamped", "rows", "true", "ordered", "where", "halved")
        kinds += ("pooled",)
        for kind in kinds:
            with self.subTest(kind):
                _, captured = self.use(kind)
                self.assertEqual(captured["checks"], [])
                self.assertNotIn("aten.ne.Tensor", captured["segments"][0]["graph"])

    def test_bounds_of_an_input_hold_for_what_follows_from_them(self) -> None:
        flat = part("graph.flat")
        checks, call = part("values.checks"), part("graph.call")
        for bound, count in ((5, 0), (6, 1)):
            opened = self.open(USES.replace("KIND", "'embedding'"))
            wrapped = call.wrap(opened.model, "forward", ["x"])
            program = flat.export(wrapped, [torch.zeros(2, 4, dtype=torch.int64)], self.root, "it")
            graph = flat.flatten(program, part("weights").collect(opened.model), "", self.root)
            specs = [spec("x", "int64", [2, 4])]
            self.assertEqual(checks.add(graph, {graph.inputs[0]: (-1, bound)}, specs, self.root), 1 + count)

    def test_an_input_with_bounds_is_clamped_and_all_that_follows_from_a_bad_value_is_nan(self) -> None:
        body = "h = self.table(x) + self.table(x.abs() % 9); return h.sum(-1), x * 2"
        opened = self.open(model(body, "self.table = torch.nn.Embedding(7, 3)"))
        captured = self.capture(opened, inputs=[("x", "int64", [2, 4])])
        self.assertEqual(captured["inputs"][0]["bounds"], [0, 7])
        # Values computed within the bounds need no check: below 7 it is never 7 or 8.
        self.assertEqual([(one["text"], one["input"]) for one in captured["checks"]], [("input `x` in 0..7", "x")])
        good = torch.tensor([[0, 1, 2, 3], [6, 0, 1, 2]])
        outputs, outcomes = self.run_on(opened, captured, good)
        self.assertEqual(outcomes, [False])
        with torch.no_grad():
            torch.testing.assert_close(outputs[0], opened.model(good)[0])
        for bad in (7, -1, LARGEST, LEAST):
            value = good.clone()
            value[0, 1] = bad
            outputs, outcomes = self.run_on(opened, captured, value)
            self.assertEqual(outcomes, [True])
            self.assertEqual(outputs[0].isnan().nonzero().tolist(), [[0, 1]])
            self.assertEqual(outputs[1].tolist(), (value.clamp(0, 6) * 2).tolist())

    def test_what_pads_an_input_is_within_its_bounds(self) -> None:
        opened = self.open(model("return self.table(x)", "self.table = torch.nn.Embedding(7, 3)"))
        specs = [{**spec("x", "int64", [2, 4]), "range": [1, 7], "pad": 0}]
        captured = self.capture(opened, specs=specs)
        for value, failed in ((0, False), (1, False), (6, False), (7, True), (-1, True)):
            self.assertEqual(self.run_on(opened, captured, torch.full((2, 4), value))[1], [failed], value)

    def test_floats_are_nan_where_no_lookup_is_by_the_value(self) -> None:
        for kind in ("nll_loss", "scatter", "index_add", "assert"):
            opened, captured = self.use(kind)
            x = torch.zeros(2, 4, dtype=torch.int64)
            self.assertFalse(any(one.isnan().any() for one in self.run_on(opened, captured, x)[0]), kind)
            outputs, outcomes = self.run_on(opened, captured, x - 100 if kind == "assert" else x + 50)
            self.assertEqual(outcomes, [True], kind)
            for one in outputs:
                self.assertEqual(bool(one.isnan().all()), one.is_floating_point(), kind)

    def test_a_bad_index_gives_nan_where_it_looks_up(self) -> None:
        for kind in ("embedding", "index", "gather", "take", "take_along_dim", "index_select", "two"):
            opened, captured = self.use(kind)
            x = torch.tensor([[0, 1, 2, 3], [5, 0, 1, 2]])
            x[0, 1] = 60
            (got,), outcomes = self.run_on(opened, captured, x)
            self.assertIn(True, outcomes, kind)
            self.assertTrue(got.isnan().any(), kind)
            whole = kind in ("index_select", "two")  # no lookup of its own: all outputs
            self.assertEqual(bool(got.isnan().all()), whole, kind)

    def test_layers_stay_one_segment_and_each_has_its_outcome(self) -> None:
        opened = self.open(LAYERS)
        captured = self.checked(opened, inputs=[("x", "int64", [2, 4])], regions=["layers.*"])
        self.assertEqual(len(captured["segments"]), 2)
        self.assertEqual(len({check["value"] for check in captured["checks"]}), 3)
        x = torch.zeros(2, 4, dtype=torch.int64)
        self.assertEqual(self.run_on(opened, captured, x)[1], [False] * 3)
        self.assertEqual(self.run_on(opened, captured, x + 6)[1], [True] * 3)

    def test_every_size_is_compared_with_its_own(self) -> None:
        body = "return h[torch.arange(2), x.sum(1)] + h.gather(1, x[:, :, None].abs().expand(-1, -1, 3))[:, 0]"
        opened = self.open(model(body, inputs="h, x"))
        inputs = [("h", "float32", [2, 4, 3], [None, "seq", None]), ("x", "int64", [2, 4], [None, "seq"])]
        captured = self.capture(opened, inputs=inputs, sizes={"seq": 4}, dynamic={"seq": {"min": 2, "max": 64}})
        self.assertEqual(len(captured["checks"]), 2)
        (segment,) = captured["segments"]
        for seq in (4, 9):
            h = torch.randn(2, seq, 3)
            for value, failed in ((0, False), (seq - 1, False), (seq, True), (-seq, True), (-seq - 1, True)):
                x = torch.zeros(2, seq, dtype=torch.int64)
                x[0, 1] = value
                places = [f"in{captured['steps'][0]['inputs'].index(number)}" for number in (0, 1)]
                made = interpret(Path(segment["file"]), dict(zip(places, (h, x), strict=True)))
                outcomes = [bool(made[captured["steps"][0]["outputs"].index(c["value"])]) for c in captured["checks"]]
                self.assertEqual(any(outcomes), failed, (seq, value))

    def test_eager_gives_the_outcomes_too(self) -> None:
        opened, captured = self.use("embedding")
        made = self.run_eager(captured, [torch.full((2, 4), 6)], self.weights(opened))
        self.assertEqual(len(made), 2)
        self.assertTrue(bool(made[1]))
