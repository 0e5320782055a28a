"""Ahead-of-time compiled PyTorch artifacts: build once, keep by content, load and call.

    import precast

    model = precast.load("artifacts", "minilm")
    out = model.encode(input_ids, attention_mask)

Importing the package imports no torch. `load` uses the libtorch that the process has, or that of the environment.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from . import _native
from ._native import Model, Module, Session, Tensor, __version__
from .client.loading import load
from .errors import (
    BadInput,
    BuildError,
    Busy,
    CallFailed,
    Error,
    LoadError,
    NoFit,
    NotFound,
    OutOfMemory,
    PrecastWarning,
)
from .fields import Fields
from .torch_private import registry

if TYPE_CHECKING:
    from .capture.build import build
    from .client.building import (
        add_remote,
        bench,
        check,
        deps,
        diff,
        doctor,
        du,
        export,
        gc,
        init,
        inspect,
        log,
        ls,
        plan,
        pull,
        push,
        releases,
        remotes,
        remove_remote,
        report,
        rollback,
        show,
        stats,
        verify,
        why,
    )
    from .compare.smoke import CompileSmoketest
    from .config import CompileConfig
    from .spec import Spec
    from .wrapper.module import CompiledModule, maybe_compile
    from .wrapper.stabilizer import ShapeStabilizer

# Names that are imported when they are first used.
_EXPORTS = {
    "CompileConfig": "config",
    "build": "capture.build",
    "CompileSmoketest": "compare.smoke",
    "CompiledModule": "wrapper.module",
    "ShapeStabilizer": "wrapper.stabilizer",
    "maybe_compile": "wrapper.module",
    "Spec": "spec",
    **dict.fromkeys(("bench", "check", "deps", "diff", "doctor", "du", "export", "gc"), "client.building"),
    **dict.fromkeys(("init", "inspect", "log", "ls", "plan", "releases", "report", "rollback"), "client.building"),
    **dict.fromkeys(("pull", "push", "show", "stats", "verify", "why"), "client.building"),
    **dict.fromkeys(("add_remote", "remotes", "remove_remote"), "client.building"),
}

__all__ = [
    "BadInput",
    "BuildError",
    "Busy",
    "CallFailed",
    "CompileConfig",
    "CompileSmoketest",
    "CompiledModule",
    "Error",
    "Fields",
    "LoadError",
    "Model",
    "Module",
    "NoFit",
    "NotFound",
    "OutOfMemory",
    "PrecastWarning",
    "Session",
    "ShapeStabilizer",
    "Spec",
    "Tensor",
    "__version__",
    "add_remote",
    "bench",
    "build",
    "check",
    "deps",
    "diff",
    "doctor",
    "du",
    "export",
    "gc",
    "init",
    "inspect",
    "load",
    "log",
    "ls",
    "maybe_compile",
    "plan",
    "pull",
    "push",
    "releases",
    "remotes",
    "remove_remote",
    "report",
    "rollback",
    "show",
    "stats",
    "verify",
    "why",
]

# Objects of the parent are refused in a child.
os.register_at_fork(after_in_child=_native.forked)
registry.register()
logging.getLogger("precast").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module `precast` has no attribute `{name}`")
    found = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
