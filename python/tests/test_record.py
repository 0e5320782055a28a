"""What an answer depends on: changes of modules and sources, against the record of a trace. Nothing is built."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from conftest import python
from fake_engine import GRAPHS, counts, fake_engine, wrapped  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("fake_engine")

SCALE = 2.0
TABLE = [1.0, 2.0]
OFFSET = torch.zeros(4)


def helper(x: Tensor, factor: float = 1.0, *, shift: float = 0.0) -> Tensor:
    return x * factor + shift


class Config:
    """Plain settings, with an object inside."""

    def __init__(self) -> None:
        self.scale, self.kind, self.unread = 1.5, "relu", 3
        self.inner = types.SimpleNamespace(depth=2, deeper=types.SimpleNamespace(names=["a"], by_name={"k": 1.0}))


class Part(nn.Module):
    """A submodule with parameters and buffers of each kind."""

    factor = 1.0
    unread = 0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("unsaved", torch.ones(4), persistent=False)
        self.plain = torch.ones(4)
        self.tensors = [torch.ones(4), {"t": torch.ones(4)}]
        self.numbers, self.by_name, self.names = [1.0, 2.0], {"a": 1.0}, {"x"}
        self.function: Callable[[Tensor], Tensor] = F.relu
        self.maybe: Any = None

    @property
    def twice(self) -> float:
        return self.config.scale * 2

    def activate(self, x: Tensor) -> Tensor:
        return x.tanh() if self.config.kind == "tanh" else x.relu()

    @staticmethod
    def still(x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.linear(x))) * self.saved + self.unsaved + self.plain
        x = x + self.tensors[0] + self.tensors[1]["t"] + OFFSET
        x = self.activate(x) * self.twice * self.factor * SCALE + self.still(x)
        x = helper(x, self.numbers[0]) * self.by_name["a"] + len(self.names) + sum(TABLE)
        if self.maybe is not None:
            x = x + 1
        if self.config.inner.depth > 1 and "a" in self.config.inner.deeper.names:
            x = x * self.config.inner.deeper.by_name["k"]
        return self.function(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.parts = nn.ModuleList([Part(self.config), Part(self.config)])
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.counter = 0

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.tail(x)


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
TAIL = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Made:
    """A value that is made for each test."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def assign(place: str, value: Any) -> Callable[[Any], Any]:
    """Returns a change: an attribute, as `parts.0.config.scale`, gets a value."""

    def change(net: Any) -> Iterator[None]:
        *path, name = place.split(".")
        for step in path:
            net = net[int(step)] if step.isdigit() else getattr(net, step)
        setattr(net, name, value.make() if isinstance(value, Made) else value)
        yield

    return contextlib.contextmanager(change)


def do(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @contextlib.contextmanager
    def change(net: Any) -> Iterator[None]:
        undo = function(net)
        try:
            yield
        finally:
            if callable(undo) and not isinstance(undo, nn.Module):
                undo()

    return change


def patched(owner: Any, name: str, value: Any) -> Callable[[Any], Any]:
    """Returns a change of a class or a module of Python, which is undone."""

    @contextlib.contextmanager
    def change(_: Any) -> Iterator[None]:
        before = vars(owner).get(name, change)
        setattr(owner, name, value)
        try:
            yield
        finally:
            if before is change:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    return change


def without_gradients(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a change that a function makes, as an optimizer does."""

    def changed(net: Any) -> Any:
        with torch.no_grad():
            function(net)

    return do(changed)


def code_of(net: Any) -> Any:
    """Puts other code into a function in place, as `%autoreload 2` does."""
    before = Part.activate.__code__

    def activate(self: Any, x: Tensor) -> Tensor:
        return x.sigmoid()

    Part.activate.__code__ = activate.__code__
    return lambda: setattr(Part.activate, "__code__", before)


def defaults_of(net: Any) -> Any:
    before = helper.__defaults__
    helper.__defaults__ = (3.0,)
    return lambda: setattr(helper, "__defaults__", before)


def keywords_of(net: Any) -> Any:
    assert helper.__kwdefaults__ is not None
    helper.__kwdefaults__["shift"] = 4.0
    return lambda: helper.__kwdefaults__.update(shift=0.0)  # type: ignore[union-attr]


def dtype_of(net: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def subclassed(net: Any) -> None:
    class Other(Part):
        def activate(self, x: Tensor) -> Tensor:
            return x.sigmoid()

    net.parts[0].__class__ = Other


def smaller(net: Any) -> None:
    net.tail[0].weight = nn.Parameter(torch.randn(3, 4))
    net.tail[0].register_parameter("bias", None)


def swapped(net: Any) -> None:
    net.parts[0], net.parts[1] = net.parts[1], net.parts[0]


# A change, and whether an artifact answers after it; either way with the module's own answer.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "an attribute of a configuration": (assign("config.scale", 3.0), False),
    "text of a configuration": (assign("config.kind", "tanh"), False),
    "an attribute that nothing reads": (assign("config.unread", 4), True),
    "an attribute of the module that nothing reads": (assign("counter", 1), True),
    "an attribute that is new": (assign("parts.0.other", 1), True),
    "a deep attribute": (assign("config.inner.depth", 1), False),
    "a deep list": (do(lambda net: net.config.inner.deeper.names.clear()), False),
    "a deep dictionary": (do(lambda net: net.config.inner.deeper.by_name.update(k=3.0)), False),
    "another object with equal values": (assign("parts.0.config", Made(Config)), False),
    "an equal number": (assign("parts.0.numbers", Made(lambda: [1.0, 2.0])), True),
    "an item of a list": (do(lambda net: net.parts[0].numbers.__setitem__(0, 5.0)), False),
    "an item that nothing reads": (do(lambda net: net.parts[0].numbers.__setitem__(1, 5.0)), True),
    "an item of a dictionary": (do(lambda net: net.parts[0].by_name.update(a=5.0)), False),
    "a set": (do(lambda net: net.parts[0].names.add("y")), False),
    "None": (assign("parts.1.maybe", 1), False),
    "a function": (assign("parts.0.function", F.silu), False),
    "a lambda": (assign("parts.0.function", Made(lambda: lambda x: x * 2)), False),
    "a class attribute": (patched(Part, "factor", 2.0), False),
    "a class attribute that nothing reads": (patched(Part, "unread", 2.0), True),
    "a class attribute behind one of the object": (assign("parts.0.factor", 3.0), False),
    "a method": (patched(Part, "activate", lambda self, x: x.sigmoid()), False),
    "a static method": (patched(Part, "still", staticmethod(lambda x: x - 1)), False),
    "a property": (patched(Part, "twice", property(lambda self: 7.0)), False),
    "a method of torch": (patched(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)), False),
    "a method of one object": (
        do(lambda net: setattr(net.parts[0], "activate", types.MethodType(lambda self, x: x.sigmoid(), net.parts[0]))),
        False,
    ),
    "a method that nothing calls": (patched(Part, "extra_repr", lambda self: "part"), True),
    "forward of the class": (patched(Net, "forward", lambda self, x: x * 2), False),
    "forward of a part": (do(lambda net: setattr(net.parts[0], "forward", lambda x: x * 2)), False),
    "code in place": (do(code_of), False),
    "defaults of a function": (do(defaults_of), False),
    "defaults of keywords": (do(keywords_of), False),
    "the class of a part": (do(subclassed), False),
    "a global number": (patched(sys.modules[__name__], "SCALE", 3.0), False),
    "an equal global number": (patched(sys.modules[__name__], "SCALE", float("2.0")), True),
    "a global list": (do(lambda _: (TABLE.append(1.0), TABLE.pop)[1]), False),
    "a global function": (patched(sys.modules[__name__], "helper", lambda x, factor=1.0: x), False),
    "another global tensor": (patched(sys.modules[__name__], "OFFSET", torch.ones(4)), True),
    "a global tensor in place": (do(lambda _: (OFFSET.add_(1), lambda: OFFSET.sub_(1))[1]), True),
    "a parameter in place": (without_gradients(lambda net: net.tail[0].weight.mul_(2)), True),
    "a parameter by data": (do(lambda net: net.tail[0].weight.data.mul_(2)), True),
    "another parameter": (assign("parts.0.linear.weight", Made(lambda: nn.Parameter(torch.randn(4, 4)))), True),
    "memory of a parameter": (assign("parts.0.linear.weight.data", Made(lambda: torch.randn(4, 4))), True),
    "strides of a parameter": (do(lambda net: setattr(net.tail[0].weight, "data", net.tail[0].weight.data.t())), False),
    "a parameter that is expanded": (assign("tail.0.weight.data", Made(lambda: torch.randn(1, 4).expand(4, 4))), False),
    "a smaller parameter": (do(smaller), False),
    "pruning": (do(lambda net: nn.utils.prune.random_unstructured(net.tail[0], "weight", 0.5)), False),
    "a weight norm": (do(lambda net: nn.utils.parametrizations.weight_norm(net.tail[0])), False),
    "a bias that is None": (do(lambda net: net.tail[0].register_parameter("bias", None)), False),
    "a state dict": (do(lambda net: net.load_state_dict(Net().eval().state_dict())), True),
    "a state dict by assignment": (do(lambda net: net.load_state_dict(Net().eval().state_dict(), assign=True)), True),
    "a buffer in place": (do(lambda net: net.parts[0].saved.mul_(2)), True),
    "a buffer by data": (do(lambda net: net.parts[0].saved.data.mul_(2)), True),
    "another buffer": (assign("parts.0.saved", Made(lambda: torch.full((4,), 3.0))), True),
    "a buffer that is not saved, in place": (do(lambda net: net.parts[0].unsaved.mul_(2)), True),
    "a buffer that is not saved, by data": (do(lambda net: net.parts[0].unsaved.data.mul_(2)), True),
    "another buffer that is not saved": (assign("parts.0.unsaved", Made(lambda: torch.full((4,), 3.0))), True),
    "a buffer that is None": (do(lambda net: net.parts[0]._buffers.update(running=None)), True),
    "a tensor attribute in place": (do(lambda net: net.parts[0].plain.mul_(2)), True),
    "another tensor attribute": (assign("parts.0.plain", Made(lambda: torch.full((4,), 3.0))), True),
    "a tensor attribute of another dtype": (
        assign("parts.0.plain", Made(lambda: torch.ones(4, dtype=torch.float64))),
        False,
    ),
    "a tensor attribute that is a number": (assign("parts.0.plain", 2.0), False),
    "a tensor in a list": (do(lambda net: net.parts[0].tensors.__setitem__(0, torch.full((4,), 3.0))), True),
    "a tensor in a list in place": (do(lambda net: net.parts[0].tensors[0].mul_(2)), True),
    "a tensor in a dictionary": (do(lambda net: net.parts[0].tensors[1].update(t=torch.full((4,), 3.0))), True),
    "a part": (do(lambda net: net.parts.__setitem__(0, Part(net.config).eval())), True),
    "parts in another order": (do(swapped), True),
    "one more part": (do(lambda net: net.parts.append(Part(net.config).eval())), False),
    "one part less": (do(lambda net: net.parts.__delitem__(1)), False),
    "another tail": (assign("tail", TAIL), False),
    "another activation": (do(lambda net: net.tail.__setitem__(1, nn.ReLU())), False),
    "a setting of a layer": (assign("tail.1.approximate", "tanh"), False),
    "an epsilon": (assign("parts.0.norm.eps", 1.0), False),
    "a probability in eval mode": (assign("parts.0.drop.p", 0.9), False),
    "training mode": (do(lambda net: net.train()), False),
    "training mode of a part": (do(lambda net: net.parts[0].norm.train()), False),
    "training mode of a part that does not read it": (do(lambda net: net.tail[0].train()), True),
    "another dtype": (do(lambda net: net.double()), False),
    "half precision of a part": (do(lambda net: net.tail.bfloat16()), False),
    "a hook": (do(lambda net: net.parts[1].linear.register_forward_hook(lambda *given: given[-1] + 1).remove), False),
    "a hook before": (
        do(lambda net: net.tail[0].register_forward_pre_hook(lambda _, given: (given[0] * 2,)).remove),
        False,
    ),
    "a backward hook": (do(lambda net: net.tail[0].register_full_backward_hook(lambda *_: None).remove), True),
    "a global hook": (
        do(lambda _: nn.modules.module.register_module_forward_hook(lambda *given: given[-1] + 1).remove),
        False,
    ),
    "the default dtype": (do(dtype_of), False),
    "the table of attributes": (
        do(lambda net: setattr(net.config, "__dict__", {**vars(net.config), "scale": 9.0})),
        False,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_or_is_none(name: str) -> None:
    change, answers = CHANGES[name]
    torch.manual_seed(0)
    net = Net().eval()
    module, _, _ = wrapped(net, sample=((X,), {}))
    with torch.no_grad():
        module(X)
        assert counts(module) == (1, {})
        with change(net):
            given = X.double() if "another dtype" in name else X
            expected, got = outcome(net, given), outcome(module, given)
            assert got == expected
            found, reasons = counts(module)
            assert (found == 2) == answers, reasons
            outcome(module, given)
            assert counts(module)[0] == (3 if answers else 1)


def outcome(module: Any, x: Tensor) -> Any:
    torch.manual_seed(0)
    buffers = [(one, one.clone()) for one in module.buffers()]
    try:
        answer = module(x)
    except Exception as error:
        return type(error).__name__
    finally:
        for one, value in buffers:
            one.copy_(value)
    return answer.dtype, answer.tolist()


MODULE = """
import helpers
from consts import FACTOR
from torch import nn
import torch

class Held:
    def __init__(self): self.k = 2.0
    def apply(self, x): return x * self.k

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held, self.other = Held(), helpers.Other()
        self.f = lambda x: x + 1

    @torch.no_grad()
    def inner(self, x):
        return helpers.last(x) * FACTOR

    def unused(self, x):
        return x * 3

    def forward(self, x):
        from late import shift
        import deep.inside as inside
        x = self.other.apply(self.held.apply(self.linear(x)))
        return self.f(self.inner(x)) + shift(x) + inside.VALUE
"""
FILES = {
    "net.py": MODULE,
    "consts.py": "FACTOR = 2.0\nUNUSED = 1\n",
    "helpers.py": "from more import twice\n\ndef last(x, k=3.0):\n    # a comment\n    return twice(x) * k\n\n"
    "def unused(x):\n    return x\n\nclass Other:\n    def apply(self, x):\n        return x - 1\n",
    "more.py": "def twice(x):\n    '''Doubles.'''\n    return x * 2\n",
    "late.py": "BY = 1.0\n\ndef shift(x):\n    return x + BY\n",
    "deep/__init__.py": "",
    "deep/inside.py": "VALUE = 4.0\nOTHER = 1\n",
}
READ = """
import json, sys
import torch
from precast.wrapper.contract import Contract
from precast.wrapper.traced import Traced

where, *folders = sys.argv[1:]
for folder in folders:
    for name in ("net", "consts", "helpers", "more", "late", "deep", "deep.inside"):
        sys.modules.pop(name, None)
    sys.path.insert(0, folder)
    if where == "inline":
        exec(compile(open(folder + "/net.py").read(), "<cell>", "exec"))
    else:
        from net import Net
    torch.manual_seed(0)
    net, x = Net().eval(), torch.ones(2, 4)
    roots = {"net": net, "own": None, "args": (x,), "kwargs": {}}
    with torch.no_grad():
        if folder == folders[0]:
            traced = Traced(net, None, (x,), {}, ["x"])
            assert traced.names == ["x"]
            text = json.dumps(Contract.of(traced).document())
        # As a later process: no module is imported that only a call imports.
        for name in ("late", "deep", "deep.inside"):
            sys.modules.pop(name, None)
        found = Contract.read(text.encode()).record
        print(found.differs(found.live(roots)))
    sys.path.remove(folder)
"""
# The file, what is replaced, by what, and whether a release is of other code then.
EDITS = [
    ("consts.py", "FACTOR = 2.0", "FACTOR = 3.0", True),
    ("consts.py", "UNUSED = 1", "UNUSED = 2", False),
    ("helpers.py", "k=3.0", "k=4.0", True),
    ("helpers.py", "# a comment", "# another one\n    # of two lines", False),
    ("helpers.py", "def unused(x):\n    return x", "def unused(x):\n    return x * 2", False),
    ("helpers.py", "twice(x) * k", "twice(x) / k", True),
    ("helpers.py", "x - 1", "x - 2", True),
    ("more.py", "x * 2", "x * 3", True),
    ("more.py", "Doubles.", "Doubles it.", False),
    ("more.py", "def twice", "def other():\n    pass\n\n\ndef twice", False),
    ("late.py", "BY = 1.0", "BY = 2.0", True),
    ("late.py", "x + BY", "x - BY", True),
    ("late.py", "BY = 1.0\n", "BY = 1.0\nMORE = 2\n", False),
    ("deep/inside.py", "VALUE = 4.0", "VALUE = 5.0", True),
    ("deep/inside.py", "OTHER = 1", "OTHER = 2", False),
    ("net.py", "self.k = 2.0", "self.k = 3.0", True),
    ("net.py", "x * self.k", "x + self.k", True),
    ("net.py", "x + 1", "x + 2", True),
    ("net.py", "* FACTOR", "+ FACTOR", True),
    ("net.py", "return x * 3", "return x * 4", False),
    ("net.py", "    def unused", "    limit = 3\n\n    def unused", False),
    ("net.py", "self.linear(x)", "self.linear(x * 2)", True),
    ("net.py", "nn.Linear(4, 4)", "nn.Linear(4, 4, bias=False)", True),
    ("net.py", "return self.f(self.inner(x))", "return self.f(self.inner(x)) * 1", True),
    ("net.py", "class Net", "# a comment\n\n\nclass Net", False),
    ("net.py", "import helpers\n", "import helpers, json\n", False),
    ("net.py", "from torch import nn", "from torch import nn, optim", False),
    ("net.py", "        x = self.other", "\n        # a comment\n        x = self.other", False),
    ("net.py", "super().__init__()", "super().__init__()\n        self.more = 1", False),
    ("net.py", "@torch.no_grad()\n", "@torch.no_grad()\n    # a comment\n", False),
]


@pytest.mark.parametrize("where", ["imported", "inline"])
def test_an_edit_of_the_sources_is_other_code_or_is_none(tmp_path: Path, where: str) -> None:
    def written(name: str, file: str = "", old: str = "", new: str = "") -> str:
        folder = tmp_path / name
        for path, text in FILES.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.replace(old, new, 1) if path == file else text)
            assert path != file or old in text
        return str(folder)

    folders = [written("first"), *(written(str(number), *edit[:3]) for number, edit in enumerate(EDITS))]
    same, *found = python(READ, where, *folders).splitlines()
    assert same == "None"
    wrong = [(*edit[:3], said) for edit, said in zip(EDITS, found, strict=True) if (said != "None") != edit[3]]
    assert wrong == []


def test_a_later_process_imports_no_tracer() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if any(one > 0 for one in (0, 1)) else x  # the tracer has an `any` of its own

    wrapped(Asks().eval(), sample=((X,), {}))
    (traced,) = GRAPHS.values()
    modules = [arg for _, kind, arg in traced.record.nodes if kind == "module"]
    assert not [name for name in modules if name.startswith("torch._dynamo")]
