"""A small vision-language model with the faults that nanoVLM had in January 2026."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, PATCHES = 16, 4


class Tokenizer:
    """A tokenizer like a library's, with properties."""

    def __init__(self) -> None:
        self.words = {"<image>": 7}

    @property
    def image_token_id(self) -> int:
        return self.words["<image>"]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.longest = 8
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        highest = positions.max() + 1
        if highest > self.longest:
            scale = highest / self.longest
            frequencies = self.frequencies / scale
        else:
            frequencies = self.frequencies
        angles = positions[..., None].float() * frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin
        causal = q.shape[1] == k.shape[1] and q.shape[1] > 1
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=causal)
        return x + self.out(y[:, 0])


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.expand(x.shape[0], -1, -1)
        return torch.cat([first, x], dim=1)[:, 1:].squeeze()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Tokenizer()
        self.vision, self.rotary, self.attention = Vision(), Rotary(), Attention()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)

    def gather(self, images: list[Tensor] | Tensor | None) -> Tensor | None:
        if isinstance(images, list):
            return torch.cat(images, dim=0)
        return images

    def place(self, ids: Tensor, tokens: Tensor, images: Tensor) -> Tensor:
        tokens = tokens.clone()
        mask = ids == self.tokenizer.image_token_id
        tokens[mask] = images.reshape(-1, WIDTH).to(tokens.dtype)
        return tokens

    def forward(self, ids: Tensor, images: list[Tensor] | Tensor | None = None) -> Tensor:
        tokens = self.embed(ids)
        pixels = self.gather(images)
        if pixels is not None:
            tokens = self.place(ids, tokens, self.vision(pixels))
        print("tokens:", tokens.shape)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos, sin = self.rotary(positions)
        return self.head(self.attention(tokens, cos, sin))


def load() -> nn.Module:
    torch.manual_seed(0)
    return Model().eval()


def samples(batch: int = 2, seq: int = 12) -> tuple[Tensor, list[Tensor]]:
    """One image of four patches for each text, whose places are the first ones."""
    ids = torch.randint(8, 32, (batch, seq))
    ids[:, :PATCHES] = 7
    return ids, [torch.randn(1, 3, 8, 8) for _ in range(batch)]
