"""Every fix is applied to a seeded module, literally, and compared with the original in eager: outputs and state.

A fix without lines is a sentence, and changes nothing.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import sys
import textwrap
import types
from typing import Any

import torch

from tests.worker.support import Quiet, part, spec

from .support import HEAD, Checks

X, WIDE, MASK = ("x", "float32", [2, 4]), ("w", "float32", [2, 4, 3]), ("mask", "bool", [2, 4])
SCALAR, COUNT = ("s", "float32", []), ("n", "int64", [])
CACHE, AT = ("cache", "float32", [2, 6]), ("at", "int64", [1])

# Name -> body of forward with its faulty line marked by `# here`; where `x` is not the only input, with all inputs.
# These fixes have lines.
SHOWN: dict[str, Any] = {
    "branch that assigns": "y = x\nif x.max() > 1:  # here\n    y = x * 2\nreturn y",
    "branch that returns": "if x.sum().item() > 0:  # here\n    return x + 1\nreturn x - 1",
    "branch with else": "if x.sum() > 0:  # here\n    y = x + 1\nelse:\n    y = x * 3\nreturn y",
    "truth of a number": "if x.round().sum():  # here\n    return x + 1\nreturn x - 1",
    "not": "if not (x > 1).any():  # here\n    return x + 1\nreturn x - 1",
    "not of a number": "if not x.round().sum():  # here\n    return x + 1\nreturn x - 1",
    "and with a setting": "if self.on and x.sum() > 0:  # here\n    return x + 1\nreturn x - 1",
    "or": "if x.sum() > 1 or x.min() < -1:  # here\n    return x + 1\nreturn x - 1",
    "chained": "if 0 < x.sum() < 2:  # here\n    return x + 1\nreturn x - 1",
    "one name, then another": (
        "y = x + 0\nz = x + 1\nif x.sum() > 0:  # here\n    y = z * 2\n    z = y + 3\nreturn y + z"
    ),
    "a name that had a value on one side": (
        "y = x + 1\nif x.sum() > 0:  # here\n    y = x\n    z = x\nelse:\n    z = x * 3\nreturn y + z"
    ),
    "a name without a value before": "y = x\nif x.sum() > 0:  # here\n    z = x * 2\n    y = y + z\nreturn y",
    "a test that is changed": "y, z = x, x\nif y.sum() > 0:  # here\n    y = -x\n    z = x * 2\nreturn y + z",
    "conditional operand": "return x * (2 if bool(x.mean() > 0) else 3)  # here",
    "conditional value": "y = x + 1 if x.mean() > 0 else x * 2  # here\nreturn y",
    "assert": "assert x.isfinite().all()  # here\nreturn x + 1",
    "item": ("y = s.item() * 2  # here\nreturn x * y", X, SCALAR),
    "float of an integer": ("return x * float(n) / 3  # here", X, COUNT),
    "int of a float": ("return x * int(s)  # here", X, SCALAR),
    "int of an integer": ("return x * int(n)  # here", X, COUNT),
    "int of an item": ("return x * int(s.item())  # here", X, SCALAR),
    "fill with a mask": "y = x + 1\nz = y.view(-1)\ny[x > 0] = 7  # here\nreturn y, z",
    "fill of a wider tensor": ("y = w + 1\ny[mask] = 0  # here\nreturn y", WIDE, MASK),
    "rows of a mask": (
        "y, two = w + 1, x.argsort(1) < 2\nz, rows = y.view(-1), 3\ny[two] = (w * 2)[:, :2].reshape(-1, 3)  # here\n"
        "return y, z * rows",
        X,
        WIDE,
    ),
    "one row for a mask": ("y = w + 1\ny[mask] = w[0, 0] * 2  # here\nreturn y", WIDE, MASK),
    "sum under a mask": ("return w[mask].sum()  # here", WIDE, MASK),
    "an object's answer": "return x * self.words.size  # here",
    "an object's answer whose name is taken": "return x * self.words.taken + self.taken  # here",
    "print": 'print("shape", x.shape)  # here\nreturn x + 1',
    "numpy and back": "y = torch.from_numpy(np.tanh(x.numpy()))  # here\nreturn y",
    "np.sort": "return torch.from_numpy(np.sort(x.numpy(), axis=0))  # here",
    "np.max": "return torch.from_numpy(np.max(x.numpy(), axis=1, keepdims=True))  # here",
    "np.std": "return torch.as_tensor(np.std(x.numpy(), axis=1))  # here",
    "an input that is written": "x += 1  # here\nreturn x * 2",
    "an input and half precision": ("h += x  # here\nreturn h * 2", ("h", "bfloat16", [2, 4]), X),
    "an input by a method": "x.mul_(3)  # here\nreturn x + 1",
    "an input by the result of a method": "y = x.mul_(3)  # here\nreturn y + x",
    "an input by a view": "flat = x.view(-1)\nflat += 1  # here\nreturn x * flat.sum()",
    "an input by an index": "x[:, 0] = 5  # here\nreturn x + 1",
    "an input that is another later": "x += 1  # here\nx = x * 2\nreturn x",
    "an input that is returned": "x += 1  # here\nreturn x",
    "an input and nothing returned": ("self.keep(cache.index_copy_(1, at, x[:, :1]))  # here", X, CACHE, AT),
    "a cache": ("cache.index_copy_(1, at, x[:, :1])  # here\nreturn cache.sum(1)", X, CACHE, AT),
    "a cache in two returns": (
        "cache.index_copy_(1, at, x[:, :1])  # here\nif self.on is None:\n    return x, cache\nelse:\n    return x",
        X,
        CACHE,
        AT,
    ),
    "two caches": (
        "cache.index_copy_(1, at, x[:, :1])  # here\nother.mul_(2)\nreturn (cache * other).sum(1), x",
        X,
        CACHE,
        ("other", "float32", [2, 6]),
        AT,
    ),
    "an input that another function writes": "return self.write(x)",
    "expand of a parameter": "return self.row.expand(x.shape[0], -1, -1) + x[..., None]  # here",
    "expand of an input": ("return y.expand(x.shape[0], x.shape[1]) + x  # here", X, ("y", "float32", [1, 4])),
    "expand to the same size": "return x.expand(x.shape[0], x.shape[1]) + 1  # here",
}
# These have a sentence alone.
SAID: dict[str, Any] = {
    "integer part": "if int(x.sum()) > 0:  # here\n    return x + 1\nreturn x - 1",
    "a name of one side that had a value": (
        "y = x + 1\nif x.sum() > 0:  # here\n    y = y + 1\n    z = x\nelse:\n    z = y * 3\nreturn y + z"
    ),
    "sides that read each other": (
        "a, b = x + 1, x + 2\nif x.sum() > 0:  # here\n    a = b\nelse:\n    b = a\nreturn a * b"
    ),
    "a branch that writes": "y = x + 0\nif x.sum() > 0:  # here\n    y += 1\nreturn y",
    "elif": "if self.on is None:\n    return x\nelif x.sum() > 0:  # here\n    return x + 1\nreturn x - 1",
    "sides of another kind": "a, b = (x, 1) if x.sum() > 0 else (x, 2)  # here\nreturn a * b",
    "conditional setting": "return x.sum(dim=0 if x.sum() > 0 else 1).sum()  # here",
    "while": "while x.norm() > 1:  # here\n    x = x / 2\nreturn x",
    "a loop that ends by values": (
        "for _ in range(3):\n    x = x / 2\n    if x.norm() < 1:  # here\n        break\nreturn x"
    ),
    "two reads": ("return x * int(s) + float(n)  # here", X, SCALAR, COUNT),
    "a size in a slice": ("count = int(mask.sum())  # here\nreturn x[:, :count].sum()", X, MASK),
    "a slice by an item": ("return x[:, : mask.sum().item()].sum()  # here", X, MASK),
    "rows under a mask": ("kept = w[mask]  # here\nreturn kept.mean()", WIDE, MASK),
    "nonzero": ("places = mask.nonzero()  # here\nreturn places[:, 0].sum() + x", X, MASK),
    "an object's method": "return x * self.words.get()  # here",
    "np.median": "return torch.as_tensor(np.median(x.numpy()))  # here",
    "numpy alone": "y = x.numpy()  # here\nreturn torch.from_numpy(np.exp(y))",
    "numpy of a number": "return x * float(np.sqrt(4.0))  # here",
    "a buffer that is written": "self.total += x.sum()  # here\nreturn x + self.total",
    "dropout that is always on": "return F.dropout(x, 1.0)  # here",
}
FIXES = {name: (one, X) if isinstance(one, str) else one for name, one in (SHOWN | SAID).items()}

MODEL = """
class Words:
    @property
    def size(self):
        return 3
    taken = size
    def get(self):
        return 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.row = nn.Parameter(torch.randn(1, 1, 3))
        self.on, self.taken = True, 5
        self.words = Words()

    def keep(self, value):
        pass

    def write(self, given):
        given[:, 0] = 0  # there
        return given * 2

    def forward(self, {names}):
{body}

def load():
    torch.manual_seed(0)
    return Model().eval()
"""


def source(body: str, inputs: list[Any]) -> str:
    return HEAD + MODEL.format(names=", ".join(one[0] for one in inputs), body=textwrap.indent(body, " " * 8))


def block(rows: list[str], start: int) -> int:
    """Returns the end of the statement at a line, with its `else`."""
    depth = len(rows[start]) - len(rows[start].lstrip())

    def deeper(row: str) -> bool:
        return not row.strip() or len(row) - len(row.lstrip()) > depth or row.lstrip().startswith("else")

    end = start + 1
    while end < len(rows) and deeper(rows[end]) and rows[start].lstrip().startswith(("if", "while", "for")):
        end += 1
    return end


def applied(text: str, at: int, lines: list[str]) -> str:
    """Returns a module with the lines of a fix where they belong."""
    rows = text.splitlines()
    indent = " " * (len(rows[at]) - len(rows[at].lstrip()))
    returns = [one for one in lines if one.startswith("return ")]
    heads = [one for one in lines if "# first in `forward`" in one]
    if heads:
        forward = next(i for i, row in enumerate(rows) if "def forward" in row)
        own = [
            i for i, row in enumerate(rows) if i > forward and row.lstrip().startswith("return") and row[:8].isspace()
        ]
        for place, new in zip(own, returns, strict=False):
            rows[place] = rows[place][: len(rows[place]) - len(rows[place].lstrip())] + new
        if not own:
            end = next(i for i, row in enumerate(rows) if row.startswith("def load")) - 1
            rows[end:end] = [" " * 8 + one for one in returns]
        rows[forward + 1 : forward + 1] = [" " * 8 + one for one in heads]
        return "\n".join(rows)
    made = [one for one in lines if "# last in `__init__`" in one]
    rows[at : block(rows, at)] = [indent + one for one in lines if one not in made]
    end = next(i for i, row in enumerate(rows) if "self.words = Words()" in row) + 1
    rows[end:end] = [" " * 8 + one for one in made]
    return "\n".join(rows)


class Fixes(Checks):
    def run_once(self, text: str, inputs: list[Any], seed: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns outputs, the inputs after the call, and the tensors of the module."""
        model = self.model(text)
        drawn = torch.Generator().manual_seed(seed)
        given = []
        for name, dtype, shape in inputs:
            value = torch.randn(shape, generator=drawn) * (seed + 1) - (seed % 3) * 2
            value = value.clamp(0, 3) if name in ("at", "n") else value
            given.append((value > 0) if dtype == "bool" else value.to(getattr(torch, dtype)))
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            returned = model(*given)
        returned = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
        return list(returned), given, [*model.buffers(), *model.parameters()]

    def model(self, text: str) -> Any:
        """Returns the model alone, without its sources and packages."""
        if str(self.root) not in sys.path:
            sys.path.insert(0, str(self.root))
        importlib.invalidate_caches()
        made = importlib.import_module(self.write(text))
        # An opened model notes the files of all modules of its folder.
        del sys.modules[made.__name__]
        return made.load()

    def looked_at(self, text: str, inputs: list[Any]) -> list[dict[str, Any]]:
        module = {"name": "m", "path": "", "method": "forward", "inputs": [spec(*one) for one in inputs]}
        opened = types.SimpleNamespace(model=self.model(text), root=self.root, device="cpu")
        subject = part("check.subject").Subject.of(opened, {"module": module, "sizes": {}, "buckets": [{}]}, Quiet())
        with contextlib.redirect_stdout(io.StringIO()):
            return [one.answer() for one in part("check").watched(subject)[1]]

    def same(self, first: list[Any], second: list[Any]) -> None:
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(other, one, equal_nan=True)

    def test_each_leaves_what_the_module_computes(self) -> None:
        shown = set()
        for name, (body, *inputs) in FIXES.items():
            with self.subTest(name):
                text = source(body, inputs)
                findings = self.looked_at(text, inputs)
                mark = "# here" if "# here" in text else "# there"
                line = next(i for i, one in enumerate(text.splitlines()) if one.endswith(mark))
                here = [one for one in findings if (one["location"] or "").endswith(f".py:{line + 1}")]
                self.assertTrue(here, findings)
                fixes = [one["fix"]["lines"] for one in here if one["fix"]["lines"]]
                self.assertEqual(bool(fixes), name in SHOWN, here)
                for one in fixes:
                    changed = applied(text, line, one)
                    for seed in range(6):
                        before, inputs_before, kept_before = self.run_once(text, inputs, seed)
                        after, inputs_after, kept_after = self.run_once(changed, inputs, seed)
                        self.same(before, after[: len(before)])
                        self.same(kept_before, kept_after)
                        written = any("# first in `forward`" in row for row in one)
                        if written:
                            # The new value of an input is an output now.
                            for value in inputs_before:
                                match = [*after, *inputs_after]
                                self.assertTrue(any(value.shape == it.shape and (value == it).all() for it in match))
                        else:
                            self.same(inputs_before, inputs_after)
                        shown.add(name)
        self.assertEqual(shown, set(SHOWN))

    def test_a_module_that_returns_its_cache_is_captured(self) -> None:
        for name in ("two caches", "an input by a view", "an input that is another later"):
            body, *inputs = FIXES[name]
            text = source(body, inputs)
            line = next(i for i, one in enumerate(text.splitlines()) if "# here" in one or "flat += 1" in one)
            lines = next(one["fix"]["lines"] for one in self.looked_at(text, inputs) if one["category"] == "in-place")
            answer = self.check(self.open(applied(text, line, lines)), inputs)
            self.assertTrue(answer["captured"], answer["findings"])
            self.assertFalse([one for one in answer["findings"] if one["category"] == "in-place"])

    def test_every_rule_is_in_the_table(self) -> None:
        rules = part("check.fixes"), part("check.numpy_fixes")
        functions = [ast.parse(inspect.getsource(rule)) for rule in rules]
        named = {
            one.name
            for tree in functions
            for one in tree.body
            if isinstance(one, ast.FunctionDef) and isinstance(one.returns, ast.Name) and one.returns.id == "Fix"
        }
        used = set()
        for module, name in ((module, name) for module in rules for name in named if hasattr(module, name)):
            rule = getattr(module, name)

            def spy(*args: Any, _name: str = name, _rule: Any = rule, **kwargs: Any) -> Any:
                used.add(_name)
                return _rule(*args, **kwargs)

            setattr(module, name, spy)
            self.addCleanup(setattr, module, name, rule)
        for body, *inputs in FIXES.values():
            self.looked_at(source(body, inputs), inputs)
        # The eager run does not use these two: test_faults and test_nanovlm test them.
        self.assertEqual(named - used, {"flag", "evaluated"})
