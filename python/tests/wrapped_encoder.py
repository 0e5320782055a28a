"""A small encoder for the tests of `maybe_compile`, in a file of its own so that another process can import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = {"ids": ["batch", "seq"], "mask": ["batch", "seq"]}
BUCKETS = {"batch": [2], "seq": [8]}


@dataclass
class Output:
    tokens: Tensor
    pooled: Any
    extra: Any = None


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.arange(16.0))
        self.register_buffer("fixed", torch.full((16,), 0.5), persistent=False)
        self.eps = 1e-3

    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0, flag: bool | None = None) -> Output:
        weights = mask[..., None].to(self.offset.dtype)
        tokens = torch.relu(self.first(self.embedding(ids) + self.offset)) * weights * scale
        tokens = self.second(tokens) + self.fixed
        pooled = (tokens * weights).sum(1) / (weights.sum(1) + self.eps)
        return Output(self.head(tokens), {"mean": pooled, "pair": (pooled[:, :4], "text")})


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


def batch(rows: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + tokens)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[0, tokens - tokens // 3 :] = 0
    return {"ids": torch.randint(0, 50, (rows, tokens), generator=generator), "mask": mask}
