"""The captured programs of a training step against eager's gradients, without a compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from precast.capture import joint
from precast.compare.gradients import difference
from precast.compare.undisturbed import restored_buffers
from precast.errors import BuildError
from precast.torch_private import draws
from precast.torch_private.draws import Draw
from precast.wrapper.traced import Traced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Of(nn.Module):
    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._call = forward

    def forward(self, x: Tensor) -> Any:
        return self._call(self, x)


def attention(rate: float) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, rate, batch_first=True)


def permuted(net: Any, x: Tensor) -> Any:
    y = net.linear(x).transpose(0, 1)
    return y, (y * 2)[0], (y.exp().transpose(0, 1), None, 3)


def checkpointed(net: Any, x: Tensor) -> Tensor:
    def attend(y: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(y, y, y).tanh()

    # As transformers marks the values of a frozen embedding.
    y = net.frozen(x).requires_grad_(True)
    return net.linear(checkpoint(attend, y, use_reentrant=False))


CASES: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh()), [3, 8]),
    "attention": (lambda: attention(0.0), [2, 5, 8]),
    "dropout": (lambda: attention(0.3), [2, 5, 8]),
    "pictures": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        [2, 3, 9, 9],
    ),
    "constant": (lambda: Of(lambda net, x: net.linear(x) * torch.tensor([1.0, 2.0]), linear=nn.Linear(8, 2)), [3, 8]),
    "permuted results": (lambda: Of(permuted, linear=nn.Linear(8, 4)), [2, 3, 8]),
    "softmax": (lambda: Of(lambda net, x: net.linear(x).softmax(-1), linear=nn.Linear(8, 4)), [3, 8]),
    "a result of a view": (lambda: Of(lambda net, x: net.linear(x).view(2, 6).relu(), linear=nn.Linear(8, 4)), [3, 8]),
    "checkpoint": (
        lambda: Of(checkpointed, frozen=nn.Linear(8, 8).requires_grad_(False), linear=nn.Linear(8, 4)),
        [1, 2, 5, 8],
    ),
    "equal gradients": (
        lambda: Of(lambda net, x: net.one(x) + net.two(x), one=nn.Linear(8, 4), two=nn.Linear(8, 4)),
        [3, 8],
    ),
}


def programs(net: nn.Module, x: Tensor, grad: bool) -> joint.Pair:
    given = x.clone().requires_grad_(grad)
    with torch.enable_grad(), restored_buffers(net):
        source = Traced(net, None, (given,), {}, ["x"])
        inputs = [source.tensors[name] for name in source.names]
        return joint.capture(source.at(inputs, [[] for _ in inputs]), source.names, inputs)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_pair_has_eagers_results_and_gradients(name: str, grad: bool) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    net, x = make().train(), torch.randn(shape)
    buffers = copy.deepcopy(dict(net.named_buffers()))
    pair = programs(net, x, grad)
    assert difference(dict(net.named_buffers()), buffers)[0] is None
    held = copy.deepcopy(dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers()))
    for value in pair.backward.inputs.values():
        assert value.is_contiguous()

    torch.manual_seed(5)
    leaf = x.clone().requires_grad_(grad)
    returned = net(leaf)
    results = [returned] if isinstance(returned, Tensor) else [*returned[:2], returned[2][0]]
    state = torch.get_rng_state()
    tangents = [torch.randn_like(one) for one in results]
    torch.autograd.backward(results, tangents)

    torch.manual_seed(5)
    given = {name: x for name in pair.forward.inputs if Draw.of(name) is None}
    given |= {name: draw.sample(x.device) for name in pair.forward.inputs if (draw := Draw.of(name)) is not None}
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        ran = pair.forward.program.run(held.__getitem__, [given[name] for name in pair.forward.inputs])
        values = dict(zip(pair.forward.outputs, ran, strict=True))
        for at, one in enumerate(results):
            assert torch.allclose(values[f"output.{at}"], one, atol=1e-5), at
        for buffer, one in net.named_buffers():
            assert torch.allclose(values.get(f"buffer.{buffer}", held[buffer]), one, atol=1e-6), buffer
        known = {**values, **given, **{f"input.{name}": one for name, one in given.items()}}
        known |= {f"tangent.{at}": one for at, one in enumerate(tangents)}
        found = pair.backward.program.run(held.__getitem__, [known[name] for name in pair.backward.inputs])
    got = {name.removeprefix("grad.parameter."): one for name, one in zip(pair.backward.outputs, found, strict=True)}
    wanted = {name: one.grad for name, one in net.named_parameters() if one.requires_grad} | (
        {"grad.input.x": leaf.grad} if grad else {}
    )
    wanted = {name.replace("grad.input.x", next(iter(set(got) - set(held)), name)): one for name, one in wanted.items()}
    assert difference(got, wanted)[0] is None and set(got) == set(wanted)
    # No gradient shares memory with another one, or with an input.
    places = [one.untyped_storage().data_ptr() for one in [*found, *known.values()] if one.numel()]
    assert all(places.count(one.untyped_storage().data_ptr()) == 1 for one in found)


def test_the_name_of_a_draw_has_all_of_it() -> None:
    for draw in (
        Draw(0.1, torch.float32, (2, 3), (0, 1)),
        Draw(1e-05, torch.bfloat16, (4, 2, 3), (1, 0, 2)),
        Draw(0.5, torch.float32, (), ()),
    ):
        assert Draw.of(draw.name(3)) == draw and draw.name(3).startswith("random.3.dropout.p")
    assert Draw.of("random") is None and Draw.of("x.0") is None


@pytest.mark.parametrize("shape", [(64, 8), (8, 4, 16)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_mask_is_eagers_for_any_strides(shape: tuple[int, ...], rate: float) -> None:
    for x in (torch.ones(shape), torch.ones(shape[::-1]).permute(*reversed(range(len(shape))))):
        torch.manual_seed(1)
        eager = torch.dropout(x, rate, True) != 0
        torch.manual_seed(1)
        draw = Draw(rate, x.dtype, tuple(x.shape), draws.axes_in_memory(x))
        assert torch.equal(draw.sample(x.device), eager)


def test_a_certain_dropout_is_refused() -> None:
    with pytest.raises(BuildError, match="a probability between 0 and 1"):
        programs(nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).train(), torch.ones(2, 4), False)
    assert programs(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train(), torch.ones(2, 4), False)
