"""The name `"precast"` in the lists of backends of torch and accelerate.

torch finds it by the entry point of an installed package, and a checkout has none. accelerate has a fixed list, which
`TrainingArguments(torch_compile_backend=…)` of transformers asks too. So both get the name when they are imported, in a
process that has imported the package.

Private: `_BACKENDS`, the names of torch's registry, and `DynamoBackend` of accelerate. Without them: a checkout needs
`torch.compile(net, backend=precast.dynamo.backend)`, and accelerate a net that is compiled before it is prepared.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from typing import Any


def _torch(registry: Any) -> None:
    entry = EntryPoint("precast", "precast.dynamo:backend", "torch_dynamo_backends")
    registry._BACKENDS.setdefault(entry.name, entry)


def _accelerate(module: Any) -> None:
    names = module.DynamoBackend

    def missing(cls: Any, value: Any) -> Any:
        if value != "PRECAST":
            return None
        made = str.__new__(cls, value)
        made._name_ = made._value_ = value
        return made

    names._missing_ = classmethod(missing)


_LISTS = {"torch._dynamo.backends.registry": _torch, "accelerate.utils.dataclasses": _accelerate}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets others find a module that has a list, and adds the name after it has run."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _LISTS:
            return None
        others = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
        spec = next((one for one in others if one is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _LISTS[fullname](module)

            loader.exec_module = exec_module
        return spec


def register() -> None:
    """Adds the name to the lists that are imported, and to others when they are."""
    for name, add in _LISTS.items():
        if name in sys.modules:
            add(sys.modules[name])
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
