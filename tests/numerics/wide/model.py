"""Six matrices of 64 MiB: weights that take more memory than the rest of a process."""

import torch
from torch import nn


def load() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6))).eval()
