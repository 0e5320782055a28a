"""Compile options that submodules declare.

`get_torch_compile_config()` returns options by method, as `{"forward": {"mode": "max-autotune"}}`, or only the options
of `forward`. A method marked with `torch.compiler.disable` has `enabled = false`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import failures
from ..torch_private import modules
from ..wire import Failure

DECLARATION = "get_torch_compile_config"


def declared(model: Any, root: Path) -> dict[str, dict[str, Any]]:
    """Returns FQN -> method -> options of the submodules that declare any."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        methods = _config(name, module, root)
        for method in _disabled(module):
            methods.setdefault(method, {})["enabled"] = False
        if methods:
            found[name] = methods
    return found


def _config(name: str, module: Any, root: Path) -> dict[str, Any]:
    function = getattr(type(module), DECLARATION, None)
    if not callable(function):
        return {}
    where = f"`{DECLARATION}` of `{name}`" if name else f"`{DECLARATION}` of the model"
    code = getattr(function, "__code__", None)
    try:
        config = getattr(module, DECLARATION)()
    except Exception as error:
        raise failures.raised("entry_call", where, error, root) from error
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else None
    if config is None:
        return {}
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise Failure("entry_call", f"{where} returned {type(config).__name__}, not a dict of options", location=place)
    try:
        config = json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise Failure(
            "entry_call", f"{where} returned a value that JSON can't hold: {error}", location=place
        ) from error
    by_method = config and all(
        isinstance(value, dict) and callable(getattr(module, key, None)) for key, value in config.items()
    )
    return config if by_method else ({"forward": config} if config else {})


def _disabled(module: Any) -> list[str]:
    """Returns the methods, in the module's classes, that `torch.compiler.disable` marks."""
    found = []
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            break
        found += [key for key, value in vars(kind).items() if callable(value) and modules.is_disabled(value)]
    if modules.is_disabled(vars(module).get("forward")):
        found.append("forward")
    return sorted(set(found))
