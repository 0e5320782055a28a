"""Regions and FSDP2: blocks that `fully_shard` shards are answered by artifacts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blocks_net import Block, config, in_two_processes, net
from precast import CallFailed, maybe_compile
from precast.torch_private import sharding
from torch import nn

SHARDED = """
import logging, sys
import torch
import torch.distributed as dist
from blocks_net import config, net
from precast import CompileSmoketest, maybe_compile
from precast.wrapper import autograd
from precast.compare.gradients import difference
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
loss = lambda y: y.square().mean()

class Records(logging.Handler):
    def emit(self, record):
        texts.append(record.getMessage())

texts, logger = [], logging.Logger("test")
logger.addHandler(Records())

def sharded(model, blocks=True, **settings):
    for block in model.blocks if blocks else ():
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)

def whole(model, what):
    return {name: what(one).full_tensor().clone() for name, one in model.named_parameters()}

def compared(module, plain, count=4):
    both = (plain, module)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in both]
    for step in range(count):
        losses = []
        for each in both:
            one = loss(each(x * (step + 1)))
            one.backward()
            losses.append(one.detach())
        torch.testing.assert_close(*losses)
        gradients = [whole(each, lambda one: one.grad) for each in both]
        assert difference(*gradients)[0] is None, difference(*gradients)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*(whole(each, lambda one: one) for each in both), rtol=1e-4, atol=1e-6)

def counted(module):
    report = module.precast_report()
    return report["artifact"], report["reasons"]
"""

FIRST = """
bound = []
bind_saved = autograd.PairEngine.bind_saved

def checked(engine, saved):
    # The memory of the forward call is free; that of the backward call holds the same values.
    before = dict(engine._bound)
    bind_saved(engine, saved)
    assert all(engine._bound[name] == one.data_ptr() != 0 for name, one in saved.items())
    bound.append(any(engine._bound[name] != before[name] for name in saved))

autograd.PairEngine.bind_saved = checked
for settings in ({"reshard_after_forward": True}, {"reshard_after_forward": False}, {"blocks": False},
                 {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
    module = maybe_compile(net(), config(sys.argv[1]), None, torch.ones(2, 4))
    plain = sharded(net(), **settings)
    sharded(module._orig_mod, **settings)
    compared(module, plain)
    assert counted(module) == (12, {}), (settings, counted(module))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    result = CompileSmoketest(2).run(module, x, optimizer, loss)
    assert result.ok and result.steps == 2, result.reason
    assert counted(module) == (18, {}), (settings, counted(module))
assert len(bound) >= 72 and any(bound), (len(bound), sum(bound))

module = maybe_compile(net(), config(sys.argv[1]), logger, torch.ones(2, 4))
half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
plain = sharded(net(), **half)
sharded(module._orig_mod, **half)
compared(module, plain, 2)
assert counted(module) == (0, {"parameters": 6}), counted(module)
assert any("(parameters)" in text and "bfloat16" in text.lower() for text in texts), texts
module = maybe_compile(net(), config(sys.argv[1]), None, torch.ones(2, 4))
plain = sharded(net())
sharded(module)
compared(module, plain)
assert counted(module) == (12, {}), counted(module)
print("equal")
dist.destroy_process_group()
"""

AFTER = """
for sample in (None, torch.ones(2, 4)):
    for half in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        own = sharded(net(), **half)
        module = maybe_compile(own, config(sys.argv[1]), logger, sample)
        opened = [region["attempt"] for region in module.precast_report()["regions"].values()]
        assert opened == [None] * 3
        if half:
            module(x).sum().backward()
        else:
            compared(module, sharded(net()))
        assert counted(module) == ((3 if half else 12), {}), counted(module)
        releases = {one["attempt"]["release"] for one in module.precast_report()["regions"].values()}
        assert len(releases) == 1
assert sum("`first.weight` is a `DTensor`" in text and "before `fully_shard`" in text for text in texts) == 2, texts

module = maybe_compile(sharded(net()), config(sys.argv[1]), logger)
region = module._precast.regions["blocks.0"]
region.prepare(torch.ones(2, 4), {})
assert region.delayed().code == "parameters" and "`norm.weight` is a `DTensor`" in region.delayed().detail
print("equal")
dist.destroy_process_group()
"""


def test_sharded_blocks_equal_those_of_eager(blocks: Path) -> None:
    assert all("equal" in out for out in in_two_processes(SHARDED + FIRST, blocks))


@pytest.mark.long
def test_blocks_that_were_sharded_before_compile_in_their_first_call(blocks: Path) -> None:
    assert all("equal" in out for out in in_two_processes(SHARDED + AFTER, blocks))


def test_marks_are_no_change_of_a_module(blocks: Path) -> None:
    module = maybe_compile(net(), config(blocks), None, torch.ones(2, 4))
    block = module.blocks[0]
    for each in block.modules():
        each._is_fsdp_managed_module = True
    vars(block)["__composable_api_state_key_1"] = {}
    module(torch.ones(2, 4)).sum().backward()
    assert module.precast_report()["artifact"] == 3
    block.other = 1
    module(torch.ones(2, 4)).sum().backward()
    assert module.precast_report() == module.precast_report() and not module.precast_report()["reasons"]


@pytest.mark.parametrize("found", [nn.Parameter(torch.ones(2)), torch.empty(0), torch.empty(2, device="meta")])
def test_tensors_with_memory_are_bound(found: torch.Tensor) -> None:
    assert sharding.unbindable({"one": found}) is None


def test_a_tensor_without_memory_is_named(blocks: Path) -> None:
    module = maybe_compile(net(), config(blocks), None, torch.ones(2, 4))
    loss = module(torch.ones(2, 4)).sum()
    weight = module.blocks[1].linear.weight
    memory = weight.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    with pytest.raises(CallFailed, match="weight` has no memory"):
        loss.backward()
    with pytest.raises(RuntimeError):
        module(torch.ones(2, 4))
    memory.resize_(size)
    assert module.precast_report()["reasons"] == {"parameters": 1}
    assert sharding.original(Block) is Block
