"""A small vision-language model with random weights, for the settings of modules and submodules.

An image becomes 16 patches, a vision encoder reads them, a projector brings them to the width of the language model,
and the language model continues `image, tokens` or, without an image, `tokens`. It answers nothing sensible; its parts
and methods are called and compiled each in its own way: see precast.toml.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 500
IMAGE = 32
PATCH = 8


class Block(nn.Module):
    """Pre-norm self-attention and a feed-forward layer, causal or not."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Patches(nn.Module):
    """`[batch, 3, 32, 32]` pixels to `[batch, 16, width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, kernel_size=PATCH, stride=PATCH)
        self.place = nn.Parameter(0.02 * torch.randn((IMAGE // PATCH) ** 2, width))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.cut(pixels).flatten(2).transpose(1, 2) + self.place


class Vision(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.blocks = nn.Sequential(Block(width, 4, causal=False))
        self.norm = nn.LayerNorm(width)

    def forward(self, pixels: Tensor) -> Tensor:
        """`[batch, 3, 32, 32]` pixels to `[batch, 16, width]`, the input of the language model."""
        return self.norm(self.blocks(self.patches(pixels)))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """The same pixels to one vector of length 1 for each image, for a search index."""
        return F.normalize(self(pixels).mean(dim=1), dim=-1)


class Projector(nn.Module):
    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, to), nn.GELU(), nn.Linear(to, to))

    def get_torch_compile_config(self) -> dict[str, Any]:
        """Returns compile settings of this submodule, by method; precast.toml may override them."""
        return {"forward": {"options": {"epilogue_fusion": False}, "smoketest_steps": 1}}

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class Language(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(Block(width, 4, causal=True))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, embedded: Tensor) -> Tensor:
        """`[batch, length, width]` to `[batch, length, 500]` logits of the next token."""
        return self.head(self.norm(self.blocks(embedded)))

    @torch.compiler.disable
    def log_likelihood(self, ids: Tensor) -> Tensor:
        """How likely each text of a batch is. Asked for now and then by a report: not worth a compile."""
        logits = self(self.embed(ids))[:, :-1].log_softmax(dim=-1)
        return logits.gather(-1, ids[:, 1:, None]).sum(dim=(1, 2))


class VisionLanguage(nn.Module):
    def __init__(self, vision: int = 48, text: int = 64) -> None:
        super().__init__()
        self.vision, self.projector, self.language = Vision(vision), Projector(vision, text), Language(text)

    def forward(self, ids: Tensor, pixels: Tensor | None = None) -> dict[str, Tensor]:
        """Tokens `[batch, tokens]`, after an image or not, to logits `[batch, tokens, 500]`."""
        embedded = self.language.embed(ids)
        if pixels is not None:
            embedded = torch.cat([self.projector(self.vision(pixels)), embedded], dim=1)
        return {"logits": self.language(embedded)[:, -ids.shape[1] :]}


def load() -> nn.Module:
    torch.manual_seed(0)
    return VisionLanguage().eval()


def load_half() -> nn.Module:
    """The same in float16, for a GPU."""
    return load().half()
