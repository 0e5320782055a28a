"""What freezing makes of weights: convolutions with batch norms, several shapes of filters, products with and without a
bias, and weights whose values a compiler likes to fold."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A convolution, its batch norm and a residual one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.depthwise(torch.relu(self.norm(self.conv(x)))) + x)


class Net(nn.Module):
    """`[batch, 3, 16, 16]` to `[batch, 512]` and to a row of weights that no input changes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.inner = nn.Linear(32, 1024, bias=False)
        self.head = nn.Linear(1024, 512)
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.zeros_(self.head.bias)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        h = self.blocks(torch.relu(self.norm(self.stem(image)))).mean((2, 3))
        return self.head(torch.nn.functional.gelu(self.inner(h))) * self.scale, self.head.weight[0] * 2


def load(seed: int = 0) -> nn.Module:
    """Returns the model; a seed above 0 gives every tensor other values."""
    torch.manual_seed(seed)
    net = Net()
    for name, buffer in net.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    if seed:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return net.eval()
