"""State that forward changes: each kind is found, and stops the build where the second answer is another one."""

from __future__ import annotations

from typing import Any

from .support import HEAD, Checks, evaluated, found

X = [("x", "float32", [2, 4])]
# Name -> statements of forward; the last one marked is the line that is found.
STATE = {
    "a counter": "self.n += 1  # here\nreturn x * self.n",
    "a tuple of attributes": "self.n, y = self.n + 1, x  # here\nreturn y * self.n",
    "a list": "self.seen.append(1)  # here\nreturn x * len(self.seen)",
    "a list that grows in place": "self.seen += [1]  # here\nreturn x * len(self.seen)",
    "a local name of a list": "seen = self.seen\nseen.append(1)  # here\nreturn x * len(seen)",
    "a dict": "self.known['n'] = self.known['n'] + 1  # here\nreturn x * self.known['n']",
    "a dict's method": "self.known.update(n=self.known['n'] + 1)  # here\nreturn x * self.known['n']",
    "an item that is deleted": "del self.many[0]  # here\nreturn x * len(self.many)",
    "a queue": "self.queue.append(1)  # here\nreturn x * len(self.queue)",
    "an object's attribute": "self.config.n += 1  # here\nreturn x * self.config.n",
    "an object of another name": "config = self.config\nconfig.n += 1  # here\nreturn x * config.n",
    "an object's method": "self.config.step()\nreturn x * self.config.n",
    "a class attribute": "Model.count += 1  # here\nreturn x * Model.count",
    "an attribute of the type": "type(self).count += 1\nreturn x * Model.count",
    "setattr": "setattr(self, 'n', self.n + 1)  # here\nreturn x * self.n",
    "an iterator": "return x * next(self.numbers)  # here",
    "a global": "global COUNT\nCOUNT += 1  # here\nreturn x * COUNT",
    "a global list": "KNOWN.append(1)  # here\nreturn x * len(KNOWN)",
    "a global dict": "TABLE['n'] += 1  # here\nreturn x * TABLE['n']",
    "a list with an end": "self.seen.append(1)  # here\nreturn x + torch.arange(3)[len(self.seen)]",
    "a tensor": "self.last = self.last * 2 + x.sum()  # here\nreturn x + self.last",
}
# These change something, and answer the same every time.
HARMLESS = {
    "a counter that nobody reads": "self.n += 1  # here\nreturn x + 1",
    "a list of sizes": "self.seen.append(x.shape[0])  # here\nreturn x + 1",
    "a value that is made once": "if self.made is None:\n    self.made = 3  # here\nreturn x * self.made",
    "random numbers": "return x + torch.rand(2, 4)  # here",
}
CLEAN = {
    "local names": "n, many, known = 1, [], {}\nn += 1\nmany.append(x)\nknown[1] = x\nreturn many[0] * n + known[1]",
    "an object of the call": "config = Config()\nconfig.n += 1\nconfig.step()\nreturn x * config.n",
}
MODEL = """
import itertools
from collections import deque

COUNT, KNOWN, TABLE = 0, [], {{"n": 0}}

class Config:
    def __init__(self):
        self.n = 0
    def step(self):
        self.n += 1{method}

class Model(nn.Module):
    count = 0

    def __init__(self):
        super().__init__()
        self.n, self.seen, self.known, self.many, self.made = 0, [], {{"n": 0}}, [1] * 99, None
        self.queue, self.config, self.numbers, self.last = deque(), Config(), itertools.count(1), torch.ones(())

    def forward(self, x):
{body}

def load():
    return Model().eval()
"""


def source(body: str) -> str:
    rows = "\n".join(" " * 8 + row for row in body.splitlines())
    marked = "# here" in body
    return HEAD + MODEL.format(body=rows, method="" if marked else "  # here")


class State(Checks):
    def at(self, text: str, category: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns the answer, and the findings of a category at the marked line, or without a line."""
        line = next((i for i, row in enumerate(text.splitlines(), 1) if row.endswith("# here")), 0)
        answer = self.check(self.open(text), X)
        here = found(answer, category)
        return answer, [one for one in here if one["location"] is None or one["location"].endswith(f".py:{line}")]

    def test_what_changes_the_next_answer_stops_the_build(self) -> None:
        for name, body in STATE.items():
            with self.subTest(name):
                answer, here = self.at(source(body), "python-state")
                self.assertEqual([one["severity"] for one in here], ["high"], answer["findings"])
                self.assertIn("another answer when it is called again", here[0]["why"])
                self.assertFalse(answer["captured"])
                self.assertTrue(here[0]["location"] or "type(self)" in body)

    def test_a_build_refuses_it(self) -> None:
        for name in ("a counter", "a global", "an iterator"):
            with self.subTest(name):
                failure = self.fails("capture", self.capture, self.open(source(STATE[name])), inputs=X)
                self.assertIn("another answer when it is called again with the same inputs", failure.message)
                self.assertIn("`precast check` names the line", failure.hint)
        for name in ("a counter that nobody reads", "random numbers", "a value that is made once"):
            self.capture(self.open(source(HARMLESS[name])), inputs=X)

    def test_what_changes_no_answer_stops_nothing(self) -> None:
        for name, body in HARMLESS.items():
            with self.subTest(name):
                category = "random" if name == "random numbers" else "python-state"
                answer, here = self.at(source(body), category)
                self.assertEqual([one["severity"] for one in here], ["medium"], answer["findings"])
                self.assertTrue(answer["captured"])

    def test_what_a_call_makes_for_itself_is_no_state(self) -> None:
        for name, body in CLEAN.items():
            with self.subTest(name):
                answer = self.check(self.open(source(body + "  # none")), X)
                self.assertEqual(found(answer, "python-state"), [])
                self.assertTrue(answer["captured"])


class Training(Checks):
    def test_a_step_of_training_is_called_that(self) -> None:
        init = "self.linear = nn.Linear(4, 4)\nself.optimizer = torch.optim.SGD(self.linear.parameters(), 0.1)"
        for step, source in (
            ("self.linear(x).sum().backward()", "self.linear(x).sum().backward()"),
            ("torch.autograd.grad(self.linear(x).sum(), self.linear.weight)", "torch.autograd.grad"),
            ("self.optimizer.step()", "self.optimizer.step()"),
        ):
            with self.subTest(step):
                answer = self.check(self.open(evaluated(f"{step}\nreturn x", init)), X)
                (one,) = found(answer, "training")
                self.assertEqual(found(answer, "inputs"), [])
                self.assertEqual(one["severity"], "medium" if answer["captured"] else "high")
                self.assertTrue(one["source"].startswith(source))
                self.assertIn("train in Python", one["fix"]["text"])
