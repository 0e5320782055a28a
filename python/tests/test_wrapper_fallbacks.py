"""`maybe_compile`: the choice between artifact and original, with an engine that computes by the module itself."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
import types
from typing import Any

import fake_engine as fakes
import pytest
import torch
from fake_engine import SEEDS, Records, counts, fake_engine  # noqa: F401
from precast.config import CompileConfig
from precast.wrapper.module import maybe_compile
from precast.wrapper.refusal import Refused
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.drop(self.norm(self.inner(x))) * self.scale
        return y if shift is None else y + shift

    def describe(self) -> str:
        return f"scale {self.scale}"


pytestmark = pytest.mark.usefixtures("fake_engine")


def wrapped(
    net: nn.Module | None = None, seeds: dict[str, Any] | None = None, sample: Any = None, **settings: Any
) -> tuple[Any, dict[str, Any], Records]:
    return fakes.wrapped(net if net is not None else Net().eval(), seeds, sample, **settings)


def test_a_change_is_logged_once_and_one_that_is_undone_is_none() -> None:
    module, _, records = wrapped()
    with torch.no_grad():
        for scale in (3.0, 4.0, 2.0):
            module.scale = scale
            module(torch.ones(2, 4))
        handle = module.inner.register_forward_hook(lambda *_: None)
        module(torch.ones(2, 4))
        handle.remove()
        module(torch.ones(2, 4))
        module.train()
        module(torch.ones(2, 4))
        module.eval()
        module(torch.ones(2, 4))
    assert counts(module) == (3, {"attributes": 2, "hooks": 1, "training": 1})
    logged = [record.precast for record in records.records if "reason" in record.precast]  # type: ignore[attr-defined]
    assert [values["reason"] for values in logged] == ["attributes", "hooks", "training"], "each once"


def test_gradients_are_never_lost() -> None:
    module, _, records = wrapped()
    x = torch.randn(3, 4)
    module(x).sum().backward()
    assert module.inner[0].weight.grad is not None
    assert counts(module) == (0, {"gradients": 1})
    assert any("no_grad" in record.getMessage() for record in records.records)
    module.requires_grad_(False)
    module(x)
    assert counts(module)[0] == 1
    x.requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None and counts(module) == (1, {"gradients": 2})


def test_modes_of_torch_are_the_originals() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Functions.seen += 1
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Dispatches.seen += 1
            return function(*args, **(kwargs or {}))

    module, _, _ = wrapped()
    x = torch.randn(3, 4)
    with torch.no_grad():
        with Functions():
            module(x)
        with Dispatches():
            module(x)
        torch.vmap(module._orig_mod.inner)(x)
        assert torch.allclose(torch.func.vmap(module)(x[None]), module._orig_mod(x)[None], atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert module.inner(x).dtype == torch.bfloat16
            module(x)
        traced = torch.jit.trace(module, x, check_trace=False)
        assert torch.equal(traced(x), module._orig_mod(x))
    assert Functions.seen and Dispatches.seen
    assert counts(module) == (0, {"mode": 3, "autocast": 1, "tracing": 1})


def test_export_and_compile_see_the_original() -> None:
    module, _, _ = wrapped()
    x = torch.randn(3, 4)
    with torch.no_grad():
        exported = torch.export.export(module, (x,))
        assert torch.allclose(exported.module()(x), module._orig_mod(x))
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x), module._orig_mod(x))
    assert counts(module)[0] == 0


def test_a_parameter_without_an_address_is_no_exception() -> None:
    module, _, _ = wrapped(nn.Sequential(nn.Linear(4, 4, bias=False)).eval())
    module[0].weight = nn.Parameter(torch.ones(4, 4).to_sparse(), requires_grad=False)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="data pointer"):
            module[0].weight.data_ptr()
        for _ in range(2):
            assert torch.equal(module(torch.ones(2, 4)), torch.full((2, 4), 4.0))
        module[0].weight = nn.Parameter(torch.ones(4, 4))
        module(torch.ones(2, 4))
    assert counts(module) == (1, {"parameters": 2})


def test_a_check_that_fails_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, _ = wrapped()

    def broken(*_: Any) -> Any:
        raise RuntimeError("seeded")

    monkeypatch.setattr(module._precast.regions[""]._guard, "refusal", broken)
    x = torch.ones(2, 4)
    assert torch.equal(module(x), module._orig_mod(x))
    assert counts(module) == (0, {"failed": 1})


def test_a_failure_of_the_engine_is_the_originals_answer() -> None:
    module, seeds, records = wrapped()
    seeds["answer"] = RuntimeError("seeded")
    x = torch.randn(3, 4)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            module(torch.ones(2, 5))  # the original's own error
        for _ in range(5):
            assert torch.equal(module(x), module._orig_mod(x))
        assert counts(module) == (0, {"failed": 6})
    failures = [record for record in records.records if record.exc_info]
    assert len(failures) == 3, "after three failures in a row the engine is not asked again"
    assert "seeded" in str(failures[0].exc_info[1])  # type: ignore[index]


def test_an_engine_without_an_answer_is_asked_again_and_the_policy_raises_failures_alone() -> None:
    module, seeds, _ = wrapped(fail_policy="raise")
    with torch.no_grad():
        seeds["answer"] = Refused("shape", "no bucket covers batch=9")
        for _ in range(5):
            module(torch.randn(9, 4))
        seeds["answer"] = None
        module(torch.randn(2, 4))
        seeds["answer"] = RuntimeError("seeded")
        with pytest.raises(RuntimeError, match="seeded"):
            module(torch.randn(3, 4))
    assert counts(module)[0] == 1 and counts(module)[1]["shape"] == 5


@pytest.mark.parametrize(
    "seeds",
    [{"open": RuntimeError("no compiler")}, {"error": 1.0}, {"error": float("nan")}, {"answer": ValueError("bad")}],
    ids=["open", "error", "nan", "answer"],
)
def test_a_failed_start_is_logged_and_never_raised(seeds: dict[str, Any]) -> None:
    module, _, records = wrapped(seeds=dict(seeds))
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(module(x), module._orig_mod(x))
    assert counts(module) == (0, {"not compiled": 1})
    values = records.records[0].precast  # type: ignore[attr-defined]
    assert values["success"] is False and values["exception"] and "Traceback" in values["stack"]
    with pytest.raises(Exception):  # noqa: B017
        wrapped(seeds=dict(seeds), fail_policy="raise")


def test_the_log_has_every_value() -> None:
    _, _, records = wrapped(mode="max-autotune", dynamic=True)
    record = records.records[0]
    values = record.precast  # type: ignore[attr-defined]
    assert values["enabled"] and values["success"] and values["seconds"] >= 0
    assert (values["backend"], values["mode"], values["dynamic"]) == ("precast", "max-autotune", True)
    assert values["exception"] is None and values["stack"] is None
    assert values["smoketest_steps"] == 3 and values["max_error"] == 0.0
    text = record.getMessage()
    for key in ("enabled", "backend", "mode", "dynamic", "success", "seconds", "exception"):
        assert f"{key}=" in text


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("a broken logger")


def test_any_logger_will_do() -> None:
    plain = types.SimpleNamespace(lines=[])
    plain.info = plain.warning = plain.lines.append
    for logger in (None, plain, Broken(), logging.LoggerAdapter(logging.getLogger("other"), {})):
        module = maybe_compile(Net().eval(), CompileConfig(enabled=False), logger, torch.ones(2, 4))
        with torch.no_grad():
            module(torch.ones(2, 4))
    assert any("enabled=False" in line for line in plain.lines)


def test_disabled_is_the_original() -> None:
    for settings in ({"enabled": False}, {"backend": "eager"}):
        module, seeds, _ = wrapped(**settings)
        with torch.no_grad():
            module(torch.ones(2, 4))
        assert counts(module) == (0, {"disabled": 1}) and "opened" not in seeds


def test_a_backend_of_torch_answers_training_and_every_size() -> None:
    torch.compiler.reset()
    net = Net()
    module = maybe_compile(net, CompileConfig(backend="aot_eager", fullgraph=False), None, torch.ones(2, 4))
    module(torch.randn(3, 4)).sum().backward()
    assert net.inner[0].weight.grad is not None
    module.eval()
    with torch.no_grad():
        x = torch.randn(5, 4)
        assert torch.allclose(module(x), net(x))
    assert counts(module) == (2, {})


def test_an_unknown_backend_is_logged() -> None:
    module = maybe_compile(Net().eval(), CompileConfig(backend="nothing"), None, torch.ones(2, 4))
    module(torch.ones(2, 4))
    assert counts(module) == (0, {"not compiled": 1})
    assert "nothing" in module.precast_report()["regions"][""]["attempt"]["exception"]


def test_the_first_call_compiles_without_a_sample() -> None:
    module, _, _ = wrapped(sample=())
    module(torch.ones(2, 4))
    with torch.no_grad():
        module(torch.ones(2, 4))
        module(torch.ones(2, 4))
    assert counts(module) == (2, {"gradients": 1})


def test_hooks_at_the_start_are_in_the_programs() -> None:
    net = Net().eval()
    handle = net.inner.register_forward_hook(lambda *given: given[-1] * 2)
    module, seeds, _ = wrapped(net)
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 4)), net(torch.ones(2, 4)))
        handle.remove()
        module(torch.ones(2, 4))
    assert counts(module) == (1, {"hooks": 1}) and seeds["opened"] == [""]


def test_the_smoke_test_leaves_everything_as_it_was() -> None:
    net = Net().train()
    torch.manual_seed(7)
    state, buffers = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    module, _, _ = wrapped(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.training for each in net.modules())
    assert all(torch.equal(value, buffers[name]) for name, value in net.state_dict().items())
    assert module.precast_report()["regions"][""]["answers"] == "artifact"


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = tuple(x.shape)
        return self.linear(x)


def test_a_module_that_changes_its_buffer_is_not_compiled() -> None:
    module, _, _ = wrapped(Counter().eval())
    assert module.calls.item() == 0
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert module.calls.item() == 1 and counts(module) == (0, {"not compiled": 1})


def test_attributes_that_a_forward_writes_are_no_change() -> None:
    module, _, _ = wrapped(Remembers().eval())
    with torch.no_grad():
        module(torch.ones(2, 4))
        module.last = "something else"
        module(torch.ones(2, 4))
    assert counts(module) == (2, {})


def test_it_behaves_as_the_original() -> None:
    net = Net().eval()
    module, _, _ = wrapped(net)
    assert isinstance(module, nn.Module)
    assert module.state_dict().keys() == net.state_dict().keys()
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert module.describe() == "scale 2.0" and module.inner is net.inner and "describe" in dir(module)
    module.scale = 5.0
    assert net.scale == 5.0
    assert module.train() is module and net.training and module.training
    module.eval()
    assert not net.drop.training
    assert module.to(torch.float64) is module and net.inner[0].weight.dtype == torch.float64
    module.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in net.parameters())
    module.extra = nn.Linear(2, 2)
    assert "extra.weight" in net.state_dict()
    del module.extra
    assert not hasattr(net, "extra")
    with pytest.raises(AttributeError):
        _ = module.missing
    assert bool(module) and "Net" in repr(module)
    with pytest.raises(TypeError):
        len(module)
    assert len(wrapped(nn.Sequential(nn.Linear(4, 4)).eval())[0]) == 1


def test_it_lives_in_other_modules() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.encoder, self.head = inner, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    torch.manual_seed(0)
    plain = Outer(Net()).eval()
    module, _, _ = wrapped(copy.deepcopy(plain.encoder))
    outer = Outer(module)
    outer.head = plain.head
    assert outer.state_dict().keys() == plain.state_dict().keys()
    outer.train()
    assert module._orig_mod.drop.training
    outer.eval()
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    missing = outer.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    assert not missing.missing_keys and not missing.unexpected_keys
    assert torch.equal(module._orig_mod.inner[0].weight, plain.encoder.inner[0].weight * 2)
    with torch.no_grad():
        outer(torch.ones(2, 4))
    assert counts(module)[0] == 1
    outer.double()
    assert module._orig_mod.inner[0].weight.dtype == torch.float64


def test_a_pickle_is_the_original() -> None:
    module, _, records = wrapped(nn.Sequential(nn.Linear(4, 4)).eval())
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded) is nn.Sequential
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    assert type(torch.load(stream, weights_only=False)) is nn.Sequential
    assert any("pickled as the original" in record.getMessage() for record in records.records)


def test_a_second_wrapper_takes_the_place_of_the_first() -> None:
    module, _, _ = wrapped()
    again = maybe_compile(module, CompileConfig(enabled=False))
    assert again._orig_mod is module._orig_mod
    with pytest.raises(TypeError, match="not a `torch"):
        maybe_compile(lambda x: x)  # type: ignore[arg-type]


def test_closed_is_the_original() -> None:
    module, seeds, _ = wrapped()
    module.precast_close()
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert seeds["closed"] and counts(module) == (0, {"closed": 1})


def test_one_thread_compiles_and_the_others_are_answered() -> None:
    started, finish = threading.Event(), threading.Event()
    net = Net().eval()

    def wait() -> None:
        started.set()
        assert finish.wait(30)

    module, _, _ = wrapped(net, {"wait": wait}, ())
    x = torch.ones(2, 4)

    def first() -> None:
        with torch.no_grad():
            module(x)

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(30)
    with torch.no_grad():
        module(x)
    finish.set()
    thread.join()
    assert counts(module) == (1, {"compiling": 1})
