"""Decode: which nodes are taken, and equal results (interpreted)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import precast_kernels
from precast_kernels import offers

from tests.worker.support import Project, long, model, part

from .support import context_of, interpreted, tidy

BLOCK = model(
    """\
y = self.first(x)
q, k, v = (one(y).view(1, x.shape[1], -1, 32).transpose(1, 2) for one in (self.q, self.k, self.v))
self.keys.index_copy_(2, at, k)
self.values.index_copy_(2, at, v)
groups = [one[:, :, None].expand(1, 2, 3, 100, 32) for one in (self.keys, self.values)]
keys, values = (one.reshape(1, 6, 100, 32) for one in groups)
y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
x = x + self.out(y.transpose(1, 2).reshape(1, x.shape[1], 192))
y = self.second(x)
return x + self.down(F.silu(self.gate(y)) * self.up(y))""",
    """\
torch.manual_seed(0)
self.first, self.second = Norm(), Norm()
self.q, self.k, self.v = nn.Linear(192, 192), nn.Linear(192, 64), nn.Linear(192, 64, bias=False)
self.out = nn.Linear(192, 192, bias=False)
self.gate, self.up = nn.Linear(192, 320, bias=False), nn.Linear(192, 320, bias=False)
self.down = nn.Linear(320, 192, bias=False)
self.register_buffer("keys", torch.zeros(1, 2, 100, 32), persistent=False)
self.register_buffer("values", torch.zeros(1, 2, 100, 32), persistent=False)
self.to(torch.{dtype})""",
    extra="""\
from torch import nn
from torch.nn import functional as F

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(192))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)
""",
    inputs="x, at, mask",
)

# Replaces the nodes that the pass takes, and compares results and states with those of the plain segment. Where the
# mask hides the cache, it has NaN.
KERNEL = """
from precast_kernels import single_row
torch.manual_seed(0)
at = 40
def value(held):
    if held.dtype == torch.int64:
        return torch.tensor([at])
    if held.shape[-1] == 100:
        return torch.zeros_like(held).masked_fill(torch.arange(100) > at, float("-inf"))
    made = torch.randn_like(held)
    if held.dim() == 4:
        made[:, :, at + 1 :] = float("nan")
    return made
inputs = [value(held) for held in inputs]
for weight in module.buffers():
    weight.copy_(torch.randn_like(weight) / 12 if weight.dim() > 1 else torch.rand_like(weight))
class Context:
    device = "cuda"
    is_constant = staticmethod(lambda node: node.op == "get_attr")
    prepack = staticmethod(lambda node: None)
def run(change):
    given = [change(one.clone()) for one in inputs]
    return [*module(*given), *given]
before = run(torch.nan_to_num)
assert single_row.replace(module, Context) == 7
assert single_row.replace(module, Context) == 0
module.graph.lint()
module.recompile()
for after, plain in zip(run(lambda one: one), before, strict=True):
    assert after.dtype == plain.dtype and after.shape == plain.shape
    far = (after.nan_to_num().double() - plain.double()).norm() / plain.double().norm().clamp(min=1e-9)
    assert far < 3e-3, far
"""


class SingleRowTest(Project):
    def segment(self, dtype: str, rows: int = 1) -> Any:
        opened = self.open(BLOCK.replace("{dtype}", dtype))
        inputs = [("x", dtype, [1, rows, 192]), ("at", "int64", [rows], [0, 100]), ("mask", dtype, [1, 1, rows, 100])]
        return self.capture(opened, inputs=inputs)["segments"][0]["file"]

    def replaced(self, file: str) -> Any:
        module, _, _ = part("graph.segment").load(Path(file), "cpu")
        tidy(module, context_of(module), [precast_kernels.decode])
        return module

    def test_products_of_one_row_and_attention_to_a_cache_are_replaced(self) -> None:
        targets = [str(node.target) for node in self.replaced(self.segment("bfloat16")).graph.nodes]
        # Query, key and value are one product where their biases allow it.
        self.assertEqual(targets.count("precast_kernels.row_product.default"), 5)
        self.assertEqual(targets.count("precast_kernels.cached_attention.default"), 1)
        for name in ("linear", "scaled_dot_product_attention", "silu", "expand"):
            self.assertNotIn(f"aten.{name}.default", targets)

    def test_more_rows_and_other_dtypes_are_left(self) -> None:
        for dtype, rows in (("float32", 1), ("bfloat16", 2)):
            targets = [str(node.target) for node in self.replaced(self.segment(dtype, rows)).graph.nodes]
            self.assertFalse([one for one in targets if one.startswith("precast_kernels")])

    def test_it_is_for_a_device_and_offered_for_one(self) -> None:
        module, _, _ = part("graph.segment").load(Path(self.segment("float16")), "cpu")
        passes = [precast_kernels.decode]
        failure = self.fails("pass", tidy, module, context_of(module, device="cpu"), passes)
        self.assertIn("`precast_kernels:decode` is for CUDA", failure.message)
        offered = [one["passes"] for one in offers.offers("cuda", [module.graph])]
        self.assertIn(["precast_kernels:decode"], offered)
        self.assertNotIn(["precast_kernels:decode"], [one["passes"] for one in offers.offers("cpu", [module.graph])])

    @long
    def test_the_kernels_give_the_same_and_read_nothing_that_is_hidden(self) -> None:
        interpreted(KERNEL, self.segment("float16"))
