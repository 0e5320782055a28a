"""Arguments in other containers than those of the sample: each answer is the module's own."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import logging
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from precast import CompileConfig, maybe_compile
from precast.compare.batches import difference
from torch import Tensor, nn


class Pair(NamedTuple):
    a: Any
    b: Any


class Other(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Data:
    a: Any
    b: Any

    @property
    def sign(self) -> float:
        return -1.0


class OtherData(Data):
    sign = 1.0  # type: ignore[assignment]


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Wide(int):
    """A number of a type of its own."""


class Dict(dict):  # type: ignore[type-arg]
    """A mapping of a type of its own."""


class Reads(nn.Module):
    """Its answer depends on every property of its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, more: Any = None, *, scale: Any = 1.0) -> Tensor:
        return self.layer(x) * _number(scale) + self._read(more, 1.0)

    def _read(self, more: Any, weight: float) -> Any:
        if isinstance(more, Tensor):
            return weight * more.sum() + more.dim()
        if more is None:
            return 0.25 * weight
        if isinstance(more, dict):
            start = 100.0 * len(more) + (1000.0 if type(more) is not dict else 0.0)
            pairs = enumerate(more.items(), 1)
            return start + sum(at * len(str(key)) * self._read(one, weight / (at + 1)) for at, (key, one) in pairs)
        if isinstance(more, (list, tuple)):
            start = (-10.0 if isinstance(more, tuple) else 10.0) + 7.0 * len(more)
            start += 3.0 if isinstance(more, Pair) else 0.0
            return start + sum(at * self._read(one, weight / (at + 2)) for at, one in enumerate(more, 1))
        if isinstance(more, Data):
            return 17.0 * more.sign + self._read(more.a, weight / 2) - self._read(more.b, weight / 3)
        return _number(more)


def _number(value: Any) -> float:
    if isinstance(value, Kind):
        return 31.0 * value.value
    if isinstance(value, str):
        return 41.0 + len(value)
    if isinstance(value, types.SimpleNamespace):
        return 51.0 + value.a
    if isinstance(value, bool):
        return 61.0 + value
    if isinstance(value, int):
        return 71.0 + value + (5.0 if type(value) is not int else 0.0)
    return 81.0 + value if isinstance(value, float) else 91.0


T, U = torch.ones(3), torch.full((3,), 2.0)
FORMS: dict[str, Any] = {
    "nothing": None,
    "tensor": T,
    "tensor of two axes": T[None],
    "empty list": [],
    "empty tuple": (),
    "empty dict": {},
    "list": [T, U],
    "list, other order": [U, T],
    "one tensor twice": [T, T],
    "tuple": (T, U),
    "one more": [T, U, U],
    "one less": [T],
    "tuple of one": (T,),
    "None inside": [T, None],
    "None first": [None, T],
    "None alone": [None],
    "list in a list": [[T], [U]],
    "list in a list, otherwise": [[T, U]],
    "list in a list, empty": [[T, U], []],
    "tuple in a list": [(T,), (U,)],
    "list in a tuple": ([T], [U]),
    "dict in a list": [{"a": T}, {"b": U}],
    "dict": {"a": T, "b": U},
    "dict, other order": {"b": U, "a": T},
    "dict, other values": {"a": U, "b": T},
    "dict, other keys": {"a": T, "ccc": U},
    "dict, a number as a key": {1: T, 222: U},
    "dict, a key less": {"a": T},
    "dict with None": {"a": T, "b": None},
    "dict with a list": {"a": [T], "b": [U]},
    "dict with a tuple": {"a": (T,), "b": (U,)},
    "dict in a dict": {"a": {"a": T}, "b": {"b": U}},
    "dict in a dict, otherwise": {"a": {"a": T, "b": U}, "b": {}},
    "ordered": collections.OrderedDict(a=T, b=U),
    "ordered, other order": collections.OrderedDict(b=U, a=T),
    "default": collections.defaultdict(list, a=T, b=U),
    "of its own type": Dict(a=T, b=U),
    "named": Pair(T, U),
    "named otherwise": Other(T, U),
    "named, None inside": Pair(T, None),
    "named in a list": [Pair(T, U)],
    "data": Data(T, U),
    "data, other values": Data(U, T),
    "data, None inside": Data(T, None),
    "data of another class": OtherData(T, U),
    "data with a list": Data([T], U),
    "number": 2,
    "another number": 3,
    "float": 2.0,
    "nearly the same float": 2.0 + 1e-9,
    "negative zero": -0.0,
    "true": True,
    "one": 1,
    "one as a float": 1.0,
    "number of its own type": Wide(2),
    "text": "ab",
    "longer text": "abc",
    "member": Kind.ONE,
    "other member": Kind.TWO,
    "number in a list": [T, 2],
    "float in a list": [T, 2.0],
    "true in a list": [T, True],
    "member in a dict": {"a": T, "b": Kind.ONE},
    "text in a dict": {"a": T, "b": "bb"},
    "object": types.SimpleNamespace(a=1),
    "set": frozenset({1}),
    "range": range(3),
}
SAMPLES = ["list", "dict", "named", "data", "nothing", "number"]


@pytest.fixture(scope="module", params=SAMPLES)
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    torch.manual_seed(0)
    config = CompileConfig(store=tmp_path_factory.mktemp("store"), smoketest_steps=1)
    made = maybe_compile(Reads().eval(), config, None, (torch.ones(2, 4), FORMS[request.param]))
    assert made.precast_report()["regions"][""]["attempt"]["success"]
    return request.param, made


def test_an_answer_is_the_modules_in_any_container(module: tuple[str, Any]) -> None:
    sample, made = module
    x = torch.randn(2, 4)
    wrong = []
    with torch.no_grad():
        for name, more in FORMS.items():
            for args, kwargs in (((x, more), {}), ((x,), {"more": more}), ((x, more), {"scale": 2})):
                expected = made._orig_mod(*args, **kwargs)
                for _ in range(2):  # the second call finds the form known
                    problem, _ = difference(made(*args, **kwargs), expected)
                    if problem is not None:
                        wrong.append((name, sorted(kwargs), problem))
    assert not wrong
    before = made.precast_report()["artifact"]
    with torch.no_grad():
        made(x, FORMS[sample])
        made(x=x, more=FORMS[sample])
    assert made.precast_report()["artifact"] == before + 2


def test_containers_in_place_of_the_first_tensor(module: tuple[str, Any]) -> None:
    _, made = module
    for given in ([torch.ones(2, 4)], {"x": torch.ones(2, 4)}, 1.0, None):
        with pytest.raises(TypeError), torch.no_grad():
            made(given)


class Teacher(logging.Logger):
    def warn_once(self, text: str) -> None:
        self.warning(text)


SAYS = Teacher("says")


class Scored(nn.Module):
    """It has a loss beside its answer, as causal models of transformers have, and says a line."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        SAYS.warning("a line")
        SAYS.warn_once("a line of a library's own")
        logits = self.head(self.words(ids))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def test_one_tensor_that_is_given_twice_is_answered_as_the_sample_gave_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Scored().eval()
    ids = torch.randint(16, (3, 6))
    wrapped = maybe_compile(copy.deepcopy(net), CompileConfig(store=tmp_path), None, {"ids": ids, "labels": ids})
    with torch.no_grad():
        for _ in range(2):
            ids = torch.randint(16, (3, 6))
            assert difference(wrapped(ids, labels=ids), net(ids, ids))[0] is None
        assert wrapped.precast_report()["rungs"] == {"artifact": 2}
        others = torch.randint(16, (3, 6))
        assert difference(wrapped(ids, labels=others), net(ids, others))[0] is None
    assert wrapped.precast_report()["reasons"] == {"inputs": 1}
