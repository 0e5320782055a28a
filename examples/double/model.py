"""The model of the guide's first page."""

import torch


class Double(torch.nn.Module):
    """Twice the GELU of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x)) * 2


def load() -> torch.nn.Module:
    """Returns the model with the same weights each time."""
    torch.manual_seed(0)
    return Double().eval()
