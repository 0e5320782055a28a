"""Eager's list of calls: the worker's encoding, and the shim's results, which equal the module's."""

from __future__ import annotations

import math
import operator
import random
import re
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import shim
from .support import Project, long, model, part


def graph_of(call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns a graph of one float input `x`, and the node that `call` makes of the graph and `x`: its output."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2, 3)
    node = call((graph, x))
    graph.output((node,))
    return graph, node


class EncoderTest(unittest.TestCase):
    def encode(self, target: Any, *args: Any, held: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Returns the call of one operation; "x" stands for the input."""

        def made(given: tuple[Any, Any]) -> Any:
            graph, x = given
            swap = torch.fx.node.map_aggregate
            node = graph.call_function(
                target,
                swap(args, lambda value: x if isinstance(value, str) and value == "x" else value),
                swap(kwargs, lambda value: x if isinstance(value, str) and value == "x" else value),
            )
            node.meta["val"] = torch.zeros(2, 3) if held is None else held
            return node

        graph, node = graph_of(made)
        inputs = [one for one in graph.nodes if one.op == "placeholder"]
        # An operation without a result is no output of a program.
        outputs = [] if held == () else [node]
        encoded = part("graph.eager").encode(
            graph, inputs, outputs if isinstance(node.meta["val"], torch.Tensor) else []
        )
        (call,) = encoded["calls"]
        return call

    def args(self, target: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.encode(target, *args, **kwargs)["args"]

    def refused(self, target: Any, *args: Any, **kwargs: Any) -> str:
        with self.assertRaises(part("graph.eager").Refused) as caught:
            self.encode(target, *args, **kwargs)
        return str(caught.exception)

    def test_each_kind_of_argument(self) -> None:
        aten = torch.ops.aten
        x = {"value": 0}
        call = self.encode(aten.add.Tensor, "x", "x", alpha=2)
        self.assertEqual(call, {"op": "aten::add.Tensor", "args": {"self": x, "other": x, "alpha": 2}, "results": [1]})
        self.assertEqual(self.encode(aten.relu.default, "x")["op"], "aten::relu")
        # A number for a tensor; floats with all their digits, and infinities and NaN, which JSON lacks.
        self.assertEqual(self.args(aten.mul.Tensor, "x", 3)["other"], 3)
        self.assertEqual(self.args(aten.add.Scalar, "x", 0.1)["other"], {"float": "0.1"})
        self.assertEqual(self.args(aten.add.Scalar, "x", 1.0)["other"], {"float": "1.0"})
        for text in ("inf", "-inf", "nan", "-0.0", "5e-324"):
            self.assertEqual(self.args(aten.add.Scalar, "x", float(text))["other"], {"float": text})
        self.assertEqual(self.args(aten.add.Scalar, "x", 1 - 2j)["other"], {"complex": ["1.0", "-2.0"]})
        self.assertIs(self.args(aten.sum.dim_IntList, "x", [-1], True)["keepdim"], True)
        # Lists, of integers, floats, tensors, and tensors of which some are missing.
        self.assertEqual(self.args(aten.view.default, "x", [3, 2])["size"], [3, 2])
        self.assertEqual(self.args(aten.view.default, "x", (3, -1))["size"], [3, -1])
        self.assertEqual(self.args(aten.cat.default, ["x", "x"], 1), {"tensors": [x, x], "dim": 1})
        self.assertEqual(self.args(aten.index.Tensor, "x", [None, "x"])["indices"], [None, x])
        scales = self.args(aten.upsample_nearest2d.vec, "x", None, [2.0, 0.5])
        self.assertEqual(scales["scale_factors"], [{"float": "2.0"}, {"float": "0.5"}])
        self.assertIsNone(scales["output_size"])
        # One number for a list of fixed length.
        pooled = self.args(aten.max_pool2d.default, "x", 3, [2, 2], padding=1)
        self.assertEqual((pooled["kernel_size"], pooled["stride"], pooled["padding"]), ([3, 3], [2, 2], [1, 1]))
        # Torch's own values.
        given = {"dtype": torch.bfloat16, "layout": torch.strided, "device": torch.device("cuda", 1)}
        given |= {"pin_memory": False, "memory_format": torch.channels_last}
        wanted = {"dtype": {"dtype": 13}, "layout": {"layout": 7}, "device": {"device": "cuda:1"}}
        wanted |= {"pin_memory": False, "memory_format": {"memory_format": 2}}
        self.assertEqual(self.args(aten.empty.memory_format, [2], **given), {"size": [2], **wanted})
        self.assertEqual(self.args(aten.gelu.default, "x", approximate="tanh")["approximate"], "tanh")

    def test_results_are_numbered_and_what_nothing_reads_is_null(self) -> None:
        aten = torch.ops.aten
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.zeros(4, 6)
        pieces = graph.call_function(aten.split.Tensor, (x, 2, 1))
        pieces.meta["val"] = [torch.zeros(4, 2)] * 3
        second = graph.call_function(operator.getitem, (pieces, 1))
        norm = graph.call_function(aten.native_layer_norm.default, (second, [2], None, None, 1e-5))
        norm.meta["val"] = (torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(4, 1))
        spread = graph.call_function(operator.getitem, (norm, 2))
        graph.call_function(aten.relu.default, (x,))  # nothing needs it
        whole = graph.call_function(aten.cat.default, (pieces,))
        graph.output((spread, whole))
        encoded = part("graph.eager").encode(graph, [x], [spread, whole])
        self.assertEqual([call["results"] for call in encoded["calls"]], [[[1, 2, 3]], [None, None, 4], [5]])
        self.assertEqual(encoded["calls"][2]["args"], {"tensors": [{"value": 1}, {"value": 2}, {"value": 3}]})
        self.assertEqual(encoded["outputs"], [4, 5])
        given = torch.randn(4, 6)
        made = shim.run(encoded, [given])
        deviation = 1 / (given[:, 2:4].var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(made[0], deviation)
        self.assertTrue(torch.equal(made[1], torch.cat(given.split(2, 1))))

    def test_what_has_no_place_in_a_list_is_named(self) -> None:
        self.assertEqual(
            self.refused(torch.ops.aten.bernoulli.default, "x", generator=torch.Generator()),
            "`aten.bernoulli.default`: argument `generator`: a `Generator`, which has no place in a list of calls",
        )
        self.assertEqual(self.refused(math.gamma, 3), "`gamma`: no operator that the runtime can call")
        refused = self.refused(torch.ops.higher_order.while_loop, None, None, (), ())
        self.assertIn("no operator that the runtime can call", refused)


class NumbersTest(unittest.TestCase):
    def test_numbers_are_pythons(self) -> None:
        eager = part("graph.eager")
        random.seed(0)
        whole = [0, 1, -1, 2, -2, 3, 7, -7, 12, -12, 1 << 40, True, False]
        real = [0.0, -0.0, 0.5, -0.5, 2.5, 3.5, -2.5, 1e300, 7.0]
        functions = [(target, name) for target, name in eager._NUMBERS.items()]
        functions += [(getattr(torch, target), name) for target, name in eager._NUMBERS_OF_TORCH.items()]
        cases = 0
        for target, name in functions:
            for _ in range(60):
                count = {"ite": 3, "sum": 4, "neg": 1, "abs": 1, "not": 1, "float": 1, "int": 1}.get(name, 2)
                count = 1 if name in ("floor", "ceil", "round", "sqrt") else count
                bits = name in ("and", "or", "xor", "sum")
                args = [random.choice(whole if bits or random.random() < 0.7 else real) for _ in range(count)]
                if name in ("and", "or", "xor"):
                    args = [bool(arg) for arg in args] if random.random() < 0.5 else [int(arg) for arg in args]
                if name == "ite":
                    args = [bool(args[0]), args[1], type(args[1])(args[2])]
                if name == "pow":
                    args[1] = random.choice([0, 1, 2, 5, -1, 0.5, 40])
                try:
                    wanted = target(args) if name == "sum" else target(*args)
                    if isinstance(wanted, int) and not -(2**63) <= wanted < 2**63:
                        continue
                except (ZeroDivisionError, ValueError, OverflowError, TypeError):
                    continue
                if isinstance(wanted, complex):
                    continue
                cases += 1
                text = f"{name}{tuple(args)} is {wanted}"
                self.assertEqual(self.computed(name, args), float(wanted), text)
        self.assertGreater(cases, 1200)

    def computed(self, name: str, args: list[Any]) -> float:
        """Returns the shim's result, from a tensor that it fills."""
        given = {str(at): {"float": repr(arg)} if isinstance(arg, float) else arg for at, arg in enumerate(args)}
        fill = {"size": [1], "fill_value": {"value": 0}, "dtype": {"dtype": 8}}
        calls = [
            {"op": f"number::{name}", "args": given, "results": [0]},
            {"op": "aten::full", "args": fill, "results": [1]},
        ]
        (made,) = shim.run({"inputs": 0, "outputs": [1], "calls": calls}, [])
        return float(made[0])

    def test_what_python_refuses_and_what_does_not_fit_is_an_error(self) -> None:
        for name, args, message in (
            ("floordiv", [1, 0], "division by zero"),
            ("mod", [1, 0], "division by zero"),
            ("truediv", [1, 0], "division by zero"),
            ("add", [1 << 62, 1 << 62], "does not fit into 64 bits"),
            ("mul", [1 << 62, 2], "does not fit into 64 bits"),
            ("pow", [10, 40], "does not fit into 64 bits"),
            ("neg", [-(1 << 63)], "does not fit into 64 bits"),
            ("floor", [1e300], "does not fit into 64 bits"),
            ("and", [0.5, 1], "an integer is wanted"),
            ("add", [1], "too few arguments"),
            ("nothing", [1], "no such function"),
        ):
            with self.assertRaisesRegex(shim.Refused, message):
                self.computed(name, args)


class ShimTest(unittest.TestCase):
    def refused(self, calls: list[dict[str, Any]], outputs: list[int], inputs: list[Any]) -> str:
        with self.assertRaises(shim.Refused) as caught:
            shim.run({"inputs": len(inputs), "outputs": outputs, "calls": calls}, inputs)
        return str(caught.exception)

    def test_a_wrong_list_is_refused_by_name(self) -> None:
        x = torch.ones(2, 3)

        def call(op: str, results: list[Any] | None = None, **args: Any) -> dict[str, Any]:
            return {"op": op, "args": args, "results": results or [1]}

        value = {"value": 0}
        for calls, outputs, message in (
            ([call("lab::none", self=value)], [1], "lab::none: no loaded library registers it"),
            ([call("aten::relu")], [1], "aten::relu: argument `self`: it has no value"),
            ([call("aten::relu", self={"value": 3})], [1], "value 3 is not made before it is read"),
            ([call("aten::relu", self=value, more=1)], [1], "arguments that its schema does not have"),
            ([call("aten::relu", self={"dtype": 7})], [1], "another type than `Scalar`"),
            ([call("aten::view", self=value, size=[{"float": "1.0"}])], [1], "another type than `SymInt`"),
            ([call("aten::relu", self=[value])], [1], "a list, where the schema has `Tensor`"),
            ([call("aten::to.dtype", self=value, dtype={"dtype": 99})], [1], "scalar type 99 is not known"),
            ([call("aten::relu", [5], self=value)], [1], "not numbered in order"),
            ([call("aten::relu", [1, 2], self=value)], [1], "fewer results than were captured"),
            ([call("aten::split.Tensor", [[1, 2]], self=value, split_size=1, dim=1)], [1], "a list of 3, not of 2"),
            ([call("aten::sym_size.int", self=value, dim=0)], [1], "an output of the graph is no tensor"),
            ([], [4], "value 4 is not made"),
            ([call("aten::view", self=value, size=[7])], [1], "aten::view`: shape '[7]' is invalid"),
        ):
            self.assertIn(message, self.refused(calls, outputs, [x]))

    def test_memory_is_free_after_its_last_reader(self) -> None:
        # Each call takes the result of the one before: two are alive at a time, of a hundred.
        calls = [
            {"op": "aten::add.Tensor", "args": {"self": {"value": at}, "other": 1}, "results": [at + 1]}
            for at in range(100)
        ]
        megabytes = 32
        x = torch.zeros(megabytes << 18)
        shim.run({"inputs": 1, "outputs": [100], "calls": calls}, [x])
        before = _peak_kib(reset=True)
        (made,) = shim.run({"inputs": 1, "outputs": [100], "calls": calls}, [x])
        self.assertEqual(float(made[-1]), 100.0)
        self.assertLess(_peak_kib() - before, 4 * megabytes << 10)


def _peak_kib(reset: bool = False) -> int:
    """Returns the peak of resident memory since it was reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


# Operations on one value and on two.
_UNARY = """
torch.relu({0}) ; torch.tanh({0}) ; {0} * 2 ; {0} + 0.5 ; 1 - {0} ; {0} / 3 ; {0}.abs().sqrt()
torch.nn.functional.gelu({0}) ; torch.softmax({0}, -1) ; {0}.flip(-1) ; {0}.cumsum(-1) ; -{0}
torch.nn.functional.layer_norm({0}, {0}.shape[-1:]) ; torch.where({0} > 0, {0}, torch.zeros_like({0}))
{0}.to(torch.float64).sum(-1, keepdim=True).float().expand({0}.shape) ; {0}.clamp(-1, 1.5) ; {0}.clone()
torch.stack({0}.unbind(-1), -1) ; torch.cat({0}.chunk(2, -1), -1) ; {0}.sort(-1)[0] ; {0}.topk(4, -1)[0]
{0}.masked_fill({0} < 0, -1.0) ; torch.nn.functional.dropout({0}, 0.5, False) ; {0}.var(-1, keepdim=True) + {0}
{0}.roll(1, 0) ; torch.nn.functional.pad({0}, (0, 0)) ; {0}.transpose(0, 1).contiguous().transpose(0, 1)
{0}.reshape(-1).view({0}.shape) ; {0}[:, [0, 1, 3, 2]] ; {0} @ self.weight
torch.nn.functional.linear({0}, self.weight) ; torch.einsum('ij,jk->ik', {0}, self.weight) ; {0} * {0}.shape[0]
{0} + torch.arange(4, dtype={0}.dtype) ; torch.full_like({0}, {0}.shape[0] * 2 + 1) - {0}
torch.scatter({0}, 1, self.at, {0}) ; {0}.gather(1, self.at)
"""
_BINARY = """
{0} + {1} ; {0} * {1} ; torch.maximum({0}, {1}) ; {0} @ {1}.T @ {1} ; torch.cat([{0}, {1}], -1)[:, :4]
torch.stack([{0}, {1}]).sum(0) ; torch.addmm({0}, {1}, self.weight, alpha=0.5) ; torch.lerp({0}, {1}, 0.3)
"""


class SameAsTheModuleTest(Project):
    """Modules of operations drawn at random, at fixed and at dynamic sizes."""

    def module(self, seed: int) -> str:
        draw = random.Random(seed)
        names, lines = ["x", "y"], []
        for at in range(draw.randrange(3, 9)):
            one, two = draw.choice(names), draw.choice(names)
            text = draw.choice(re.split(" ; |\n", (_BINARY if draw.random() < 0.35 else _UNARY).strip()))
            lines.append(f"v{at} = {text.format(one, two)}")
            names.append(f"v{at}")
        picked = [names[-1], *draw.sample(names, draw.randrange(0, 3))]
        return model(
            "\n".join([*lines, f"return [{', '.join(picked)}]"]),
            "self.weight = torch.nn.Parameter(torch.randn(4, 4))\n"
            "self.register_buffer('at', torch.tensor([[2, 0, 1, 3]] * 5))",
        )

    @long
    def test_random_modules(self) -> None:
        for seed in range(60):
            text = self.module(seed)
            dynamic = seed % 3 == 0 and "self.at" not in text
            with self.subTest(seed=seed):
                opened = self.open(text)
                rows = [["rows", None], [None, None]][not dynamic]
                inputs = [("x", "float32", [5, 4], rows), ("y", "float32", [5, 4], rows)]
                more = {"dynamic": {"rows": {"min": 2, "max": 32}}, "sizes": {"rows": 5}} if dynamic else {}
                captured = self.capture(opened, inputs=inputs, compiled=False, **more)
                weights = self.weights(opened, captured)
                for size in (3, 17) if dynamic else (5,):
                    given = [torch.randn(size, 4), torch.randn(size, 4)]
                    with torch.no_grad():
                        wanted = opened.model(*given)
                    for made, right in zip(self.run_eager(captured, given, weights), wanted, strict=True):
                        self.assertTrue(torch.equal(made, right), f"{text}\n{made}\n{right}")

    def test_branches_are_chosen_by_value(self) -> None:
        choice = "torch.cond(x.sum() > 0, lambda a, b: (a + b, a * 2), lambda a, b: (a - b, -b), (x, y))"
        opened = self.open(model(f"return {choice}"))
        inputs = [("x", "float32", [3]), ("y", "float32", [3])]
        captured = self.capture(opened, inputs=inputs, compiled=False)
        for x in (torch.ones(3), -torch.ones(3)):
            given = [x, torch.randn(3)]
            for made, right in zip(shim.run(Path(captured["exported"]), given), opened.model(*given), strict=True):
                self.assertTrue(torch.equal(made, right))

    def test_a_failing_assertion_of_the_model_is_an_error(self) -> None:
        text = model("torch._assert_async((x > 0).all(), 'x is not positive')\nreturn x * 2")
        captured = self.capture(self.open(text), inputs=[("x", "float32", [3])], compiled=False)
        self.assertEqual(shim.run(Path(captured["exported"]), [torch.ones(3)])[0].tolist(), [2.0] * 3)
        with self.assertRaisesRegex(shim.Refused, "x is not positive"):
            shim.run(Path(captured["exported"]), [-torch.ones(3)])

    def test_a_module_that_only_eager_runs_must_be_a_list_of_calls(self) -> None:
        text = model(
            "from torch._higher_order_ops.while_loop import while_loop\n"
            "return while_loop(lambda v: v.sum() < 10, lambda v: (v + 1,), (x,))[0]"
        )
        opened, inputs = self.open(text), [("x", "float32", [3])]
        failure = self.refused("capture", opened, inputs=inputs, compiled=False)
        self.assertIn("`while_loop`: no operator that the runtime can call", failure.message)
        captured = self.capture(opened, inputs=inputs)
        self.assertIsNone(captured["exported"])
        self.assertIn("requests that no bucket covers are refused", captured["notes"][0])
