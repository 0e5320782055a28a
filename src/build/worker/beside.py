"""Imports what a capture needs in a thread of its own, while the model is made.

Half of torch's compiler comes with a process's first capture, and takes seconds in which the model's weights are drawn
or read. The thread imports and does nothing else: it draws no random number and runs no operator.

Two threads that import modules which import each other can see half a module. So nobody else imports what is not there
yet while the thread is at it: who asks for that waits for the thread first, before Python takes a lock for the module.
So does a fork, whose child would have such a lock for ever.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import _bootstrap as _imports  # what `importlib.import_module` calls
from types import ModuleType
from typing import Any

# Modules that bring all of what a capture imports, but for some milliseconds. One that is not there is left out.
FOR_CAPTURES = (
    "torch._dynamo",
    "torch.export._trace",
    "torch._inductor.ir",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._export.passes.replace_set_grad_with_hop_pass",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator",
    "torch.utils.serialization",
)
# What of other packages they import: a model that imports these too is not told apart from one that does not, unless a
# file of the project names them.
PACKAGES = frozenset({"filelock", "mpmath", "networkx", "numpy", "sympy", "triton"})
# A thread of the entry's own may have a lock that an import waits for: nobody waits for ever.
_PATIENCE = 60.0
# Seconds that either thread runs Python before the other one may.
_TURN = 0.0005


@contextmanager
def importing(names: Sequence[str]) -> Iterator[None]:
    """Imports modules while what is inside runs, and is done at its end."""
    thread = threading.Thread(target=_import, args=(names,), name="imports", daemon=True)
    statement, function = builtins.__import__, _imports._gcd_import

    def settle() -> None:
        if threading.current_thread() is not thread and thread.is_alive():
            thread.join(_PATIENCE)

    def by_statement(name: str, *args: Any, **more: Any) -> Any:
        names = dict(zip(("globals", "locals", "fromlist", "level"), args, strict=False), **more)
        if not _there(name, names.get("fromlist") or (), names.get("level") or 0):
            settle()
        return statement(name, *args, **more)

    def by_function(name: str, package: Any = None, level: int = 0) -> ModuleType:
        if not _there(name, (), level):
            settle()
        return function(name, package, level)

    os.register_at_fork(before=settle)
    interval = sys.getswitchinterval()
    # Who makes the model calls operators, and would wait as long for Python's lock after each.
    sys.setswitchinterval(_TURN)
    builtins.__import__, _imports._gcd_import = by_statement, by_function
    try:
        thread.start()
        yield
    finally:
        # However long it takes: how long making a model may take is the build's to say.
        thread.join()
        builtins.__import__, _imports._gcd_import = statement, function
        sys.setswitchinterval(interval)


def _import(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # who needs it will say so
            continue


def _there(name: str, items: Sequence[str], level: int) -> bool:
    """Returns whether an import finds all that it asks for."""
    module = sys.modules.get(name) if level == 0 else None
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return False
    return all(item == "*" or item in vars(module) for item in items)
