"""The model of the guide's first page."""

import torch


class Double(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x)) * 2


def load():
    torch.manual_seed(0)
    return Double().eval()
