"""Every file of the worker can be imported first: which one is depends on the first request."""

from __future__ import annotations

import subprocess
import sys
import unittest

from .support import SOURCES

IMPORT = """
import importlib, sys
from pathlib import Path
sources = Path(sys.argv[1])
sys.path.insert(0, str(sources.parent))
import torch
names = sorted(path.stem for path in sources.glob("*.py") if not path.stem.startswith("__"))
for name in names:
    for known in [each for each in sys.modules if each.split(".")[0] == sources.name]:
        del sys.modules[known]
    importlib.import_module(f"{sources.name}.{name}")
print(len(names))
"""


class ImportsTest(unittest.TestCase):
    def test_each_file_can_be_the_first(self) -> None:
        command = [sys.executable, "-P", "-c", IMPORT, str(SOURCES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(int(done.stdout), 40)
