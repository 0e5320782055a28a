"""A step of one row: products as loops over weights as they are, and attention to a cache that is not copied."""

from __future__ import annotations

from typing import Any

import torch

from .artifact import agrees
from .support import Project, model, part

# Four heads of queries read two heads of keys and values. One product has a number of columns that no four share.
STEP = model(
    """\
h = torch.nn.functional.rms_norm(x, (320,)) * self.scale
query = self.query(h).view(1, 1, 4, 80).transpose(1, 2)
keys, values = (one[:, :, None].expand(1, 2, 2, 16, 80).reshape(1, 4, 16, 80) for one in (keys, values))
made = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
h = x + self.out(made.transpose(1, 2).reshape(1, 1, 320))
return self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h)), self.odd(h)""",
    """\
self.scale = torch.nn.Parameter(torch.ones(320))
self.query, self.out = torch.nn.Linear(320, 320), torch.nn.Linear(320, 320, bias=False)
self.gate, self.up = torch.nn.Linear(320, 640, bias=False), torch.nn.Linear(320, 640, bias=False)
self.down, self.odd = torch.nn.Linear(640, 320), torch.nn.Linear(320, 207)""",
    inputs="x, keys, values, mask",
)


class Function(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class OneRowTest(Project):
    def test_a_step_of_one_row_reads_weights_and_cache_as_they_are(self) -> None:
        cache = [1, 2, 16, 80]
        shapes = {"x": [1, 1, 320], "keys": cache, "values": cache, "mask": [1, 1, 1, 16]}
        opened = self.open(STEP)
        captured = self.capture(opened, inputs=[(name, "float32", shape) for name, shape in shapes.items()])
        answer = self.compile(captured, options={"freezing": True})
        for call in ("aoti_torch_cpu_addmm_out(", "aoti_torch_cpu_mm_out(", "linear_pointwise("):
            self.assertNotIn(call, self.wrapper())
        self.assertEqual(answer["prepared"], [])
        agrees(self, opened, captured, answer, [torch.randn(shape) for shape in shapes.values()], (1e-4, 1e-5))

    def test_attention_of_one_query_to_repeated_keys_reads_them_once(self) -> None:
        functional = torch.nn.functional
        query, one = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 16, 8)

        def attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
            key, value = (held[:, :, None].expand(1, 2, 2, 16, 8).reshape(1, 4, 16, 8) for held in (key, value))
            return functional.scaled_dot_product_attention(query, key, value, mask, scale=0.5)

        # The mask of one head is not that of another, and several queries don't see the same keys.
        cases = [(query, [1, 1, 1, 16], 2), (query, [1, 4, 1, 16], 4), (torch.randn(1, 4, 3, 8), [1, 1, 3, 16], 4)]
        for given, mask, heads in cases:
            inputs = (given, one, one.cos(), torch.randn(mask))
            program = torch.export.export(Function(attention), inputs)
            module = torch.fx.GraphModule(torch.nn.Module(), program.graph)
            part("passes.one_query").rewrite(module.graph)
            module.recompile()
            operator = torch.ops.aten.scaled_dot_product_attention.default
            (found,) = module.graph.find_nodes(op="call_function", target=operator)
            self.assertEqual(found.args[1].meta["val"].shape[1], heads)
            torch.testing.assert_close(module(*inputs)[0], attention(*inputs))
