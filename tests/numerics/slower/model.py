"""A module whose artifact is slower than eager: compiled for one thread and without vectors, as its spec asks for."""

import torch
from torch import Tensor, nn


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, 65536]` float32 to the same."""
        for _ in range(4):
            x = torch.tanh(torch.erf(x) * self.scale)
        return x


def load() -> nn.Module:
    return Curve().eval()
