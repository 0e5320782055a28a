"""Two small linear layers: a model whose own work is so little that what is around it shows."""

import torch
from torch import nn


def load() -> nn.Module:
    """`[batch, 64]` float32 to the same shape."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
