"""A model with ten faults at once: each is found, with its line and a fix; the fixed model has none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from .support import Checks

HERE = Path(__file__).parent

# Category, severity, the line that has it, a line of the fix.
FAULTS = [
    ("python-object", "medium", "mask = ids == self.tokenizer.image_token_id", "self.image_token_id"),
    ("value-size", "medium", "tokens[mask] = images.reshape(-1, WIDTH).to(tokens.dtype)", ".cumsum(0)"),
    ("control-flow", "high", "if highest > self.longest:", "torch.where(highest > self.longest, "),
    ("symbolic-flag", "medium", "y = F.scaled_dot_product_attention(", "is_causal=bool(causal)"),
    ("python-branch", "low", "if pixels is not None:", None),
    ("list-input", "medium", "if isinstance(images, list):", None),
    ("python-branch", "low", "if isinstance(images, list):", None),
    ("expand", "low", "first = self.first.expand(x.shape[0], -1, -1)", "self.first.repeat(x.shape[0], 1, 1)"),
    ("print", "medium", 'print("tokens:", tokens.shape)', "if not torch.compiler.is_compiling():"),
    ("size-one", "low", "return torch.cat([first, x], dim=1)[:, 1:].squeeze()", None),
]


class NanoVLM(Checks):
    def model(self, name: str) -> dict[str, Any]:
        Checks.count += 1
        module = f"vlm_{Checks.count}"
        shutil.copyfile(HERE / f"{name}.py", self.root / f"{module}.py")
        from tests.worker.support import part

        self.file = f"{module}.py"
        self.text = (self.root / self.file).read_text().splitlines()
        opened = part("model.entry").open_model(self.root, f"{module}:load", "cpu", ())
        sizes = {"batch": 2, "seq": 12}
        # The number of images in the list follows the batch: one size of it.
        if name == "nanovlm":
            sizes.pop("batch")
        return self.check(opened, samples=f"{module}:samples", sizes=sizes)

    def test_ten_faults_are_found_with_line_and_fix(self) -> None:
        answer = self.model("nanovlm")
        for category, severity, source, fix in FAULTS:
            with self.subTest(category=category, source=source):
                here = [
                    one
                    for one in answer["findings"]
                    if one["category"] == category and one["source"].startswith(source)
                ]
                self.assertEqual(len(here), 1, answer["findings"])
                self.assertEqual(here[0]["severity"], severity)
                line = int(here[0]["location"].removeprefix(f"{self.file}:"))
                self.assertEqual(self.text[line - 1].strip(), here[0]["source"])
                if fix is not None:
                    self.assertIn(fix, "\n".join(here[0]["fix"]["lines"]))
                self.assertTrue(here[0]["fix"]["text"])
        self.assertFalse(answer["captured"])

    def test_the_fixed_model_has_nothing_above_low(self) -> None:
        answer = self.model("fixed")
        self.assertTrue(answer["captured"])
        self.assertEqual([one for one in answer["findings"] if one["severity"] != "low"], [])
        self.assertEqual(answer["dynamic"], {dim: {"min": 1, "max": None} for dim in ("batch", "seq")})

    def test_the_fixed_model_computes_the_same(self) -> None:
        import importlib
        import sys

        sys.path.insert(0, str(HERE))
        faulty, fixed = importlib.import_module("nanovlm"), importlib.import_module("fixed")
        ids, images = faulty.samples()
        with torch.no_grad():
            expected = faulty.load()(ids, images)
            self.assertTrue(torch.equal(fixed.load()(ids, torch.cat(images)), expected))
