"""The module of the training tests: normalization, dropout, tied, frozen and unused weights, a constant."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BUCKETS = {"batch": [4, 6]}
SHAPES = {"x": ["batch", 8], "weight": ["batch"]}


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.25)
        self.second = nn.Linear(16, 16)
        self.second.weight.requires_grad_(False)
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.arange(16.0) / 16)

    def forward(self, x: Tensor, weight: Tensor, text: str = "pair") -> dict[str, object]:
        hidden = self.drop(torch.nn.functional.gelu(self.norm(self.first(x))))
        hidden = hidden + self.second(hidden) * self.shift
        back = torch.nn.functional.softmax(hidden, -1) @ self.tied.weight
        return {"y": back * weight[:, None], "most": back.argmax(-1), "text": text, "hidden": hidden}


def net() -> Trained:
    torch.manual_seed(0)
    return Trained().train()


def batch(rows: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 8, generator=generator), "weight": torch.rand(rows, generator=generator)}


def loss(answer: dict[str, Tensor]) -> Tensor:
    return answer["y"].square().mean() + answer["hidden"].sin().mean()
