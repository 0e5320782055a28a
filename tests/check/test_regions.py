"""Repeated submodules: groups that share an artifact, and the differences of the others."""

from __future__ import annotations

import time
from typing import Any

from tests.worker.support import long

from .support import Checks, evaluated, found, part

X = [("x", "float32", [2, 4], ["batch", None])]
BLOCK = """
class Block(nn.Module):
    def __init__(self, index, scale=2.0, act="gelu", dtype=torch.float32, width=8):
        super().__init__()
        self.index, self.scale, self.act, self.skip = index, scale, getattr(F, act), True
        self.up, self.down = nn.Linear(4, width, dtype=dtype), nn.Linear(width, 4, dtype=dtype)
        self.register_buffer("order", torch.arange(4))

    def forward(self, x):
        y = self.down(self.act(self.up(x.to(self.up.weight.dtype)))).to(x.dtype) * self.scale
        return x + y[:, self.order] if self.skip else y
"""


def source(change: str = "pass", end: str = "") -> str:
    init = f"self.blocks = nn.ModuleList(Block(i) for i in range(5))\n{change}"
    return evaluated(f"for block in self.blocks:\n    x = block(x)\nreturn x{end}", init, BLOCK)


class Regions(Checks):
    def looked_at(self, change: str, end: str = "", **request: Any) -> dict[str, Any]:
        text = source(change, end)
        return self.check(self.open(text), X, sizes={"batch": 2}, **request)

    def test_equal_blocks_share_one_artifact(self) -> None:
        answer = self.looked_at("pass")
        expected = {"glob": "blocks.*", "class": "Block", "count": 5, "artifacts": 1, "region": False}
        self.assertEqual(answer["lists"], [expected])
        # The number of the block differs in each, and is not in the way.
        self.assertEqual(found(answer, "region"), [])
        asked = self.looked_at("pass", regions=["blocks.*"])
        self.assertEqual(asked["lists"], [{**expected, "region": True}])
        self.assertEqual(asked["artifacts"], 1)

    @long
    def test_names_that_begin_like_the_wrapper(self) -> None:
        for name in ("m", "model", "mlp"):
            text = source().replace("self.blocks", f"self.{name}")
            with self.subTest(name):
                answer = self.check(self.open(text), X, sizes={"batch": 2})
                self.assertEqual(answer["lists"][0]["glob"], f"{name}.*")
                for glob in (f"{name}.*", f"**.{name}.**", "**.*"):
                    asked = self.check(self.open(text), X, sizes={"batch": 2}, regions=[glob])
                    self.assertEqual((asked["lists"][0]["region"], asked["artifacts"]), (True, 1), glob)
                wrong = name[1:] + ".*"
                failure = self.fails("no_module", self.check, self.open(text), X, regions=[wrong])
                self.assertEqual(failure.spec, wrong)

    def test_what_differs_is_named_with_both_values(self) -> None:
        for change, said in (
            ("self.blocks[3].scale = 0.5", "`scale` is 0.5, in the others 2.0"),
            ("self.blocks[3] = Block(3, act='relu')", "`act` is torch.nn.functional.relu, in the others "),
            ("self.blocks[3] = Block(3, dtype=torch.bfloat16)", "the dtype of `up.weight` is bfloat16, in the others"),
            ("self.blocks[3] = Block(3, width=6)", "`up.weight.shape` is [6, 4], in the others [8, 4]"),
            ("self.blocks[3].skip = False", "`skip` is False, in the others True"),
            ("self.blocks[3].order = torch.tensor([3, 2, 1, 0])", "`order (values)` is sha256 "),
            ("self.blocks[3].up.bias = None", "`up.bias` is there in the others only"),
        ):
            with self.subTest(change):
                answer = self.looked_at(change)
                (one,) = found(answer, "region")
                self.assertEqual((one["severity"], one["function"]), ("low", "Block.forward"))
                self.assertIn("1 of 5 `Block` need artifacts of their own, the others share one", one["why"])
                self.assertIn(f"; `blocks.3`: {said}", one["why"])
                self.assertEqual(answer["lists"][0]["artifacts"], 2)

    def test_without_a_capture_attributes_are_compared(self) -> None:
        answer = self.looked_at("self.blocks[1].scale = 0.5", ".reshape(int(x.sum()))")
        self.assertFalse(answer["captured"])
        self.assertEqual([(one["count"], one["artifacts"]) for one in answer["lists"]], [(5, 2)])
        self.assertIn("`scale` is 0.5, in the others 2.0", found(answer, "region")[0]["why"])
        self.assertIn("compared by attributes alone", " ".join(answer["unknown"]))

    def test_the_same_model_gives_the_same_answer(self) -> None:
        change = "self.blocks[3].scale, self.blocks[1].skip = 0.5, False"
        first, second = (found(self.looked_at(change), "region") for _ in range(2))
        self.assertEqual([one["why"] for one in first], [one["why"] for one in second])
        self.assertIn("; `blocks.1`: `skip` is False, in the others True; `blocks.3`: `scale` is ", first[0]["why"])

    def test_time_is_linear_in_modules(self) -> None:
        def seconds(count: int) -> float:
            model = self.open(source().replace("range(5)", f"range({count})")).model
            best = []
            for _ in range(3):
                started = time.process_time()
                (repeat,) = part("model.repeats").find(model)
                for member in repeat.members.values():
                    part("model.repeats").facts(member)
                best.append(time.process_time() - started)
            return min(best)

        self.assertLess(seconds(800), 16 * seconds(100))
