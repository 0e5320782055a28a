"""A stack of equal decoder blocks with random weights, for regions and for the benchmarks.

Every block has the same graph, so with `regions = ["blocks.*"]` one artifact per bucket serves all of them.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm causal self-attention and a feed-forward layer four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Blocks(nn.Module):
    """`count` blocks and a final norm, from `[batch, seq, width]` to the same shape."""

    def __init__(self, count: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(count))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def make(count: int, width: int, heads: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Blocks(count, width, heads).to(dtype).eval()


def load() -> nn.Module:
    """24 blocks of width 1024 in bfloat16: 604 MB of weights."""
    return make(24, 1024, 16, torch.bfloat16)


def load_small() -> nn.Module:
    """24 blocks of width 256 in float32, for machines without a GPU: 76 MB of weights."""
    return make(24, 256, 4, torch.float32)


def load_one() -> nn.Module:
    """One block of width 1024 in bfloat16."""
    return make(1, 1024, 16, torch.bfloat16)


def load_tiny() -> nn.Module:
    """Two blocks of width 64 in float32: to try things on."""
    return make(2, 64, 2, torch.float32)
