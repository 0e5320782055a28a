"""DDP and FSDP2 over two devices by NCCL, of blocks that artifacts answer, beside the same in eager.

python parallel.py STORE     two processes on one machine; what it prints ends with `ok`

DEVICE=cpu: by gloo on the CPU.
"""

import logging
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CPU = os.environ.get("DEVICE") == "cpu"
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(net: nn.Module, x: Tensor) -> list[float]:
    """Returns the losses of steps with a batch of this rank."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = (net(x * (step + 1)) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(way: str, module: Any, both: list[nn.Module], x: Tensor) -> None:
    plain, own = (trained(each, x) for each in both)
    torch.testing.assert_close(own, plain, rtol=1e-3, atol=1e-5)
    report = module.precast_report()
    assert report["reasons"] == {} and report["artifact"] == 3 * STEPS, report
    print(f"{way}: losses {own}, in eager {plain}", flush=True)


def member(store: str) -> None:
    """Trains as one process of the group. Rank 0 builds, and the others load."""
    from precast import CompileConfig, maybe_compile
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    device = torch.device("cpu" if CPU else f"cuda:{rank}")
    if not CPU:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if CPU else "nccl")
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)).to(device)
    # Programs are built for the first device, and loaded on each.
    config = CompileConfig(
        kind="autograd", prefer="artifact", name="net", store=store, allowlist=["blocks.*"], fail_policy="raise"
    )

    def net() -> Net:
        torch.manual_seed(0)
        return Net().to(device).train()

    def wrapped() -> Any:
        if rank == 0:
            module = maybe_compile(net(), config, logging.getLogger(), x)
        dist.barrier()
        if rank != 0:
            module = maybe_compile(net(), config, logging.getLogger(), x)
        dist.barrier()
        return module

    module = wrapped()
    built = [region["attempt"]["built"] for region in module.precast_report()["regions"].values()]
    assert any(built) == (rank == 0), built
    compared("DDP", module, [DistributedDataParallel(each) for each in (net(), module)], x)
    mesh = init_device_mesh(device.type, (2,))
    module, plain = wrapped(), net()
    for each in (plain, module._orig_mod):
        for block in each.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(each, mesh=mesh)
    compared("FSDP2", module, [plain, module], x)
    dist.destroy_process_group()


def main(store: str) -> None:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": "2"}
    command = [sys.executable, __file__, store, "member"]
    members = [subprocess.Popen(command, env={**os.environ, **own, "RANK": str(rank)}) for rank in range(2)]
    assert not any([each.wait() for each in members])
    print("DDP and FSDP2 in two processes: ok")


if __name__ == "__main__":
    member(sys.argv[1]) if len(sys.argv) > 2 else main(sys.argv[1])
