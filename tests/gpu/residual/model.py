"""A small residual network in float16. Each convolution and its epilogue are one kernel on CUDA."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Odd numbers of channels, strides and dilations, and a convolution that is added to one with a bias of its own.
        self.stem = nn.Conv2d(3, 24, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(Block(24, dilation) for dilation in (1, 2))
        self.wide, self.aside = nn.Conv2d(24, 40, 3, stride=2, padding=1), nn.Conv2d(24, 40, 1, stride=2)
        self.last = nn.Conv2d(40, 7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.last(torch.relu(self.wide(x) + self.aside(x))))


def load() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        block.norm.running_mean.normal_(std=0.1)
        block.norm.running_var.uniform_(0.5, 2)
    return net.half().eval()
