"""Training with regions, and in the wrappers of torch.distributed."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from precast import CompileConfig, CompiledModule, CompileSmoketest, maybe_compile
from precast.gradients import difference
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


def config(store: Path) -> CompileConfig:
    return CompileConfig(kind="autograd", name="blocks", store=store, allowlist=["blocks.*"])


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the pair of a block."""
    kept = os.environ.get("PRECAST_TEST_STORE")
    store = Path(kept) / "blocks" if kept else tmp_path_factory.mktemp("blocks")
    module = maybe_compile(net(), config(store), None, torch.ones(2, 4))
    module(torch.ones(2, 4)).sum().backward()
    assert module.precast_report()["artifact"] == 3, module.precast_report()
    return store


def test_equal_blocks_share_one_pair(blocks: Path) -> None:
    module = maybe_compile(net(), config(blocks), None, torch.ones(2, 4))
    plain = copy.deepcopy(module._orig_mod)
    for each in (module, plain):
        each(torch.randn(2, 4, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    gradients = [{name: one.grad for name, one in each.named_parameters()} for each in (module, plain)]
    assert difference(*gradients)[0] is None
    report = module.precast_report()
    regions = report["regions"]
    assert report["artifact"] == 3 and report["reasons"] == {} and len(regions) == 3
    releases = {(region["attempt"]["name"], region["attempt"]["release"]) for region in regions.values()}
    assert len(releases) == 1 and not any(region["attempt"]["built"] for region in regions.values())


def test_a_copy_trains_by_regions(blocks: Path) -> None:
    module = copy.deepcopy(maybe_compile(net(), config(blocks), None, torch.ones(2, 4)))
    module(torch.ones(2, 4)).sum().backward()
    report = module.precast_report()
    assert report["artifact"] == 3 and report["reasons"] == {}
    assert all(one.grad is not None for one in module.parameters())


def test_whole_steps_of_regions_agree(blocks: Path) -> None:
    module = maybe_compile(net(), config(blocks), None, torch.ones(2, 4))
    assert isinstance(module, CompiledModule)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    result = CompileSmoketest(2).run(module, torch.ones(2, 4), optimizer, lambda y: y.square().mean())
    assert result.ok and result.steps == 2, result.reason
    assert module.precast_report()["artifact"] == 6


PARALLEL = """
import copy, sys
import torch
import torch.distributed as dist
from precast import CompileSmoketest, maybe_compile
from precast.gradients import difference
from test_training_regions import config, net
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
plain = net()
module = maybe_compile(net(), config(sys.argv[1]), None, torch.ones(2, 4))
x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
both = [DistributedDataParallel(each) for each in (plain, module)]
optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in both]
result = CompileSmoketest(2).run(both[1], x, optimizers[1], lambda y: y.square().mean())
assert result.ok and result.steps == 2, result.reason
for step in range(3):
    losses = []
    for each, optimizer in zip(both, optimizers):
        loss = each(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    gradients = [{name: one.grad for name, one in each.named_parameters()} for each in (module, plain)]
    assert difference(*gradients)[0] is None, difference(*gradients)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(*losses, rtol=1e-4)
mine = plain.head.weight.detach().clone()
dist.broadcast(mine, 0)
assert torch.equal(mine, plain.head.weight)
assert module.precast_report()["reasons"] == {} and module.precast_report()["artifact"] == 15
print("equal")
dist.destroy_process_group()
"""

SHARDED = """
import sys
import torch
import torch.distributed as dist
from precast import CompileSmoketest, maybe_compile
from test_training_regions import config, net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
module = maybe_compile(net(), config(sys.argv[1]), None, torch.ones(2, 4))
for block in module.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(module._orig_mod, mesh=mesh)
x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
result = CompileSmoketest(2).run(module, x, optimizer, lambda y: y.square().mean())
assert result.ok and result.steps == 2, result.reason
report = module.precast_report()
print("counts", report["artifact"], report["reasons"])
dist.destroy_process_group()
"""


def in_two_processes(code: str, store: Path) -> list[str]:
    """Runs code in two processes of a gloo group; returns their outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(store)],
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


def test_ddp_equals_ddp_in_eager(blocks: Path) -> None:
    assert all("equal" in out for out in in_two_processes(PARALLEL, blocks))


def test_fsdp_is_answered_by_the_originals_by_name(blocks: Path) -> None:
    for out in in_two_processes(SHARDED, blocks):
        assert "counts 0 {'hooks': 6}" in out
