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


class Everything(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested, self.encode, self.count = Nested(), Encoder(), Counter()

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: torch.Tensor) -> dict:
        return self.nested(x, pair, scale)


def load() -> Everything:
    torch.manual_seed(0)
    return Everything().eval()
