"""A module in hand: its capture, the folder for the build, the errors and the digest. Nothing is compiled."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import precast
import pytest
import torch
from precast.capture import exported
from precast.capture.nesting import call_of
from precast.capture.programs import Plain, check_build
from precast.errors import BadInput
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

Shapes = dict[str, Any]


class Odd(nn.Module):
    """Tied weights, buffers of both kinds, a tensor as an attribute, autocast, constants, nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.again = self.layers[0]
        self.register_buffer("position", torch.randn(1, 32, 8))
        self.register_buffer("steps", torch.arange(32), persistent=False)
        self.scale = torch.randn(20)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Any, past: Any, *more: Any, factor: float, mask: Any = None) -> Any:
        x = self.embedding(ids) + self.position[:, : ids.shape[1]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in (*self.layers, self.again):
                x = layer(x)
        x = self.dropout(x.float()) * factor + past[0]["k"] + more[0]
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return {"logits": self.head(x), "rest": (x.sum(1), [self.steps[: ids.shape[1]], self.scale + 1])}


class Result(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    pair: Result


class Model(collections.OrderedDict[str, Any]):
    """As the outputs of transformers."""


class Structured(nn.Module):
    def forward(self, x: Any) -> Any:
        return Output(x + 1, Result(x * 2, None)), Model(logits=x - 1)


class Branches(nn.Module):
    """Decides by its sizes: by parity, by size 1 and by a bound."""

    def forward(self, x: Any) -> Any:
        if x.shape[1] % 2 == 0:
            x = x * 2
        if x.shape[0] == 1:
            x = x - 3
        return x + 1 if x.shape[1] > 5 else x


class Halves(nn.Module):
    """Fixes a size of one of its inputs, and needs even sizes of the other."""

    def forward(self, x: Any, y: Any) -> Any:
        return x + torch.arange(4), torch.stack(y.chunk(2, dim=1)).sum(0) * y.shape[1]


class Counts(nn.Module):
    """Writes into a buffer, and replaces another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.last = x.sum(0)
        return x + self.calls


class Python(nn.Module):
    """Keeps a number in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x + self.calls


class Values(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x


class Cache(nn.Module):
    def forward(self, x: Any) -> Any:
        return {"x": x, "cache": object()}


def capture(net: nn.Module, sample: Any, shapes: Shapes, buckets: Any, folder: Path, method: str = "forward") -> Any:
    """Returns the module that a worker would open."""
    net, call, dims, points = exported.asked(net, sample, shapes, buckets, method)
    exported.save(Plain(net, method, call), dims, points, folder)
    spec = importlib.util.spec_from_file_location(f"replay_{folder.name}", folder / "replay.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    replay = module.load()
    weights = load_file(folder / "weights.safetensors")
    saved = set(replay.state_dict()) - {name for name, _ in exported.parameters(net).items() if name not in weights}
    assert saved == set(weights)
    with torch.no_grad():
        for name, tensor in replay.state_dict(keep_vars=True).items():
            if name in weights:
                tensor.copy_(weights[name])
    return replay


def test_an_odd_module_answers_as_before_at_every_size(tmp_path: Path) -> None:
    net = Odd()
    net.layers[1].eval()
    modes = {name: module.training for name, module in net.named_modules()}

    def sample(batch: int, seq: int) -> Any:
        ids, more = torch.randint(0, 50, (batch, seq)), torch.randn(8)
        past = ({"k": torch.randn(batch, seq, 8)},)
        return (ids, past, more), {"factor": 0.5, "mask": torch.ones(batch, seq)}

    shapes = {name: {0: "batch", 1: "seq"} for name in ("ids", "past.0.k", "mask")}
    replay = capture(net, sample(3, 7), shapes, {"batch": [1, 4], "seq": [8, 16]}, tmp_path)
    assert {name: module.training for name, module in net.named_modules()} == modes
    assert all(one.grad is None and one.requires_grad for one in net.parameters())
    net.eval()
    for batch, seq in ((1, 1), (1, 8), (2, 1), (3, 5), (4, 16), (9, 32)):
        args, kwargs = sample(batch, seq)
        call = call_of(net.forward, (args, kwargs))
        assert call.names == ["ids", "past.0.k", "args.2", "mask"]
        wanted, given = net(*args, **kwargs), replay(*call.tensors)
        torch.testing.assert_close(given, wanted)
    assert replay.get_parameter("embedding.weight") is replay.get_parameter("head.weight")
    assert replay.get_parameter("again.weight") is replay.get_parameter("layers.0.weight")
    with pytest.raises(ValueError, match="not captured for batch=2 seq=40"):
        replay(*call_of(net.forward, sample(2, 40)).tensors)


def test_results_keep_names_and_fields(tmp_path: Path) -> None:
    replay = capture(Structured(), torch.randn(2, 3), {}, None, tmp_path)
    x = torch.randn(2, 3)
    output, model = replay(x)
    assert [type(one).__name__ for one in (output, output.pair, model)] == ["Output", "Result", "Model"]
    assert output.pair.second is None and output.pair._fields == ("first", "second")
    torch.testing.assert_close([output.value, output.pair.first, model.logits], [x + 1, x * 2, x - 1])


def test_a_branch_by_size_is_taken_as_before(tmp_path: Path) -> None:
    buckets = {"batch": [1, 3], "width": [3, 4, 6, 7, 8]}
    net = Branches()
    replay = capture(net, torch.randn(2, 4), {"x": ["batch", "width"]}, buckets, tmp_path)
    asked = [(batch, width) for batch in buckets["batch"] for width in buckets["width"]] + [(2, 12), (9, 8)]
    for batch, width in asked:
        x = torch.randn(batch, width)
        torch.testing.assert_close(replay(x), net(x))


def test_a_size_that_the_code_fixes_has_programs_of_its_own(tmp_path: Path) -> None:
    net, buckets = nn.LSTM(4, 4, batch_first=True), {"batch": [1, 4], "seq": [3, 5]}
    replay = capture(net, torch.randn(2, 3, 4), {"input": ["batch", "seq", 4]}, buckets, tmp_path)
    for batch, seq in ((1, 3), (2, 5), (7, 3)):
        x = torch.randn(batch, seq, 4)
        torch.testing.assert_close(replay(x), net(x))
    with pytest.raises(ValueError, match="batch=2 seq=4"):
        replay(torch.randn(2, 4, 4))


def test_sizes_that_the_code_fixes_or_needs_even_leave_the_others_free(tmp_path: Path) -> None:
    net = Halves()
    shapes = {"x": ["batch", "fixed"], "y": ["batch", "even"]}
    buckets = {"batch": [1, 4], "fixed": [4], "even": [6, 8]}
    replay = capture(net, (torch.randn(2, 4), torch.randn(2, 6)), shapes, buckets, tmp_path)
    for batch, even in ((1, 6), (3, 8), (9, 6)):
        x, y = torch.randn(batch, 4), torch.randn(batch, even)
        torch.testing.assert_close(replay(x, y), net(x, y))


def test_written_buffers_are_written_by_the_program_and_not_by_the_capture(tmp_path: Path) -> None:
    net = Counts()
    calls, last = net.calls, net.last
    replay = capture(net, torch.randn(2, 4), {"x": ["batch", 4]}, {"batch": [2, 3]}, tmp_path)
    assert net.calls is calls and net.last is last and calls.item() == 0 and not last.any()
    x = torch.ones(3, 4)
    for expected in (2, 3):
        torch.testing.assert_close(replay(x), torch.full((3, 4), float(expected)))
    assert replay.calls.item() == 2 and replay.last.tolist() == [3.0] * 4


def test_another_method_is_captured(tmp_path: Path) -> None:
    class Encoder(nn.Linear):
        def encode(self, x: Any, times: int = 1) -> Any:
            return self(x) * times

    net = Encoder(4, 4)
    replay = capture(net, (torch.randn(2, 4), 3), {"x": ["batch", 4]}, {"batch": [2]}, tmp_path, "encode")
    x = torch.randn(5, 4)
    torch.testing.assert_close(replay(x), net.encode(x, 3))


def test_equal_modules_make_equal_files(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    body = """
        import sys
        from pathlib import Path
        import torch
        from precast.capture import exported
        from precast.capture.programs import Plain

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(4, 4)
            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.linear(x)

        torch.manual_seed(0)
        net = Net()
        asked = exported.asked(net, torch.randn(3, 4), {"x": ["batch", 4]}, {"batch": [1, 8]}, "forward")
        exported.save(Plain(asked[0], "forward", asked[1]), *asked[2:], Path(sys.argv[1]))
    """
    for name, comment in (("a", ""), ("b", "# a comment moves every line\n")):
        script.write_text(comment + textwrap.dedent(body), "utf-8")
        subprocess.run([sys.executable, script, tmp_path / name], check=True)
    first, second = ({one.name: one.read_bytes() for one in (tmp_path / name).iterdir()} for name in ("a", "b"))
    names = ["buffers.pt", "captured.json", "program0.pt2", "program1.pt2", "replay.py", "weights.safetensors"]
    assert sorted(first) == names and [name for name in names if first[name] != second[name]] == []


OPERATORS = """
import torch

@torch.library.custom_op("tests_of_precast::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
"""


def test_a_worker_imports_the_modules_that_register_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice_operators.py").write_text(OPERATORS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    twice = importlib.import_module("twice_operators").twice

    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return twice(x)

    for imports, words in ((["twice_operators"], ""), ([], "no operator `tests_of_precast::twice` in a worker")):
        asked = exported.asked(Twice(), torch.randn(2), None, None, "forward")
        folder = tmp_path / f"imports{len(imports)}"
        exported.save(Plain(asked[0], "forward", asked[1]), *asked[2:], folder, imports)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        process = subprocess.run(
            [sys.executable, "-c", "import replay; replay.load()"],
            cwd=folder,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert (process.returncode == 0) == bool(imports) and words in process.stderr


@pytest.mark.parametrize(
    ("net", "kind", "words"),
    [
        (Values(), precast.BuildError, [f"{__file__}:", "`Values.forward` can't be captured", "torch.where"]),
        (Cache(), precast.BuildError, ["`cache` of its result is a object", "use_cache"]),
        (Python(), precast.BuildError, ["`Python.forward` gives other answers", "registered buffer"]),
        (nn.Linear(4, 4, device="meta"), precast.BadInput, ["meta device", "load its weights"]),
        (nn.Linear(5, 4), precast.BuildError, ["`Linear.forward` can't be captured: RuntimeError", "[2, 4] X [5, 4]"]),
    ],
)
def test_a_module_that_can_t_be_captured_says_why(net: nn.Module, kind: type, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(kind) as raised:
        exported.build(net, torch.randn(2, 4), name="net", store=tmp_path / "artifacts")
    for word in words:
        assert word in str(raised.value)
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    with pytest.raises(precast.BadInput, match="TorchScript"):
        exported.build(torch.jit.trace(nn.ReLU(), torch.ones(1)), torch.ones(1), name="net")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"shapes": {"x": ["batch", 4]}}, "`buckets` has no sizes of it"),
        ({"buckets": {"batch": [1]}}, "no input has this dimension"),
        ({"shapes": {"y": ["batch", 4]}}, "names `y`, which is no tensor of the example"),
        ({"shapes": {"x": ["batch"]}}, "has 1 axes of `x`, the example has 2"),
        ({"shapes": {"x": ["batch", 5]}}, "axis 1 of `x` is 5 in `shapes`, and 4 in the example"),
        ({"shapes": {"x": {2: "batch"}}}, "names axis 2 of `x`"),
        ({"shapes": {"x": {0: "batch"}}, "example_inputs": torch.ones(0, 4)}, "axis 0 of `x` has no element"),
        ({"shapes": {"x": ["batch", 4]}, "buckets": {"batch": []}}, "has no size"),
        ({"pad": {"y": 1}}, "`pad` names `y`"),
        ({"ranges": {"y": (0, 1)}}, "`ranges` names `y`"),
        ({"example_inputs": (1, 2)}, "too many positional arguments"),
        ({"example_inputs": (None,)}, "no tensor"),
        ({"example_inputs": ({"x": object()},)}, "input `x.x` is a object"),
        ({"example_inputs": torch.zeros(2, dtype=torch.complex64)}, "torch.complex64"),
    ],
)
def test_a_mistake_in_the_request_is_named(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(precast.BadInput) as raised:
        exported.build(Structured(), **{"example_inputs": torch.randn(2, 4), "name": "net", **asked})
    assert words in str(raised.value)


def test_parameters_share_memory_and_have_every_name() -> None:
    net = Odd()
    named = exported.parameters(net)
    assert named.keys() == net.state_dict().keys()
    assert all(tensor.data_ptr() == net.state_dict()[name].data_ptr() for name, tensor in named.items())
    assert named.keys() == exported.parameters(torch.compile(net)).keys()


def test_a_build_is_on_the_first_gpu() -> None:
    with FakeTensorMode():
        tensors = {device: torch.ones(3, 4, device=device) for device in ("cuda:0", "cuda:1", "cpu")}
    assert check_build({"x": tensors["cuda:0"]}) == "cuda" and check_build({"x": tensors["cpu"]}) == "cpu"
    with pytest.raises(BadInput, match="the module is on cuda:1, and the store has no release for it"):
        check_build({"x": tensors["cuda:1"]})
    with pytest.raises(BadInput, match="are on cpu, cuda:0"):
        check_build({"x": tensors["cpu"], "y": tensors["cuda:0"]})
