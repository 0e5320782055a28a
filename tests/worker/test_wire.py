"""The process: lines in, lines out, also if a model writes to stdout."""

from __future__ import annotations

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
