"""Hooks of modules: those of a region's own module run around artifacts; those inside are compiled in, or refused."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks_net import Block, config, net
from conftest import gradients, in_threads
from fake_engine import SEEDS, counts, fake_engine  # noqa: F401
from precast import CompiledModule, maybe_compile
from precast.compare.gradients import difference
from precast.torch_private import hooks
from test_wrapper_fallbacks import wrapped
from test_wrapper_regions import Model
from torch import Tensor, nn

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def trained(store: Path, **settings: Any) -> CompiledModule:
    return maybe_compile(net(), config(store, **settings), None, torch.ones(2, 4))


def noted(module: nn.Module, seen: list[Any]) -> None:
    """Adds a hook of each kind; some change what they get."""

    def note(kind: str, answer: Any = None) -> Callable[..., Any]:
        return lambda *given: (seen.append((kind, len(given))), answer(*given) if answer is not None else None)[1]

    module.register_forward_pre_hook(note("before", lambda _, args: (args[0] * 2,)))
    module.register_forward_pre_hook(note("with names"), with_kwargs=True)
    module.register_forward_hook(note("after", lambda _, args, y: y * 3 + args[0]))
    module.register_forward_hook(note("always"), always_call=True)
    module.register_full_backward_pre_hook(note("gradient", lambda _, grads: (grads[0] * 2,)))
    module.register_full_backward_hook(note("gradients", lambda _, grads, of: (grads[0] + of[0],)))


@pytest.mark.parametrize("sample", [torch.ones(2, 4), None])  # without one, the first call opens the regions
def test_hooks_of_a_region_run_around_the_artifact(blocks: Path, sample: Tensor | None) -> None:
    module, plain = maybe_compile(net(), config(blocks), None, sample), net()
    runs: list[list[Any]] = [[], []]
    for seen, each in zip(runs, (plain, module), strict=True):
        for at in (0, 2):
            noted(each.blocks[at], seen)
        answer = each(X)
        answer.square().sum().backward()
        seen.append(answer.detach())
    assert torch.allclose(runs[0].pop(), runs[1].pop(), atol=1e-5)
    assert runs[0] == runs[1] and len(runs[0]) == 12
    assert difference(gradients(module), gradients(plain))[0] is None
    assert counts(module) == (3, {})
    assert all("forward" not in vars(block) for block in module.blocks)


backward_hook, backward_pre_hook = nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook


def global_hook(_: nn.Module, hook: Callable[..., None]) -> Any:
    return nn.modules.module.register_module_full_backward_hook(hook)


@pytest.mark.parametrize(("add", "left"), [(backward_hook, 2), (backward_pre_hook, 2), (global_hook, 0)])
def test_a_backward_hook_inside_a_region_runs(blocks: Path, add: Callable[..., Any], left: int) -> None:
    module, seen = trained(blocks), []
    handle = add(module.blocks[1].norm, lambda each, *_: seen.append(type(each)))
    try:
        module(X).sum().backward()
    finally:
        handle.remove()
    assert nn.LayerNorm in seen and counts(module) == (left, {"hooks": 3 - left})
    module(X).sum().backward()
    assert counts(module) == (left + 3, {"hooks": 3 - left})


def test_an_old_backward_hook_of_a_region_is_the_originals(blocks: Path) -> None:
    module, seen = trained(blocks), []
    module.blocks[1].register_backward_hook(lambda _, grads, of: seen.append(len(grads)))
    with pytest.warns(FutureWarning, match="non-full backward hook"):
        module(X).sum().backward()
    assert seen == [2] and counts(module) == (2, {"hooks": 1})


@pytest.mark.usefixtures("fake_engine")
def test_a_backward_hook_says_nothing_to_calls_without_gradients() -> None:
    module, _, _ = wrapped()
    module.inner.register_full_backward_hook(lambda *_: None)
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert counts(module) == (1, {})


@pytest.mark.parametrize("inside", ["", "blocks.1.norm"])
@pytest.mark.parametrize("add", [pytest.param(backward_hook, marks=pytest.mark.long), backward_pre_hook])
def test_a_module_that_is_one_region_runs_its_hooks(tmp_path: Path, inside: str, add: Callable[..., Any]) -> None:
    module, seen = maybe_compile(net(), config(tmp_path, allowlist=["*"])), []
    add(module._orig_mod.get_submodule(inside), lambda *_: seen.append(inside))
    module(X.clone().requires_grad_()).sum().backward()
    assert seen == [inside] and counts(module) == ((0, {"hooks": 1}) if inside else (1, {}))


@pytest.fixture
def module(fake_engine: None) -> CompiledModule:  # noqa: F811
    """Two regions on the fake engine."""
    return wrapped(Model().eval(), sample=((torch.ones(2, 5, 3),), {}), allowlist=["layers.*"])[0]


def test_the_original_answers_within_the_same_hooks(module: CompiledModule) -> None:
    (seeds,) = SEEDS.values()
    seen: list[str] = []
    module.layers[0].register_forward_hook(lambda *_: seen.append("own"))
    module.layers[0].mlp.register_forward_hook(lambda *_: seen.append("inner"))
    seeds["answered"] = 0
    with torch.no_grad():
        answer = module(torch.ones(2, 5, 3))
        assert seen == ["inner", "own"] and seeds["answered"] == 1
        assert torch.equal(answer, module._orig_mod(torch.ones(2, 5, 3)))
    assert counts(module) == (1, {"hooks": 1})


def test_a_hook_that_raises_leaves_the_module_as_it_was(module: CompiledModule) -> None:
    def refuse(*_: Any) -> None:
        raise KeyError("hook")

    handle = module.layers[0].register_forward_pre_hook(refuse)
    with torch.no_grad():
        with pytest.raises(KeyError, match="hook"):
            module(torch.ones(2, 5, 3))
        assert "forward" not in vars(module.layers[0])
        handle.remove()
        module(torch.ones(2, 5, 3))
    assert counts(module) == (2, {})


def test_a_hook_may_call_its_module(module: CompiledModule) -> None:
    layer, seen = module.layers[0], []

    def again(each: nn.Module, args: Any) -> None:
        if not seen:
            seen.append(None)
            seen.append(each(*args, scale=0.5))

    handle = layer.register_forward_pre_hook(again)
    with torch.no_grad():
        answer = module(torch.ones(2, 5, 3))
        handle.remove()
        assert torch.equal(answer, module._orig_mod(torch.ones(2, 5, 3)))
    assert len(seen) == 2 and "forward" not in vars(layer) and counts(module) == (3, {})


def test_copies_made_within_hooks_are_the_module(module: CompiledModule) -> None:
    copies: list[nn.Module] = []

    def copied(each: nn.Module, _: Any) -> None:
        assert isinstance(vars(each)["forward"], hooks.StandIn)
        copies.extend([copy.deepcopy(each), pickle.loads(pickle.dumps(each))])

    layer = module.layers[0]
    layer.register_forward_pre_hook(call_of_copy)
    COPY.append(copied)
    x = torch.ones(2, 5, 4)
    with torch.no_grad():
        module(torch.ones(2, 5, 3))
        COPY.clear()
        layer.mlp[0].weight.mul_(2)
        for each in copies:
            assert each.forward.__self__ is each
            assert not torch.equal(each(x), layer(x))


COPY: list[Any] = []


def call_of_copy(each: nn.Module, args: Any) -> None:
    for one in COPY:
        one(each, args)


def test_threads_within_hooks_do_not_disturb_each_other(module: CompiledModule) -> None:
    layer, both = module.layers[0], threading.Barrier(2, timeout=20)
    layer.register_forward_pre_hook(lambda *_: None if both.broken else (both.wait(), None)[1])

    def run(number: int) -> list[Tensor]:
        with torch.no_grad():
            return [module(torch.full((2, 5, 3), float(number))) for _ in range(20)]

    answers = in_threads(2, run)
    assert counts(module) == (80, {}) and "forward" not in vars(layer)
    both.abort()
    with torch.no_grad():
        for number, found in enumerate(answers):
            wanted = module._orig_mod(torch.full((2, 5, 3), float(number)))
            assert all(torch.equal(one, wanted) for one in found)


def test_a_call_meets_the_stand_in_of_another_thread() -> None:
    block, inside, done = Block(), threading.Event(), threading.Event()
    block.register_forward_pre_hook(lambda *_: (inside.set(), done.wait(20), None)[2])
    within, answers = hooks.StandIn(block, lambda args, kwargs: "artifact"), []
    thread = threading.Thread(target=lambda: answers.append(within.call((torch.ones(2, 8),), {})))
    thread.start()
    assert inside.wait(20) and block.forward is within
    assert torch.equal(block.forward(torch.ones(2, 8)), Block.forward(block, torch.ones(2, 8)))
    assert hooks.own_forward(block) is None
    done.set()
    thread.join()
    assert answers == ["artifact"] and "forward" not in vars(block)
