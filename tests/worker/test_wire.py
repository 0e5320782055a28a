"""The process: lines in, lines out, also if a model writes to stdout."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

from .support import talk

NOISY = """
import os, sys
import torch

print("imported")
os.write(1, b"raw bytes\\n")


def load():
    print("loading", file=sys.stdout)
    assert sys.stdin.read() == ""
    return torch.nn.Linear(2, 3)


def leave():
    sys.exit(7)
"""


class WireTest(unittest.TestCase):
    def test_prints_and_exits_of_a_model_never_reach_the_stream(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            Path(root, "noisy.py").write_text(NOISY)
            opened = {"op": "open", "root": root, "device": "cpu"}
            answers = talk(
                [
                    {"id": 1, "op": "hello"},
                    {"id": 2, **opened, "entry": "noisy:load"},
                    {"id": 3, **opened, "entry": "noisy:leave"},
                    {"id": 4, "op": "dance"},
                    "not json",
                    {"id": 6, "op": "weights", "out": root},
                ]
            )
        self.assertEqual([answer["id"] for answer in answers], [1, 2, 3, 4, 0, 6])
        self.assertEqual(answers[0]["value"]["protocol"], 2)
        self.assertEqual(answers[1]["value"]["modules"], {"": "Linear"})
        self.assertEqual(answers[2]["error"]["code"], "entry_call")
        self.assertEqual(answers[2]["error"]["location"], "noisy.py:16")
        self.assertEqual(answers[3]["error"]["code"], "protocol")
        self.assertEqual(answers[4]["error"]["code"], "protocol")
        # The failed `open` left no model behind.
        self.assertEqual(answers[5]["error"]["code"], "protocol")

    def test_a_missing_torch_is_an_answer(self) -> None:
        with tempfile.TemporaryDirectory() as shadow:
            Path(shadow, "torch.py").write_text("raise ImportError('libtorch.so: no such file')\n")
            requests = [
                {"id": 1, "op": "hello"},
                {"id": 2, "op": "open", "root": shadow, "entry": "a:b", "device": "cpu"},
            ]
            answers = talk(requests, {"PYTHONPATH": shadow})
        for answer in answers:
            self.assertEqual(answer["error"]["code"], "torch_missing")
            self.assertIn("libtorch.so: no such file", answer["error"]["message"])
            self.assertTrue(answer["error"]["hint"])

    def test_answers_are_one_line_of_json(self) -> None:
        answer = talk([{"id": 9, "op": "open", "root": "/", "entry": "no_such_module:f", "device": "cpu"}])[0]
        self.assertEqual(answer["error"]["code"], "entry_import")
        self.assertNotIn("\n", answer["error"]["message"])
        json.dumps(answer)
