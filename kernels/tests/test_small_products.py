"""Small products with weights are an artifact's own code, with the same results."""

from __future__ import annotations

import unittest
import unittest.mock
from typing import Any

import torch
from precast_kernels import products

from tests.worker.artifact import agrees
from tests.worker.support import Project, long, model, part
from tests.worker.test_compile import follow

from .support import context_of, graph_of

MODEL = model(
    """\
up = F.gelu(self.a(x))
wide = self.b(up)
# Rows with gaps, transposed rows, and rows with an addition.
gaps = self.d(up[:, :32])
across = torch.addmm(gaps, self.c.weight[: x.shape[0], :32], self.d.weight.t()) + gaps.relu()
return wide, x + self.c(wide[:, :330]), across, self.e(up)""",
    """\
torch.manual_seed(0)
self.a, self.b, self.c = nn.Linear(48, 64), nn.Linear(64, 500), nn.Linear(330, 48, bias=False)
self.d, self.e = nn.Linear(32, 144), nn.Linear(64, 10)""",
    extra="""\
from torch import nn
from torch.nn import functional as F
""",
)


class SmallProductsTest(Project):
    def compiled(self, opened: Any, rows: int, isa: str = "native") -> tuple[str, list[list[int]]]:
        """Compiles for some number of rows, and checks the results; returns code and shapes of prepacked weights."""
        captured = self.capture(opened, inputs=[("x", "float32", [rows, 48])])
        passes = part("passes.segments").described(["precast_kernels:small_products"], self.root)
        answer = self.compile(captured, f"{isa}{rows}", isa=isa, options={"freezing": True}, passes=passes)
        weights = self.bound(captured, self.weights(opened))
        made = {one["name"]: follow(one["call"], weights) for one in answer["prepared"]}
        agrees(self, opened, captured, answer, [self.samples(captured)["in.0"]], (1e-5, 1e-5), made=made)
        return self.wrapper(f"{isa}{rows}"), [made["shape"] for made in answer["prepared"] if len(made["shape"]) == 3]

    def test_small_products_are_own_code_for_any_number_of_rows(self) -> None:
        opened = self.open(MODEL)
        for rows in (1, 19):
            code, shapes = self.compiled(opened, rows)
            # Of ten columns, a vector would hold more zeros than values.
            self.assertEqual(code.count("aoti_torch_cpu_addmm_out("), 1, code)
            self.assertNotIn("aoti_torch_cpu_mm_out(", code)
            width = products._width()
            if width == 16:
                # The columns of a block do not depend on the rows, so that buckets share them.
                wanted = [[2, 48, 32], [16, 64, 32], [1, 330, 48], [3, 32, 48]]
                self.assertEqual(sorted(shapes), sorted(wanted), rows)

    @long
    def test_a_baseline_has_its_own_vectors_or_none(self) -> None:
        opened = self.open(MODEL)
        code, shapes = self.compiled(opened, 6, "x86-64-v3")
        self.assertEqual(code.count("aoti_torch_cpu_addmm_out("), 1)
        self.assertEqual({shape[2] % 8 for shape in shapes}, {0})
        code, shapes = self.compiled(opened, 6, "x86-64-v2")
        self.assertEqual((code.count("aoti_torch_cpu_addmm_out("), shapes), (6, []))

    def test_columns_are_taken_so_that_few_are_added(self) -> None:
        for width, wanted in (
            (16, {48: 48, 144: 48, 64: 32, 500: 32, 16: 16, 15: 16, 14: 0, 10: 0, 1: 0}),
            (8, {48: 24, 64: 16, 500: 24, 10: 0, 8: 8, 1: 0}),
            (0, {48: 0}),
        ):
            with unittest.mock.patch.object(products, "_width", return_value=width):
                self.assertEqual({columns: products._columns(columns) for columns in wanted}, wanted)

    def test_what_is_large_or_no_float32_or_no_weight_stays(self) -> None:
        def product(m: Any, x: Any) -> Any:
            return torch.mm(x, m.w)

        for rows, weight, known, taken in (
            (8, torch.randn(32, 32), True, True),
            (8, torch.randn(32, 32), False, False),
            (8, torch.randn(32, 32).double(), True, False),
            (8, torch.randn(32, 32).bfloat16(), True, False),
            (1, torch.randn(256, 256), True, True),
            (1, torch.randn(256, 288), True, False),
            (1024, torch.randn(32, 32), True, True),
            (1025, torch.randn(32, 32), True, False),
            (0, torch.randn(32, 32), True, False),
        ):
            x = torch.randn(rows, weight.shape[0]).to(weight.dtype)
            with unittest.mock.patch.object(products, "_width", return_value=16):
                traced = graph_of(product, {"w": weight}, x)
                context = context_of(traced, "cpu")
                if not known:
                    context._weights.own = frozenset()
                products.replace_products(traced.graph, context)
                traced.graph.eliminate_dead_code()
            kept = [node for node in traced.graph.nodes if node.target is torch.ops.aten.mm.default]
            self.assertEqual(not kept, taken, (rows, weight.shape, weight.dtype))
