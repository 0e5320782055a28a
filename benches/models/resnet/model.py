"""ResNet-50 of torchvision with random weights, in the memory format that is fastest on both kinds of device."""

import torch
import torchvision
from torch import Tensor, nn


class ResNet(nn.Module):
    """`[batch, 3, 224, 224]` to `[batch, 1000]`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.resnet50(weights=None).to(memory_format=torch.channels_last)

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image.contiguous(memory_format=torch.channels_last))


def load() -> nn.Module:
    """Returns the model in float32."""
    torch.manual_seed(0)
    return ResNet().eval()


def load_half() -> nn.Module:
    """Returns the model in float16, for a GPU."""
    return load().half()
