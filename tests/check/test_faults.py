"""Seeded faults: each is found with its category, its line and, where one follows from the line, its fix.

A fault is a forward whose faulty line ends in `# here`, and inputs. A fixed line takes its place; then the module has
no finding of that category.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from tests.worker.support import ROOT, part

from .support import Checks, evaluated, found

X = ("x", "float32", [2, 4])
MASK = ("mask", "bool", [2, 4])

# Category, severity and name of each fault; the body of forward, with the input `mask` if it names it; after `=>` the
# fixed line, if there is one.
FAULTS = r"""
control-flow high: if on a maximum
    y = x
    if x.max() > 1:  # here
        y = x * 2
    return y
=> y = torch.where(x.max() > 1, x * 2, y)

control-flow high: conditional expression
    return x * (2 if bool(x.mean() > 0) else 3)  # here
=> return x * torch.where(x.mean() > 0, 2, 3)

control-flow high: while on a norm
    while x.norm() > 1:  # here
        x = x / 2
    return x

control-flow high: any in a branch
    scale = 1.0
    if torch.isnan(x).any():  # here
        scale = 0.0
    return x * scale
=> scale = torch.where(torch.isnan(x).any(), 0.0, scale)

value-read high: a number from a tensor
    count = int(mask.sum())  # here
    return x[:, :count]

value-read high: a list of values
    first = mask.tolist()  # here
    return x * (2 if first[0][0] else 3)

value-size high: nonzero
    places = mask.nonzero()  # here
    return x.reshape(-1)[places[:, 0]]

value-size high: a mask as an index
    kept = x[mask]  # here
    return kept * 2

value-size low: a comparison as an index that is written to
    y = torch.stack([x, x], -1)
    y[x > 1] = 0  # here
    return y
=> y.masked_fill_((x > 1)[..., None], 0)

value-size high: masked_select
    return torch.masked_select(x, mask)  # here

value-size high: unique
    return torch.unique(x)  # here

print medium: print
    print("shape", x.shape)  # here
    return x + 1
=> pass

print medium: a log
    log.info("forward of %s", x.shape)  # here
    return x + 1
=> pass

numpy medium: numpy of a tensor
    y = torch.from_numpy(np.tanh(x.numpy()))  # here
    return y

numpy medium: a constant from numpy
    scale = np.sqrt(4.0)  # here
    return x / float(scale)

random medium: Python's random
    scale = random.random()  # here
    return x * scale

random medium: noise
    return x + torch.randn(2, 4)  # here

random medium: dropout that is always on
    return F.dropout(x, 0.5)  # here

python-state medium: a cache of a tensor
    self.last = x * 2  # here
    return self.last + 1

in-place low: a buffer that counts
    self.total += x.sum()  # here
    return x + self.total

in-place high: an input that is written
    x += 1  # here
    return x * 2

in-place high: an input written by a method
    x.mul_(3)  # here
    return x + 1

python-object medium: an object's answer
    return x * self.tokenizer.pad_id  # here
=> return x * self.pad_id

python-branch low: a type
    if isinstance(x, (list, tuple)):  # here
        x = torch.stack(list(x))
    return x + 1

custom-operator high: an operator in Python without a fake
    return torch.ops.seeded.double(x)  # here
"""

TOKENIZER = "\nclass Tokenizer:\n    @property\n    def pad_id(self):\n        return 3\n"
INIT = """\
self.linear = nn.Linear(4, 4)
self.register_buffer("total", torch.zeros(()))
self.calls, self.pad_id, self.tokenizer = 0, 3, Tokenizer()"""


def faults() -> Iterator[tuple[str, str, str, str, str | None]]:
    """Yields category, severity, name, body and fixed line of each fault."""
    for block in FAULTS.strip().split("\n\n"):
        head, *rows = block.splitlines()
        kind, _, name = head.partition(": ")
        fixed = rows.pop().removeprefix("=> ") if rows[-1].startswith("=> ") else None
        yield *kind.split(), name, textwrap.dedent("\n".join(rows)), fixed  # type: ignore[misc]


class Faults(Checks):
    def source(self, body: str, inputs: list[Any]) -> str:
        names = ", ".join(one[0] for one in inputs)
        return evaluated(textwrap.dedent(body).strip("\n"), INIT, TOKENIZER, names)

    def looked_at(self, body: str, inputs: list[Any], **request: Any) -> dict[str, Any]:
        return self.check(self.open(self.source(body, inputs)), inputs, **request)

    def test_each_is_found_at_its_line(self) -> None:
        library = torch.library.Library("seeded", "FRAGMENT")
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        self.assertGreaterEqual(len(list(faults())), 25)
        for category, severity, name, body, fixed in faults():
            with self.subTest(name):
                inputs = [X, MASK] if "mask" in body else [X]
                text = self.source(body, inputs)
                line = 1 + next(i for i, one in enumerate(text.splitlines()) if one.endswith("# here"))
                answer = self.check(self.open(text), inputs)
                here = [one for one in found(answer, category) if one["location"].endswith(f".py:{line}")]
                self.assertTrue(here, answer["findings"])
                self.assertEqual(here[0]["severity"], severity)
                self.assertEqual(here[0]["function"], "Model.forward")
                self.assertTrue(here[0]["source"].endswith("# here"))
                self.assertTrue(here[0]["fix"]["text"])
                self.assertTrue(any(one["location"] == here[0]["location"] for one in answer["findings"]))
                if severity == "high":
                    self.assertFalse(answer["captured"])
                if fixed is not None:
                    self.fixed(category, body, inputs, fixed, here[0]["fix"]["lines"])

    def test_all_that_stops_a_build_is_found_in_one_run(self) -> None:
        stops = {
            "branch": "if x.max() > 1:  # here\n    x = x * 2",
            "size": "x = x + mask.nonzero()[:, 0].sum()  # here",
            "unique": "x = x + torch.unique(x).sum()  # here",
            "slice": "x = torch.cat([x, x[:, : mask.sum().item()]], 1)[:, :4]  # here",
            "state": "self.calls += 1  # here\nx = x * self.calls",
        }
        for names in (list(stops), list(reversed(stops))):
            body = "\n".join([*(stops[name] for name in names), "return x"])
            text = self.source(body, [X, MASK])
            answer = self.check(self.open(text), [X, MASK])
            lines = {i for i, row in enumerate(text.splitlines(), 1) if row.endswith("# here")}
            high = {int(one["location"].rpartition(":")[2]) for one in answer["findings"] if one["severity"] == "high"}
            self.assertLessEqual(lines, high, answer["findings"])

    def test_a_loop_stays_with_the_caller(self) -> None:
        step = "    def generate(self, x):\n        while x.max() > 1:\n            x = x - 1\n        return x\n\n"
        for body in (
            "while x.norm() > 1:  # here\n    x = x / 2\nreturn x",
            "for _ in range(3):\n    if x.sum() > 9:  # here\n        break\n    x = x * 2\nreturn x",
            "return self.generate(x)",
        ):
            with self.subTest(body):
                text = self.source(body, [X]).replace("def load", f"{step}def load")
                answer = self.check(self.open(text), [X])
                self.assertTrue(found(answer, "control-flow"), answer["findings"])
                for one in found(answer, "control-flow"):
                    self.assertIn("let the caller loop", one["fix"]["text"])
                if "generate" in body:
                    answer = self.check(self.open(text), [X], method="generate")
                    self.assertIn("let the caller loop", found(answer, "control-flow")[0]["fix"]["text"])

    def test_a_slice_by_an_item_and_a_sort_of_numpy_have_a_way_out(self) -> None:
        answer = self.looked_at("return x[:, : mask.sum().item()]", [X, MASK])
        self.assertIn("leave out the rest with a mask", found(answer, "value-read")[0]["fix"]["text"])
        answer = self.looked_at("return torch.from_numpy(np.sort(x.numpy()))", [X])
        (one,) = found(answer, "numpy")
        self.assertEqual(one["fix"]["lines"], ["return torch.sort(x).values"])
        self.assertIn("`torch.sort(…).values`", one["fix"]["text"])

    def test_a_model_in_training_mode(self) -> None:
        text = self.source("return x + 1", [X]).replace(".eval()", "")
        answer = self.check(self.open(text), [X])
        (one,) = found(answer, "training-mode")
        self.assertEqual(one["severity"], "medium")
        self.assertEqual(one["fix"]["lines"], ["return Model().eval()"])
        self.assertTrue(one["source"].startswith("def load"))

    def test_a_module_that_fails_on_its_inputs(self) -> None:
        opened = self.open(self.source("return self.linear(x)", [X]))
        answer = self.check(opened, [("x", "float32", [2, 5])])
        (one,) = found(answer, "inputs")
        self.assertEqual((one["severity"], one["source"]), ("high", "return self.linear(x)"))
        self.assertFalse(answer["captured"])

    def test_what_a_capture_refuses_is_refused(self) -> None:
        for body, inputs, why in (
            ("return self.linear(x)", [("x", "int64", [2, 4])], "must have the same dtype, but got Long and Float"),
            ("return torch.complex(x, x)", [X], "output `output` of module `m` is complex64"),
            ("self.n = getattr(self, 'n', 0) + 1\nreturn x + self.n * (x > 0)", [X], "gives another answer"),
        ):
            with self.subTest(body):
                opened = self.open(self.source(body, inputs))
                with self.assertRaises(part("wire").Failure) as refused:
                    self.capture(opened, inputs=inputs)
                self.assertIn(why, refused.exception.message)
                answer = self.looked_at(body, inputs)
                high = [one["why"] for one in answer["findings"] if one["severity"] == "high"]
                self.assertTrue(any(why in one for one in high), answer["findings"])
                self.assertFalse(answer["captured"])

    def test_a_dimension_that_the_code_fixes(self) -> None:
        body = """
        rows = x.shape[0] * 1
        return x.view(int(str(rows)), 2, 2)  # here
        """
        inputs = [("x", "float32", [3, 4], ["batch", None])]
        answer = self.looked_at(body, inputs, sizes={"batch": 3})
        self.assertTrue(answer["captured"])
        self.assertEqual(answer["dynamic"], {"batch": None})
        (one,) = found(answer, "fixed-size")
        self.assertEqual((one["severity"], one["function"]), ("low", "Model.forward"))
        self.assertIn("`batch`", one["why"])
        dynamic = {"batch": {"min": 2, "max": 8}}
        asked = self.looked_at(body, inputs, sizes={"batch": 3}, dynamic=dynamic)
        self.assertEqual([one["severity"] for one in found(asked, "fixed-size")], ["high"])

    def test_another_answer_at_size_one(self) -> None:
        inputs = [("x", "float32", [3, 4], ["batch", None])]
        answer = self.looked_at("return x.squeeze()  # here", inputs, sizes={"batch": 3})
        here = [one for one in found(answer, "size-one") if one["severity"] == "medium"]
        self.assertEqual([one["source"] for one in here], ["return x.squeeze()  # here"])
        self.assertEqual(answer["dynamic"], {"batch": {"min": 2, "max": None}})
        answer = self.looked_at("return x + 1", inputs, sizes={"batch": 3})
        self.assertEqual(answer["dynamic"], {"batch": {"min": 1, "max": None}})

    def test_an_operator_that_reads_padding(self) -> None:
        inputs = [("x", "float32", [3, 4], ["batch", "n"])]
        for body in ("x.amax(1)", "x.softmax(1)", "(x + 1).sum(1)", "x.mean(1)", "x[:, -1]", "x.sort(1).values"):
            answer = self.looked_at(f"return {body}  # here", inputs, sizes={"batch": 3, "n": 4})
            (one,) = found(answer, "padding")
            self.assertEqual((one["severity"], one["source"]), ("low", f"return {body}  # here"))
            self.assertIn("reads the padding of `n`", one["why"])
            self.assertIn('padding = "trusted"', one["fix"]["text"])
        trusted = self.looked_at("return x.amax(1)", inputs, sizes={"batch": 3, "n": 4}, padding="trusted")
        self.assertEqual(found(trusted, "padding"), [])

    def test_a_comparison_of_sizes(self) -> None:
        body = """
        if x.shape[0] > 2:  # here
            return x + 1
        return x - 1
        """
        inputs = [("x", "float32", [3, 4], ["batch", None])]
        answer = self.looked_at(body, inputs, sizes={"batch": 3})
        (one,) = found(answer, "python-branch")
        self.assertEqual(one["severity"], "low")
        self.assertIn("`batch > 2`", one["why"])
        self.assertEqual(answer["dynamic"], {"batch": {"min": 3, "max": None}})

    def test_what_did_not_run_is_reported(self) -> None:
        body = """
        if x.shape[0] > 5:
            print(x)
        return x
        """
        answer = self.looked_at(body, [X])
        self.assertEqual(found(answer, "print"), [])
        self.assertIn("1 line of `Model.forward`", " ".join(answer["unknown"]))

    def test_the_spec_knows_every_category(self) -> None:
        file = ROOT / "crates/precast-builder/src/spec/check.rs"
        table = file.read_text().partition("CATEGORIES: &[&str] = &[")[2].partition("];")[0]
        self.assertEqual(re.findall(r'"([^"]+)"', table), list(part("check.finding").CATEGORIES))

    def fixed(self, category: str, body: str, inputs: list[Any], line: str, lines: list[str]) -> None:
        """Puts the fixed line in the place of the faulty statement: nothing of the category is left."""
        if line not in ("pass", "return x * self.pad_id"):
            self.assertIn(line, lines)
        rows = textwrap.dedent(body).strip("\n").splitlines()
        index = next(i for i, one in enumerate(rows) if one.endswith("# here"))
        end = index + 1
        while rows[index].startswith(("if ", "while ")) and end < len(rows) and rows[end].startswith(" "):
            end += 1
        kept = [*rows[:index], line]
        if not line.startswith("return"):
            kept += rows[end:]
        answer = self.looked_at("\n".join(kept), inputs)
        self.assertTrue(answer["captured"], answer["findings"])
        self.assertEqual(found(answer, category), [])
