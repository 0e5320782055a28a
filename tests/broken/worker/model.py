"""Modules that harm the process they run in."""

import ctypes
import itertools
import time

import torch
from torch import Tensor, nn


class Good(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def crash(x: Tensor) -> None:
    ctypes.string_at(0)  # line: crash


class Dies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        crash(x)
        return x + 1


class Hangs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(3600)  # line: hang
        return x + 1


class Eats(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hoard = [time.sleep(0.02) or b"\1" * (32 << 20) for _ in itertools.count()]  # line: eat
        return x + len(hoard)


def load() -> nn.Module:
    model = nn.Module()
    for kind in (Dies, Hangs, Eats, Good):
        model.add_module(kind.__name__.lower(), kind())
    return model.eval()
