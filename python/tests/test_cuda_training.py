"""Training through `maybe_compile` on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from precast import CompileConfig, CompiledModule, Error, maybe_compile
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(drop)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(x.shape)))
        return x + self.down(nn.functional.gelu(self.up(x)))


def twins(plain: nn.Module, store: Path, **settings: Any) -> tuple[CompiledModule, nn.Module]:
    """Returns a wrapped module on the device, and an eager one with equal parameters."""
    plain = plain.cuda().train()
    config = CompileConfig(kind="autograd", prefer="artifact", store=store, name="twins", **settings)
    return maybe_compile(copy.deepcopy(plain), config), plain


def losses(module: nn.Module, half: bool) -> list[float]:
    """Returns the losses of six steps of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    found = []
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(4, 32, 64, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = (module(x) - x.flip(0)).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(("drop", "half"), [(0.0, False), (0.0, True), (0.25, False)])
def test_losses_are_those_of_eager(tmp_path: Path, drop: float, half: bool, mode: str) -> None:
    torch.manual_seed(0)
    module, plain = twins(Block(drop), tmp_path, mode=mode)
    torch.testing.assert_close(losses(module, half), losses(plain, half), rtol=3e-2 if half else 1e-4, atol=1e-4)
    report = module.precast_report()
    assert report["artifact"] == 6, report


def test_what_a_graph_lends_keeps_its_values_while_it_is_held(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, plain = twins(Block(), tmp_path, mode="reduce-overhead")
    inputs = torch.randn(4, 4, 32, 64, device="cuda")

    def values(net: nn.Module) -> list[Tensor]:
        def gradients() -> list[Tensor]:
            return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]

        kept = []
        for x in inputs[:3]:  # accumulates
            kept.append(net(x))
            kept[-1].square().mean().backward()
        found = gradients()
        held = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        net.zero_grad()
        first, second = net(inputs[0]), net(inputs[1])
        second.square().mean().backward()
        loss = first.mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found += [*gradients(), *held, *kept, first, second]
        net.zero_grad()
        last = net(inputs[3])
        last.square().mean().backward()
        return [one.detach().clone() for one in (*found, *gradients(), *held, *kept, first, last)]

    got, expected = values(module), values(plain)
    assert len(got) == len(expected)
    for mine, eager in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-5)
    report = module.precast_report()
    assert report["artifact"] == 6, report


def test_a_graph_keeps_what_its_products_write(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Products of few values from many are sums of parts, which cuBLAS keeps in its workspace.
    module, plain = twins(nn.Linear(1 << 16, 16, bias=False), tmp_path, mode="reduce-overhead")
    x = torch.randn(16, 1 << 16, device="cuda")

    def answer(net: nn.Module) -> Tensor:
        y = net(x)
        y.square().mean().backward()
        net.zero_grad()
        return y.detach().clone()

    expected = answer(plain)
    torch.testing.assert_close(answer(module), expected, rtol=1e-3, atol=1e-3)
    # As `torch.compile(mode="reduce-overhead")` does before it captures.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.zeros(1 << 18, device="cuda") for _ in range(1 << 10)]
    for _ in range(3):
        torch.testing.assert_close(answer(module), expected, rtol=1e-3, atol=1e-3)
    assert not any(other.any() for other in others)
    report = module.precast_report()
    assert report["artifact"] == 4, report


def test_a_backward_program_frees_what_it_has_read(tmp_path: Path) -> None:
    wide = [nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(6)]
    module, _ = twins(nn.Sequential(*wide), tmp_path)
    x = torch.randn(1024, 2048, device="cuda")

    def peak(retain_graph: bool) -> int:
        module.zero_grad()
        loss = module(x).square().mean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward(retain_graph=retain_graph)
        return torch.cuda.max_memory_allocated() - before

    peak(False)
    # A value between two layers has 8 MiB, a gradient 16.
    assert peak(True) - peak(False) > 32 << 20
    report = module.precast_report()
    assert report["artifact"] == 3, report


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 64), nn.Linear(64, 5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.table(tokens).mean(1)), targets)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_step_does_not_wait_and_names_an_index_out_of_bounds(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    module, plain = twins(Classifier(), tmp_path, mode=mode)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (module, plain)]
    tokens, targets = torch.randint(10, (8, 6)).cuda(), torch.randint(5, (8,)).cuda()

    def step(at: int) -> Tensor:
        loss = (module, plain)[at](tokens, targets)
        loss.backward()
        optimizers[at].step()
        optimizers[at].zero_grad()
        return loss.detach().clone()

    found = [step(0) for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found += [step(0) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [step(1) for _ in range(6)]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)

    for bad in (5, -1, 1 << 40):
        wrong = targets.clone()
        wrong[3] = bad
        loss = module(tokens, wrong)
        with pytest.raises(Error, match=r"index in 0\.\.5"):
            loss.backward()
        module.zero_grad()
    with torch.no_grad():  # the device goes on
        torch.testing.assert_close(module(tokens, targets), plain(tokens, targets), rtol=1e-4, atol=1e-5)
    step(0)
    report = module.precast_report()
    assert report["artifact"] == 6 + 3 + 2 and not report["reasons"], report
