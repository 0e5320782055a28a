"""The imports of the Python code: no circles, and every file of the worker can be the first that is imported."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path

from .support import ROOT, SOURCES, long

IMPORT = """
import importlib, sys
from pathlib import Path
sources = Path(sys.argv[1])
sys.path.insert(0, str(sources.parent))
import torch
paths = [path for path in sources.rglob("*.py") if not path.stem.startswith("__")]
for path in sorted(paths):
    for known in [each for each in sys.modules if each.split(".")[0] == sources.name]:
        del sys.modules[known]
    importlib.import_module(".".join(path.relative_to(sources.parent).with_suffix("").parts))
print(len(paths))
"""

Module = tuple[str, ...]


def modules(root: Path) -> dict[Module, ast.Module]:
    """Returns the modules below a folder by their paths, a package by that of its folder."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = ast.parse(path.read_text("utf-8"))
    return found


def imports(root: Path) -> dict[Module, set[Module]]:
    """Returns the modules below a folder, each with those that it imports, also in functions and for types only."""
    known = modules(root)
    packages = {module[:end] for module in known for end in range(len(module))}
    found: dict[Module, set[Module]] = {}
    for module, tree in known.items():
        own = module if module in packages else module[:-1]
        found[module] = set(_imported(tree, own, root.name, known)) - {module}
    return found


def _imported(tree: ast.AST, own: Module, root: str, known: Iterable[Module]) -> Iterator[Module]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            base = own[: len(own) - node.level + 1] + parts
        elif parts[:1] == (root,):
            base = parts[1:]
        else:
            continue
        for alias in node.names:
            yield from [each for each in ((*base, alias.name), base) if each in known][:1]


def circle(uses: dict[Module, set[Module]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        return [".".join(each) for each in error.args[1]]
    return []


def packages(uses: dict[Module, set[Module]]) -> dict[Module, set[Module]]:
    """Returns the imports of a root's folders and files: each folder is one, but that of torch's private names."""
    found: dict[Module, set[Module]] = {}
    for module, others in uses.items():
        if module[0] == "torch_private":
            continue
        found.setdefault(module[:1], set()).update(other[:1] for other in others if other[:1] != module[:1])
    return found


class ImportsTest(unittest.TestCase):
    @long
    def test_each_file_can_be_the_first(self) -> None:
        command = [sys.executable, "-P", "-c", IMPORT, str(SOURCES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(int(done.stdout), 90)

    def test_modules_and_packages_import_each_other_in_no_circle(self) -> None:
        for root in (SOURCES, ROOT / "python/precast", ROOT / "kernels/precast_kernels", ROOT / "benches"):
            uses = imports(root)
            # The door of a package imports what it has.
            uses.pop((), None)
            self.assertGreater(len(uses), 3)
            with self.subTest(root.name):
                self.assertEqual(circle(uses), [])
                self.assertEqual(circle(packages(uses)), [])

    def test_circles_are_found(self) -> None:
        uses = {("a", "x"): {("b", "y")}, ("b", "y"): set(), ("b", "z"): {("a", "x")}}
        self.assertEqual(circle(uses), [])
        self.assertEqual(sorted(set(circle(packages(uses)))), ["a", "b"])
        tree = ast.parse("from . import x\nfrom ..b import y\nfrom root.c import z\nfrom other import w")
        known = [("a", "x"), ("b", "y"), ("c",)]
        self.assertEqual(list(_imported(tree, ("a",), "root", known)), known)
