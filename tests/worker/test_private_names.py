"""Torch's private names: only the package `torch_private` uses any, and documents each."""

from __future__ import annotations

import ast
import re
import unittest
from collections.abc import Iterator
from pathlib import Path

from .support import ROOT, SOURCES

PACKAGE = ROOT / "python/precast"
# Private without an underscore: attributes of torch's symbolic sizes, fake tensors and errors.
ATTRIBUTES = {"maybe_as_int", "fake_mode", "shape_env", "replacements_slocs", "inner_exception"}
# Attributes of `SymInt.node`, whose names are common.
OF_NODE = {"hint", "expr"}
# Not torch's: fields of named tuples, IPython's and Python's own, and those of the package.
OTHERS = {"_fields", "_replace", "_repr_html_", "_getframe", "_precast", "_run_taking", "_device", "_opened", "_exit"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return name not in OTHERS and name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_module(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and (any(map(is_private, parts)) or name.startswith("torch.fx.experimental"))


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and text of each use of a private name of torch, or of another object's private attribute."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | {"self", "cls"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = any(private_module(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found = not node.level and any(private_module(f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            # Operators of ATen are public under any name.
            found = (is_private(node.attr) and of not in own and of not in ("aten", "torch.ops.aten")) or (
                node.attr in ATTRIBUTES or (node.attr in OF_NODE and of.endswith(".node"))
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            found = isinstance(name, ast.Constant) and (is_private(str(name.value)) or name.value in ATTRIBUTES)
        else:
            # A module that is named to be imported, or a logger.
            found = isinstance(node, ast.Constant) and isinstance(node.value, str) and private_module(node.value)
            found = found and re.fullmatch(r"[\w.]+", node.value) is not None
        if found:
            yield node.lineno, ast.unparse(node)


class PrivateNamesTest(unittest.TestCase):
    def test_no_other_file_uses_a_private_name(self) -> None:
        for root in (SOURCES, PACKAGE):
            files = [path for path in sorted(root.rglob("*.py")) if "torch_private" not in path.parts]
            # It is copied to where no other file of the package is.
            files = [path for path in files if path != PACKAGE / "capture/replay.py"]
            self.assertGreater(len(files), 20)
            found = [
                f"{path}:{line}: {text}" for path in files for line, text in private_names(ast.parse(path.read_text()))
            ]
            self.assertEqual(found, [], "move these into torch_private/")

    def test_each_private_name_is_found(self) -> None:
        uses = (
            "import torch._inductor.config",
            "import torch.utils._pytree as tree",
            "from torch import _dynamo",
            "from torch.fx.experimental.proxy_tensor import make_fx",
            "target._schema.name",
            "torch._C._dispatch_dump(name)",
            "torch.ops.mkldnn._reorder_linear_weight",
            "module._parameters",
            "size.node.hint",
            "value.fake_mode",
            'getattr(function, "_torchdynamo_disable", False)',
            'importlib.import_module("torch._inductor.config")',
        )
        for use in uses:
            self.assertEqual([line for line, _ in private_names(ast.parse(use))][:1], [1], use)
        public = (
            "import torch.nn.functional",
            "from torch.export import Dim",
            "from ._names import other",
            "torch.ops.aten._to_copy.default",
            "self._weights",
            "failure.hint",
            'getattr(module, "__file__", None)',
            'print("torch._inductor is not imported here")',
        )
        for use in public:
            self.assertEqual(list(private_names(ast.parse(use))), [], use)

    def test_the_packages_say_what_each_name_is_for_and_the_workers_imports_no_other_part(self) -> None:
        for root in (SOURCES, PACKAGE):
            with self.subTest(root.name):
                self.said(root / "torch_private")

    def said(self, folder: Path) -> None:
        files = {path.stem: ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))}
        table = re.findall(r"^\| `(\w+)` \| ", ast.get_docstring(files.pop("__init__")) or "", re.MULTILINE)
        self.assertEqual(sorted(table), sorted(files))
        for name, tree in files.items():
            essay = ast.get_docstring(tree) or ""
            for part in tree.body:
                if not isinstance(part, ast.FunctionDef | ast.ClassDef) or not list(private_names(part)):
                    continue
                text = essay + (ast.get_docstring(part) or "")
                # The helpers of a file need the names of its functions.
                if not part.name.startswith("_"):
                    self.assertIn("Private:", text, f"{name}.py:{part.lineno}: `{part.name}` uses a private name")
            outside = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 1]
            if SOURCES in folder.parents:
                self.assertEqual(outside, [], f"{name}.py")
