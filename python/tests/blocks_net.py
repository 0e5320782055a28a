"""The module of the tests with regions that train, and two processes of a group that train it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from precast import CompileConfig
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Blocks:
    torch.manual_seed(0)
    return Blocks().train()


def config(store: Path | str, **settings: Any) -> CompileConfig:
    settings = {"name": "blocks", "allowlist": ["blocks.*"], **settings}
    return CompileConfig(kind="autograd", prefer="artifact", store=store, **settings)


# A thread of gloo frees the tensors of a call after the call has returned. If that is at the end of the process, Python
# before 3.14 aborts it: also in a process without Precast. So these processes end without closing the interpreter.
END = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


def in_two_processes(code: str, *arguments: Any) -> list[str]:
    """Runs code in two processes of a gloo group; returns their outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code + END, *map(str, arguments)],
            env={**os.environ, **own, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for each in started:
        out, err = each.communicate(timeout=300)
        assert each.returncode == 0, err
        found.append(out)
    return found
