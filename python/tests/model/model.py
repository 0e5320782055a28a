"""The modules of the package's tests: one of each kind of answer, small enough to compile in seconds."""

from typing import NamedTuple

import torch


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class Nested(torch.nn.Module):
    """Takes and returns nested values, and has no weights."""

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: torch.Tensor) -> dict:
        first, second = pair
        return {
            "sum": (x + first) * scale,
            "pair": Pair(x.minimum(second), x.maximum(second)),
            "none": None,
            "list": [-x],
        }


class Encoder(torch.nn.Module):
    """Token numbers to vectors, with an embedding whose rows are the valid values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.table(ids)) * mask.unsqueeze(-1)
        return x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Counter(torch.nn.Module):
    """Adds its input to a sum that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 1


class Chat(torch.nn.Module):
    """Tokens to logits of the next one, by the sum of all tokens before, a mood, which `start` gives, and warmth."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
        self.register_buffer("seen", torch.zeros(1, 16, 8), persistent=False)
        self.register_buffer("mood", torch.zeros(1, 8), persistent=False)

    def start(self, style: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mood": torch.tanh(style) * 4}

    def forward(self, ids: torch.Tensor, at: torch.Tensor, warmth: torch.Tensor) -> torch.Tensor:
        self.seen.index_copy_(1, at, self.table(ids))
        before = torch.arange(self.seen.shape[1]) <= at[:, None]
        return self.head(before.float() @ self.seen[0] + self.mood)[None] * warmth


class Everything(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested, self.encode, self.count = Nested(), Encoder(), Counter()

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: torch.Tensor) -> dict:
        return self.nested(x, pair, scale)


def load() -> Everything:
    torch.manual_seed(0)
    return Everything().eval()


def chat() -> Chat:
    torch.manual_seed(0)
    return Chat().eval()
