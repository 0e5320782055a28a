"""Misspelt names of the project's callables are refused before torch is imported."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from .support import Project, part, talk

MODEL = """
import os.path
from math import floor as down
import torch

CASES = {"a": 1}
first, (second, *rest) = object, (object, 1)

def load(width=3):
    global made
    made = torch.nn.Linear(width, 3)
    return made

class Passes:
    def one(self):
        pass

match CASES:
    case {"a": one_case, **others}:
        pass
"""
NAMES = "load Passes.one Passes.two made first second rest os.path down one_case torch.nn".split()
MORE = ("from os import *", "def __getattr__(name): ...", "globals()['laod'] = 1", "setattr(x, 'laod', 1)")


class Names(Project):
    def check(self, name: str) -> None:
        part("model.names").check(self.root, [name])

    def test_names_that_may_be_there_are_left_to_the_import(self) -> None:
        name = self.write(MODEL)
        for path in NAMES:
            self.check(f"{name}:{path}")
        for more in MORE:
            self.check(f"{self.write(MODEL + more)}:laod")
        self.check(f"{self.write('def load(:')}:laod")
        for installed in ("torch:nn", "torch.nn:Linear", "json:loads"):
            self.check(installed)
        (self.root / "space").mkdir()
        self.check("space.model:load")

    def test_names_that_are_not_there_are_refused_as_the_import_does(self) -> None:
        name = self.write(MODEL)
        load = part("model.entry").load
        sys.path.insert(0, str(self.root))
        wrong: list[tuple[str, str, Any]] = [
            (f"{name}:laod", "entry_call", "did you mean `load`?"),
            (f"{name}:nothing_like", "entry_call", "it has: `load`, `Passes`"),
            (name, "entry_import", None),
            ("nowhere:load", "entry_import", None),
            (f"{name[:-1]}x:load", "entry_import", f"did you mean `{name}`?"),
        ]
        for entry, code, hint in wrong:
            with self.subTest(entry):
                early = self.fails(code, self.check, entry)
                if hint is not None:
                    self.assertEqual(early.hint, hint)
                self.assertEqual(early.spec, entry)
                late = self.fails(code, load, self.root, entry)
                self.assertEqual((late.message, late.spec), (early.message, early.spec))

    def test_a_worker_refuses_them_without_torch(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            Path(root, "torch.py").write_text("raise ImportError('it was imported')\n")
            Path(root, "model.py").write_text("import torch\n\ndef load():\n    pass\n")
            asked = {"op": "hello", "root": root}
            open_ = {"id": 3, "op": "open", "root": root, "entry": "model:load", "device": "cpu"}
            asked = [{"id": 1, **asked, "names": ["model:laod"]}, {"id": 2, **asked, "names": ["model:load"]}, open_]
            refused, *others = (answer["error"] for answer in talk(asked, {"PYTHONPATH": root}))
        self.assertEqual((refused["message"], refused["location"]), ("`model` has no `laod`", "model.py:1"))
        for error in others:
            self.assertEqual((error["code"], bool(error["hint"])), ("torch_missing", True))
            self.assertIn("it was imported", error["message"])
