"""A model that learns which token follows two others."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Next(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(31, 16), nn.BatchNorm1d(32)
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, 31)

    def forward(self, ids: Tensor) -> Tensor:  # [rows, 2]
        return self.head(F.gelu(self.up(self.norm(self.tokens(ids).flatten(1)))))

    def loss(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self(ids)
        hits = (logits.argmax(-1) == targets).float().mean()
        return F.cross_entropy(logits, targets), {"accuracy": hits}

    def steady_loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss with the norm's weights alone, without the statistics of a batch."""
        x = self.tokens(ids).flatten(1) * self.norm.weight + self.norm.bias
        return F.cross_entropy(self.head(F.gelu(self.up(x))), targets)

    def dropped_loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = F.dropout(self.tokens(ids).flatten(1) * self.norm.weight + self.norm.bias, 0.2, self.training)
        return F.cross_entropy(self.head(F.dropout(F.gelu(self.up(x)), 0.5, self.training)), targets)


def load() -> Next:
    torch.manual_seed(3)
    return Next()
