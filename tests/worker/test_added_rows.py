"""Values added at numbers: in place, as torch adds them, and in one order."""

from __future__ import annotations

from typing import Any

import torch

from .artifact import run
from .support import Project, model, part

ADDS = model("return torch.zeros(7, 4).index_put((numbers,), rows, accumulate=True)", inputs="numbers, rows")
ATEN = torch.ops.aten
PUT = ATEN.index_put.default


class AddedRowsTest(Project):
    def added(self, operator: Any, *args: Any) -> bool:
        """Compares the function in an operator's place with it; returns whether there is one."""
        got = part("passes.added_rows").decompositions()[operator](*args)
        if got is NotImplemented:
            return False
        torch.testing.assert_close(got, operator(*args))
        return True

    def test_numbers_of_any_axes_and_shapes_are_added(self) -> None:
        table, a, b = torch.randn(5, 4, 3, 2), torch.tensor([[0, -1, 0], [4, 2, -5]]), torch.tensor([1, -1, 1])
        cases: list[tuple[list[Any], list[int]]] = [
            ([a], [2, 3, 4, 3, 2]),
            ([a], [3, 2]),
            ([a[0, 0]], [4, 3, 2]),
            ([None, b], [5, 3, 3, 2]),
            ([a, b], [2, 3, 3, 2]),
            ([None, a[:1, :2] % 4, b[:2]], [5, 1, 2, 2]),
            ([b, None, b], [3, 4, 2]),
            ([None, b, None, b], [3, 5, 3]),
            ([b, b, b, b], [3]),
            ([b.int()], [3, 4, 3, 2]),
        ]
        for indices, shape in cases:
            with self.subTest(shape):
                self.assertTrue(self.added(PUT, table, indices, torch.randn(shape), True))
        self.assertTrue(self.added(ATEN.put.default, table, a, torch.randn(2, 3), True))
        masked = (torch.randn(5), torch.tensor([True, False, True]), [b * 9], torch.randn(3))
        self.assertTrue(self.added(ATEN._unsafe_masked_index_put_accumulate.default, *masked))

    def test_numbers_that_are_not_there_are_refused(self) -> None:
        put = part("passes.added_rows").decompositions()[PUT]
        for wrong in ([torch.tensor([5]), torch.tensor([0])], [torch.tensor([0]), torch.tensor([-5])]):
            with self.assertRaises(RuntimeError):
                put(torch.zeros(5, 4), wrong, torch.ones(1), True)

    def test_what_adds_no_floats_at_numbers_stays(self) -> None:
        table, numbers, rows = torch.randn(5, 3), torch.tensor([0, 1]), torch.randn(2, 3)
        self.assertFalse(self.added(PUT, table, [numbers], rows))
        self.assertFalse(self.added(PUT, table.long(), [numbers], rows.long(), True))
        self.assertFalse(self.added(PUT, table, [torch.tensor([True] * 5)], torch.randn(5, 3), True))
        self.assertFalse(self.added(PUT, table, [numbers[:0]], rows[:0], True))
        self.assertFalse(self.added(ATEN.put.default, table, numbers, torch.randn(2)))

    def test_an_artifact_adds_them_in_place(self) -> None:
        inputs = [("numbers", "int64", [6]), ("rows", "float32", [6, 4])]
        answer = self.compile(self.capture(self.open(ADDS), inputs=inputs))
        self.assertNotIn("aoti_torch_index_put", self.wrapper())
        numbers, rows = torch.tensor([0, 6, 0, 3, 0, 2]), torch.randn(6, 4)
        (got,) = run(answer["library"], "cpu", {}, [numbers, rows], 1)
        torch.testing.assert_close(got, torch.zeros(7, 4).index_add(0, numbers, rows))
        with self.assertRaisesRegex(AssertionError, "exit code"):
            run(answer["library"], "cpu", {}, [numbers + 1, rows], 1)
