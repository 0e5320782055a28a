"""Modules that are broken, each in its own way, around two that are not."""

import operator

import torch
from torch import Tensor, nn
from torch._inductor.lowering import lowerings, register_lowering


class Good(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # line: branch
            return x + 1
        return x - 1


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max())):  # line: loop
            x = x * 2
        return x


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this module does not work")  # line: raises


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # line: shapes


class Text(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "no tensor"


class Strange:
    """Not a tensor, and nothing that can be taken apart."""


class Object(nn.Module):
    def forward(self, x: Tensor) -> Strange:
        return Strange()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.sum(0))  # line: writes
        return x + self.seen


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)  # line: writes_input
        return x + 1


@torch.library.custom_op("broken::python_only", mutates_args=())
def python_only(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


@python_only.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class PythonOnly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return python_only(x) + 1  # line: python_only


class Lowering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x) + 1  # line: lowering


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i1e(x)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Mean(nn.Module):
    """Its answer depends on how many rows there are: it can't be padded."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Alias(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:1]


class Autocast(nn.Module):
    """Computes a part in bfloat16, and a part of that with gradients that nobody asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.linear(x)
            with torch.enable_grad():
                y = y * 2
        return torch.tanh(y.float()) + self.linear(x)


class Narrow(nn.Module):
    """A convolution and its norm in bfloat16, and an answer in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 32, 3, padding=1, bias=False, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm2d(32, dtype=torch.bfloat16)
        for buffer in (self.norm.running_mean, self.norm.running_var):
            nn.init.uniform_(buffer, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x.to(torch.bfloat16))).float()


def pass_that_raises(graph: torch.fx.GraphModule) -> None:
    raise RuntimeError("the pass gave up")


def wrong_numbers(graph: torch.fx.GraphModule) -> None:
    """Doubles the module's answer."""
    _replace(graph, lambda g, value: g.call_function(torch.ops.aten.mul.Tensor, (value, 2)))


def not_a_number(graph: torch.fx.GraphModule) -> None:
    """Takes the logarithm of negative numbers."""

    def wrong(g: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
        negative = g.call_function(torch.ops.aten.sub.Tensor, (value, 10))
        return g.call_function(torch.ops.aten.log.default, (negative,))

    _replace(graph, wrong)


def _replace(graph: torch.fx.GraphModule, make) -> None:  # noqa: ANN001
    end = next(node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(end):
        end.args = (tuple(make(graph.graph, value) for value in end.args[0]),)


def load() -> nn.Module:
    torch.manual_seed(0)
    # A compiler that fails on one operator, with no line of this file in its stack.
    register_lowering(torch.ops.aten.special_i0e.default)(operator.itemgetter("no such kernel"))
    # A compiler that makes a wrong kernel of another one: its numbers are those of `exp`.
    register_lowering(torch.ops.aten.special_i1e.default)(lowerings[torch.ops.aten.exp.default])
    kinds = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    model = nn.Module()
    for kind in kinds:
        model.add_module(kind.__name__.lower(), kind())
    return model.eval()
