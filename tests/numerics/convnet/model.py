"""Weights that freezing transforms: convolutions with batch norms, several shapes of filters, products with and without
a bias, weights with values that compilers fold, and weights that the passes can't transform."""

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


class Odd(nn.Module):
    """`[batch, 3, 16, 16]` through filters without kernels in oneDNN, and numbers beside filters and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 8, 3)
        self.right = nn.Conv2d(3, 8, 3)
        self.precise = nn.Conv2d(3, 8, 3, dtype=torch.float64)
        self.cells = nn.LSTM(16, 8, batch_first=True)
        self.turns = nn.Parameter(torch.randn(8, 2))
        self.register_buffer("table", torch.arange(16).reshape(4, 4))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        rows = image[:, 0, 0, :4]
        pairs = torch.view_as_complex(image[:, 0, :8, :2].contiguous())
        return (
            self.left(image) * 2.0 + self.right(image) * 3.0,
            self.precise(image.double()).float(),
            self.cells(image[:, 0])[0],
            torch.view_as_real(pairs * torch.view_as_complex(self.turns * 2.0)),
            rows @ (self.table * 0.5),
            (rows.to(torch.int64) @ self.table).float(),
            rows @ self.power(40) + rows @ self.power(3),
        )

    def power(self, steps: int) -> Tensor:
        """Returns a weight's square's square, and so on, as an iteration on weights computes it."""
        made = self.turns[:4] @ self.turns[:4].T
        for _ in range(steps):
            made = (made @ made) / made.norm()
        return made


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
        self.odd = Odd()

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
