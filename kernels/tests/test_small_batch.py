"""Small-batch GEMM and single-tile attention: which nodes are taken, and equal results (interpreted)."""

from __future__ import annotations

import unittest.mock
from pathlib import Path
from typing import Any

import precast_kernels
from precast_kernels import small_batch

from tests.worker.support import Project, long, model, part

from .support import context_of, interpreted, tidy

BLOCK = model(
    """\
q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 1, 3, 64).permute(3, 0, 2, 1, 4).unbind(0)
attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
x = x + self.out(attended.reshape(*x.shape[:2], 64))
return x + self.down(torch.nn.functional.gelu(self.up(x)))""",
    """\
self.norm = torch.nn.LayerNorm(1024)
self.qkv, self.out = torch.nn.Linear(1024, 192), torch.nn.Linear(64, 1024, bias=False)
self.up, self.down = torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 1024)
self.to(torch.{dtype})""",
)

# Splits a captured segment; returns the changes and the largest difference from the plain one.
KERNEL = """
from precast_kernels import small_batch
inputs = [torch.randn_like(value) for value in inputs]
for weight in module.buffers():
    weight.div_(32)
(before,) = module(*inputs)
assert small_batch.split(module.graph, 132) == 4
assert small_batch.attend(module.graph) == 1
assert not small_batch.attend(module.graph)
module.graph.lint()
module.recompile()
(after,) = module(*inputs)
assert after.dtype == before.dtype and after.shape == before.shape
far = (after.double() - before.double()).norm() / before.double().norm()
assert far < 2e-3, far
"""


class SmallBatchTest(Project):
    def segment(self, dtype: str, rows: int) -> Any:
        opened = self.open(BLOCK.replace("{dtype}", dtype))
        captured = self.capture(opened, inputs=[("x", dtype, [1, rows, 1024])])
        return captured["segments"][0]["file"]

    def test_only_few_rows_of_a_narrow_dtype_are_split(self) -> None:
        for dtype, rows in (("float32", 48), ("bfloat16", 65)):
            module, _, _ = part("graph.segment").load(Path(self.segment(dtype, rows)), "cpu")
            self.assertEqual(small_batch.split(module.graph, 132), 0)

    def test_as_passes_they_are_for_a_device(self) -> None:
        module, _, _ = part("graph.segment").load(Path(self.segment("float16", 48)), "cpu")
        passes = [precast_kernels.split_k, precast_kernels.single_tile_attention]
        failure = self.fails("pass", tidy, module, context_of(module, device="cpu"), passes)
        self.assertIn("`precast_kernels:split_k` is for CUDA", failure.message)
        context = context_of(module)
        with unittest.mock.patch.object(type(context), "processors", 132):
            tidy(module, context, passes)
        operators = {node.target.namespace for node in module.graph.nodes if hasattr(node.target, "namespace")}
        self.assertEqual(operators, {"aten", "precast_kernels"})
        targets = [str(node.target) for node in module.graph.nodes]
        self.assertNotIn("aten.linear.default", targets)
        self.assertIn("precast_kernels.attention.default", targets)

    @long
    def test_the_kernels_give_the_same(self) -> None:
        interpreted(KERNEL, self.segment("float16", 48))
