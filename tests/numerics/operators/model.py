"""A model that calls custom operators from C++; `lab.so` lies beside this file, compiled from `lab.cpp` by the test."""

from pathlib import Path

import torch
from torch import Tensor, nn

torch.ops.load_library(str(Path(__file__).with_name("lab.so")))
lab = torch.ops.lab


@torch.library.register_fake("lab::scale")
def _(x: Tensor, k: float, *, negate: bool = False) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("lab::mix")
def _(xs: list[Tensor], bias: Tensor | None = None, mode: str = "sum", *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(xs[0], dtype=dtype)


@torch.library.register_fake("lab::parts")
def _(x: Tensor, sizes: list[int], dim: int, factors: list[float]) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x.sum(dim)), [torch.empty_like(piece) for piece in x.split_with_sizes(sizes, dim)]


@torch.library.register_fake("lab::add_in_place")
def _(x: Tensor, k: float) -> None:
    pass


class Mixer(nn.Module):
    """`[batch, 6]` to `[batch]` sums and `[batch, 3]` mixed halves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = lab.scale(torch.tanh(self.mix(x)), 1.5, negate=True)
        sums, halves = lab.parts(rows, [3, 3], 1, [2.0, 0.5])
        return sums, lab.mix(halves, self.bias, "mean") + lab.mix(halves, dtype=torch.float64).float()

    def shifted(self, x: Tensor) -> Tensor:
        """`[batch, 6]`, by an operator that writes to its argument."""
        rows = torch.cos(self.mix(x))
        lab.add_in_place(rows, 3)
        return torch.relu(rows)


def load() -> nn.Module:
    torch.manual_seed(0)
    return Mixer().eval()
