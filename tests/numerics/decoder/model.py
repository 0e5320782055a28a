"""A small decoder with a cache of keys and values in buffers, of the largest context."""

import torch
from torch.nn import functional as F

WIDTH, HEADS, CONTEXT, VOCABULARY = 32, 4, 64, 97


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("k", torch.zeros(1, HEADS, CONTEXT, WIDTH // HEADS), persistent=False)
        self.register_buffer("v", torch.zeros(1, HEADS, CONTEXT, WIDTH // HEADS), persistent=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        self.k.index_copy_(2, at, k)
        self.v.index_copy_(2, at, v)
        mask = torch.arange(self.k.shape[2], device=x.device) <= at[:, None]
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(1, -1, WIDTH))


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(at)
        for block in self.blocks:
            x = block(x, at)
        return self.head(x)


def load() -> Decoder:
    torch.manual_seed(0)
    return Decoder()
