"""Every size that a module takes is answered by its list of calls: one, beyond the samples, and between them."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .support import Project, model, part

UNBOUNDED = part("sizes.dynamic").UNBOUNDED
ROWS = [("x", "float32", [2, 6, 8], ["batch", "seq", None])]
IMAGE = [("x", "float32", [2, 3, 16, 16], ["batch", None, "height", "width"])]
DEEP = "torch.nn.Sequential(*[torch.nn.Conv2d(3, 3, 3, 2, 1) for _ in range(5)])"


class SizesTest(Project):
    def eager(self, text: str, inputs: list[Any]) -> tuple[Any, dict[str, Any]]:
        opened = self.open(text)
        sizes = {dim: size for *_, shape, dims in inputs for dim, size in zip(dims, shape, strict=True) if dim}
        free = {dim: {"min": 1, "max": UNBOUNDED} for dim in sizes}
        return opened, self.capture(opened, inputs=inputs, sizes=sizes, dynamic=free, compiled=False)

    def bounds(self, captured: dict[str, Any]) -> dict[str, tuple[int, int | None]]:
        whole = {dim: (one["min"], one["max"]) for dim, one in captured["dynamic"].items()}
        return {dim: (low, None if high == UNBOUNDED else high) for dim, (low, high) in whole.items()}

    def compare(self, opened: Any, captured: dict[str, Any], inputs: list[Any], sizes: tuple[int, ...]) -> None:
        weights = self.weights(opened, captured)
        ((_, _, shape, dims),) = inputs
        free = [dim for dim in dims if dim]
        for at in itertools.product(
            *[[size for size in sizes if size >= self.bounds(captured)[dim][0]] for dim in free]
        ):
            known = dict(zip(free, at, strict=True))
            x = torch.randn([known.get(dim, size) for dim, size in zip(dims, shape, strict=True)])
            for factor in (1, 100):
                with torch.no_grad():
                    wanted = opened.model(x * factor)
                (made,) = self.run_eager(captured, [x * factor], weights)
                with self.subTest(**known):
                    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-3)

    def test_every_size_of_every_dimension(self) -> None:
        cases = {
            "linear": ("return self.a(x)", "self.a = torch.nn.Linear(8, 4)"),
            "transformer": (
                "return self.a(x)",
                "self.a = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)",
            ),
            # Captured from 2, the slice is always 2 wide.
            "a short slice": ("y = x[:, :2]\nreturn y.reshape(x.shape[0], -1).sum(1) + y.shape[1]",),
            "a branch": ("return x * 2 if x.shape[0] == 1 else x",),
            "a branch that only large values show": ("return x.clamp(max=90) if x.shape[0] == 1 else x",),
            "branches of two dimensions, with weights": (
                "y = self.a(x) if x.shape[0] == 1 else self.b(x)\nreturn y * 3 if x.shape[1] == 1 else y",
                "self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)",
            ),
            "a branch of both": ("return x * 2 if x.shape[0] * x.shape[1] == 1 else x",),
        }
        images = {
            "convolutions": ("return self.a(x).mean((2, 3))", f"self.a = {DEEP}"),
            "pooling": (
                "return self.a(x).amax((2, 3))",
                "self.a = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.MaxPool2d(2))",
            ),
        }
        for name, text in (cases | images).items():
            inputs = ROWS if name in cases else IMAGE
            lows = {"pooling": (1, 4, 4), "convolutions": (1, 1, 1)}.get(name, (1, 1))
            with self.subTest(name):
                opened, captured = self.eager(model(*text), inputs)
                self.assertEqual(list(self.bounds(captured).values()), [(low, None) for low in lows])
                self.compare(opened, captured, inputs, (1, 2, 5, 33, 70) if inputs is ROWS else (1, 4, 33, 70))

    def test_a_module_that_refuses_large_values_goes_down_to_one(self) -> None:
        check = 'torch.ops.aten._assert_async.msg((x > -100).all(), "x must be above -100")'
        _, captured = self.eager(model(f"{check}\nreturn x * 2 + 1"), ROWS)
        self.assertEqual(list(self.bounds(captured).values()), [(1, None), (1, None)])

    def test_the_gate_gets_the_smallest_sizes(self) -> None:
        _, captured = self.eager(model("return x * 2 if x.shape[0] == 1 else x"), ROWS)
        samples = self.samples(captured)
        shapes = {tuple(value.shape) for name, value in samples.items() if name.endswith("in.0")}
        self.assertLessEqual({(1, 6, 8), (2, 1, 8), (1, 1, 8)}, shapes)

    def test_the_bounds_are_those_of_the_module(self) -> None:
        table = "self.a = torch.nn.Parameter(torch.randn(40, 8))"
        opened, captured = self.eager(model("return x + self.a[: x.shape[1]]", table), ROWS)
        self.assertEqual(self.bounds(captured), {"batch": (1, None), "seq": (1, 40)})
        self.compare(opened, captured, ROWS, (1, 2, 39, 40))
        # A record says one rank for all sizes.
        _, captured = self.eager(model("return x.squeeze(0)"), ROWS)
        self.assertEqual(self.bounds(captured), {"batch": (2, None), "seq": (1, None)})

    def test_the_lowest_size(self) -> None:
        lowest = part("sizes.smallest").lowest
        for low, floor, end in itertools.product((2, 3, 17, 33, 64), (1, 2), (1, 2, 3, 16, 32, 40)):
            found = lowest(low, floor, lambda size, end=end: size >= end)
            self.assertEqual(found, max(floor, min(end, low)) if floor <= low else low, f"{low} {floor} {end}")
