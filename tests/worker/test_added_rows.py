"""Rows added to a table: in place, and as torch adds them."""

from __future__ import annotations

from typing import Any

import torch

from .artifact import run
from .support import Project, Quiet, model, part

ADDS = model("return torch.zeros(7, 4).index_put((numbers,), rows, accumulate=True)", inputs="numbers, rows")


class Function(torch.nn.Module):
    def __init__(self, **named: Any) -> None:
        super().__init__()
        self.named = named

    def forward(self, table: Any, numbers: Any, rows: Any) -> Any:
        return table.index_put((numbers,), rows, **self.named)


class AddedRowsTest(Project):
    def rewritten(self, inputs: tuple[Any, ...], **named: Any) -> bool:
        """Compares the rewritten graph with the original; returns whether it is another one."""
        program = torch.export.export(Function(**named), inputs)
        module = torch.fx.GraphModule(torch.nn.Module(), program.graph)
        part("added_rows").rewrite(module.graph)
        module.recompile()
        torch.testing.assert_close(module(*inputs)[0], Function(**named)(*inputs))
        return not module.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)

    def test_numbers_from_both_ends_and_of_any_shape_are_added(self) -> None:
        table, numbers = torch.randn(5, 3), torch.tensor([[0, -1, 0], [4, 2, -5]])
        self.assertTrue(self.rewritten((table, numbers, torch.randn(2, 3, 3)), accumulate=True))
        self.assertTrue(self.rewritten((table, numbers[0], torch.randn(3, 3)), accumulate=True))
        self.assertTrue(self.rewritten((table, numbers[0, 0], torch.randn(3)), accumulate=True))

    def test_what_is_not_rows_added_to_a_table_stays(self) -> None:
        table, numbers = torch.randn(5, 3), torch.tensor([0, 1])
        self.assertFalse(self.rewritten((table, numbers, torch.randn(2, 3))))
        self.assertFalse(self.rewritten((table, numbers, torch.randn(3)), accumulate=True))
        self.assertFalse(self.rewritten((torch.randn(5, 3, 2), numbers, torch.randn(2, 3, 2)), accumulate=True))
        self.assertFalse(self.rewritten((table, torch.tensor([True] * 5), torch.randn(5, 3)), accumulate=True))

    def test_an_artifact_adds_them_in_place(self) -> None:
        opened = self.open(ADDS)
        inputs = [("numbers", "int64", [6]), ("rows", "float32", [6, 4])]
        captured = self.capture(opened, inputs=inputs)
        request = {"device": "cpu", "isa": "native", "options": {}, "file": captured["segments"][0]["file"]}
        answer = part("compiler").compile_segment(request, self.out, Quiet())
        code = "".join(file.read_text() for file in self.out.rglob("*wrapper.cpp"))
        self.assertNotIn("index_put", code)
        numbers, rows = torch.tensor([0, 6, 0, 3, 0, 2]), torch.randn(6, 4)
        (got,) = run(answer["library"], "cpu", {}, [numbers, rows], 1)
        torch.testing.assert_close(got, torch.zeros(7, 4).index_add(0, numbers, rows))
        with self.assertRaisesRegex(AssertionError, "exit code"):
            run(answer["library"], "cpu", {}, [numbers + 1, rows], 1)
