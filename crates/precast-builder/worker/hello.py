"""Describes the worker: versions of Python, torch and CUDA, and the devices."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from .failures import named
from .torch_private import versions
from .wire import PROTOCOL, Failure


def torch_or_fail() -> Any:
    """Imports torch; raises `torch_missing` if it is missing or broken."""
    try:
        import torch

        torch.empty(0)
        _ = torch.version.git_version
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        why = "there is none" if missing else named(error)
        raise Failure(
            "torch_missing",
            f"Python {platform.python_version()} at `{sys.executable}` can't import torch: {why}",
            hint="name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`, or install torch there",
        ) from error
    return torch


def site_packages() -> list[str]:
    """Returns the folders of installed packages, in the order of imports.

    They are the environment's own and others on its path (`.pth` files, `--system-site-packages`, PYTHONPATH).
    """
    return [path for path in dict.fromkeys(sys.path) if path and any(Path(path).glob("*.dist-info"))]


def hello() -> dict[str, Any]:
    """Returns the protocol's `Hello`."""
    torch = torch_or_fail()
    version = versions.in_use()
    if version > versions.NEWEST and (name := versions.missing(versions.EVERY_BUILD)):
        raise Failure(
            "torch_untried",
            f"torch {torch.__version__} has no `{name.replace(':', '.')}`, which every build needs",
            hint="name an interpreter with an older torch with `--python PATH` or `PRECAST_PYTHON`",
        )
    return {
        "protocol": PROTOCOL,
        "python": platform.python_version(),
        "site_packages": site_packages(),
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "off": versions.off(version),
    }
