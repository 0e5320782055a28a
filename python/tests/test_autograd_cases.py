"""Small cases of autograd: each is answered as in eager, by artifacts or by the original with a reason."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import folder, gradients
from precast import CompileConfig, CompiledModule, maybe_compile
from precast.compare import gradients as steps
from precast.compare.batches import difference
from precast.compare.gradients import difference as difference_of_gradients
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Net(nn.Module):
    """Several results, of which none follows from all parameters; tied, frozen and unused weights, noise, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.a = nn.Linear(8, 2)
        self.b = nn.Linear(8, 4, bias=False)
        self.c = nn.Linear(4, 8, bias=False)
        self.c.weight = self.body.weight  # tied
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: Tensor, ids: Tensor, more: Any = None) -> dict[str, Any]:
        hidden = self.drop(self.norm(self.body(x).tanh()))
        hidden = hidden + self.frozen(hidden)
        b = self.b(hidden) * scale
        return {"a": self.a(hidden)[ids], "b": b, "c": (hidden * self.c(x), hidden.argmax(-1)), "none": None}


def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def batch(grad: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(16, 4, generator=generator).requires_grad_(grad),
        "scale": torch.rand(4, generator=generator).requires_grad_(grad),
        "ids": torch.tensor([0, 2, 2, 1]),
    }


def loss(answer: dict[str, Any]) -> Tensor:
    return answer["a"].square().sum() + answer["b"].sin().sum() + answer["c"][0].mean()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two pairs of the net, without and with gradients of its inputs, and a program of its evaluation."""
    store = folder(tmp_path_factory, "cases")
    module = wrapped(store, net())
    loss(module(**batch())).backward()
    loss(module(**batch(True))).backward()
    evaluated_under_autocast(module)
    assert module.precast_report()["artifact"] == 3, module.precast_report()
    return store


@pytest.fixture
def store(built: Path, no_build: None) -> Path:
    return built


def wrapped(store: Path, module: nn.Module) -> CompiledModule:
    return maybe_compile(module, CompileConfig(kind="autograd", prefer="artifact", store=store, name="cases"))


Case = Callable[[Any], Any]


def evaluated_under_autocast(m: Any) -> Any:
    m.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return m(**batch())


def checkpointed(m: Any, reentrant: bool) -> Any:
    given = batch(True)
    y = checkpoint(lambda x: m(**{**given, "x": x})["b"], given["x"], use_reentrant=reentrant)
    y.square().sum().backward()
    return y.detach(), given["x"].grad


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.own = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.own(x)


def by(who: str) -> Callable[[Case], Case]:
    """Says who answers the calls of a case in place of artifacts alone: the reasons of the original, too."""
    return lambda function: (setattr(function, "by", who), function)[1]


class Cases:
    """Each is called with an eager module and a wrapped one, and gives the same with both: see `test_case`."""

    def gradients_of_inputs(m: Any) -> Any:
        given = batch(True)
        loss(m(**given)).backward()
        return given["x"].grad, given["scale"].grad

    def one_result_alone(m: Any) -> Any:
        m(**batch())["a"].sum().backward()
        assert m.a.weight.grad is not None and m.b.weight.grad is None

    def another_result_alone(m: Any) -> Any:
        m(**batch())["b"].sum().backward()
        assert m.b.weight.grad is not None and m.a.weight.grad is None and m.a.bias.grad is None

    def an_input_of_a_result_that_is_not_used(m: Any) -> Any:
        given = batch(True)
        m(**given)["a"].sum().backward()
        assert given["scale"].grad is None
        return given["x"].grad

    def a_result_times_zero(m: Any) -> Any:
        answer = m(**batch())
        (answer["a"].sum() + 0 * answer["b"].sum()).backward()
        assert m.b.weight.grad is not None

    def an_unused_head_under_weight_decay(m: Any) -> Any:
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            m(**batch())["a"].square().sum().backward()
            optimizer.step()
        return [one.detach().clone() for one in m.parameters()]

    def accumulates(m: Any) -> Any:
        for _ in range(3):
            loss(m(**batch())).backward()

    def results_one_after_the_other(m: Any) -> Any:
        answer = m(**batch())
        answer["a"].sum().backward(retain_graph=True)
        first = m.body.weight.grad.clone()
        answer["b"].sum().backward()
        return first

    def zero_grad(m: Any) -> Any:
        for to_none in (False, True):
            loss(m(**batch())).backward()
            m.zero_grad(set_to_none=to_none)
            m(**batch())["a"].sum().backward()
            assert (m.b.weight.grad is None) == to_none

    def a_retained_graph(m: Any) -> Any:
        value = loss(m(**batch()))
        value.backward(retain_graph=True)
        value.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            value.backward()

    def grad_with_allow_unused(m: Any) -> Any:
        wanted = [m.a.weight, m.b.weight, m.unused.weight, m.body.bias]
        value = m(**batch())["a"].sum()
        found = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=True)
        return found, torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)

    def grad_without_allow_unused(m: Any) -> Any:
        with pytest.raises(RuntimeError, match="not to have been used in the graph"):
            torch.autograd.grad(m(**batch())["a"].sum(), [m.b.weight])

    def batched_gradients(m: Any) -> Any:
        answer = m(**batch())["a"]
        if isinstance(m, CompiledModule):
            with pytest.raises(Exception, match="can't read the gradient of a result"):
                torch.autograd.grad(answer, [m.a.weight], torch.eye(8).reshape(8, 4, 2), is_grads_batched=True)
            return None
        return None

    def a_given_gradient_with_strides(m: Any) -> Any:
        for gradient in (batch()["x"].t().contiguous().t(), torch.tensor(2.0).expand(16, 4)):
            m(**batch())["b"].backward(gradient)

    def a_view_of_a_result(m: Any) -> Any:
        m(**batch())["b"].t().reshape(2, -1)[1].square().sum().backward()

    def a_result_changed_in_place(m: Any) -> Any:
        b = m(**batch())["b"]
        b.mul_(2).add_(1)
        b.square().sum().backward()
        return b.detach()

    def an_input_changed_before(m: Any) -> Any:
        given = batch()
        given["x"].mul_(2)
        loss(m(**given)).backward()

    def changes_in_place_between(m: Any) -> Any:
        given = batch()
        for changed in (given["x"], m.a.weight):
            value = loss(m(**given))
            with torch.no_grad():
                changed.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                value.backward()
        value = loss(m(**given))
        with torch.no_grad():
            m.body.bias.add_(1)  # no backward call reads it
        value.backward()

    def a_detached_result(m: Any) -> Any:
        answer = m(**batch())
        (answer["a"].sum() * answer["b"].detach().sum()).backward()
        assert m.b.weight.grad is None

    def inputs_of_another_graph(m: Any) -> Any:
        own = batch()["x"].requires_grad_()
        given = {**batch(True), "x": (own * 2).sin()}
        loss(m(**given)).backward()
        return own.grad, given["scale"].grad

    def upstream_of_a_result_that_is_not_used(m: Any) -> Any:
        own = torch.ones(4, requires_grad=True)
        m(**{**batch(True), "scale": own * 2})["a"].sum().backward()
        assert own.grad is None

    def a_retained_gradient_of_an_input(m: Any) -> Any:
        x = batch()["x"].requires_grad_() * 2
        x.retain_grad()
        loss(m(**{**batch(True), "x": x})).backward()
        return x.grad

    def a_retained_gradient_of_a_result(m: Any) -> Any:
        answer = m(**batch())
        answer["b"].retain_grad()
        loss(answer).backward()
        return answer["b"].grad

    def expanded_inputs(m: Any) -> Any:
        x = batch()["x"][:, :1].clone().requires_grad_()
        loss(m(**{**batch(True), "x": x.expand(16, 4)})).backward()
        return x.grad

    def a_hook_of_a_result(m: Any) -> Any:
        answer = m(**batch())
        answer["b"].register_hook(lambda grad: grad * 3)
        loss(answer).backward()

    def a_hook_of_an_input(m: Any) -> Any:
        given = batch(True)
        given["x"].register_hook(lambda grad: grad * 3)
        loss(m(**given)).backward()
        return given["x"].grad

    def hooks_of_a_parameter_of_all_results(m: Any) -> Any:
        seen: list[str] = []
        m.body.bias.register_hook(lambda grad: (seen.append("tensor"), grad * 2)[1])
        m.body.bias.register_post_accumulate_grad_hook(lambda one: seen.append("accumulated"))
        m(**batch())["a"].sum().backward()
        assert seen == ["tensor", "accumulated"]

    @by("hooks")
    def hooks_of_a_parameter_of_one_result(m: Any) -> Any:
        seen: list[Any] = []
        m.b.weight.register_hook(seen.append)
        m.b.weight.register_post_accumulate_grad_hook(seen.append)
        m(**batch())["a"].sum().backward()
        assert not seen

    @by("hooks")
    def a_backward_hook_inside(m: Any) -> Any:
        seen: list[Any] = []
        m.a.register_full_backward_hook(lambda _, into, out: seen.append(out[0].clone()))
        loss(m(**batch())).backward()
        return seen

    def hooks_of_the_module_itself(m: Any) -> Any:
        m.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "x": kwargs["x"] * 2}), with_kwargs=True)
        m.register_forward_hook(lambda _, args, answer: {**answer, "b": answer["b"] * 2})
        loss(m(**batch())).backward()

    def hooks_for_saved_tensors(m: Any) -> Any:
        packed: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: (packed.append(one), one)[1], lambda one: one)
        for context in (hooks, torch.autograd.graph.save_on_cpu()):
            with context:
                value = loss(m(**batch()))
            value.backward()
        assert packed

    def saved_tensors_as_copies(m: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one):
            value = loss(m(**batch()))
        with torch.no_grad():
            m.a.weight.add_(1)  # eager has packed a copy, too
        value.backward()

    def a_checkpoint(m: Any) -> Any:
        return checkpointed(m, False)

    @by("artifact gradients")  # the first call of a state is inside of the checkpoint
    def a_reentrant_checkpoint(m: Any) -> Any:
        return checkpointed(m, True)

    def a_checkpoint_among_others(m: Any) -> Any:
        given = batch(True)
        first = m(**given)
        y = checkpoint(lambda x: m(**{**given, "x": x})["b"] * 2, first["b"], use_reentrant=False)
        (y.square().sum() + first["a"].sum()).backward()
        return y.detach(), given["x"].grad

    @by("mode")
    def a_selective_checkpoint(m: Any) -> Any:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

        given = batch(True)
        y = checkpoint(lambda x: m(**{**given, "x": x})["b"], given["x"], use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
        return given["x"].grad

    @by("gradients")
    def no_grad(m: Any) -> Any:
        with torch.no_grad():
            answer = m(**batch())
        assert not answer["b"].requires_grad
        return answer

    def no_grad_after_a_step(m: Any) -> Any:
        loss(m(**batch())).backward()
        with torch.no_grad():
            return m(**batch())

    @by("artifact gradients")
    def inference_mode(m: Any) -> Any:
        with torch.inference_mode():
            answer = m(**batch())
        loss(m(**batch())).backward()
        return answer["b"].clone()

    @by("inputs")
    def inference_tensors_in_training(m: Any) -> Any:
        with torch.inference_mode():
            given = batch()
        loss(m(**given)).backward()

    @by("artifact gradients")
    def set_grad_enabled(m: Any) -> Any:
        found = []
        for on in (False, True, False, True):
            torch.set_grad_enabled(on)
            try:
                found.append(m(**batch())["b"])
            finally:
                torch.set_grad_enabled(True)
            if on:
                found[-1].sum().backward()
        assert [one.requires_grad for one in found] == [False, True, False, True]
        return [one.detach() for one in found]

    def results_that_require_gradients(m: Any) -> Any:
        answer = m(**batch())
        found = [answer["a"].requires_grad, answer["b"].requires_grad, *(one.requires_grad for one in answer["c"])]
        assert found == [True, True, True, False] and answer["none"] is None
        assert not answer["b"].is_leaf

    @by("artifact not compiled")
    def frozen_and_back(m: Any) -> Any:
        m.a.requires_grad_(False)
        loss(m(**batch())).backward()
        m.a.requires_grad_(True)
        loss(m(**batch())).backward()

    @by("training")
    def all_frozen(m: Any) -> Any:
        m.requires_grad_(False)
        return m(**batch())

    @by("not compiled")
    def adapters_that_are_put_in(m: Any) -> Any:
        m.requires_grad_(False)
        m.a = Adapter(m.a)
        loss(m(**batch())).backward()
        return m.a.own.weight.grad

    def a_forward_that_another_library_sets(m: Any) -> Any:
        own = m.forward
        m.forward = lambda *args, **kwargs: own(*args, **kwargs)
        try:
            loss(m(**batch())).backward()
        finally:
            del m.forward

    def dropout_draws_what_eager_draws(m: Any) -> Any:
        torch.manual_seed(5)
        found = [m(**batch())["b"].detach() for _ in range(2)]
        assert not torch.equal(*found)
        return found, torch.rand(2)

    @by("not compiled")
    def autocast(m: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(m(**batch()))
        value.backward()

    def evaluation_under_autocast(m: Any) -> Any:
        loss(m(**batch())).backward()
        answer = evaluated_under_autocast(m)
        assert answer["a"].dtype == torch.bfloat16 and answer["b"].dtype == torch.float32
        return answer["a"], answer["b"].bfloat16()

    @by("not compiled")
    def evaluation_under_no_autocast(m: Any) -> Any:
        m.eval()
        with torch.no_grad():
            return m(**batch())

    def backward_under_autocast(m: Any) -> Any:
        value = loss(m(**batch()))
        with torch.autocast("cpu", torch.bfloat16):
            value.backward()
        for one in m.parameters():  # eager rounds products of gradients
            one.grad = None

    def a_scaled_loss(m: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler.scale(loss(m(**batch()))).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(m.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return [one.detach().clone() for one in m.parameters()]

    def second_derivatives(m: Any) -> Any:
        given = batch(True)
        value = loss(m(**given))
        if not isinstance(m, CompiledModule):
            return None
        with pytest.raises(Exception, match="a compiled backward program has no gradient of its own"):
            torch.autograd.grad(value, [given["x"]], create_graph=True)
        return None

    @by("mode")
    def forward_mode(m: Any) -> Any:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(batch()["x"], torch.ones(16, 4))
            return forward_ad.unpack_dual(m(**{**batch(), "x": x})["b"]).tangent.detach()

    @by("mode")
    def transforms_of_functions(m: Any) -> Any:
        given, ones = batch(), torch.ones(16, 4)

        def call(x: Tensor) -> Tensor:
            return m(**{**given, "x": x})["b"]

        result, back = torch.func.vjp(call, given["x"])
        found = [*torch.func.jvp(call, (given["x"],), (ones,)), result, back(ones)[0]]
        m.eval()
        found += [torch.func.vmap(call)(torch.stack([ones, ones])), torch.func.jacrev(call)(given["x"])]
        return [one.detach() for one in found]

    def functional_call(m: Any) -> Any:
        own = {name: (one.detach() * 2).requires_grad_(one.requires_grad) for name, one in m.named_parameters()}
        loss(torch.func.functional_call(m, own, (), batch())).backward()
        loss(m(**batch())).backward()
        return {name: one.grad for name, one in own.items() if one.grad is not None}

    def anomaly_mode(m: Any) -> Any:
        with torch.autograd.detect_anomaly(check_nan=True):
            loss(m(**batch())).backward()

    @by("artifact mode")
    def deterministic_mode(m: Any) -> Any:
        loss(m(**batch())).backward()
        torch.use_deterministic_algorithms(True)
        try:
            loss(m(**batch())).backward()
        finally:
            torch.use_deterministic_algorithms(False)

    def a_copy(m: Any) -> Any:
        loss(m(**batch())).backward()
        found = []
        for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            twin.zero_grad()
            loss(twin(**batch())).backward()
            found.append([one.grad for one in twin.parameters() if one.grad is not None])
        return found

    def a_state_dict_in_training(m: Any) -> Any:
        before = copy.deepcopy(m.state_dict())
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
        for _ in range(2):
            loss(m(**batch())).backward()
            optimizer.step()
        m.load_state_dict(before)
        m.zero_grad()
        loss(m(**batch())).backward()

    def data_of_a_parameter_before_backward(m: Any) -> Any:
        before = m.a.weight.data
        value = loss(m(**batch()))
        m.a.weight.data = before * 2
        if isinstance(m, CompiledModule):
            m(**batch())  # binds the new memory
        else:  # eager may read the new memory: these are the gradients of the call
            m.drop.eval()
            torch.rand(16, 8)
            m.a.weight.data = before
        value.backward()
        m.a.weight.data = before * 2
        m.norm.reset_running_stats()

    def another_shape_before_backward(m: Any) -> Any:
        value = loss(m(**batch()))
        m.a.weight.data = torch.zeros(5, 8)
        value.backward()
        assert m.a.weight.grad.shape == (2, 8)  # as eager

    @by("artifact parameters")
    def another_dtype(m: Any) -> Any:
        loss(m(**batch())).backward()
        m.double().zero_grad()
        given = {name: one.double() if one.is_floating_point() else one for name, one in batch().items()}
        loss(m(**given)).backward()

    @by("not compiled")
    def inputs_by_position(m: Any) -> Any:
        loss(m(*batch().values())).backward()

    def an_optimizer_in_the_backward_call(m: Any) -> Any:
        optimizer = torch.optim.SGD([m.body.bias], lr=0.1)

        def step(one: Tensor) -> None:
            optimizer.step()
            one.grad = None

        m.body.bias.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            loss(m(**batch())).backward()
        return m.body.bias.detach().clone()

    def several_calls_before_one_backward(m: Any) -> Any:
        (loss(m(**batch())) * loss(m(**batch()))).backward()

    def a_result_as_the_next_input(m: Any) -> Any:
        given = batch(True)
        answer = m(**given)
        loss(m(**{**given, "x": answer["b"]})).backward()
        return given["x"].grad

    def a_gradient_with_nan(m: Any) -> Any:
        m(**batch())["b"].backward(torch.full((16, 4), float("nan")))
        assert bool(m.body.bias.grad.isnan().all())
        m.zero_grad()


def keywords(_: Any, args: Any, kwargs: Any, answer: Any) -> Any:
    return answer * 2


# A change before a step, or between two; who answers; what is given after the change.
Changes = dict[str, tuple[Case, str, dict[str, Any]]]
X = batch()["x"]
BEFORE: Changes = {
    "nothing": (lambda m: None, "artifact", {}),
    "a forward hook": (lambda m: m.body.register_forward_hook(lambda _, args, y: y * 2), "not compiled", {}),
    "a hook with keywords": (lambda m: m.body.register_forward_hook(keywords, with_kwargs=True), "not compiled", {}),
    "eval mode": (lambda m: m.eval(), "not compiled", {}),
    "a parametrization": (lambda m: parametrizations.weight_norm(m.a), "not compiled", {}),
    "one that is removed": (
        lambda m: parametrize.remove_parametrizations(parametrizations.weight_norm(m.a), "weight"),
        "artifact",
        {},
    ),
    "inputs with strides": (lambda m: None, "artifact", {"x": X.t().contiguous().t()}),
}
BETWEEN: Changes = {
    "a frozen part": (lambda m: (m.zero_grad(), m.a.requires_grad_(False)), "artifact not compiled", {}),
    "eval mode of a part": (lambda m: m.drop.eval(), "artifact not compiled", {}),
    "an untied weight": (
        lambda m: setattr(m.c, "weight", nn.Parameter(m.body.weight.detach().clone())),
        "artifact parameters",
        {},
    ),
    "an assigned state dict": (  # the tied parameters are two afterwards
        lambda m: m.load_state_dict({name: one.clone() * 2 for name, one in m.state_dict().items()}, assign=True),
        "artifact parameters",
        {},
    ),
    "data of a parameter": (lambda m: setattr(m.a.weight, "data", m.a.weight.data * 2), "artifact", {}),
    "an attribute": (lambda m: setattr(m.norm, "momentum", 0.5), "artifact attributes", {}),
    "another size": (lambda m: None, "artifact shape", {"x": torch.ones(2, 4), "ids": torch.tensor([0, 1])}),
    "another dtype of an input": (lambda m: None, "artifact shape", {"ids": torch.tensor([0, 2], dtype=torch.int32)}),
    "another constant": (lambda m: None, "artifact inputs", {"more": 3}),
}


def changed(between: bool, change: Case, who: str, given: dict[str, Any]) -> Case:
    @by(who)
    def call(m: Any) -> Any:
        if between:
            loss(m(**batch())).backward()
        change(m)
        loss(m(**{**batch(), **given})).backward()

    return call


CASES = {name: function for name, function in vars(Cases).items() if inspect.isfunction(function)}
CASES |= {f"before: {name}": changed(False, *one) for name, one in BEFORE.items()}
CASES |= {f"between: {name}": changed(True, *one) for name, one in BETWEEN.items()}


def outcome(function: Case, module: nn.Module) -> tuple[Any, Any]:
    torch.manual_seed(3)
    try:
        return function(module), None
    except Exception as error:
        return None, error


@pytest.mark.parametrize("name", CASES)
def test_case(store: Path, name: str) -> None:
    """Runs a case with an eager module and with a wrapped one: results, gradients, buffers, and who answered."""
    function, plain = CASES[name], net()
    module = wrapped(store, copy.deepcopy(plain))
    (expected, failure), (got, error) = outcome(function, plain), outcome(function, module)
    if failure is not None or error is not None:
        assert type(failure) is type(error) and str(failure) == str(error), (failure, error)
    problem, _ = difference(got, expected)
    assert problem is None, problem
    problem, _ = difference_of_gradients(gradients(module), gradients(plain), 1e-4)
    assert problem is None, problem
    problem, _ = difference(dict(module.named_buffers()), dict(plain.named_buffers()), noun="buffer")
    assert problem is None, problem
    report = module.precast_report()
    who = {"artifact"} if report["artifact"] else set()
    found = " ".join(sorted(who | set(report["reasons"])))
    assert found == getattr(function, "by", "artifact"), report


def test_a_pair_that_is_slower_is_not_used(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = steps._seconds
    monkeypatch.setattr(steps.Kept, "read", lambda self: {})
    times = iter([1.0, 1.5] * steps.ROUNDS)
    monkeypatch.setattr(steps, "_seconds", lambda *step: (honest(*step), next(times))[1])
    written: list[Any] = []
    monkeypatch.setattr(steps.Kept, "write", lambda self, shares: written.append(shares))
    config = CompileConfig(kind="autograd", store=store, name="cases")
    module, plain = maybe_compile(net(), config), net()
    with caplog.at_level("INFO", "precast"):
        for each in (plain, module):
            torch.manual_seed(3)
            loss(each(**batch())).backward()
    report = module.precast_report()
    assert report["artifact"] == 0 and report["reasons"] == {"slower": 1}
    assert "a step of the pair takes 1.50 times eager's" in caplog.text
    assert torch.equal(module.body.bias.grad, plain.body.bias.grad)
    # A later start measures nothing, and `prefer` decides.
    monkeypatch.setattr(steps.Kept, "read", lambda self: written[-1])
    for prefer, reasons in (("fastest", {"slower": 1}), ("artifact", {})):
        module = maybe_compile(net(), replace(config, prefer=prefer))
        loss(module(**batch())).backward()
        assert module.precast_report()["reasons"] == reasons
