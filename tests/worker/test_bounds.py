"""Which values inputs may have: found in the graph, narrowed by `range`, and noted for the runtime."""

from __future__ import annotations

from typing import Any

from .support import Project, spec

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)
        self.other = torch.nn.Embedding(20, 8)

    def lookup(self, ids):
        return self.table(ids)

    def shaped(self, ids):
        return self.table(ids.view(-1).unsqueeze(0).expand(2, -1).to(torch.int64))

    def shifted(self, ids):
        return self.table(ids + 2) + self.other(ids - 3)

    def counted(self, ids):
        return self.table.weight[ids]

    def chosen(self, ids):
        return self.table(ids[:, 1:])

    def computed(self, ids):
        return self.table(ids.clamp(0, 49))

    def remainder(self, ids):
        return self.table(ids % 7 - 1 + 1)

    def gathered(self, ids):
        return torch.gather(self.table.weight, 0, ids)

    def both(self, ids):
        return self.table(torch.cat([ids, ids + 1]))

    def summed(self, ids):
        return ids.sum(1)

def load():
    return Model()
"""


class BoundsTest(Project):
    def captured(self, method: str, dtype: str = "int64", **more: Any) -> dict[str, Any]:
        return self.capture(
            self.open(MODEL), name=method, method=method, specs=[{**spec("ids", dtype, [2, 4]), **more}]
        )

    def bounds(self, method: str, dtype: str = "int64", **more: Any) -> Any:
        return self.captured(method, dtype, **more)["inputs"][0].get("bounds")

    def test_bounds_are_those_of_the_tables_that_all_values_index(self) -> None:
        expected = {"lookup": [0, 50], "shaped": [0, 50], "shifted": [3, 23], "counted": [-50, 50]}
        expected |= {"gathered": [0, 50], "both": [0, 49]}
        # What is computed or chosen has none.
        expected |= dict.fromkeys(("chosen", "computed", "remainder", "summed"))
        for method, bounds in expected.items():
            self.assertEqual(self.bounds(method), bounds, method)
        self.assertEqual(self.bounds("shaped", "int32"), [0, 50])

    def test_a_range_narrows_them(self) -> None:
        self.assertEqual(self.bounds("lookup", range=[5, 9]), [5, 9])
        self.assertEqual(self.bounds("summed", range=[0, 2]), [0, 2])

    def test_a_range_beyond_the_table_is_a_mistake_of_the_spec(self) -> None:
        failure = self.fails("bad_input", self.captured, "lookup", range=[0, 60])
        self.assertIn("`range` of input `ids` of module `lookup` is [0, 60]", failure.message)
        self.assertIn("`aten.embedding` takes values of [0, 50]", failure.message)
        self.assertEqual(failure.hint, "write `range = [0, 50]`, or leave it out")

    def test_a_computed_index_that_is_negative_is_beyond_the_table(self) -> None:
        # A slice may be negative; a clamped value and a remainder may not; counting from the end is allowed.
        for method, guarded in {"chosen": True, "computed": False, "counted": False, "lookup": False}.items():
            text = self.captured(method)["segments"][0]["graph"]
            self.assertEqual("masked_fill" in text, guarded, method)
