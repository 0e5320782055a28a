"""Training with regions, and in `DistributedDataParallel`."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from blocks_net import config, in_two_processes, net
from precast import CompileSmoketest, maybe_compile


def test_whole_steps_of_regions_agree_also_of_a_copy(blocks: Path) -> None:
    module = copy.deepcopy(maybe_compile(net(), config(blocks), None, torch.ones(2, 4)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    result = CompileSmoketest(2).run(module, torch.ones(2, 4), optimizer, lambda y: y.square().mean())
    assert result.ok and result.steps == 2, result.reason
    assert module.precast_report()["artifact"] == 6


PARALLEL = """
import copy, sys
import torch
import torch.distributed as dist
from blocks_net import config, net
from precast import CompileSmoketest, maybe_compile
from precast.compare.gradients import difference
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


def test_ddp_equals_ddp_in_eager(blocks: Path) -> None:
    assert all("equal" in out for out in in_two_processes(PARALLEL, blocks))
