"""Training from a release that `precast build` made: a module of kind `autograd` in a spec."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HERE, build, folder, gradients
from precast import CompileConfig, CompiledModule, maybe_compile
from precast.capture import exported, joint, pairs
from precast.compare.batches import difference
from precast.compare.gradients import difference as gradients_differ
from precast.errors import LoadError, NotFound
from precast.wrapper import parts
from trained_net import batch, loss, net


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the model `trains` of `trained.toml`."""
    store = folder(tmp_path_factory, "released")
    build(HERE / "trained.toml", store)
    return store


@pytest.fixture(autouse=True)
def _nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("captured")

    for owner, name in ((joint, "capture"), (parts, "build"), (exported, "build")):
        monkeypatch.setattr(owner, name, refused)


def wrapped(store: Path, module: Any = None, sample: Any = None, **settings: Any) -> CompiledModule:
    settings = {"release": "trains", "fail_policy": "raise", **settings}
    config = CompileConfig(kind="autograd", prefer="artifact", store=store, **settings)
    return maybe_compile(module or net(), config, None, sample)


def test_a_trainer_takes_the_pair_of_a_spec(released: Path) -> None:
    torch.manual_seed(3)
    module = wrapped(released)
    for one in module.parameters():
        # The values are the module's own, not those of the build.
        with torch.no_grad():
            one.add_(torch.randn_like(one) * 0.1)
    plain = copy.deepcopy(module._orig_mod)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (plain, module)]
    for step in range(4):
        answers, states = [], []
        for each, optimizer in zip((plain, module), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            answers.append(each(**batch(4, step)))
            loss(answers[-1]).backward()
            optimizer.step()
            states.append(torch.get_rng_state())
        assert difference(answers[1], answers[0])[0] is None
        assert gradients_differ(gradients(module), gradients(plain))[0] is None
        assert difference(dict(module.named_buffers()), dict(plain.named_buffers()), noun="buffer")[0] is None
        assert torch.equal(*states)
    report = module.precast_report()
    assert (report["artifact"], report["reasons"]) == (4, {})
    attempt = report["regions"][""]["pairs"][0]
    assert attempt["built"] is False and attempt["release"] == "trains" and attempt["smoketest_steps"] == 1


def test_the_original_answers_what_the_release_has_no_program_for(released: Path) -> None:
    module = wrapped(released, fail_policy="fallback_eager", sample=batch(9))
    loss(module(**batch(6))).backward()
    with torch.no_grad():
        module.eval()(**batch(4))
    module.train().drop.eval()
    loss(module(**batch(4))).backward()
    loss(module.train()(**batch(4))).backward()
    report = module.precast_report()
    assert (report["artifact"], report["reasons"]) == (1, {"shape": 1, "release": 1, "not compiled": 1})


def test_a_module_that_is_not_the_releases_is_refused(released: Path) -> None:
    other = net()
    other.unused = torch.nn.Linear(2, 3)
    assert wrapped(released, other, batch()).precast_report()["regions"][""]["pairs"]  # no program reads it
    other.second.weight.requires_grad_(True)
    with pytest.raises(Exception, match=r"the gradient of `second\.weight` is missing, and eager has one"):
        wrapped(released, other, batch())
    other.first = torch.nn.Linear(8, 16, bias=False)
    with pytest.raises(Exception, match=r"first\.(weight|bias)"):
        wrapped(released, other, batch())
    with pytest.raises(NotFound, match="absent"):
        wrapped(released, sample=batch(), release="absent")


def test_a_release_without_one_pair_is_named() -> None:
    def found(*modules: str) -> list[tuple[str, str]]:
        return pairs.found(SimpleNamespace(name="m", modules=list(modules)))  # type: ignore[arg-type]

    assert found("forward", "train.forward", "train.backward") == [("train.forward", "train.backward")]
    two = ["a.forward_0", "a.backward_0", "a.forward_1", "a.backward_1"]
    assert found(*two) == [("a.forward_0", "a.backward_0"), ("a.forward_1", "a.backward_1")]
    with pytest.raises(LoadError, match=r"`m` has no module of kind `autograd`, only forward, a\.forward") as caught:
        found("forward", "a.forward")
    assert "autograd" in caught.value.hint
    with pytest.raises(LoadError, match="several modules of kind `autograd`: a, b"):
        found("a.forward", "a.backward", "b.forward", "b.backward")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kind": "inference"}, '`release` is for `kind = "autograd"`'),
        ({"backend": "inductor"}, '`release` is for `kind = "autograd"`'),
        ({"name": "n"}, "`name` is given with `release`"),
        ({"buckets": {"batch": [4]}, "shapes": {"x": ["batch", 8]}}, "`buckets` is given with `release`"),
        ({"allowlist": ["layers.*"]}, "`allowlist` is given with `release`"),
    ],
)
def test_settings_that_the_release_has_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CompileConfig(**{"kind": "autograd", "release": "trains", **settings})
