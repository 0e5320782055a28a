"""Products of the same rows become one, with the same results."""

from __future__ import annotations

import unittest
from typing import Any

from .support import part


def graph_of(function: Any, constants: dict[str, Any], x: Any) -> Any:
    """Returns a frozen graph: constants are attributes, and every node has its value as `meta["val"]`."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    module = torch.nn.Module()
    for name, value in constants.items():
        module.register_buffer(name, value)
    traced = make_fx(lambda x: function(module, x))(x)

    class Values(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            node.meta["val"] = super().run_node(node)
            return node.meta["val"]

    Values(traced).run(x)
    return traced


class JoinTest(unittest.TestCase):
    def products(self, traced: Any) -> list[list[int]]:
        import torch

        wanted = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return [list(node.meta["val"].shape) for node in traced.graph.nodes if node.target in wanted]

    def check(self, function: Any, constants: dict[str, Any], products: list[list[int]], apart: Any = None) -> None:
        import torch

        x = torch.randn(6, 8)
        traced = graph_of(function, constants, x)
        wanted = traced(x)
        part("joined").join(traced.graph, apart or (lambda _: False))
        traced.graph.lint()
        traced.recompile()
        self.assertEqual(self.products(traced), products)
        torch.testing.assert_close(traced(x), wanted)

    def matrices(self, *columns: int) -> dict[str, Any]:
        import torch

        torch.manual_seed(0)
        made = {f"w{index}": torch.randn(8, count) for index, count in enumerate(columns)}
        return made | {f"b{index}": torch.randn(count) for index, count in enumerate(columns)}

    def test_matrices_of_other_widths_are_one(self) -> None:
        import torch

        def heads(m: Any, x: Any) -> Any:
            query = torch.mm(x, m.w0).view(2, 3, 4, 2)
            key = torch.mm(x, m.w1).view(2, 3, 1, 2)
            # In between, as what a rotary embedding does to the first ones.
            return query * key + torch.mm(x, m.w2).view(2, 3, 2, 1).neg().sum(2, keepdim=True)

        self.check(heads, self.matrices(8, 2, 2), [[6, 12]])

        def biased(m: Any, x: Any) -> Any:
            # Of a part with gaps between its rows there is no such view.
            halves = torch.addmm(m.b0, x, m.w0).view(12, 4).sum(1)
            return halves.view(6, 2) - torch.addmm(m.b1, x, m.w1)

        self.check(biased, self.matrices(8, 2), [[6, 10]])

    def test_what_differs_stays_apart(self) -> None:
        import torch

        def rows(m: Any, x: Any) -> Any:
            return torch.mm(x, m.w0) + torch.mm(x.relu(), m.w0) + torch.addmm(m.b1, x, m.w1)

        self.check(rows, self.matrices(4, 4), [[6, 4]] * 3)

        # A matrix that a call makes is not there before.
        def made(m: Any, x: Any) -> Any:
            return torch.mm(x, m.w0) + torch.mm(x, m.w1 + x.sum())

        self.check(made, self.matrices(4, 4), [[6, 4]] * 2)

        def both(m: Any, x: Any) -> Any:
            return torch.mm(x, m.w0) + torch.mm(x, m.w1)

        self.check(both, self.matrices(4, 4), [[6, 4]] * 2, apart=lambda _: True)
        self.check(both, self.matrices(4, 4), [[6, 8]])


if __name__ == "__main__":
    unittest.main()
