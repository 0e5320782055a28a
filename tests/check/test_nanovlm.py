"""A model with ten faults at once: each is found, with its line and a fix; the fixed model has none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from .support import Checks, found, part

# Each statement as `precast check` says it should be.
FIXED = {
    """        if highest > self.longest:
            scale = highest / self.longest
            frequencies = self.frequencies / scale
        else:
            frequencies = self.frequencies
""": """        scale = highest / self.longest
        frequencies = torch.where(highest > self.longest, self.frequencies / scale, self.frequencies)
""",
    "is_causal=causal)": "is_causal=bool(causal))",
    "self.first.expand(x.shape[0], -1, -1)": "self.first.repeat(x.shape[0], 1, 1)",
    "[:, 1:].squeeze()": "[:, 1:]",
    "self.tokenizer = Tokenizer()": "self.image_token_id = Tokenizer().image_token_id",
    "        tokens = tokens.clone()\n": "",
    "self.tokenizer.image_token_id": "self.image_token_id",
    """        tokens[mask] = images.reshape(-1, WIDTH).to(tokens.dtype)
        return tokens
""": """        values = images.reshape(-1, WIDTH).to(tokens.dtype)
        rows = (mask.flatten().cumsum(0) - 1).clamp(0, values.shape[0] - 1)
        return torch.where(mask[..., None], values[rows].view_as(tokens), tokens)
""",
    "images: list[Tensor] | Tensor | None = None": "images: Tensor",
    """        tokens = self.embed(ids)
        pixels = self.gather(images)
        if pixels is not None:
            tokens = self.place(ids, tokens, self.vision(pixels))
        print("tokens:", tokens.shape)
""": """        tokens = self.place(ids, self.embed(ids), self.vision(images))
""",
    "[torch.randn(1, 3, 8, 8) for _ in range(batch)]": "torch.randn(batch, 3, 8, 8)",
}

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
    def source(self, fixed: bool) -> str:
        text = (Path(__file__).parent / "nanovlm.py").read_text()
        for old, new in FIXED.items() if fixed else ():
            self.assertIn(old, text)
            text = text.replace(old, new)
        return text

    def looked_at(self, fixed: bool) -> dict[str, Any]:
        text = self.source(fixed)
        module = self.write(text)
        self.file, self.text = f"{module}.py", text.splitlines()
        opened = part("model.entry").open_model(self.root, f"{module}:load", "cpu", ())
        # The number of images in the list follows the batch: one size of it.
        sizes = {"seq": 12, "batch": 2} if fixed else {"seq": 12}
        return self.check(opened, samples=f"{module}:samples", sizes=sizes)

    def test_ten_faults_are_found_with_line_and_fix(self) -> None:
        answer = self.looked_at(False)
        for category, severity, source, fix in FAULTS:
            with self.subTest(category=category, source=source):
                here = [one for one in found(answer, category) if one["source"].startswith(source)]
                self.assertEqual(len(here), 1, answer["findings"])
                self.assertEqual(here[0]["severity"], severity)
                line = int(here[0]["location"].removeprefix(f"{self.file}:"))
                self.assertEqual(self.text[line - 1].strip(), here[0]["source"])
                if fix is not None:
                    self.assertIn(fix, "\n".join(here[0]["fix"]["lines"]))
                self.assertTrue(here[0]["fix"]["text"])
        self.assertFalse(answer["captured"])

    def test_the_fixed_model_has_nothing_above_low(self) -> None:
        answer = self.looked_at(True)
        self.assertTrue(answer["captured"])
        self.assertEqual([one for one in answer["findings"] if one["severity"] != "low"], [])
        self.assertEqual(answer["dynamic"], {dim: {"min": 1, "max": None} for dim in ("batch", "seq")})

    def test_the_fixed_model_computes_the_same(self) -> None:
        sys.path.insert(0, str(self.root))
        faulty, fixed = (importlib.import_module(self.write(self.source(one))) for one in (False, True))
        ids, images = faulty.samples()
        with torch.no_grad():
            expected = faulty.load()(ids, images)
            self.assertTrue(torch.equal(fixed.load()(ids, torch.cat(images)), expected))
