"""Tests of the graph passes. They use the helpers of the worker's tests, and need no installed package.

The folder above is not put on `sys.path`: this package would then hide the other tests.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]


def _package() -> None:
    found = FOLDER / "precast_kernels"
    spec = importlib.util.spec_from_file_location(
        found.name, found / "__init__.py", submodule_search_locations=[str(found)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[found.name] = module
    spec.loader.exec_module(module)


if "precast_kernels" not in sys.modules:
    _package()
